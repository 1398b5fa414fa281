"""Rounds in compiled blocks, with evaluation, log, checkpoints and progress around them."""

from __future__ import annotations

import inspect
import json
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, validate
from fedjax_sim.population.protocol import check_population
from fedjax_sim.running import checkpoint, checksums, distributed
from fedjax_sim.running.environment import matmul_precision, numerics, use_compilation_cache
from fedjax_sim.running.fingerprint import fingerprint
from fedjax_sim.running.log import Log, as_record, plain
from fedjax_sim.running.planning import check_memory
from fedjax_sim.running.progress import progress_bar
from fedjax_sim.running.spending import Spending
from fedjax_sim.types import Algorithm, Array, Population, PyTree

__all__ = ["History", "check_kinds", "interrupts", "num_arguments", "run"]

MAX_INFO = 4096  # numbers in an entry of info
MAX_BLOCK = 256  # most rounds between two returns to the host
BLOCK_SECONDS = 0.5  # target: long enough to hide the host's overhead, short enough for the progress bar


class History(NamedTuple):
    """The log of a run and its summary.

    With an evaluation the first record is that of round 0: the evaluation of the model before training, nothing else.
    """

    records: list[dict[str, Any]]  # one a round, as in metrics.jsonl
    summary: dict[str, Any]  # as in summary.json

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(rounds, values) of a metric, over the rounds that have it; those of an evaluation start at round 0.

        Raises: KeyError for a name that no record has, with the nearest one.
        """
        having = [record for record in self.records if name in record]
        if self.records and not having:
            known = sorted({key for record in self.records for key in record})
            raise KeyError(f"name: expected one of {', '.join(known)}, got {name!r}. {validate.nearest(name, known)}")
        return np.array([r["round"] for r in having]), np.array([r[name] for r in having], float)


def run(
    key: Array,
    algorithm: Algorithm,
    params: PyTree,
    population: Population,
    num_rounds: int,
    *,
    evaluation: Callable | None = None,
    evaluate_every: int = 10,
    directory: str | Path | None = None,
    checkpoint_every: int | None = None,
    keep_checkpoints: int = 2,
    client_memory: str = "auto",
    delta: float | None = None,
    resume: bool = False,
    allow_previous: bool = False,
    callbacks: Sequence[Callable] = (),
    progress: bool = False,
    identity: dict | None = None,
    files: Mapping[str, str] | None = None,
) -> tuple[PyTree, History]:
    """Runs `num_rounds` rounds of an algorithm over a population.

    Args:
      key: the one seed; round t uses fold_in(key, t), whatever happened before. Where a part has noise, the key is
        first bound to program, initial model and data (`fingerprint`), so that different private runs share neither
        cohorts nor noise. Keep it secret, and use it for one run.
      algorithm, params, population: what learns, its initial model, and the clients.
      num_rounds: T, counted from the start, also after a resume.
      evaluation: params -> dict of numbers (`metrics.evaluation(...)`), or (params, state) -> one, called before the
        first round, every `evaluate_every` rounds and at the end. Its values before the first round are the record of
        round 0, which holds nothing else.
      directory: the folder of `metrics.jsonl` (one record a round), `timing.jsonl`, `summary.json` and `checkpoints/`.
      checkpoint_every: rounds; by default `evaluate_every` when there is a directory.
      keep_checkpoints: how many of the newest checkpoints are kept, at least 1.
      client_memory: where per-client state is stored: "device", split over the devices; "disk", in `directory`; "auto":
        on disk if it would take more than a quarter of a device, and after a resume where it was.
      delta: at which epsilon is stated where a part has noise: in the record of each evaluated round, and in the
        summary with all that it depends on; by default n^-1.1 of the n clients (or records) that are hidden.
      resume: continue from the newest checkpoint in `directory`.
      allow_previous: if that checkpoint is damaged, continue from the one before, with a warning.
      callbacks: called as callback(round, state, record) where the evaluation is due, after the round is on disk; a
        true result stops the run. They may keep the state.
      progress: show a bar with rounds/s, clients/s, loss and the remaining time.
      identity: a JSON-able description of algorithm, data and options. A resume refuses a checkpoint with another one,
        and shows the difference. Key, shapes of the state, and what draws and last bits depend on
        (`environment.numerics`) are always compared. The privacy ledger does not rely on it: rounds that are repeated
        with another program or other data are another release, and count again.
      files: texts by name, written into `directory` once the run is certain to start or continue.

    Compiled programs are kept for the next run, as the command line keeps them (`environment.use_compilation_cache`).

    Returns: (state, History).

    Raises: FloatingPointError where an algorithm with nonfinite="error" meets a non-finite update; FileExistsError,
    FileNotFoundError, `checkpoint.CheckpointError`, `checkpoint.RunLocked` for what the directory holds; MemoryError
    for a program that does not fit.

    Guarantees: a run killed at any moment and resumed, on any number of devices, gives the bits of the uninterrupted
    run, model and log (tests/running/test_loop.py::test_kill_and_resume_gives_the_same_bits); neither evaluation nor
    checkpoints nor block length change a bit (::test_looking_changes_nothing); the log holds each round once
    (::test_log_has_every_round_once). All of it with client memory on disk too
    (tests/running/test_client_memory.py::test_resume_gives_the_same_bits). Rounds are in the privacy ledger before they
    run (tests/running/test_spending.py::test_a_crash_is_counted), and a resume with a changed program draws other noise
    and counts again (::test_changed_runs_share_nothing). Every file is checked when it is read
    (tests/running/test_checksums.py::test_every_changed_byte_is_found), and a folder that vanishes stops the run
    (::test_a_file_that_vanished_is_not_begun_anew). A resumed run has no summary and no page until it ends
    (tests/running/test_loop.py::test_a_summary_is_of_all_rounds), and one that is refused leaves no files
    (::test_a_refused_run_leaves_nothing).
    """
    _check(num_rounds, evaluate_every, checkpoint_every, keep_checkpoints, directory, resume)
    check_kinds(key, algorithm, population, evaluation, callbacks)
    use_compilation_cache()
    started = time.perf_counter()
    population = jax.tree.map(jnp.asarray, population)
    if resume and client_memory == "auto" and any(Path(directory).glob("*.mem")):
        client_memory = "disk"
    with engine.client_memory(client_memory, directory):
        init_key = jax.random.fold_in(key, 2**31 - 1)
        state = distributed.agreed(lambda: algorithm.init(init_key, params, population))
    state = engine.owned(state, (params, population))  # since blocks donate their buffers
    own = {"key": np.asarray(jax.random.key_data(key)).tolist()}
    identity = json.loads(json.dumps(identity or {})) | own | numerics()
    memory_files = [file for file, _ in engine.memory_files(state)]
    checkpoint_every = evaluate_every if checkpoint_every is None else checkpoint_every
    with ExitStack() as stack:
        interrupted = stack.enter_context(interrupts())
        stack.enter_context(jax.default_matmul_precision(matmul_precision()))
        log = Log(directory)
        log.metrics = tuple({x.name: x for x in (*log.metrics, *algorithm.metrics)}.values())
        source = distributed.from_first(lambda: fingerprint(key, algorithm, params, population))
        spending = distributed.agreed(lambda: Spending(algorithm, params, population, source, delta, log.directory))
        log.spending = spending
        first = 0
        if resume:
            distributed.by_first(log.check_resumable)
            distributed.by_first(lambda: stack.enter_context(checkpoint.lock(directory)))
            state, first = log.resume(state, identity, allow_previous)
            rule = f"at least the {first} rounds done"
            distributed.agreed(lambda: first > num_rounds and validate.fail("num_rounds", rule, num_rounds))
        elif directory is not None:
            distributed.by_first(log.check_fresh)
        block, state, population, compile_seconds = _compiled(algorithm, spending.key(key), state, population)
        if directory is not None and not resume:  # after compilation: a run that does not fit leaves no folder
            distributed.by_first(lambda: stack.enter_context(checkpoint.lock(directory)))
            log.start()
            for file in memory_files:
                file.create()
            distributed.by_first(spending.start)
        if directory is not None:
            distributed.by_first(lambda: _put_files(Path(directory), files or {}))
        if directory is not None and not resume:
            log.commit(0, state, identity, keep_checkpoints)  # so that a run stopped in its first block can continue
        judge = partial(_judged, evaluation, algorithm)
        if first == 0 and (at_start := judge(state, {"round": 0})):
            log.append([{"round": 0} | at_start], 0.0, time.perf_counter() - started)
        bar = stack.enter_context(progress_bar(progress, first, num_rounds))
        stop, length, round = False, 1, first
        while round < num_rounds and not stop:
            left = [every - round % every for every in (evaluate_every, checkpoint_every)]
            count = min(length, MAX_BLOCK, num_rounds - round, *left)
            if spending.mechanism is not None:
                distributed.agreed(partial(spending.enter, round, round + count))
            before = time.perf_counter()
            with _in_their_words(memory_files):
                state, infos = block(state, population, round, count)
                infos = jax.device_get(distributed.whole(infos))
            seconds = time.perf_counter() - before
            length = max(1, min(2 * count, int(BLOCK_SECONDS * count / max(seconds, 1e-6))))
            records = [as_record(round + i + 1, infos, i) for i in range(count)]
            round += count
            if spending.mechanism is not None:
                distributed.agreed(partial(spending.observe, records))
            records, failed = _until_failure(records)
            looking = round % evaluate_every == 0 or round == num_rounds
            if looking and not failed:
                records[-1] |= judge(state, records[-1])
                records[-1] |= {name: plain(value) for name, value in spending.record(round).items()}
            log.append(records, seconds, time.perf_counter() - started)
            bar(records, seconds)
            if failed:
                raise distributed.everywhere(FloatingPointError(failed))
            looks = distributed.gathered(length, bool(interrupted))  # clocks and signals differ between processes
            length, interrupt = int(looks[0, 0]), looks[:, 1].any()
            due = round % checkpoint_every == 0 or round == num_rounds
            if directory is not None and (due or interrupt):
                log.commit(round, state, identity, keep_checkpoints)
            if interrupt:
                raise distributed.everywhere(KeyboardInterrupt())
            if looking and callbacks:
                kept = jax.tree.map(jnp.array, state)
                stop = any([callback(round, kept, records[-1]) for callback in callbacks])
                stop = distributed.gathered(stop).any()
                if directory is not None and stop and not due:
                    log.commit(round, state, identity, keep_checkpoints)
        summary = log.summary(compile_seconds, peak_memory_bytes()) | {"finished": round >= num_rounds}
        summary |= spending.summary({name for record in log.records for name in record})
        if directory is not None:
            text, path = json.dumps(summary, indent=2) + "\n", Path(directory) / "summary.json"
            distributed.by_first(lambda: checksums.write(path, text.encode()))
    return state, History(log.records, summary)


def _put_files(directory: Path, files: Mapping[str, str]) -> None:
    """Writes the files of a run that starts or continues; summary and page of an earlier end are removed."""
    checksums.remove(directory, ["summary.json", "report.html"])
    for name, text in files.items():
        checksums.write(directory / name, text.encode())


@contextmanager
def _in_their_words(memory_files: list) -> Iterator[None]:
    """Raises the errors of client memory on disk, which compiled code can only report as its own."""
    try:
        yield
    except jax.errors.JaxRuntimeError:
        for file in memory_files:
            file.check()
        raise
    for file in memory_files:
        file.check()


@contextmanager
def interrupts() -> Iterator[list]:
    """A list that the first Ctrl-C fills, so that a run stops between two blocks; the second one stops it at once.

    An exception raised at once could hit Python code that is called from compiled code, and would be lost there.
    """
    seen: list = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def note(number, frame):
        seen.append(number)
        if len(seen) > 1 and callable(before):
            before(number, frame)

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def check_kinds(key: Any, algorithm: Any, population: Any, evaluation: Any, callbacks: Any) -> None:
    """Raises TypeError for arguments of `run` of a wrong type."""
    if not isinstance(key, jax.Array) or key.ndim != (not jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        validate.fail("key", "one random key", key, "Make one: jax.random.key(0).", TypeError)
    if not isinstance(algorithm, Algorithm):
        validate.fail("algorithm", "an Algorithm", type(algorithm).__name__, "Call a recipe or federated().", TypeError)
    check_population(population)
    if evaluation is not None and not callable(evaluation):
        validate.fail("evaluation", "a function of params", evaluation, "See metrics.evaluation.", TypeError)
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        validate.fail("callbacks", "a list of functions", callbacks, error=TypeError)


def _check(num_rounds, evaluate_every, checkpoint_every, keep_checkpoints, directory, resume) -> None:
    validate.integer("num_rounds", num_rounds, 0)
    validate.integer("evaluate_every", evaluate_every)
    if checkpoint_every is not None:
        validate.integer("checkpoint_every", checkpoint_every)
    validate.integer("keep_checkpoints", keep_checkpoints)
    if resume and directory is None:
        validate.fail("directory", "the run directory to resume", None)


def _check_info(info: Mapping[str, Any]) -> None:
    """Refuses large arrays in a round's info: the log holds scalars, one record a round."""
    for name, value in info.items():
        size = max((x.size for x in jax.tree.leaves(value)), default=0)
        if size > MAX_INFO:
            hint = "The log holds scalars. To see what a server saw, replay the round: algorithms.round.observe."
            validate.fail(f"info[{name!r}]", f"at most {MAX_INFO:,} numbers", f"{size:,} numbers", hint)


