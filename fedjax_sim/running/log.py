"""Writes the metric log of a run and commits it with the state: every round is logged once, also after a kill."""

from __future__ import annotations

import contextlib
import json
import math
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, tree
from fedjax_sim.files.regular_files import content_of, json_of
from fedjax_sim.round.costs import ROUND_METRICS
from fedjax_sim.running import checkpoint, checksums
from fedjax_sim.running.checkpoint_format import meta_of
from fedjax_sim.running.checksums import GrowingFile
from fedjax_sim.running.kept_files import check_free_of
from fedjax_sim.running.loggers import Logger
from fedjax_sim.running.privacy_ledger import Spending
from fedjax_sim.running.processes import current
from fedjax_sim.running.seconds import so_far, time_account, timed_part
from fedjax_sim.running.shared_arrays import broadcast, whole
from fedjax_sim.types import Count, Metric, PyTree

NOT_FINITE = {"nan", "inf", "-inf"}
METRICS, TIMING = "metrics.jsonl", "timing.jsonl"
# Metrics that pages show in words of their own.
KNOWN = {metric.name for metric in ROUND_METRICS} | {"distinct_clients"}
# Beginnings of the names of what an evaluation measures; a summary has the last ones.
JUDGED = ("test_", "held_out_", "train_", "attack_", "local_test_", "personal_", "newcomer_", "owner_")
# Totals that every summary has, at least as 0.
ALWAYS = ("clients_invited", "clients_reported", "uplink_bytes", "downlink_bytes", "skipped_rounds", "dropped_clients")


def totals_of(records: Sequence[Mapping[str, Any]], metrics: Iterable[Metric]) -> dict[str, Any]:
    """Returns each metric pooled over a run's records, as the metric states; metrics that no record has are left out.

    Args:
      records: one a round, as in `metrics.jsonl`.
      metrics: each states how it is pooled: as a sum, a weighted mean, a maximum, or the last value.

    >>> lost = Metric("lost", "messages lost", "count")
    >>> totals_of([{"lost": 2, "seen": 3}, {"lost": 1, "seen": 5}], [lost, Metric("seen", "seen", pooled="last")])
    {'lost': 3, 'seen': 5}
    """
    totals = {}
    for metric in metrics:
        records_with_it = [record for record in records if metric.name in record]
        if not records_with_it:
            continue
        numbers = [_number(record[metric.name]) for record in records_with_it]
        weights = [1 if metric.by is None else _number(record.get(metric.by, math.nan)) for record in records_with_it]
        # In rounds without this metric another metric's number may count in its place.
        if metric.instead is not None:
            other_numbers = [_number(record.get(metric.instead, 0)) for record in records if metric.name not in record]
            numbers = numbers + other_numbers
            weights = weights + [1] * len(other_numbers)
        pools = {"sum": sum(numbers), "mean": _mean(numbers, weights), "max": max(numbers), "last": numbers[-1]}
        totals[metric.name] = plain(pools[metric.pooled])
    return totals


def _number(value: Any) -> Any:
    """Returns a number of a log, whose NaN and infinities are texts."""
    return float(value) if isinstance(value, str) else value


def _mean(numbers: Sequence[float], weights: Sequence[float]) -> float:
    """Returns the weighted mean; a number without weight may be anything, and the mean of no numbers is NaN."""
    total = sum(x * weight for x, weight in zip(numbers, weights, strict=True) if weight != 0)
    return total / sum(weights) if sum(weights) != 0 else math.nan


def visits_of(counts: Mapping[str, Any]) -> int:
    """Returns the number of clients that sent a message, finite or not."""
    return sum(counts.get(name, 0) for name in ("clients_reported", "dropped_clients"))


def plain(value: Any) -> Any:
    """Returns a JSON value: floats as the shortest decimals that read back to the same float.

    Non-finite floats are texts, for JSON has none. An array is a list.

    Args:
      value: a number, an array, or a `Count`.

    >>> plain(np.float32(0.1)), plain(np.float32(np.nan)), plain(np.arange(2)), plain(jnp.bfloat16(np.nan))
    (0.1, 'nan', [0, 1], 'nan')
    """
    if isinstance(value, Count):
        return value.total()
    value = np.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value.tolist()
    if not np.issubdtype(value.dtype, np.floating):
        value = value.astype(np.float32)  # NumPy takes bfloat16 for no float, and would not see its NaN
    # NumPy writes all numbers of an array as their shortest decimals at once.
    texts = value.reshape(-1).astype(str).tolist()
    numbers = np.array([x if x in NOT_FINITE else float(x) for x in texts], object)
    return numbers.reshape(value.shape).tolist()


