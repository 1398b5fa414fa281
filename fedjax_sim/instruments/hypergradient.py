"""Computes hyper-gradients: derivatives of the final loss, through all rounds, by numeric hyper-parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree, validate
from fedjax_sim.prng import init_key
from fedjax_sim.running.environment import matmul_precision
from fedjax_sim.transform.chain import wire_of
from fedjax_sim.types import Algorithm, Array, Population, PyTree
from fedjax_sim.validate import PositiveInt


@validate.named_arguments
def hypergradient(
    key: Array,
    make: Callable[..., Algorithm],
    values: Mapping[str, float],
    params: PyTree,
    population: Population,
    *,
    num_rounds: PositiveInt,
    loss: Callable[[PyTree], Array],
) -> tuple[float, dict[str, float]]:
    """Computes the loss after T rounds and its derivative by each numeric hyper-parameter, in reverse mode.

    Cohorts, minibatches and noise depend on the key and not on the values, so this is the derivative of a single
    trajectory. Each round is computed again in the backward pass (rematerialised). Therefore memory grows with T times
    the state, and not with T times the clients' work.

    Args:
      key: the key of the rounds, as for `run`.
      make: (**values) -> Algorithm, made for one device. It must take traced numbers, such as learning rates, proximal
        weights and noise multipliers.
      values: the hyper-parameters at which the derivative is taken.
      params: the initial model.
      population: the clients.
      num_rounds: T.
      loss: params -> a number, such as the mean loss of validation examples; traced.

    Returns: (loss, {name: derivative}).

    Raises: ValueError for transforms that round, whose derivative is zero almost everywhere; FloatingPointError where
    the trajectory or its derivative is not finite.

    Guarantees: derivatives agree with central differences of the same rounds
    (tests/instruments/test_hypergradient.py::test_finite_differences), and, for one quadratic client, with the
    derivative by hand (tests/instruments/test_hypergradient.py::test_by_hand).

    References: Maclaurin, Duvenaud and Adams 2015 (gradient-based hyper-parameter optimisation through training).

    >>> import optax
    >>> from fedjax_sim import algorithms, population, sampling
    >>> from fedjax_sim.population import quadratic_loss, quadratic_population
    >>> def make(rate):
    ...     return algorithms.fedavg(quadratic_loss, sampling.full(1), optax.sgd(rate), num_steps=1)
    >>> clients, start = quadratic_population([1.0], [0.0]), {"w": jnp.ones(1)}
    >>> value, slope = hypergradient(
    ...     jax.random.key(0), make, {"rate": 0.5}, start, clients, num_rounds=1, loss=lambda params: params["w"][0])
    >>> round(value, 6), round(slope["rate"], 6)  # w = 1 - rate
    (0.5, -1.0)
    """
    if not isinstance(values, Mapping) or not values:
        validate.fail("values", "a dict of numbers by name", values, error=TypeError)
    for name, value in values.items():
        validate.in_range(f"values[{name!r}]", value, -jnp.inf, jnp.inf, open_low=True, open_high=True)
    _check(make(**values), params)

    # The algorithm is made anew from traced numbers, so that its hyper-parameters have derivatives.
    def final(values):
        algorithm = make(**values)
        state = algorithm.init(init_key(key), params, population)

        # Only the states between rounds are kept for the backward pass.
        @jax.checkpoint
        def one_round(state, t):
            return algorithm.step(jax.random.fold_in(key, t), state, population)[0], None

        state, _ = jax.lax.scan(one_round, state, jnp.arange(num_rounds, dtype=jnp.int32))
        return loss(algorithm.params(state))

    # Exact sums are sums of integers, which have no derivative: in fast arithmetic they are float sums.
    with engine.one_device(), engine.fast_arithmetic(), jax.default_matmul_precision(matmul_precision()):
        numbers = {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}
        value, slopes = jax.jit(jax.value_and_grad(final))(numbers)
    value = float(value)
    slopes = {name: float(slope) for name, slope in slopes.items()}
    if not all(map(jnp.isfinite, (value, *slopes.values()))):
        raise FloatingPointError(f"The loss is {value}, its derivatives {slopes}: the trajectory diverges.")
    return value, slopes


def _check(algorithm: Algorithm, params: PyTree) -> None:
    """Refuses transforms and servers that round: their messages have fewer bits than the model's numbers."""
    for name in ("transform", "server"):
        part = getattr(algorithm.parts, name, None)
        if part is None or part.wire is None:
            continue
        spec = tree.spec(params)
        wire = wire_of(part, spec) if name == "transform" else part.wire(spec)
        bits_per_value = 8 * tree.num_bytes(spec) / max(tree.num_values(spec), 1)
        if wire.payload_bits < bits_per_value * wire.values:
            hint = "Rounding has no derivative: leave it out of what is differentiated."
            validate.fail(name, "one that sends unrounded numbers", f"{wire.payload_bits} bits for {wire.values}", hint)
