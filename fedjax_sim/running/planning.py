"""The cost of a run beforehand: memory from the compiled program, time from a few rounds, lanes by a timed trial."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fedjax_sim import engine
from fedjax_sim.types import Algorithm, Array, Population, PyTree

__all__ = ["Forecast", "check_memory", "fastest", "forecast", "largest_cohort", "round_needs"]

LANES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PATIENCE = 2  # slower candidates in a row before a trial ends
TRIAL_SECONDS = 1.0  # of rounds for each candidate


class Forecast(NamedTuple):
    """What one config will take."""

    needs: engine.Needs  # bytes of a round
    limit: int  # bytes available
    compile_seconds: float
    round_seconds: float


def _compiled(algorithm: Algorithm, key: Array, state: PyTree, population: Population):
    program = jax.jit(algorithm.step, donate_argnums=1, compiler_options=engine.compiler_options())
    return program.lower(key, state, population).compile()


def round_needs(algorithm: Algorithm, key: Array, params: PyTree, population: Population) -> engine.Needs:
    """The bytes that a round of this algorithm takes; it is compiled and not run."""
    state = jax.eval_shape(algorithm.init, key, params, population)
    return engine.needs(_compiled(algorithm, key, state, population))


def check_memory(needs: engine.Needs) -> None:
    """Raises: MemoryError with the byte counts where a program cannot fit (tests/running/test_planning.py)."""
    limit = engine.total_memory()
    if needs.total > limit:
        raise MemoryError(
            f"memory: expected at most the {limit:,} bytes that are there, got {needs.total:,}: "
            f"{needs.arguments:,} for population and state, {needs.temporary:,} at work, {needs.results:,} for results."
            " `fedjax-sim plan` shows the largest cohort that fits."
        )


def forecast(
    algorithm: Algorithm, key: Array, params: PyTree, population: Population, *, client_memory: str = "auto"
) -> Forecast:
    """Compiles a round, checks that it fits into memory, and times it (without the first one).

    Args:
      client_memory: as for `run`; "disk" is in the folder for temporary files.

    Raises: MemoryError if it does not fit.
    """
    with tempfile.TemporaryDirectory() as folder, engine.client_memory(client_memory, folder):
        return _forecast(algorithm, key, params, population)


def _forecast(algorithm: Algorithm, key: Array, params: PyTree, population: Population) -> Forecast:
    state = _started(algorithm, key, params, population)
    before = time.perf_counter()
    compiled = _compiled(algorithm, key, state, population)
    compile_seconds = time.perf_counter() - before
    needs = engine.needs(compiled)
    check_memory(needs)
    return Forecast(needs, engine.total_memory(), compile_seconds, _seconds(compiled, key, state, population))


def _started(algorithm: Algorithm, key: Array, params: PyTree, population: Population) -> PyTree:
    state = algorithm.init(key, params, population)
    for file, _ in engine.memory_files(state):
        file.create()
    return jax.tree.map(jax.numpy.array, state)


def _seconds(compiled: jax.stages.Compiled, key: Array, state: PyTree, population: Population) -> float:
    """The median seconds of a few rounds, the first one left out."""
    (key_place, state_place, population_place), _ = compiled.input_shardings
    population = jax.device_put(population, population_place)
    key = jax.device_put(key, key_place)
    seconds = []
    while len(seconds) < 3 or (sum(seconds) < TRIAL_SECONDS and len(seconds) < 50):
        state = jax.device_put(state, state_place)
        before = time.perf_counter()
        state, _ = jax.block_until_ready(compiled(key, state, population))
        seconds.append(time.perf_counter() - before)
        if sum(seconds) > 10 * TRIAL_SECONDS:
            break
    return statistics.median(seconds[1:] or seconds)


def fastest(
    make: Callable[[engine.Plan], Algorithm], key: Array, params: PyTree, population: Population
) -> engine.Plan:
    """The plan with the shortest rounds, of 1, 2, 4, ... lanes; the trial ends when two in a row were slower.

    Args:
      make: a plan -> the algorithm under it, on one device.
    """
    with tempfile.TemporaryDirectory() as folder, engine.client_memory("auto", folder):
        return _fastest(make, key, params, population)


def _fastest(make: Callable, key: Array, params: PyTree, population: Population) -> engine.Plan:
    best = engine.Plan(1, 1)
    least = float("inf")
    slower = 0
    for lanes in LANES:
        plan = engine.Plan(lanes, lanes)
        algorithm = make(plan)
        state = _started(algorithm, key, params, population)
        compiled = _compiled(algorithm, key, state, population)
        if engine.needs(compiled).total > engine.total_memory():
            break
        seconds = _seconds(compiled, key, state, population)
        slower = slower + 1 if seconds >= least else 0
        if seconds < least:
            best = plan
            least = seconds
        if slower == PATIENCE:
            break
    return best


def largest_cohort(build: Callable[[int], Any], cohort_size: int) -> int:
    """The size of the largest cohort that fits, extrapolated from the bytes at this size and at twice as many clients.

    Args:
      build: cohort size -> `config.build.Experiment`.
      cohort_size: the smaller of the two sizes.
    """
    small, large = (_total(build(size)) for size in (cohort_size, 2 * cohort_size))
    each = max((large - small) / cohort_size, 1e-9)
    return max(int((engine.total_memory() - (small - each * cohort_size)) / each), 0)


def _total(experiment: Any) -> int:
    with tempfile.TemporaryDirectory() as folder, engine.client_memory("auto", folder):
        return _needed(experiment)


def _needed(experiment: Any) -> int:
    return round_needs(experiment.algorithm, experiment.key, experiment.params, experiment.data.train).total