def as_record(round: int, info: dict) -> dict[str, Any]:
    """Returns the log record of a round, from its info by name; round 0 is the evaluation before training."""
    return {"round": round} | {name: plain(value) for name, value in info.items()}


def as_records(first: int, infos: dict, count: int) -> list[dict[str, Any]]:
    """Returns the log records of rounds `first`, `first` + 1, ..., from infos that are stacked over `count` rounds."""
    columns = {}
    for name, value in infos.items():
        if isinstance(value, Count):
            columns[name] = [Count(value.number[i], value.unit[i]).total() for i in range(count)]
        else:
            columns[name] = plain(value[:count])
    return [{"round": first + i} | {name: column[i] for name, column in columns.items()} for i in range(count)]


def check_logs(directory: Path) -> None:
    """Raises CheckpointError if a record that the newest checkpoint committed was changed since.

    Guarantees: every changed or missing byte is found
    (tests/running/test_checksums.py::test_every_changed_byte_is_found), and the error names the record
    (tests/running/test_checksums.py::test_a_page_of_changed_records_is_refused).
    """
    path_and_meta = checkpoint.newest_meta(directory / "checkpoints")
    try:
        if path_and_meta is not None:
            _check_logs(*path_and_meta)
    except (checkpoint.CheckpointError, AttributeError, KeyError, TypeError):
        # The meta was read without verifying it: perhaps the checkpoint is damaged and not the log. This verifies both.
        checkpoint.latest(directory / "checkpoints", check=_check_logs)


def verified(directory: Path) -> int | None:
    """Returns how many of the first records are as the run wrote them; None without checksums.

    The timing log holds a CRC-32 of each record. Records after the last commit have no other checksum, and a power
    failure may have truncated or lost them.

    Args:
      directory: the run's folder.

    Guarantees: a record that was changed after the last commit is found
    (tests/running/test_checksums.py::test_a_changed_tail_is_not_shown).
    """
    written_sums = []
    # The timing log is read first: a run in progress appends records before their timing.
    for line in _lines(directory / TIMING):
        try:
            written_sums += json_of(line)["crc32"]
        except (KeyError, TypeError, ValueError):
            break
    if not written_sums:
        return None
    lines_and_sums = zip(_lines(directory / METRICS), written_sums, strict=False)
    is_same = [f"{zlib.crc32(line):08x}" == written_sum for line, written_sum in lines_and_sums]
    return is_same.index(False) if False in is_same else len(is_same)


def _lines(path: Path) -> list[bytes]:
    """Returns the lines of a file, with their ends; none for a missing file."""
    return content_of(path).splitlines(keepends=True) if path.is_file() else []


def _check_logs(path: Path, meta: dict) -> None:
    """Raises CheckpointError if the logs are not as a checkpoint committed them."""
    for name, mark in meta["log"].items():
        file = path.parents[1] / name
        if GrowingFile(file).matches(mark):
            continue
        size = file.stat().st_size if file.is_file() else 0
        if size < mark["bytes"]:
            finding = f"expected the {mark['bytes']:,} bytes that {path.name} committed, got {size:,}: cut or replaced"
        else:
            finding = f"{_changed(path.parents[1], name)} was changed or damaged after {path.name} committed it"
        raise checkpoint.CheckpointError(f"{file}: {finding}. Put the file back from a copy if there is one.")


def _changed(directory: Path, name: str) -> str:
    """Names the record of a log that was changed, as far as the CRC-32 in the timing log show it.

    Args:
      directory: the run's folder.
      name: of the log in it, `METRICS` or `TIMING`. The timing log has no CRC-32 of its own records, so that only a
        record that is no JSON can be named there.

    Returns: words, such as "record 3 (line 3)". Records are counted from 1.
    """
    lines = content_of(directory / name).splitlines(keepends=True)
    try:
        blocks = _read(directory / TIMING)
        sums = [f"{zlib.crc32(line):08x}" for line in lines]
        written_sums = [x for block in blocks for x in block["crc32"]]
        pairs = enumerate(zip(sums, written_sums, strict=False))
        if name == METRICS:
            return next(f"record {i + 1} (line {i + 1})" for i, (now, written) in pairs if now != written)
    except (KeyError, StopIteration, TypeError, ValueError):
        # The timing log is damaged too, or older: a record that is no JSON can still be named.
        pass
    for i, line in enumerate(lines):
        try:
            json_of(line)
        except ValueError:
            return f"record {i + 1}"
    return "one of its records"