def _compiled(algorithm: Algorithm, key: Array, state: PyTree, population: PyTree):
    """(The compiled block program, state and population on their devices, the seconds that compilation took.)"""

    step = jax.jit(algorithm.step)  # traced once, though called twice

    def block(key, state, population, first, count):
        _, info = jax.eval_shape(step, key, state, population)
        _check_info(info)
        infos = jax.tree.map(lambda x: jnp.zeros((MAX_BLOCK, *x.shape), x.dtype), info)

        def one_round(i, carry):
            state, infos = carry
            state, info = step(jax.random.fold_in(key, first + i), state, population)
            return state, jax.tree.map(lambda rows, x: rows.at[i].set(x), infos, info)

        return jax.lax.fori_loop(0, count, one_round, (state, infos))

    before = time.perf_counter()
    zero = np.int32(0)
    key, state, population = distributed.replicated((key, state, population))
    places = {"out_shardings": (None, key.sharding)} if distributed.several() else {}  # infos are read everywhere
    compiled = jax.jit(block, donate_argnums=1, **places).lower(key, state, population, zero, zero).compile()
    seconds = time.perf_counter() - before
    distributed.agreed(lambda: check_memory(engine.needs(compiled)))
    (key_place, state_place, population_place, *_), _ = compiled.input_shardings
    key, state = jax.device_put(key, key_place), jax.device_put(state, state_place)
    population = jax.device_put(population, population_place)

    def call(state, population, first, count):
        state, infos = compiled(key, state, population, np.int32(first), np.int32(count))
        return jax.device_put(state, state_place), infos

    return call, state, population, seconds


