"""The optimisers of optax that a config can name for the clients, with checked options.

From Python any optax transformation can be used; see `client.local_sgd`. A schedule of optax counts local steps, and
starts again in each round, as all state of a client's optimiser; `over_rounds` makes one that counts rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import optax

from fedjax_sim import validate

__all__ = ["OverRounds", "adagrad", "adam", "adamw", "over_rounds", "rmsprop", "sgd"]

SCHEDULES = ("constant", "cosine", "linear")
COUNTED = ("steps", "rounds")


class OverRounds(optax.GradientTransformationExtraArgs):
    """An optimiser whose learning rate is that of the round: `update(gradients, state, params, round=...)`."""


def over_rounds(make: Callable[[float], optax.GradientTransformation], schedule: optax.Schedule) -> OverRounds:
    """An optimiser of clients whose learning rate is a function of the round, and constant within it.

    Args:
      make: (learning rate) -> optax transformation.
      schedule: (round, [] int32 from 0) -> learning rate, such as `optax.cosine_decay_schedule(0.1, 100)`.

    Which round it is: that of the server; of the version that a client was sent in asynchronous algorithms; inside of
    an edge its own, which go on only where the edge keeps its state (others refuse it).

    Guarantees: round t trains as with the constant rate schedule(t)
    (tests/client/test_over_rounds.py::test_a_round_is_that_of_its_rate).

    >>> import jax.numpy as jnp
    >>> made = over_rounds(optax.sgd, optax.linear_schedule(1.0, 0.0, 4))
    >>> float(made.update(jnp.ones(()), made.init(jnp.ones(())), None, round=jnp.int32(1))[0])
    -0.75
    """
    validate.function("make", make, "learning_rate")
    validate.function("schedule", schedule, "round")

    def update(updates, state, params=None, *, round=None, **extra_args):
        if round is None:
            hint = "Clients are told in which round they are; here nobody is. Take a constant rate."
            validate.fail("optimizer", "a rate that does not fall over rounds, where no round is told", "one", hint)
        moved, state = make(schedule(round)).update(updates, state, params)
        return jax.tree.map(lambda x, like: x.astype(like.dtype), moved, updates), state

    return OverRounds(lambda params: make(0.0).init(params), update)


def _made(
    make: Callable, learning_rate: float, schedule: str, decay_steps: int | None, schedule_over: str
) -> optax.GradientTransformation:
    """`make` of the learning rate at each local step, whose schedule starts again in each round, or at each round."""
    validate.positive("learning_rate", learning_rate)
    validate.one_of("schedule", schedule, SCHEDULES)
    validate.one_of("schedule_over", schedule_over, COUNTED)
    if schedule == "constant":
        if decay_steps is not None:
            validate.fail("decay_steps", "none with a constant schedule", decay_steps, "Set schedule too.")
        if schedule_over != "steps":
            validate.fail("schedule_over", "'steps' with a constant schedule", schedule_over, "Set schedule too.")
        return make(learning_rate)
    counted = "rounds" if schedule_over == "rounds" else "local steps"
    validate.integer("decay_steps", decay_steps, hint=f"The {schedule} schedule falls to 0 in so many {counted}.")
    if schedule == "cosine":
        rate = optax.cosine_decay_schedule(learning_rate, decay_steps)
    else:
        rate = optax.linear_schedule(learning_rate, 0.0, decay_steps)
    return over_rounds(make, rate) if schedule_over == "rounds" else make(rate)


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
    schedule_over: str = "steps",
) -> optax.GradientTransformation:
    """Stochastic gradient descent, with momentum or without.

    Args:
      learning_rate: > 0; the default suits the default run of `fedjax-sim run`.
      momentum: in [0, 1).
      nesterov: Nesterov's momentum; needs momentum > 0.
      schedule: "constant", or "cosine" or "linear" decay to 0 within `decay_steps`.
      schedule_over: what these count: the local "steps" of a round, in each of which the schedule starts again, or
        "rounds": then the rate is constant within a round (`over_rounds`).

    >>> sgd(learning_rate=0.5).update(1.0, sgd().init(0.0))[0]
    -0.5
    """
    _decays(momentum=momentum)
    if nesterov and not momentum:
        validate.fail("nesterov", "false without momentum", nesterov, "Set momentum too.")
    make = lambda rate: optax.sgd(rate, momentum or None, nesterov)  # noqa: E731
    return _made(make, learning_rate, schedule, decay_steps, schedule_over)


def adam(
    *,
    learning_rate: float = 0.001,
    first_decay: float = 0.9,
    second_decay: float = 0.999,
    epsilon: float = 1e-8,
    schedule: str = "constant",
    decay_steps: int | None = None,
    schedule_over: str = "steps",
) -> optax.GradientTransformation:
    """Adam; its moments are initialised in each round.

    References: Kingma and Ba 2015.
    """
    _decays(first_decay=first_decay, second_decay=second_decay)
    validate.positive("epsilon", epsilon)
    make = lambda rate: optax.adam(rate, first_decay, second_decay, epsilon)  # noqa: E731
    return _made(make, learning_rate, schedule, decay_steps, schedule_over)


def adamw(
    *,
    learning_rate: float = 0.001,
    first_decay: float = 0.9,
    second_decay: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 1e-4,
    schedule: str = "constant",
    decay_steps: int | None = None,
    schedule_over: str = "steps",
) -> optax.GradientTransformation:
    """Adam with decoupled weight decay.

    References: Loshchilov and Hutter 2019.
    """
    _decays(first_decay=first_decay, second_decay=second_decay)
    validate.positive("epsilon", epsilon)
    validate.in_range("weight_decay", weight_decay, 0)
    make = lambda rate: optax.adamw(rate, first_decay, second_decay, epsilon, weight_decay=weight_decay)  # noqa: E731
    return _made(make, learning_rate, schedule, decay_steps, schedule_over)


def adagrad(
    *,
    learning_rate: float = 0.01,
    initial_accumulator: float = 0.1,
    epsilon: float = 1e-7,
    schedule: str = "constant",
    decay_steps: int | None = None,
    schedule_over: str = "steps",
) -> optax.GradientTransformation:
    """Adagrad.

    References: Duchi, Hazan and Singer 2011.
    """
    validate.in_range("initial_accumulator", initial_accumulator, 0)
    validate.positive("epsilon", epsilon)
    make = lambda rate: optax.adagrad(rate, initial_accumulator, epsilon)  # noqa: E731
    return _made(make, learning_rate, schedule, decay_steps, schedule_over)


def rmsprop(
    *,
    learning_rate: float = 0.001,
    decay: float = 0.9,
    epsilon: float = 1e-8,
    momentum: float = 0.0,
    schedule: str = "constant",
    decay_steps: int | None = None,
    schedule_over: str = "steps",
) -> optax.GradientTransformation:
    """RMSProp, with momentum or without.

    References: Tieleman and Hinton 2012.
    """
    _decays(decay=decay, momentum=momentum)
    validate.positive("epsilon", epsilon)
    make = lambda rate: optax.rmsprop(rate, decay, epsilon, momentum=momentum or None)  # noqa: E731
    return _made(make, learning_rate, schedule, decay_steps, schedule_over)