class Log:
    """Keeps records in memory and, given a directory, in its files, which process 0 alone reads and writes.

    `metrics.jsonl` holds a record of each round. `timing.jsonl` holds a record of each block of rounds that ran
    together, with the CRC-32 of the block's records. Every checkpoint holds the SHA-256 of both files.
    """

    def __init__(self, directory: str | Path | None, loggers: Sequence[Logger] = ()):
        self.processes = current()
        self.directory = Path(directory) if directory is not None and self.processes.is_first else None
        folder = self.directory
        self.files = {} if folder is None else {name: GrowingFile(folder / name) for name in (METRICS, TIMING)}
        self.spending: Spending | None = None  # the privacy ledger, which a commit holds too
        self.metrics: tuple[Metric, ...] = ROUND_METRICS  # with those that the algorithm states
        self.records: list[dict] = []
        self.seconds = self.elapsed = self.earlier = 0.0  # of the rounds; in total; in total before a resume
        self.loggers = loggers if self.processes.is_first else ()
        self.started_loggers: list[Logger] = []
        self.earlier_parts: dict[str, float] = {}  # seconds of the sessions before a resume
        self.final_summary: dict | None = None  # None until the run ends without an error

    @property
    def folder(self) -> Path:
        """The folder of the run, where it is kept in one, on process 0."""
        assert self.directory is not None, "the run is kept in a folder, and this is process 0"
        return self.directory

    def check_resumable(self) -> None:
        """Refuses a folder without a checkpoint; does not create it."""
        folder = self.directory and self.directory / "checkpoints"
        if folder and not any(checkpoint.CHECKPOINT_NAME.fullmatch(path.name) for path in folder.glob("*.ckpt")):
            raise FileNotFoundError(f"resume: expected a checkpoint in {folder}, found none. Start without resume.")

    def start(self) -> None:
        """Creates the files of a new run; refuses to overwrite an earlier one."""
        self.processes.by_first(self._start)

    def _start(self) -> None:
        """Creates the files, on process 0."""
        self.check_fresh()
        for file in self.files.values():
            file.create()

    def check_fresh(self) -> None:
        """Refuses a folder with a run, a sweep or a study; does not create it."""
        check_free_of(self.folder, "a run", "a sweep", "a study")

    def check_same_run(self, identity: dict, allow_previous: bool) -> None:
        """Refuses a checkpoint of another run, before its program is traced, whose identity has no "program" yet.

        Args:
          identity: of this run, as for `run`, without "program".
          allow_previous: as for `run`; it matters only if the newest checkpoint is damaged.

        Raises: CheckpointError with the differences.
        """
        folder = self.folder / "checkpoints"
        path_and_meta = checkpoint.newest_meta(folder)
        if path_and_meta is None:
            return
        path, meta = path_and_meta
        try:
            _same_options(meta["identity"], identity, path)
        except (checkpoint.CheckpointError, KeyError, TypeError):
            # The meta was read without verifying it: perhaps the checkpoint is damaged.
            path = self._newest_checkpoint(allow_previous)
            meta = meta_of(path)
            assert meta is not None, "it was verified"
            _same_options(meta["identity"], identity, path)

    def resume(
        self, state: PyTree, identity: dict, allow_previous: bool, program_on: Callable[[int], dict] | None = None
    ) -> tuple[PyTree, int]:
        """Returns state and round of the newest checkpoint; truncates the log to that round.

        Args:
          state: the state before the first round, which gives shapes, dtypes and devices.
          identity: the run's identity, which must be that of the checkpoint. Where this session has no evaluation, the
            digest of the checkpoint's evaluation is put into it, so that a later session cannot have another one.
          allow_previous: as for `run`.
          program_on: a number of devices -> the "program" that the run's identity has on so many; None without a
            program in the identity.

        Raises: CheckpointError for a damaged file, or for a checkpoint of another run.
        """
        spec = engine.gathered(state, spec=True)
        read_back = partial(self._read_back, spec, identity, allow_previous, program_on)
        saved, meta = self.processes.by_first(read_back) or (spec, None)
        if self.processes.several:
            read = meta, self.records, self.earlier_parts
            meta, self.records, self.earlier_parts = self.processes.from_first(lambda: read)
            saved = broadcast(saved)
        assert meta is not None, "process 0 has read it"
        state = engine.scattered(saved, like=state)
        if evaluation := meta["identity"].get("program", {}).get("evaluation"):
            identity["program"].setdefault("evaluation", evaluation)
        # Client memory on the disk has a version for each checkpoint.
        for file, version in engine.memory_files(state):
            file.resume(int(version), meta["client_memory"][file.path.name], file.written)
        self.seconds, self.earlier = (meta[name] for name in ("seconds", "elapsed_seconds"))
        with time_account() as kept:
            kept.add(self.earlier_parts)
        self.elapsed = self.earlier
        if self.spending is not None:
            self.spending.resume(meta.get("privacy"), meta["round"])
        return state, meta["round"]

    def _read_back(
        self, plain: PyTree, identity: dict, allow_previous: bool, program_on: Callable[[int], dict] | None
    ) -> tuple[PyTree, dict]:
        """Reads the newest checkpoint on process 0, and goes back to its round in the logs.

        Args:
          plain: shapes and dtypes of the state, as one process holds it.
          identity, allow_previous, program_on: as for `resume`.

        Returns: (state, meta) of the checkpoint.

        Raises: CheckpointError for a damaged file, or for a checkpoint of another run.
        """
        path = self._newest_checkpoint(allow_previous)
        saved, meta = checkpoint.restore(path, plain)
        if program_on is not None:
            # Programs for other numbers of devices cannot be compared.
            stored = meta["identity"].get("program", {})
            devices = stored.get("devices", identity["program"]["devices"])
            if stored.get("processes", 1) != identity["program"]["processes"]:
                # A program of several processes cannot be traced by another number of them.
                unknown = {name: stored[name] for name in ("sha256", "devices", "processes") if name in stored}
                identity = identity | {"program": identity["program"] | unknown}
            elif devices != identity["program"]["devices"]:
                identity = identity | {"program": identity["program"] | program_on(devices)}
        _same_run(meta["identity"], identity, path)
        self.earlier_parts = self._parts_before(meta)
        for name, file in self.files.items():
            file.go_back(meta["log"][name])
        self.records = _read(self.folder / METRICS)
        return saved, meta

    def _newest_checkpoint(self, allow_previous: bool) -> Path:
        """Returns the newest checkpoint, verified with the logs."""
        path = checkpoint.latest(self.folder / "checkpoints", allow_previous=allow_previous, check=_check_logs)
        if path is None:  # they were removed since
            self.check_resumable()
        assert path is not None, "`check_resumable` refuses a folder without a checkpoint"
        return path

    def _parts_before(self, meta: dict) -> dict[str, float]:
        """Returns the seconds of the sessions before by part: until their end, if they ended, else until a checkpoint.

        Args:
          meta: of the checkpoint that the run goes on from.
        """
        # An earlier version kept no parts.
        since = {"rounds": meta["seconds"], "other": max(0.0, meta["elapsed_seconds"] - meta["seconds"])}
        until_checkpoint = meta.get("parts", since)
        with contextlib.suppress(AttributeError, KeyError, OSError, TypeError, ValueError):
            checksums.check_files(self.folder, ["summary.json"])
            summary = json_of(content_of(self.folder / "summary.json"))
            parts = {name: float(summary["seconds"][name]) for name in until_checkpoint}
            if summary["rounds"] == meta["round"] and sum(parts.values()) >= sum(until_checkpoint.values()):
                return parts
        return until_checkpoint

    def append(self, records: list[dict], seconds: float, elapsed: float) -> None:
        """Adds the records of a block of rounds.

        Args:
          records: the records, in the order of the rounds.
          seconds: the time that the rounds took.
          elapsed: the time since this process started the run.
        """
        with timed_part("logs"):
            self._append(records, seconds, elapsed)

    def _append(self, records: list[dict], seconds: float, elapsed: float) -> None:
        """Adds records, as `append`."""
        self.records += records
        self.seconds += seconds
        self.elapsed = self.earlier + elapsed
        timing = {"round": records[-1]["round"], "seconds": self.seconds, "elapsed_seconds": self.elapsed}
        if self.directory is not None:
            lines = [_line(record) for record in records]
            timing["crc32"] = [f"{zlib.crc32(line):08x}" for line in lines]
            self.files[METRICS].append(b"".join(lines))
            self.files[TIMING].append(_line(timing))
        for logger in list(self.started_loggers):
            self._tell(logger, logger.write, records)

    def start_loggers(self) -> None:
        """Hands the loggers what is logged so far."""
        for logger in self.loggers:
            self._tell(logger, logger.start, self.records)
            self.started_loggers.append(logger)

    def finish_loggers(self) -> None:
        """Ends the loggers that were started; where the run ends by an error, that error is raised and no other."""
        for logger in list(self.started_loggers):
            try:
                self._tell(logger, logger.finish, self.final_summary)
            except RuntimeError as error:
                if self.final_summary is not None:
                    raise
                warnings.warn(str(error), RuntimeWarning, stacklevel=2)

    def _tell(self, logger: Logger, call: Callable, content: Any) -> None:
        """Calls a method of a logger, which is not called again after an error, since a dead server makes it wait.

        Errors of whatever type name the logger and say how to go on.
        """
        try:
            with timed_part("logs"):
                call(content)
        except Exception as error:
            self.started_loggers = [other for other in self.started_loggers if other is not logger]
            raise RuntimeError(
                f"loggers: {type(logger).__name__} failed with {type(error).__name__}: {error}. The run lost nothing: "
                "resume it, where need be without loggers (--set run.log=none, in Python loggers=())."
            ) from error

    def commit(self, round: int, state: PyTree, identity: dict, keep: int) -> None:
        """Commits log, state and ledger together.

        The log is on disk before the checkpoint with its checksum, so that no checkpoint has more rounds than the log.

        Args:
          round: the number of rounds done.
          state: the algorithm's state after them.
          identity: the run's identity, which a resume compares.
          keep: how many checkpoints are kept.
        """
        state = whole(state)
        self.processes.by_first(lambda: self._commit(round, state, identity, keep))

    def _commit(self, round: int, state: PyTree, identity: dict, keep: int) -> None:
        """Writes the checkpoint on process 0, after all that it refers to is on disk.

        Args:
          round, identity, keep: as for `commit`.
          state: the algorithm's state after the round, whole in every process.
        """
        marks = {name: file.mark() for name, file in self.files.items()}
        meta = {"identity": identity, "log": marks, "seconds": self.seconds, "elapsed_seconds": self.elapsed}
        meta["parts"] = so_far()
        if self.spending is not None and (ledger := self.spending.state()) is not None:
            meta["privacy"] = ledger
        # Rows on disk are written while rounds are computed: these must have ended.
        memory_files = engine.memory_files(jax.block_until_ready(state))
        for file, version in memory_files:
            file.sync(int(version))
            meta["client_memory"] = meta.get("client_memory", {}) | {file.path.name: file.mark.hex()}
        checkpoint.save(self.folder / "checkpoints", round, engine.gathered(state), meta, keep=keep)
        # Only now may rows of older versions be given up.
        for file, _ in memory_files:
            file.advance(keep)
        # If the run's folder was deleted meanwhile, the checkpoint created it again, without the logs.
        for file in self.files.values():
            file.check_there()

    def summary(self, compile_seconds: float, peak_memory_bytes: int) -> dict[str, Any]:
        """Returns the totals of the run and its last evaluation, as `summary.json` holds them.

        Args:
          compile_seconds: of this session.
          peak_memory_bytes: the most bytes of a device in use.
        """
        totals = {name: 0 for name in ALWAYS} | totals_of(self.records, self.metrics)
        client_visits = visits_of(totals)
        totals.pop("clients_reported")
        # Metrics that pages have no words for carry their own.
        stated_metrics = [metric for metric in self.metrics if metric.name in totals and metric.name not in KNOWN]
        own_metrics = {
            metric.name: {"words": metric.words, "unit": metric.unit} | ({"besides": True} if metric.besides else {})
            for metric in stated_metrics
        }
        losses = ("test_loss", "held_out_loss", "train_loss", "owner_loss")
        evaluated = [record for record in self.records if any(name in record for name in losses)]
        last = evaluated[-1] if evaluated else {}
        return {
            **{name: last[name] for name in last if name.startswith(JUDGED)},
            "rounds": sum(record["round"] > 0 for record in self.records),
            "client_visits": client_visits,
            "rounds_seconds": self.seconds,
            "compile_seconds": compile_seconds,
            "clients_per_second": client_visits / self.seconds if self.seconds else 0.0,
            "peak_memory_bytes": peak_memory_bytes,
            **totals,
            **({"metrics": own_metrics} if own_metrics else {}),
        }


