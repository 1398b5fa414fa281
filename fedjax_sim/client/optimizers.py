"""The optimisers of optax that a config can name for the clients, with checked options.

From Python any optax transformation can be used; see `client.local_sgd`. A schedule of optax counts local steps, and
starts again in each round, as all state of a client's optimiser; `over_rounds` makes one that counts rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypedDict, Unpack

import jax
import numpy as np
import optax
from jax.extend import core

from fedjax_sim import validate
from fedjax_sim.engine.jaxpr import Program, evaluate, opened
from fedjax_sim.types import PyTree
from fedjax_sim.validate import Default, NonNegative, Positive, PositiveInt, ShareBelowOne

__all__ = ["OverRounds", "adagrad", "adam", "adamw", "over_rounds", "plain_sgd_rate", "rmsprop", "sgd"]


TRIED = [np.ones((2,) * rank) for rank in (0, 1, 2, 4)]  # parameters of the ranks that optimizers tell apart, float64


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


def plain_sgd_rate(algorithm: str, optimizer: optax.GradientTransformation) -> Any:
    """The learning rate of plain SGD, for algorithms that hold for nothing else; read from the optimizer's program.

    Args:
      algorithm: named in the error.
      optimizer: of the clients, such as `optax.sgd(0.1)`. It is tried on parameters of its own; whether it treats some
        names of parameters otherwise cannot be seen there.

    Returns: a float; an array, [], where a sweep traces the rate.

    Raises: ValueError for every other optimizer: with momentum, with a schedule, adaptive, with a clip, with decay,
      with a mask, or with several rates.

    Guarantees: tests/client/test_optimizers.py::test_plain_sgd_is_recognised_by_its_program.

    References: optax 0.2 (`scale_by_learning_rate` multiplies each gradient by -rate).

    >>> plain_sgd_rate("scaffold", optax.sgd(0.1))
    0.1
    """
    validate.optax_transformation("optimizer", optimizer)
    hint = 'The algorithm holds for one constant rate only: take optax.sgd(0.1), or name = "sgd" without momentum.'
    rule = f"plain SGD for {algorithm}"
    if isinstance(optimizer, OverRounds):
        validate.fail("optimizer", rule, "a rate that falls over rounds", hint)

    def moved(gradients: PyTree, params: PyTree) -> PyTree:
        return optimizer.update(gradients, optimizer.init(params), params)[0]

    try:
        has_state = bool(jax.tree.leaves(jax.eval_shape(optimizer.init, TRIED)))
        program = None if has_state else jax.make_jaxpr(moved)(TRIED, TRIED).jaxpr
        rates = [] if has_state else [-x for x in jax.tree.leaves(moved(TRIED, TRIED))]
    except (TypeError, ValueError):  # of a mask or of labels for other parameters, say
        validate.fail("optimizer", rule, "one that needs more than gradients", hint)
    if has_state:
        validate.fail("optimizer", rule, "one with a state, as of momentum or of a schedule", hint)
    if not _multiplies_each_gradient(program, len(TRIED)):
        validate.fail("optimizer", rule, "one that does more than scale gradients, as a clip or a mask does", hint)
    if any(isinstance(rate, jax.core.Tracer) for rate in rates):
        return -optimizer.update(1.0, optimizer.init(1.0), 1.0)[0]  # of a Python number: as wide as the rate is
    first = float(np.ravel(rates[0])[0])
    validate.positive("learning_rate", first)
    if any((np.asarray(rate) != first).any() for rate in rates):
        validate.fail("optimizer", rule, "one with several rates", hint)
    return first


def _multiplies_each_gradient(program: Program, number: int) -> bool:
    """Whether each output is the gradient at its own place times a constant, whatever gradients and parameters are.

    Args:
      program: of so many gradients, followed by as many parameters.
    """
    sources = _sources(program, [{place} for place in range(2 * number)])
    return sources == [{place} for place in range(number)]


def _sources(program: Program, inputs: Sequence[set[int] | None]) -> list[set[int] | None]:
    """For each output, the place of the input that it is a constant multiple of; None for other functions of inputs.

    Args:
      inputs: the same for each input of the program; an empty set for constants.
    """

    def rule(equation: core.JaxprEqn, operands: list[set[int] | None]) -> list[set[int] | None]:
        name = equation.primitive.name
        dependent = [source for source in operands if source != set()]
        if name in ("jit", "pjit"):
            return _sources(equation.params["jaxpr"], operands)
        if not dependent:
            return [set()] * len(equation.outvars)
        if name in ("mul", "neg", "convert_element_type") and len(dependent) == 1:
            return dependent
        return [None] * len(equation.outvars)

    num_constants = len(opened(program)[0].constvars)
    return evaluate(program, inputs, rule, constants=[set()] * num_constants, literal=lambda _: set())


class ScheduleOptions(TypedDict, total=False):
    """How the learning rate falls; see `sgd`."""

    schedule: Annotated[Literal["constant", "cosine", "linear"], Default("constant")]
    decay_steps: Annotated[PositiveInt | None, Default(None)]
    schedule_over: Annotated[Literal["steps", "rounds"], Default("steps")]


def _scheduled(
    make: Callable,
    learning_rate: float,
    schedule: str = "constant",
    decay_steps: int | None = None,
    schedule_over: str = "steps",
) -> optax.GradientTransformation:
    """`make` of the learning rate at each local step, whose schedule starts again in each round, or at each round."""
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


@validate.named_arguments
def sgd(
    *,
    learning_rate: Positive = 0.5,
    momentum: ShareBelowOne = 0.0,
    nesterov: bool = False,
    **options: Unpack[ScheduleOptions],
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
    if nesterov and not momentum:
        validate.fail("nesterov", "false without momentum", nesterov, "Set momentum too.")
    make = lambda rate: optax.sgd(rate, momentum or None, nesterov)  # noqa: E731
    return _scheduled(make, learning_rate, **options)


@validate.named_arguments
def adam(
    *,
    learning_rate: Positive = 0.001,
    first_decay: ShareBelowOne = 0.9,
    second_decay: ShareBelowOne = 0.999,
    epsilon: Positive = 1e-8,
    **options: Unpack[ScheduleOptions],
) -> optax.GradientTransformation:
    """Adam; its moments are initialised in each round.

    References: Kingma and Ba 2015.
    """
    make = lambda rate: optax.adam(rate, first_decay, second_decay, epsilon)  # noqa: E731
    return _scheduled(make, learning_rate, **options)


@validate.named_arguments
def adamw(
    *,
    learning_rate: Positive = 0.001,
    first_decay: ShareBelowOne = 0.9,
    second_decay: ShareBelowOne = 0.999,
    epsilon: Positive = 1e-8,
    weight_decay: NonNegative = 1e-4,
    **options: Unpack[ScheduleOptions],
) -> optax.GradientTransformation:
    """Adam with decoupled weight decay.

    References: Loshchilov and Hutter 2019.
    """
    make = lambda rate: optax.adamw(rate, first_decay, second_decay, epsilon, weight_decay=weight_decay)  # noqa: E731
    return _scheduled(make, learning_rate, **options)


@validate.named_arguments
def adagrad(
    *,
    learning_rate: Positive = 0.01,
    initial_accumulator: NonNegative = 0.1,
    epsilon: Positive = 1e-7,
    **options: Unpack[ScheduleOptions],
) -> optax.GradientTransformation:
    """Adagrad.

    References: Duchi, Hazan and Singer 2011.
    """
    make = lambda rate: optax.adagrad(rate, initial_accumulator, epsilon)  # noqa: E731
    return _scheduled(make, learning_rate, **options)


@validate.named_arguments
def rmsprop(
    *,
    learning_rate: Positive = 0.001,
    decay: ShareBelowOne = 0.9,
    epsilon: Positive = 1e-8,
    momentum: ShareBelowOne = 0.0,
    **options: Unpack[ScheduleOptions],
) -> optax.GradientTransformation:
    """RMSProp, with momentum or without.

    References: Tieleman and Hinton 2012.
    """
    make = lambda rate: optax.rmsprop(rate, decay, epsilon, momentum=momentum or None)  # noqa: E731
    return _scheduled(make, learning_rate, **options)
