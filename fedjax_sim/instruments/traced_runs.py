"""Runs algorithms with traced hyper-parameters and populations: one program serves all settings of equal shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import tree
from fedjax_sim.prng import init_key
from fedjax_sim.running import kept_results
from fedjax_sim.types import Algorithm, Array, Population, PyTree


def stacked(trees: list[PyTree]) -> PyTree:
    """Stacks settings (populations, models, numbers) of equal shape into a pytree with a leading axis.

    `traced_runs` takes such stacks.

    >>> stacked([(1.0, 2.0), (3.0, 4.0)])[0].tolist()
    [1.0, 3.0]
    """
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *trees)


class _Setting(NamedTuple):
    """One setting, or S of them with a leading axis S in each leaf."""

    key: Array
    params: PyTree  # the initial model
    population: Population
    values: tuple  # traced numbers, the arguments of `make`
    target: PyTree  # what the evaluation compares with


def traced_runs(make: Callable[..., Algorithm], evaluation: Callable[[PyTree, Any], dict[str, Array]]) -> Callable:
    """Makes a function that runs S settings side by side, and that is compiled once for each shape.

    Args:
      make: (*values) -> Algorithm, made with `mesh=None`; values are traced numbers.
      evaluation: (params, target) -> dict of numbers, traced.

    Returns: (keys [S], params, populations, values, targets, *, rounds) -> dict of [S, looks] float64. All arguments
      but the last have a leading axis S; `values` is a tuple. `rounds` are the rounds after which runs are evaluated,
      rising: [looks], shared by all settings, or [S, looks]; it is passed by name.

    Raises: FloatingPointError, from the function, if a client's update was not finite.

    Guarantees: each run is a run of `run` (tests/instruments/test_traced_runs.py::test_runs_are_those_of_run). Further
    settings of the same shape compile nothing (tests/instruments/test_traced_runs.py::test_one_program).
    """

    def one_run(setting, rounds):
        key, params, population, values, target = setting
        algorithm = make(*values)

        def segment(carry, bounds):
            """Runs the rounds from one look to the next, then evaluates."""

            def advance(t, carry):
                state, num_dropped = carry
                state, info = algorithm.step(jax.random.fold_in(key, t), state, population)
                return state, num_dropped + info["dropped_clients"]

            first, last = bounds
            state, num_dropped = jax.lax.fori_loop(first, last, advance, carry)
            return (state, num_dropped), evaluation(algorithm.params(state), target)

        state = algorithm.init(init_key(key), params, population)
        bounds = jnp.concatenate([jnp.zeros(1, rounds.dtype), rounds[:-1]]), rounds
        start = tree.varying((state, jnp.int32(0)), jax.random.key_data(key)[0])
        (_, num_dropped), results = jax.lax.scan(segment, start, bounds)
        return results, num_dropped

    all_runs = jax.jit(jax.vmap(one_run))

    def runs(keys, params, populations, values, targets, *, rounds) -> dict[str, np.ndarray]:
        rounds = jnp.broadcast_to(jnp.asarray(rounds, jnp.int32), (len(keys), np.shape(rounds)[-1]))
        settings = _Setting(keys, params, populations, values, targets)
        results, num_dropped = jax.device_get(kept_results.call(all_runs, settings, rounds))
        if num_dropped.any():
            raise FloatingPointError(f"{int(num_dropped.sum())} updates were not finite: lower the learning rate.")
        return {name: x.astype(np.float64) for name, x in results.items()}

    return runs
