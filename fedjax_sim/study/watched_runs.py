"""This module runs an algorithm over simulated devices and records time, bytes, joules and accuracy along the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, metrics
from fedjax_sim.prng import init_key
from fedjax_sim.running import kept_results
from fedjax_sim.types import Algorithm, Array, Population, PyTree

# Numbers of a step's info that are recorded, where an algorithm reports them.
STEP_METRICS = ("round_seconds", "joules", "clients_reported", "staleness")


class Watched(NamedTuple):
    """The record of R runs with T steps and L evaluations each; all arrays are float64.

    Fields:
      steps: [R, T] numbers of each step by name: those of `STEP_METRICS` that the algorithm's info has, and "bytes",
        which is downlink plus uplink.
      accuracy: [R, L + 1] before the first step, and after every `every` steps.
      every: steps between two evaluations, T / L.
    """

    steps: dict[str, np.ndarray]
    accuracy: np.ndarray
    every: int

    def so_far(self, name: str) -> np.ndarray:
        """Sums a number of the steps up to each evaluation.

        Args:
          name: a key of `steps`.

        Returns: [R, L + 1]; the first column, before any step, is zero.
        """
        sums = np.cumsum(self.steps[name], axis=1)[:, self.every - 1 :: self.every]
        return np.concatenate([np.zeros((len(sums), 1)), sums], axis=1)

    def until(self, target: float, name: str) -> np.ndarray:
        """Sums a number of the steps until the accuracy first reaches the target.

        Between two evaluations accuracy and sum are interpolated linearly.

        Args:
          target: an accuracy.
          name: a key of `steps`.

        Returns: [R]; inf for a run that never reaches the target.

        >>> run = Watched({"bytes": np.ones((1, 4))}, np.array([[0.0, 0.5, 1.0]]), 2)
        >>> run.until(0.75, "bytes").tolist()
        [3.0]
        """
        evaluations = np.arange(self.accuracy.shape[1])
        totals = []
        for accuracy, sums in zip(self.accuracy, self.so_far(name), strict=True):
            # A fractional index of an evaluation; infinite if the run never reaches the target.
            position = metrics.rounds_to_target(accuracy, target, rounds=evaluations, rising=True, interpolate=True)
            totals.append(np.interp(position, evaluations, sums) if math.isfinite(position) else math.inf)
        return np.array(totals)


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
    """Runs an algorithm several times, one run after the other in one program, and records each step.

    Runs are mapped sequentially because a vmap would copy the model versions that an asynchronous server keeps.

    Args:
      algorithm: made with `mesh=None`; its info has simulated time.
      keys: [R], one for each run.
      params: the first model.
      population: the clients.
      evaluation: (params) -> accuracy, traced.
      num_steps: T, a multiple of `every`.
      every: steps between two evaluations.

    Returns: `Watched`.

    Raises: FloatingPointError if a client's update was not finite.

    Guarantees: the recorded numbers are those of `run`
    (tests/study/test_time_to_target.py::test_watched_runs_are_runs).
    """

    def single_run(key):
        def step(state, t):
            state, info = algorithm.step(jax.random.fold_in(key, t), state, population)
            numbers = {name: info[name].astype(jnp.float32) for name in STEP_METRICS if name in info}
            byte_counts = [info[name] for name in ("uplink_bytes", "downlink_bytes")]
            return state, (numbers, byte_counts, info["dropped_clients"])

        def steps_and_evaluation(state, index):
            state, records = jax.lax.scan(step, state, index * every + jnp.arange(every))
            return state, (records, evaluation(algorithm.params(state)))

        state = algorithm.init(init_key(key), params, population)
        records, accuracy = jax.lax.scan(steps_and_evaluation, state, jnp.arange(num_steps // every))[1]
        return records, jnp.concatenate([evaluation(params)[None], accuracy])

    run_all = jax.jit(lambda keys: jax.lax.map(single_run, keys), compiler_options=engine.compiler_options())
    (numbers, byte_counts, num_lost), accuracy = jax.device_get(kept_results.call(run_all, keys))
    if num_lost.any():
        raise FloatingPointError(f"{int(num_lost.sum())} updates were not finite: lower the learning rate.")
    # From [R, L, every] to [R, T].
    steps: dict[str, Any] = {name: x.reshape(len(keys), -1).astype(np.float64) for name, x in numbers.items()}
    # A count is a number times a unit of 64 bits, held as two words of 32 bits.
    up, down = (count.number * (count.unit[..., 0] * 2.0**32 + count.unit[..., 1]) for count in byte_counts)
    steps["bytes"] = (up + down).reshape(len(keys), -1).astype(np.float64)
    return Watched(steps, accuracy.astype(np.float64), every)