def _local(tree: PyTree) -> PyTree:
    """One device's copy of replicated arrays."""
    return jax.tree.map(lambda x: x.addressable_data(0), tree)


def _judged(evaluation: Callable | None, algorithm: Algorithm, state: PyTree, record: dict) -> dict:
    """An evaluation's values for the record; refuses names that the record already has."""
    values = {}
    if evaluation is not None:
        sees_state = num_arguments(evaluation) == 2
        if sees_state and distributed.several():
            hint = "The clients' memories are split over the processes: evaluate params alone, or use one process."
            validate.fail("evaluation", "one of params, with several processes", "one of (params, state)", hint)
        values = evaluation(_local(algorithm.params(state)), *([state] if sees_state else []))
    for name in values:
        if name in record or name == "epsilon":
            validate.fail("evaluation", "names that the round does not use", name, "Put a prefix before it.")
    return {name: plain(value) for name, value in values.items()}


def num_arguments(evaluation: Callable) -> int:
    """1 for an evaluation of params, 2 for one of (params, state)."""
    try:
        parameters = inspect.signature(evaluation).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have none
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return 2 if sum(x.kind in kinds and x.default is x.empty for x in parameters) == 2 else 1


def _until_failure(records: list[dict]) -> tuple[list[dict], str]:
    """(The records up to the first round with forbidden non-finite updates, the error's text, "" without any.)"""
    failed = [[id for id in record.pop("error_ids", []) if id >= 0] for record in records]
    for i, (record, ids) in enumerate(zip(records, failed, strict=True)):
        if ids:
            return records[: i + 1], (
                f"round {record['round']}: {record['dropped_clients']} clients sent non-finite updates, among them "
                f"{ids}. Lower the learning rate, clip, or use nonfinite='drop'."
            )
    return records, ""


def peak_memory_bytes() -> int:
    """The peak memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
