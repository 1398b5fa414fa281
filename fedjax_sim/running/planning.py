"""Estimates the cost of a run: memory from the compiled program, time from a few rounds, lanes by a timed trial."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fedjax_sim import engine
from fedjax_sim.types import Algorithm, Array, Population, PyTree

LANES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TRIAL_PATIENCE = 2  # a trial ends after so many slower candidates in a row
TRIAL_SECONDS = 1.0  # seconds of rounds for each candidate


class Forecast(NamedTuple):
    """The memory and the time that a config will take."""

    needs: engine.Needs  # bytes of a round
    limit: int  # bytes available
    compile_seconds: float
    round_seconds: float


def _compiled(algorithm: Algorithm, key: Array, state: PyTree, population: Population):
    """Compiles one round, as a run compiles it."""
    program = jax.jit(algorithm.step, donate_argnums=1, compiler_options=engine.compiler_options())
    return program.lower(key, state, population).compile()


def round_needs(algorithm: Algorithm, key: Array, params: PyTree, population: Population) -> engine.Needs:
    """Returns the bytes that a round of this algorithm takes; the round is compiled and not run."""
    state = jax.eval_shape(algorithm.init, key, params, population)
    return engine.needs(_compiled(algorithm, key, state, population))


def check_memory(needs: engine.Needs) -> None:
    """Refuses a program that needs more memory than this process's devices have.

    Raises: MemoryError with the byte counts (tests/running/test_planning.py::test_a_run_that_cannot_fit_is_refused).
    """
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
    """Compiles a round, checks that it fits into memory, and times it; the first round is not timed.

    Args:
      algorithm: whose rounds are forecast.
      key, params, population: as for `run`.
      client_memory: as for `run`; "disk" is in the folder for temporary files.

    Raises: MemoryError if the round does not fit.
    """
    with tempfile.TemporaryDirectory() as folder, engine.client_memory(client_memory, folder):
        return _forecast(algorithm, key, params, population)


def _forecast(algorithm: Algorithm, key: Array, params: PyTree, population: Population) -> Forecast:
    """Does the work of `forecast`, with the client memory chosen."""
    state = _started(algorithm, key, params, population)
    start_seconds = time.perf_counter()
    compiled = _compiled(algorithm, key, state, population)
    compile_seconds = time.perf_counter() - start_seconds
    needs = engine.needs(compiled)
    check_memory(needs)
    return Forecast(needs, engine.total_memory(), compile_seconds, _seconds(compiled, key, state, population))


def _started(algorithm: Algorithm, key: Array, params: PyTree, population: Population) -> PyTree:
    """Returns the state before the first round, in buffers that a round may take over, with its files created."""
    state = algorithm.init(key, params, population)
    for file, _ in engine.memory_files(state):
        file.create()
    return jax.tree.map(jax.numpy.array, state)


def _seconds(compiled: jax.stages.Compiled, key: Array, state: PyTree, population: Population) -> float:
    """Returns the median seconds of a few rounds; the first round is left out, since it is slower.

    There are at least 3 rounds, and more until they have taken `TRIAL_SECONDS`, but at most 50. If they take more than
    ten times `TRIAL_SECONDS` the trial ends at once.

    Args:
      compiled: a round, (key, state, population) -> (state, info), as `_compiled` returns it.
      key: of every round, since a round's time does not depend on its number.
      state: before the first round; its buffers are taken over.
      population: the clients.
    """
    (key_sharding, state_sharding, population_sharding), _ = compiled.input_shardings
    population = jax.device_put(population, population_sharding)
    key = jax.device_put(key, key_sharding)
    seconds = []
    while len(seconds) < 3 or (sum(seconds) < TRIAL_SECONDS and len(seconds) < 50):
        state = jax.device_put(state, state_sharding)
        start_seconds = time.perf_counter()
        state, _ = jax.block_until_ready(compiled(key, state, population))
        seconds.append(time.perf_counter() - start_seconds)
        # Very slow rounds end the trial early, after the first one if need be.
        if sum(seconds) > 10 * TRIAL_SECONDS:
            break
    return statistics.median(seconds[1:] or seconds)


def fastest(
    make: Callable[[engine.Plan], Algorithm], key: Array, params: PyTree, population: Population
) -> engine.Plan:
    """Returns the plan with the shortest rounds, of 1, 2, 4, ... lanes.

    The trial ends when two plans in a row were slower than the fastest so far.

    Args:
      make: a plan -> the algorithm under it, on one device.
      key, params, population: as for `run`.
    """
    with tempfile.TemporaryDirectory() as folder, engine.client_memory("auto", folder):
        return _fastest(make, key, params, population)


def _fastest(make: Callable, key: Array, params: PyTree, population: Population) -> engine.Plan:
    """Does the work of `fastest`, with the client memory chosen.

    Each plan has as many clients in a chunk as it has lanes. The trial ends too at a plan whose round does not fit into
    memory.

    Args:
      make: a plan -> the algorithm under it, on one device.
      key, params, population: as for `run`.
    """
    fastest_plan = engine.Plan(1, 1)
    fewest_seconds = float("inf")
    num_slower = 0
    for lanes in LANES:
        plan = engine.Plan(lanes, lanes)
        algorithm = make(plan)
        state = _started(algorithm, key, params, population)
        compiled = _compiled(algorithm, key, state, population)
        if engine.needs(compiled).total > engine.total_memory():
            break
        seconds = _seconds(compiled, key, state, population)
        num_slower = num_slower + 1 if seconds >= fewest_seconds else 0
        if seconds < fewest_seconds:
            fastest_plan = plan
            fewest_seconds = seconds
        if num_slower == TRIAL_PATIENCE:
            break
    return fastest_plan


def largest_cohort(build: Callable[[int], Any], cohort_size: int) -> int:
    """Returns the size of the largest cohort that fits into memory.

    It is extrapolated from the bytes at `cohort_size` and at twice as many clients.

    Args:
      build: cohort size -> `config.build.Experiment`.
      cohort_size: the smaller of the two sizes.
    """
    small_bytes, large_bytes = (_total(build(size)) for size in (cohort_size, 2 * cohort_size))
    return cohort_that_fits(cohort_size, small_bytes, large_bytes, engine.total_memory())


def cohort_that_fits(cohort_size: int, small_bytes: float, large_bytes: float, limit: float) -> int:
    """Returns the largest cohort within `limit` bytes, from the bytes of a cohort and of one of twice the size."""
    # The bytes grow by a line: a constant, and a number for each client. The bound keeps the division finite.
    bytes_per_client = max((large_bytes - small_bytes) / cohort_size, 1e-9)
    constant_bytes = small_bytes - bytes_per_client * cohort_size
    return max(int((limit - constant_bytes) / bytes_per_client), 0)


def _total(experiment: Any) -> int:
    """Returns the bytes of an experiment's round, with its client memory in the folder for temporary files."""
    with tempfile.TemporaryDirectory() as folder, engine.client_memory("auto", folder):
        return _needed(experiment)


def _needed(experiment: Any) -> int:
    """Returns the bytes of an experiment's round."""
    population = experiment.data.train
    return round_needs(experiment.algorithm, experiment.key, experiment.params, population).total