def _same_options(stored: dict, current: dict, path: Path) -> None:
    """Raises CheckpointError as `_same_run`, for a run whose program is not known yet."""
    # A checkpoint of an earlier version has no program, and is refused for that.
    has_program = {"program": None} if "program" in stored else {}
    _same_run(stored | has_program, current | {"program": None}, path)


def _same_run(stored: dict, current: dict, path: Path) -> None:
    """Raises CheckpointError, with every difference, if a checkpoint's identity is not the run's.

    Another seed alone is named: the key and perhaps the data follow from it.

    Args:
      stored: the identity in the checkpoint, as JSON.
      current: the identity of the run now, as JSON.
      path: the checkpoint, for the error.
    """
    has_no_program = "program" in current and "program" not in stored
    stored = tree.dotted(stored)
    current = tree.dotted(current)
    names = sorted(stored.keys() | current.keys())
    names = [name for name in names if stored.get(name, "absent") != current.get(name, "absent")]
    if "program.evaluation" not in stored or "program.evaluation" not in current:  # one that is not known may be added
        names = [name for name in names if name != "program.evaluation"]
    follows = ("key", "data_sha256") if stored.get("seed") != current.get("seed") else ()
    differing = [
        f"  {name}: {stored.get(name, 'absent')!r} in the checkpoint, {current.get(name, 'absent')!r} now"
        for name in names
        if name not in follows and name.partition(".")[0] not in ("modules", "program", "versions")
    ]
    if has_no_program:
        differing.append("  An earlier version wrote it, which kept no digest of the program: finish it there.")
    else:
        differing += _changed_code(names, stored, current, bool(differing))
    if stored.get("host_threads") != current.get("host_threads"):
        number = stored.get("host_threads", "as many as there were cores")
        setting = f"NPROC={number}"
        devices = jax.local_device_count()
        if isinstance(number, int) and devices > number:
            setting += (
                f" and JAX_NUM_CPU_DEVICES={number} or less, for each of the {devices} devices here has a thread,"
            )
        differing.append(f"  Threads change last bits: set {setting} in the environment before JAX starts.")
    file_options = [name.removeprefix("files.") for name in current if name.startswith("files.")]
    if any(isinstance(stored.get(name), str) for name in file_options):
        differing.append("  An earlier version wrote it, which compared paths: finish it there, or begin it anew.")
    if differing:
        differing.append("Resume with what the checkpoint says, or begin anew in another folder.")
        raise checkpoint.CheckpointError(f"{path}: this checkpoint is of another run:\n" + "\n".join(differing))


