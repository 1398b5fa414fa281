"""Runs rounds in compiled blocks, with evaluation, log, checkpoints and progress around them."""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np

from fedjax_sim import engine, validate
from fedjax_sim.prng import init_key
from fedjax_sim.running import checksums, seconds
from fedjax_sim.running.arguments import (
    check_initial_model,
    check_kinds,
    check_run_numbers,
    check_stopping,
    compile_evaluation,
    evaluated,
    evaluation_program,
)
from fedjax_sim.running.blocks import MAX_BLOCK, compiled_block, memory_errors, traced_round
from fedjax_sim.running.environment import matmul_precision, numerics, use_compilation_cache
from fedjax_sim.running.executables import KeptRound, find_round, keep_round, name_of_round
from fedjax_sim.running.files import lock
from fedjax_sim.running.fingerprint import (
    RoundProgram,
    fingerprint,
    is_private,
    program_digest,
    round_program,
    round_program_on,
)
from fedjax_sim.running.history import History as History
from fedjax_sim.running.interrupts import interrupts
from fedjax_sim.running.log import Log, as_records, plain
from fedjax_sim.running.loggers import Logger
from fedjax_sim.running.privacy_ledger import Spending
from fedjax_sim.running.processes import Processes, current, everywhere
from fedjax_sim.running.progress import progress_bar
from fedjax_sim.running.settings import Judging, Keeping, Resuming, Stopping, Training
from fedjax_sim.types import Algorithm, Array, Population, PyTree

