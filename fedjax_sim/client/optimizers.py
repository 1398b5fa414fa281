"""The optax optimisers that a config can name for the clients, with checked options.

From Python any optax transformation can be used; see `client.local_sgd`. A schedule of optax counts local steps, and
starts again in each round, like all state of a client's optimiser. `over_rounds` makes an optimiser whose schedule
counts rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypedDict, Unpack, cast

import jax
import numpy as np
import optax
from jax.core import Tracer
from jax.extend import core

from fedjax_sim import validate
from fedjax_sim.engine.jaxpr import Program, evaluate, jaxpr_and_constants
from fedjax_sim.types import PyTree
from fedjax_sim.validate import Default, NonNegative, Positive, PositiveInt, ShareBelowOne

# Parameters on which `plain_sgd_rate` tries an optimizer: float64, of the ranks that optimizers tell apart.
TRIED = [np.ones((2,) * rank) for rank in (0, 1, 2, 4)]


class OverRounds(optax.GradientTransformationExtraArgs):
    """An optimiser whose learning rate depends on the round, which its `update` takes as the argument `round`."""


def over_rounds(make: Callable[[float], optax.GradientTransformation], schedule: optax.Schedule) -> OverRounds:
    """Makes an optimiser of clients whose learning rate is a function of the round, and constant within a round.

    Args:
      make: (learning rate) -> optax transformation.
      schedule: (round, [] int32 from 0) -> learning rate, such as `optax.cosine_decay_schedule(0.1, 100)`.

    The round is the server's. In asynchronous algorithms it is the round of the model that the client was sent. Inside
    of an edge of a hierarchy it is the edge's own round; an edge that does not keep its state begins at round 0 every
    time, and refuses such an optimiser.

    Guarantees: round t trains as with the constant rate schedule(t)
    (tests/client/test_over_rounds.py::test_a_round_is_that_of_its_rate).

    >>> import jax.numpy as jnp
    >>> optimizer = over_rounds(optax.sgd, optax.linear_schedule(1.0, 0.0, 4))
    >>> float(optimizer.update(jnp.ones(()), optimizer.init(jnp.ones(())), None, round=jnp.int32(1))[0])
    -0.75
    """
    validate.function("make", make, "learning_rate")
    validate.function("schedule", schedule, "round")

    def update(updates, state, params=None, *, round=None, **extra_args):
        if round is None:
            hint = "Clients are told in which round they are; here nobody is. Take a constant rate."
            validate.fail("optimizer", "a rate that does not fall over rounds, where no round is told", "one", hint)
        # optax states wider types for a schedule's rates than for the rates that its optimisers take.
        scaled_updates, state = make(cast(float, schedule(round))).update(updates, state, params)
        # A traced float32 rate would widen gradients of 16 bits.
        return jax.tree.map(lambda x, like: x.astype(like.dtype), scaled_updates, updates), state

    return OverRounds(lambda params: make(0.0).init(params), update)


def plain_sgd_rate(algorithm: str, optimizer: optax.GradientTransformation) -> Any:
    """Reads the learning rate of plain SGD from an optimizer's program; refuses every other optimizer.

    Some algorithms hold for plain SGD with one constant rate only.

    Args:
      algorithm: its name, for the error.
      optimizer: of the clients, such as `optax.sgd(0.1)`. It is tried on a list of arrays. An optimizer that treats
        parameters of some names otherwise is therefore not noticed.

    Returns: the rate, a float; an array, [], where a sweep traces the rate.

    Raises: ValueError for every other optimizer: with momentum, with a schedule, adaptive, with a clip, with decay,
      with a mask, or with several rates.

    Guarantees: a rate that is not traced has the precision of a Python float, not that of float32
    (tests/client/test_optimizers.py::test_plain_sgd_is_recognised_by_its_program); 14 other optimizers are refused, and
    the error says why (::test_all_others_are_refused_by_name).

    References: optax 0.2 (`scale_by_learning_rate` multiplies each gradient by -rate).

    >>> plain_sgd_rate("scaffold", optax.sgd(0.1))
    0.1
    """
    validate.optax_transformation("optimizer", optimizer)
    hint = 'The algorithm holds for one constant rate only: take optax.sgd(0.1), or name = "sgd" without momentum.'
    rule = f"plain SGD for {algorithm}"
    if isinstance(optimizer, OverRounds):
        validate.fail("optimizer", rule, "a rate that falls over rounds", hint)

    def updates_of(gradients: PyTree, params: PyTree) -> PyTree:
        return optimizer.update(gradients, optimizer.init(params), params)[0]

    try:
        has_state = bool(jax.tree.leaves(jax.eval_shape(optimizer.init, TRIED)))
        program = None if has_state else jax.make_jaxpr(updates_of)(TRIED, TRIED).jaxpr
        # The gradients are ones, so plain SGD returns minus its rate everywhere.
        rates = [] if has_state else [-x for x in jax.tree.leaves(updates_of(TRIED, TRIED))]
    except (TypeError, ValueError):  # of a mask or of labels for other parameters, say
        validate.fail("optimizer", rule, "one that needs more than gradients", hint)
    if program is None:
        validate.fail("optimizer", rule, "one with a state, as of momentum or of a schedule", hint)
    if not _multiplies_each_gradient(program, len(TRIED)):
        validate.fail("optimizer", rule, "one that does more than scale gradients, as a clip or a mask does", hint)
    if any(isinstance(rate, Tracer) for rate in rates):
        # The gradient is a Python number here, so that the result has the dtype of the rate.
        return -updates_of(1.0, 1.0)
    first_rate = float(np.ravel(rates[0])[0])
    validate.positive("learning_rate", first_rate)
    if any((np.asarray(rate) != first_rate).any() for rate in rates):
        validate.fail("optimizer", rule, "one with several rates", hint)
    return first_rate


def _multiplies_each_gradient(program: Program, number: int) -> bool:
    """Whether each output is the gradient at the same place times a constant, for all gradients and parameters.

    Args:
      program: its inputs are `number` gradients, followed by as many parameters.
      number: of gradients.
    """
    sources = _sources(program, [{place} for place in range(2 * number)])
    return sources == [{place} for place in range(number)]


def _sources(program: Program, inputs: Sequence[set[int] | None]) -> list[set[int] | None]:
    """Finds, for each output of a program, the one input of which it is a constant multiple.

    A program whose outputs are all multiples of their own gradients is that of plain SGD
    (`_multiplies_each_gradient`).

    Args:
      program: whose equations are followed from the inputs to the outputs.
      inputs: the source of each input, in the form of the results: {i}, the empty set, or None.

    Returns: for each output its source: {i} for a constant multiple of input i; the empty set for a constant; None for
    any other function of the inputs.
    """

    def rule(equation: core.JaxprEqn, operands: list[set[int] | None]) -> list[set[int] | None]:
        name = equation.primitive.name
        varying_operands = [source for source in operands if source != set()]
        if name in ("jit", "pjit"):
            return _sources(equation.params["jaxpr"], operands)
        if not varying_operands:
            return [set()] * len(equation.outvars)
        if name in ("mul", "neg", "convert_element_type") and len(varying_operands) == 1:
            return varying_operands  # the other operand, if any, is a constant: the source stays
        return [None] * len(equation.outvars)

    num_constants = len(jaxpr_and_constants(program)[0].constvars)
    return evaluate(program, inputs, rule, constants=[set()] * num_constants, literal=lambda _: set())


class _CommonOptions(TypedDict, total=False):
    """Options that say how gradients are clipped and how the learning rate falls; `sgd` describes each."""

    schedule: Annotated[Literal["constant", "cosine", "linear"], Default("constant")]
    decay_steps: Annotated[PositiveInt | None, Default(None)]
    schedule_over: Annotated[Literal["steps", "rounds"], Default("steps")]
    clip_value: Annotated[Positive | None, Default(None)]
    clip_norm: Annotated[Positive | None, Default(None)]


def _finished(
    make: Callable,
    learning_rate: float,
    *,
    clip_value: float | None = None,
    clip_norm: float | None = None,
    **schedule: Any,
) -> optax.GradientTransformation:
    """Makes an optimiser whose gradients are clipped, and whose learning rate follows a schedule, if these are stated.

    Args:
      make: (learning rate, or a schedule of optax) -> optax transformation.
      learning_rate, clip_value, clip_norm: as in `sgd`.
      schedule: the options of `_scheduled`.
    """
    clips = [optax.clip(clip_value)] if clip_value is not None else []
    clips += [optax.clip_by_global_norm(clip_norm)] if clip_norm is not None else []
    clipped = (lambda rate: optax.chain(*clips, make(rate))) if clips else make
    return _scheduled(clipped, learning_rate, **schedule)


def _scheduled(
    make: Callable,
    learning_rate: float,
    schedule: str = "constant",
    decay_steps: int | None = None,
    schedule_over: str = "steps",
) -> optax.GradientTransformation:
    """Makes an optimiser whose learning rate is constant, or follows a schedule over local steps or over rounds.

    A schedule over local steps starts again in each round.

    Args:
      make: (learning rate, or a schedule of optax) -> optax transformation.
      learning_rate: > 0; with a schedule, at its start.
      schedule: "constant", "cosine" or "linear".
      decay_steps: after how many steps, or rounds, the rate is 0; None for a constant one.
      schedule_over: "steps" or "rounds".
    """
    if schedule == "constant":
        if decay_steps is not None:
            validate.fail("decay_steps", "none with a constant schedule", decay_steps, "Set schedule too.")
        if schedule_over != "steps":
            validate.fail("schedule_over", "'steps' with a constant schedule", schedule_over, "Set schedule too.")
        return make(learning_rate)
    unit = "rounds" if schedule_over == "rounds" else "local steps"
    validate.integer("decay_steps", decay_steps, hint=f"The {schedule} schedule falls to 0 in so many {unit}.")
    assert decay_steps is not None, "None is no integer"
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
    weight_decay: NonNegative = 0.0,
    **options: Unpack[_CommonOptions],
) -> optax.GradientTransformation:
    """Makes stochastic gradient descent, with momentum or without.

    A step with a gradient g of a minibatch at parameters w clips g by value, then by norm, and adds the decay d w. Then
    v = g + m v with momentum m, and w falls by the rate times v, or times g + m v for Nesterov's momentum.

    The clips bound a step, and give no privacy: they see the mean of a minibatch, not an example or a client. Private
    clients clip each example, and add noise, before the optimiser; a private server clips each message after it. Both
    guarantees are the same with these clips and without them.

    Args:
      learning_rate: > 0; the default suits the default run of `fedjax-sim run`.
      momentum: in [0, 1).
      nesterov: Nesterov's momentum; needs momentum > 0.
      weight_decay: d >= 0; w times d is added to the clipped gradient. That is the gradient of d / 2 ||w||^2, so a
        private client's decay is not noised.
      schedule: "constant", or "cosine" or "linear" decay to 0 within `decay_steps`.
      decay_steps: number of local steps or rounds until the rate is 0; None for a constant schedule.
      schedule_over: the unit of `decay_steps`. "steps": local steps; the schedule starts again in each round. "rounds":
        the rate is constant within a round (`over_rounds`).
      clip_value: > 0; entries of a gradient are clipped to [-clip_value, clip_value]. None clips none.
      clip_norm: > 0; a gradient whose L2 norm, over all parameters that the optimiser trains, is larger is scaled to
        it. None clips none.

    Guarantees: steps equal NumPy (tests/client/test_optimizer_options.py::test_sgd_equals_numpy); without clips and
    decay the optimiser is optax's own, with the same program (::test_options_that_are_off_cost_nothing); algorithms
    for plain SGD refuse clips and decay (::test_clips_and_decay_are_not_plain_sgd).

    References: Pascanu, Mikolov and Bengio 2013, section 3.2 (clips by norm); Sutskever et al. 2013 (momentum).

    >>> sgd(learning_rate=0.5).update(1.0, sgd().init(0.0))[0]
    -0.5
    """
    if nesterov and not momentum:
        validate.fail("nesterov", "false without momentum", nesterov, "Set momentum too.")

    def make(rate: float) -> optax.GradientTransformation:
        steps = optax.sgd(rate, momentum or None, nesterov)
        return optax.chain(optax.add_decayed_weights(weight_decay), steps) if weight_decay else steps

    return _finished(make, learning_rate, **options)


@validate.named_arguments
def adam(
    *,
    learning_rate: Positive = 0.001,
    first_decay: ShareBelowOne = 0.9,
    second_decay: ShareBelowOne = 0.999,
    epsilon: Positive = 1e-8,
    **options: Unpack[_CommonOptions],
) -> optax.GradientTransformation:
    """Makes Adam; its moments are initialised in each round.

    Args:
      learning_rate: > 0.
      first_decay, second_decay: of the two moments, in [0, 1).
      epsilon: > 0, added to the root of the second moment.
      schedule, decay_steps, schedule_over, clip_value, clip_norm: as in `sgd`.

    References: Kingma and Ba 2015.
    """
    make = lambda rate: optax.adam(rate, first_decay, second_decay, epsilon)  # noqa: E731
    return _finished(make, learning_rate, **options)


@validate.named_arguments
def adamw(
    *,
    learning_rate: Positive = 0.001,
    first_decay: ShareBelowOne = 0.9,
    second_decay: ShareBelowOne = 0.999,
    epsilon: Positive = 1e-8,
    weight_decay: NonNegative = 1e-4,
    **options: Unpack[_CommonOptions],
) -> optax.GradientTransformation:
    """Makes Adam with decoupled weight decay; its moments are initialised in each round.

    Args:
      learning_rate, first_decay, second_decay, epsilon: as in `adam`.
      weight_decay: >= 0; the weights, times this and the rate, are subtracted in each step.
      schedule, decay_steps, schedule_over, clip_value, clip_norm: as in `sgd`.

    References: Loshchilov and Hutter 2019.
    """
    make = lambda rate: optax.adamw(rate, first_decay, second_decay, epsilon, weight_decay=weight_decay)  # noqa: E731
    return _finished(make, learning_rate, **options)


@validate.named_arguments
def adagrad(
    *,
    learning_rate: Positive = 0.01,
    initial_accumulator: NonNegative = 0.1,
    epsilon: Positive = 1e-7,
    **options: Unpack[_CommonOptions],
) -> optax.GradientTransformation:
    """Makes Adagrad; its sum of squares is initialised in each round.

    Args:
      learning_rate: > 0.
      initial_accumulator: >= 0, the sum of squares before the first step.
      epsilon: > 0, added to the sum of squares.
      schedule, decay_steps, schedule_over, clip_value, clip_norm: as in `sgd`.

    References: Duchi, Hazan and Singer 2011.
    """
    make = lambda rate: optax.adagrad(rate, initial_accumulator, epsilon)  # noqa: E731
    return _finished(make, learning_rate, **options)


@validate.named_arguments
def rmsprop(
    *,
    learning_rate: Positive = 0.001,
    decay: ShareBelowOne = 0.9,
    epsilon: Positive = 1e-8,
    momentum: ShareBelowOne = 0.0,
    **options: Unpack[_CommonOptions],
) -> optax.GradientTransformation:
    """Makes RMSProp, with momentum or without; its mean of squares is initialised in each round.

    Args:
      learning_rate: > 0.
      decay: of the mean of squares, in [0, 1).
      epsilon: > 0, added to the mean of squares.
      momentum: in [0, 1); 0 for none.
      schedule, decay_steps, schedule_over, clip_value, clip_norm: as in `sgd`.

    References: Tieleman and Hinton 2012.
    """
    make = lambda rate: optax.rmsprop(rate, decay, epsilon, momentum=momentum or None)  # noqa: E731
    return _finished(make, learning_rate, **options)