def _changed_code(names: Sequence[str], stored: dict, current: dict, has_other_causes: bool) -> list[str]:
    """Returns lines that say which code is not that of a checkpoint.

    Args:
      names: what differs between the two identities.
      stored, current: the identity in the checkpoint and that of the run now, with dotted names.
      has_other_causes: whether options or data differ, which make another program.
    """
    lines = []
    for name in names:
        kind, _, module = name.partition(".")
        if kind == "versions":
            lines.append(f"  {module}: version {stored.get(name)} in the checkpoint, {current.get(name)} now")
        elif kind == "modules":
            change = "changed" if name in stored and name in current else "added" if name in current else "taken out"
            lines.append(f"  module {module}: {change} after the checkpoint")
    # A program changes with the modules, the versions and the options that it is made of.
    if "program.sha256" in names and not lines and not has_other_causes:
        of_modules = "no module of --with" if "modules" in {name.partition(".")[0] for name in stored} else "no option"
        lines.append(
            f"  program: another one, though {of_modules} was changed: the algorithm that Python gives, fedjax_sim, or "
            "a package that they use was edited or updated"
        )
    if "program.evaluation" in names and not lines and not has_other_causes:
        lines.append(
            "  evaluation: another one, though no option and no module of --with was changed: what measures the model, "
            "or what it reads (a file, a variable of the environment), was edited"
        )
    return lines


def _read(path: Path) -> list[dict]:
    """Returns the records of a log."""
    return [json_of(line) for line in content_of(path).splitlines()]


def _line(record: dict) -> bytes:
    return (json.dumps(record) + "\n").encode()