# The target length of a block: long enough to hide the host's overhead, short enough for the progress bar.
BLOCK_SECONDS = 0.5
# The least time from one checkpoint to the next, if no number of rounds is stated. Many a small model trains for rounds
# in the milliseconds that a checkpoint takes.
CHECKPOINT_SECONDS = 1.0


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
    loggers: Sequence[Logger] = (),
    progress: bool = False,
    identity: dict | None = None,
    files: Mapping[str, str] | None = None,
    origin: str | None = None,
) -> tuple[PyTree, History]:
    """Runs `num_rounds` rounds of an algorithm over a population.

    Args:
      key: the only source of randomness: round t uses fold_in(key, t), whatever happened before. If a part adds noise,
        the key is first bound to program, initial model and data (`fingerprint`). So different private runs share
        neither cohorts nor noise. Keep the key secret, and use it for one run.
      algorithm, params, population: the algorithm, its initial model, and the clients.
      num_rounds: T, counted from the start, also after a resume.
      evaluation: params -> dict of numbers (`metrics.evaluation(...)`), or (params, state) -> dict of numbers. It is
        called before the first round, every `evaluate_every` rounds, and at the end. Its values before the first round
        are the record of round 0, which holds nothing else. `algorithm.params_kind` says what the params are: those of
        FedProto, for example, are a start that no round trains, and clients' own models are its result. None for no
        evaluation.
      evaluate_every: rounds from one evaluation to the next, at least 1.
      directory: the folder of `metrics.jsonl` (one record a round), `timing.jsonl`, `summary.json` and `checkpoints/`.
      checkpoint_every: rounds from one checkpoint to the next. By default there is one after each evaluation, but no
        more than one a second unless there are callbacks, and one at the end. Without a directory there is none.
      keep_checkpoints: how many of the newest checkpoints are kept, at least 1.
      client_memory: where per-client state is stored: "device", split over the devices; "disk", in `directory`; "auto":
        on disk if it would take more than a quarter of a device, and after a resume where it was.
      delta: the delta at which epsilon is stated if a part adds noise. Epsilon is in the record of each evaluated
        round, and in the summary with all that it depends on. The default is n^-1.1 for the n clients (or records) that
        are hidden.
      resume: continue from the newest checkpoint in `directory`.
      allow_previous: if the newest checkpoint is damaged, continue from an earlier one, with a warning.
      callbacks: called as callback(round, state, record) when an evaluation is due, after the round is on disk. A true
        result stops the run. Callbacks may keep the state.
      loggers: get every record too, such as `loggers.TensorBoard(directory)`. What a logger raises stops the run, which
        can be resumed.
      progress: show a bar with rounds/s, clients/s, loss and the remaining time.
      identity: a JSON-able description of algorithm, data and options. A resume refuses a checkpoint with another
        identity, and shows the difference. The key, the shapes of the state, the program of a round, the loss of an
        evaluation that `metrics.evaluation` built, the versions of JAX and its compiler, and the settings that draws
        and last bits depend on (`environment.numerics`) are always compared. Data, other evaluations and callbacks are
        compared only as far as they are described here, and what a round computes in a host callback cannot be
        compared. The privacy ledger does not rely on the identity: rounds that are repeated with another program or
        other data are another release, and count again. None describes nothing.
      files: texts by name, written into `directory` once the run is certain to start or continue; None for none.
      origin: a digest of all that algorithm and population are made from (`origin.origin_of`), under which the compiled
        rounds are kept: a later run of this origin traces nothing. The command line states it, whose configs are
        values. None where that is not known, as for functions of Python.

    Inside of `with engine.fast_arithmetic():` the run is in fast arithmetic, which is part of its identity.
    Compiled programs are kept for the next run, as the command line keeps them (`environment.use_compilation_cache`).

    Returns: (state, History).

    Raises: FloatingPointError where an algorithm with nonfinite="error" meets a non-finite update; FileExistsError,
    FileNotFoundError, NotADirectoryError, `checkpoint.CheckpointError`, `checkpoint.RunLocked` for what the directory
    is or holds; MemoryError for a program that does not fit.

    Guarantees:
      A run that is killed at any moment and resumed gives the bits of the uninterrupted run, model and log
      (tests/running/test_loop.py::test_kill_and_resume_gives_the_same_bits). In reproducible arithmetic, which is the
      default, the number of devices may be another one.
      Neither evaluation nor checkpoints nor block length change a bit
      (tests/running/test_loop.py::test_looking_changes_nothing).
      The log holds each round once (tests/running/test_loop.py::test_log_has_every_round_once).
      The three above hold with client memory on disk too
      (tests/running/test_client_memory.py::test_resume_gives_the_same_bits).
      Rounds are in the privacy ledger before they run (tests/running/test_privacy_ledger.py::test_a_crash_is_counted).
      A run goes on with its own program alone, on any number of devices
      (tests/running/test_same_program.py::test_another_program_is_refused, ::test_other_devices_continue).
      Repeated rounds with another program or other data draw other noise and count again
      (tests/running/test_privacy_ledger.py::test_changed_runs_share_nothing).
      Every file is checked when it is read (tests/running/test_checksums.py::test_every_changed_byte_is_found).
      A folder that vanishes stops the run
      (tests/running/test_checksums.py::test_a_file_that_vanished_is_not_begun_anew).
      A resumed run has no summary and no page until it ends
      (tests/running/test_loop.py::test_a_summary_is_of_all_rounds).
      The seconds of a run's parts, `summary["seconds"]`, add up to its wall time until the summary, sessions before a
      resume included (tests/running/test_seconds.py::test_a_run_adds_up). What a stopped session did after its last
      checkpoint is not in them, since its rounds run again.
      A run that is not traced has the log, state and noise of one that is
      (tests/running/test_warm_starts.py::test_the_same_run).
      A run that is refused leaves no files (tests/running/test_loop.py::test_a_refused_run_leaves_nothing).
    """
    check_run_numbers(
        num_rounds=num_rounds,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        directory=directory,
        resume=resume,
    )
    check_kinds(key, algorithm, population, evaluation, callbacks)
    check_initial_model(params)
    check_stopping(algorithm, callbacks)
    use_compilation_cache()
    # A run with client memory on disk left its files there: a resume goes on with them.
    if directory is not None and resume and client_memory == "auto" and any(Path(directory).glob("*.mem")):
        client_memory = "disk"
    session = _Session(
        training=Training(key=key, algorithm=algorithm, params=params),
        judging=Judging(evaluation=evaluation, evaluate_every=evaluate_every),
        stopping=Stopping(num_rounds=num_rounds, callbacks=callbacks),
        keeping=Keeping(
            directory=directory,
            checkpoint_every=checkpoint_every,
            keep_checkpoints=keep_checkpoints,
            client_memory=client_memory,
            files=files or {},
            loggers=loggers,
        ),
        resuming=Resuming(resume=resume, allow_previous=allow_previous),
        processes=current(),
        population=jax.tree.map(jnp.asarray, population),
        started=time.perf_counter(),
        # As JSON has it, so that it compares equal to the identity in a checkpoint.
        identity=json.loads(json.dumps(identity or {})),
        origin=origin,
    )
    with ExitStack() as stack:
        stack.enter_context(seconds.time_account())
        with seconds.timed_part("start"):
            session.init()
            session.interrupted = stack.enter_context(interrupts())
            stack.enter_context(jax.default_matmul_precision(matmul_precision()))
            session.account(delta)
            session.open(stack)
        session.train(stack.enter_context(progress_bar(progress, session.round, num_rounds)))
        return session.state, session.history()


