"""Runs of an algorithm over simulated devices, watched as they go: time, bytes, joules and accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, metrics
from fedjax_sim.prng import init_key
from fedjax_sim.types import Algorithm, Array, Population, PyTree

__all__ = ["Watched", "watched_runs"]

STEP = ("round_seconds", "joules", "clients_reported", "staleness")


class Watched(NamedTuple):
    """What runs did, R of them; float64."""

    steps: dict[str, np.ndarray]  # [R, T] of each step: `STEP` as far as info has them, and "bytes", both ways
    accuracy: np.ndarray  # [R, L + 1] before the first step, and after every `every` of them
    every: int

    def so_far(self, name: str) -> np.ndarray:
        """[R, L + 1] sums of a number of the steps, up to each evaluation."""
        sums = np.cumsum(self.steps[name], axis=1)[:, self.every - 1 :: self.every]
        return np.concatenate([np.zeros((len(sums), 1)), sums], axis=1)

    def until(self, target: float, name: str) -> np.ndarray:
        """[R] the sums when the accuracy first reached the target, linear between evaluations; inf if never.

        >>> run = Watched({"bytes": np.ones((1, 4))}, np.array([[0.0, 0.5, 1.0]]), 2)
        >>> run.until(0.75, "bytes").tolist()
        [3.0]
        """
        looks, found = np.arange(self.accuracy.shape[1]), []
        for accuracy, sums in zip(self.accuracy, self.so_far(name), strict=True):
            at = metrics.rounds_to_target(accuracy, target, rounds=looks, rising=True, interpolate=True)
            found.append(np.interp(at, looks, sums) if math.isfinite(at) else math.inf)
        return np.array(found)


def watched_runs(
    algorithm: Algorithm,
    keys: Array,
    params: PyTree,
    population: Population,
    evaluation: Callable[[PyTree], Array],
    *,
    num_steps: int,
    every: int,
) -> Watched:
    """Runs of one algorithm, one after the other in one program.

    Args:
      algorithm: made with `mesh=None`; its info has simulated time.
      keys: [R], one a run.
      evaluation: (params) -> accuracy, traced.
      num_steps: T, a multiple of `every`.

    Raises: FloatingPointError if a client's update was not finite.

    Guarantees: the numbers of `run` (tests/study/test_time_to_target.py::test_watched_runs_are_runs).
    """

    def one(key):
        def step(state, t):
            state, info = algorithm.step(jax.random.fold_in(key, t), state, population)
            seen = {name: info[name].astype(jnp.float32) for name in STEP if name in info}
            counts = [info[name] for name in ("uplink_bytes", "downlink_bytes")]
            return state, (seen, counts, info["dropped_clients"])

        def look(state, first):
            state, seen = jax.lax.scan(step, state, first * every + jnp.arange(every))
            return state, (seen, evaluation(algorithm.params(state)))

        state = algorithm.init(init_key(key), params, population)
        seen, accuracy = jax.lax.scan(look, state, jnp.arange(num_steps // every))[1]
        return seen, jnp.concatenate([evaluation(params)[None], accuracy])

    go = jax.jit(lambda keys: jax.lax.map(one, keys), compiler_options=engine.compiler_options())
    (seen, counts, lost), accuracy = jax.device_get(go(keys))
    if lost.any():
        raise FloatingPointError(f"{int(lost.sum())} updates were not finite: lower the learning rate.")
    steps: dict[str, Any] = {name: x.reshape(len(keys), -1).astype(np.float64) for name, x in seen.items()}
    sizes = [count.number * (count.unit[..., 0] * 2.0**32 + count.unit[..., 1]) for count in counts]
    steps["bytes"] = sum(sizes).reshape(len(keys), -1).astype(np.float64)
    return Watched(steps, accuracy.astype(np.float64), every)
