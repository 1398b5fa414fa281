"""The optimisers of optax that a config can name for the clients, with checked options.

From Python any optax transformation can be used; see `client.local_sgd`.
"""

from __future__ import annotations

import optax

from fedjax_sim import validate

__all__ = ["adagrad", "adam", "adamw", "rmsprop", "sgd"]

SCHEDULES = ("constant", "cosine", "linear")


def _rate(learning_rate: float, schedule: str, decay_steps: int | None) -> optax.ScalarOrSchedule:
    """The learning rate at each local step; the state, and so the schedule, starts again in each round."""
    validate.positive("learning_rate", learning_rate)
    validate.one_of("schedule", schedule, SCHEDULES)
    if schedule == "constant":
        if decay_steps is not None:
            validate.fail("decay_steps", "none with a constant schedule", decay_steps, "Set schedule too.")
        return learning_rate
    validate.integer("decay_steps", decay_steps, hint=f"The {schedule} schedule falls to 0 in so many local steps.")
    if schedule == "cosine":
        return optax.cosine_decay_schedule(learning_rate, decay_steps)
    return optax.linear_schedule(learning_rate, 0.0, decay_steps)


def _decays(**decays: float) -> None:
    for name, value in decays.items():
        validate.in_range(name, value, 0, 1, open_high=True)


def sgd(
    *,
    learning_rate: float = 0.5,
    momentum: float = 0.0,
    nesterov: bool = False,
    schedule: str = "constant",
    decay_steps: int | None = None,
) -> optax.GradientTransformation:
    """Stochastic gradient descent, with momentum or without.

    Args:
      learning_rate: > 0; the default suits the default run of `fedjax-sim run`.
      momentum: in [0, 1).
      nesterov: Nesterov's momentum; needs momentum > 0.
      schedule: "constant", or "cosine" or "linear" decay to 0 within `decay_steps` local steps of a round.

    >>> sgd(learning_rate=0.5).update(1.0, sgd().init(0.0))[0]
    -0.5
    """
    rate = _rate(learning_rate, schedule, decay_steps)
    _decays(momentum=momentum)
    if nesterov and not momentum:
        validate.fail("nesterov", "false without momentum", nesterov, "Set momentum too.")
    return optax.sgd(rate, momentum or None, nesterov)


def adam(
    *,
    learning_rate: float = 0.001,
    first_decay: float = 0.9,
    second_decay: float = 0.999,
    epsilon: float = 1e-8,
    schedule: str = "constant",
    decay_steps: int | None = None,
) -> optax.GradientTransformation:
    """Adam; its moments are initialised in each round.

    References: Kingma and Ba 2015.
    """
    rate = _rate(learning_rate, schedule, decay_steps)
    _decays(first_decay=first_decay, second_decay=second_decay)
    validate.positive("epsilon", epsilon)
    return optax.adam(rate, first_decay, second_decay, epsilon)


def adamw(
    *,
    learning_rate: float = 0.001,
    first_decay: float = 0.9,
    second_decay: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 1e-4,
    schedule: str = "constant",
    decay_steps: int | None = None,
) -> optax.GradientTransformation:
    """Adam with decoupled weight decay.

    References: Loshchilov and Hutter 2019.
    """
    rate = _rate(learning_rate, schedule, decay_steps)
    _decays(first_decay=first_decay, second_decay=second_decay)
    validate.positive("epsilon", epsilon)
    validate.in_range("weight_decay", weight_decay, 0)
    return optax.adamw(rate, first_decay, second_decay, epsilon, weight_decay=weight_decay)


def adagrad(
    *,
    learning_rate: float = 0.01,
    initial_accumulator: float = 0.1,
    epsilon: float = 1e-7,
    schedule: str = "constant",
    decay_steps: int | None = None,
) -> optax.GradientTransformation:
    """Adagrad.

    References: Duchi, Hazan and Singer 2011.
    """
    validate.in_range("initial_accumulator", initial_accumulator, 0)
    validate.positive("epsilon", epsilon)
    return optax.adagrad(_rate(learning_rate, schedule, decay_steps), initial_accumulator, epsilon)


def rmsprop(
    *,
    learning_rate: float = 0.001,
    decay: float = 0.9,
    epsilon: float = 1e-8,
    momentum: float = 0.0,
    schedule: str = "constant",
    decay_steps: int | None = None,
) -> optax.GradientTransformation:
    """RMSProp, with momentum or without.

    References: Tieleman and Hinton 2012.
    """
    rate = _rate(learning_rate, schedule, decay_steps)
    _decays(decay=decay, momentum=momentum)
    validate.positive("epsilon", epsilon)
    return optax.rmsprop(rate, decay, epsilon, momentum=momentum or None)