@dataclasses.dataclass
class _Session:
    """A run in progress.

    The state is an attribute and no local variable, so that no frame keeps buffers that a block has taken over.
    """

    training: Training
    judging: Judging
    stopping: Stopping
    keeping: Keeping
    resuming: Resuming
    processes: Processes
    population: PyTree
    started: float  # on the clock of `time.perf_counter`
    identity: dict
    origin: str | None = None
    kept_round_name: str | None = None  # of the file of the compiled rounds
    kept_round: KeptRound | None = None  # compiled by an earlier process
    private_program: str = ""  # the digest of a private run's program
    state: PyTree = None
    round: int = 0  # rounds done
    committed_round: int = -1  # of the newest checkpoint
    committed_at: float = 0.0  # on the clock of `time.perf_counter`
    log: Log = dataclasses.field(init=False)  # from `account` on
    spending: Spending = dataclasses.field(init=False)  # from `account` on
    memory_files: Sequence = ()
    block: Callable = dataclasses.field(init=False)  # from `open` on
    compile_seconds: float = 0.0
    interrupted: Sequence = ()  # filled by Ctrl-C
    by_client: Mapping | None = None  # of the last evaluation; None before the first

    def init(self) -> None:
        """Makes the state before the first round."""
        key, algorithm, params = self.training
        with engine.client_memory(self.keeping.client_memory, self.keeping.directory):
            self.state = self.processes.agreed(lambda: algorithm.init(init_key(key), params, self.population))
        # Blocks donate the state's buffers: the caller's params and population must not be among them.
        self.state = engine.owned(self.state, (params, self.population))
        self.memory_files = [file for file, _ in engine.memory_files(self.state)]

    def account(self, delta: float | None) -> None:
        """Makes the log and the privacy ledger, whose key is bound to the program, the initial model and the data.

        Args:
          delta: as for `run`.
        """
        key, algorithm, params = self.training
        self.identity |= {"key": np.asarray(jax.random.key_data(key)).tolist()} | numerics()
        self.identity |= {"versions": {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__}}
        self.log = log = Log(self.keeping.directory, self.keeping.loggers)
        # If the algorithm states a metric of a round anew, its statement counts.
        log.metrics = tuple({metric.name: metric for metric in (*log.metrics, *algorithm.metrics)}.values())
        arguments = (key, self.state, self.population)
        with seconds.timed_part("compilation"):
            self.kept_round_name = name_of_round(self.origin, *arguments)
            self.kept_round = find_round(self.kept_round_name, *arguments)
        if is_private(algorithm):
            kept = self.kept_round and self.kept_round.private_program
            self.private_program = kept or self.processes.from_first(
                lambda: program_digest(algorithm, params, self.population)
            )
        run_fingerprint = self.processes.from_first(
            lambda: fingerprint(key, algorithm, params, self.population, self.private_program)
        )
        self.spending = log.spending = self.processes.agreed(
            lambda: Spending(algorithm, params, self.population, run_fingerprint, delta=delta, directory=log.directory)
        )

    def open(self, stack: ExitStack) -> None:
        """Resumes if asked, compiles, and locks the folder.

        A run that is refused, or that does not fit into memory, leaves no folder behind.

        Args:
          stack: holds the folder's lock until the run ends.
        """
        key, algorithm, _ = self.training
        resume, allow_previous = self.resuming
        log = self.log
        directory = self.keeping.directory
        if resume:
            assert directory is not None, "`check_run_numbers` refuses a resume without a directory"
            self.processes.by_first(log.check_resumable)
            self.processes.by_first(lambda: stack.enter_context(lock(directory)))
            self.processes.by_first(lambda: log.check_same_run(self.identity, allow_previous))
        elif directory is not None:
            self.processes.by_first(log.check_fresh)
        with seconds.timed_part("compilation"):
            step = self.kept_round or traced_round(algorithm, key, self.state, self.population)
        keep = None
        if directory is not None:
            if isinstance(step, KeptRound):
                of_round = step.round_program
            else:
                of_round = RoundProgram(**self.processes.from_first(lambda: round_program(step.traced.jaxpr)._asdict()))
                keep = partial(keep_round, self.kept_round_name, of_round, self.private_program)
            self.identity["program"] = of_round._asdict()
            self.identity["program"]["processes"] = self.processes.number
            program = evaluation_program(self.judging.evaluation, algorithm, self.state)
            if program is not None:
                sha256 = self.processes.from_first(lambda: round_program(program).sha256)
                self.identity["program"]["evaluation"] = sha256
        if resume:
            self.state, self.round = log.resume(self.state, self.identity, allow_previous, self.program_on)
            rounds_done = self.round
            rounds = self.stopping.num_rounds
            rule = f"at least the {self.round} rounds done"
            self.processes.agreed(lambda: rounds_done > rounds and validate.fail("num_rounds", rule, rounds))
        with seconds.timed_part("compilation"):
            self.block, self.state, self.population, self.compile_seconds = compiled_block(
                step,
                self.spending.key(key),
                self.state,
                self.population,
                keep=keep,
                meanwhile=self.prepare_evaluation,
            )
        # Files are created only after compilation, which may fail for want of memory.
        if directory is not None and not resume:
            self.processes.by_first(lambda: stack.enter_context(lock(directory)))
            log.start()
            for file in self.memory_files:
                file.create()
            self.processes.by_first(self.spending.start)
        if directory is not None:
            self.processes.by_first(lambda: _put_files(Path(directory), self.keeping.files))
        # A checkpoint of round 0, so that a run that is stopped in its first block can continue.
        if directory is not None and not resume:
            self.commit()
        stack.callback(log.finish_loggers)
        self.processes.by_first(log.start_loggers)
        if self.round == 0 and (at_start := self.evaluate({"round": 0})):
            log.append([{"round": 0} | at_start], 0.0, time.perf_counter() - self.started)

    def program_on(self, num_devices: int) -> dict:
        """Returns the program of a round on another number of devices, as a run's identity holds it."""
        key, algorithm, params = self.training
        kind = "disk" if self.memory_files else "device"
        with engine.client_memory(kind, self.keeping.directory):
            return round_program_on(num_devices, algorithm, init_key(key), params, self.population)._asdict()

    def train(self, bar: Callable) -> None:
        """Runs blocks until all rounds are done or a callback stops the run.

        Args:
          bar: (records of a block, its seconds) -> None, as of `progress_bar`.
        """
        stop, length = False, 1
        while self.round < self.stopping.num_rounds and not stop:
            # A block ends where an evaluation or a checkpoint is due.
            rounds_until_due = [
                every - self.round % every
                for every in (self.judging.evaluate_every, self.keeping.checkpoint_every)
                if every is not None
            ]
            count = min(length, MAX_BLOCK, self.stopping.num_rounds - self.round, *rounds_until_due)
            records, block_seconds = self.run_block(count)
            # The next block is at most twice as long, and long enough for BLOCK_SECONDS at the speed of this one.
            length = max(1, min(2 * count, int(BLOCK_SECONDS * count / max(block_seconds, 1e-6))))
            records, failed = _until_failure(records)
            evaluation_is_due = self.due(self.judging.evaluate_every)
            if evaluation_is_due and not failed:
                records[-1] |= self.evaluate(records[-1])
                records[-1] |= {name: plain(value) for name, value in self.spending.record(self.round).items()}
            self.log.append(records, block_seconds, time.perf_counter() - self.started)
            bar(records, block_seconds)
            if failed:
                raise everywhere(FloatingPointError(failed))
            # Clocks and signals differ between processes. Process 0 decides on the length of the next block and on the
            # checkpoint; an interrupt of any process counts.
            decisions = self.processes.gathered_numbers(length, self.checkpoint_is_due(), bool(self.interrupted))
            length, checkpoint_is_due = int(decisions[0, 0]), bool(decisions[0, 1])
            interrupt = decisions[:, 2].any()
            if self.keeping.directory is not None and (checkpoint_is_due or interrupt):
                self.commit()
            if interrupt:
                raise everywhere(KeyboardInterrupt())
            if evaluation_is_due and self.stopping.callbacks:
                stop = self.call_back(records[-1])

    def prepare_evaluation(self) -> None:
        """Compiles the evaluation. What that raises, the first evaluation raises again, once the run has its files."""
        with seconds.timed_part("evaluation"), suppress(Exception):
            compile_evaluation(self.judging.evaluation, self.training.algorithm, self.state)

    def evaluate(self, record: Mapping) -> dict:
        """Returns the values of an evaluation after the rounds done, and keeps its results by client."""
        with seconds.timed_part("evaluation"):
            values, self.by_client = evaluated(self.judging.evaluation, self.training.algorithm, self.state, record)
        return values

    def due(self, every: int) -> bool:
        """Returns whether an action of every `every` rounds is due after this round; at the end all are due."""
        return self.round % every == 0 or self.round == self.stopping.num_rounds

    def checkpoint_is_due(self) -> bool:
        """Returns whether a checkpoint is due after this round."""
        if self.keeping.checkpoint_every is not None:
            return self.due(self.keeping.checkpoint_every)
        # A callback is called after the round is on disk.
        is_wanted = bool(self.stopping.callbacks) or time.perf_counter() - self.committed_at >= CHECKPOINT_SECONDS
        return self.round == self.stopping.num_rounds or (is_wanted and self.due(self.judging.evaluate_every))

    def run_block(self, count: int) -> tuple[list[dict], float]:
        """Runs the next rounds, after writing them into the ledger, and returns (their records, their seconds)."""
        if self.spending.mechanism is not None:
            self.processes.agreed(partial(self.spending.enter, self.round, self.round + count))
        start_seconds = time.perf_counter()
        with seconds.timed_part("rounds"), memory_errors(self.memory_files):
            self.state, infos = self.block(self.state, self.population, self.round, count)
        block_seconds = time.perf_counter() - start_seconds
        records = as_records(self.round + 1, infos, count)
        self.round += count
        if self.spending.mechanism is not None:
            self.processes.agreed(partial(self.spending.observe, records))
        return records, block_seconds

    def call_back(self, record: dict) -> bool:
        """Calls the callbacks with a copy of the state, and returns whether one of them stops the run.

        Callbacks may keep the copy; the state's own buffers are donated to the next block.
        """
        state_copy = jax.tree.map(jnp.array, self.state)
        # A list and no generator: every callback is called, even after one that stops the run.
        with seconds.timed_part("callbacks"):
            stop = any([callback(self.round, state_copy, record) for callback in self.stopping.callbacks])
        stop = self.processes.gathered_numbers(stop).any()
        if self.keeping.directory is not None and stop and self.committed_round != self.round:
            self.commit()
        return stop

    def commit(self) -> None:
        """Writes a checkpoint, with log and ledger."""
        with seconds.timed_part("checkpoints"):
            self.log.commit(self.round, self.state, self.identity, self.keeping.keep_checkpoints)
        self.committed_round = self.round
        self.committed_at = time.perf_counter()

    def history(self) -> History:
        """Returns the log, the summary, which is written to the folder too, and the results by client."""
        # A run that was resumed after its last round has evaluated nothing yet.
        if self.by_client is None:
            self.evaluate({})
        summary = self.log.summary(self.compile_seconds, _peak_memory_bytes())
        summary |= {"finished": self.round >= self.stopping.num_rounds, "seconds": seconds.so_far()}
        summary |= self.spending.summary({name for record in self.log.records for name in record})
        self.log.final_summary = summary
        if self.keeping.directory is not None:
            text = json.dumps(summary, indent=2) + "\n"
            path = Path(self.keeping.directory) / "summary.json"
            self.processes.by_first(lambda: checksums.write(path, text.encode()))
        assert self.by_client is not None, "`evaluate` keeps them"
        return History(self.log.records, summary, self.by_client)


def _put_files(directory: Path, files: Mapping[str, str]) -> None:
    """Writes the files of a run that starts or continues; what was written at an earlier end is removed."""
    checksums.remove(directory, ["summary.json", "by_client.csv", "report.html"])
    for name, text in files.items():
        checksums.write(directory / name, text.encode())


def _until_failure(records: list[dict]) -> tuple[list[dict], str]:
    """Returns (the records up to the first round with forbidden non-finite updates, the error's text).

    The text is "" if there was no such round. The ids of the clients are taken out of all records.
    """
    ids_by_record = [[id for id in record.pop("error_ids", []) if id >= 0] for record in records]
    for i, (record, ids) in enumerate(zip(records, ids_by_record, strict=True)):
        if ids:
            return records[: i + 1], (
                f"round {record['round']}: {record['dropped_clients']} clients sent non-finite updates, among them "
                f"{ids}. Lower the learning rate, clip, or use nonfinite='drop'."
            )
    return records, ""


def _peak_memory_bytes() -> int:
    """Returns the peak memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts in bytes, Linux in KiB.
    return peak if sys.platform == "darwin" else peak * 1024
