"""Runs with traced hyper-parameters and populations: one compiled program for all settings of equal shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import tree
from fedjax_sim.prng import init_key
from fedjax_sim.types import Algorithm, Array, PyTree

__all__ = ["stacked", "traced_runs"]


def stacked(trees: list[PyTree]) -> PyTree:
    """Settings (populations, models, numbers) of equal shape as one pytree with a leading axis, for `traced_runs`.

    >>> stacked([(1.0, 2.0), (3.0, 4.0)])[0].tolist()
    [1.0, 3.0]
    """
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *trees)


def traced_runs(make: Callable[..., Algorithm], evaluation: Callable[[PyTree, Any], dict[str, Array]]) -> Callable:
    """A function that runs S settings side by side, compiled once for each shape.

    Args:
      make: (*values) -> Algorithm, made with `mesh=None`; values are traced numbers.
      evaluation: (params, target) -> dict of numbers, traced.

    Returns: (keys [S], params, populations, values, targets, rounds) -> dict of [S, looks] float64. All but the last
      have a leading axis S, values is a tuple; rounds is [looks], rising, shared by all, or [S, looks].

    Raises: FloatingPointError, from the function, if a client's update was not finite.

    Guarantees: each is a run of `run` (tests/instruments/test_traced_runs.py::test_runs_are_those_of_run), and further
    settings of the same shape compile nothing (::test_one_program).
    """

    def one(key, params, population, values, target, rounds):
        algorithm = make(*values)

        def segment(carry, bounds):
            def advance(t, carry):
                state, lost = carry
                state, info = algorithm.step(jax.random.fold_in(key, t), state, population)
                return state, lost + info["dropped_clients"]

            state, lost = jax.lax.fori_loop(*bounds, advance, carry)
            return (state, lost), evaluation(algorithm.params(state), target)

        state = algorithm.init(init_key(key), params, population)
        looks = jnp.concatenate([jnp.zeros(1, rounds.dtype), rounds[:-1]]), rounds
        start = tree.varying((state, jnp.int32(0)), jax.random.key_data(key)[0])
        (_, lost), seen = jax.lax.scan(segment, start, looks)
        return seen, lost

    every = jax.jit(jax.vmap(one))

    def runs(keys, params, populations, values, targets, rounds) -> dict[str, np.ndarray]:
        rounds = jnp.broadcast_to(jnp.asarray(rounds, jnp.int32), (len(keys), np.shape(rounds)[-1]))
        seen, lost = jax.device_get(every(keys, params, populations, values, targets, rounds))
        if lost.any():
            raise FloatingPointError(f"{int(lost.sum())} updates were not finite: lower the learning rate.")
        return {name: x.astype(np.float64) for name, x in seen.items()}

    return runs
