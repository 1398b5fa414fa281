"""The metric log of a run and its commits: every round is logged once, also after a kill."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_sim import engine, tree
from fedjax_sim.round.costs import ROUND_METRICS
from fedjax_sim.running import checkpoint, distributed
from fedjax_sim.running.checksums import GrowingFile
from fedjax_sim.running.shared_arrays import broadcast, whole
from fedjax_sim.types import Count, Metric, PyTree

__all__ = ["Log", "as_record", "check_logs", "earlier_run", "plain", "totals_of", "verified", "visits_of"]

METRICS, TIMING = "metrics.jsonl", "timing.jsonl"
KNOWN = {metric.name for metric in ROUND_METRICS} | {"distinct_clients"}  # which pages show in words of their own
ALWAYS = ("clients_invited", "clients_reported", "uplink_bytes", "downlink_bytes", "skipped_rounds", "dropped_clients")


def totals_of(records: Sequence[Mapping[str, Any]], metrics: Iterable[Metric]) -> dict[str, Any]:
    """Each of these numbers over a run's records, pooled as it states; those that no record has are left out.

    >>> lost = Metric("lost", "messages lost", "count")
    >>> totals_of([{"lost": 2, "seen": 3}, {"lost": 1, "seen": 5}], [lost, Metric("seen", "seen", pooled="last")])
    {'lost': 3, 'seen': 5}
    """
    found = {}
    for metric in metrics:
        having = [record for record in records if metric.name in record]
        if not having:
            continue
        numbers = [_number(record[metric.name]) for record in having]
        weights = [1 if metric.by is None else _number(record.get(metric.by, math.nan)) for record in having]
        if metric.instead is not None:
            others = [_number(record.get(metric.instead, 0)) for record in records if metric.name not in record]
            numbers = numbers + others
            weights = weights + [1] * len(others)
        pools = {"sum": sum(numbers), "mean": _mean(numbers, weights), "max": max(numbers), "last": numbers[-1]}
        found[metric.name] = plain(pools[metric.pooled])
    return found


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value  # "nan" and "inf" of a log


def _mean(numbers: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted mean; a number without weight may be anything, and NaN is the mean of none."""
    total = sum(x * weight for x, weight in zip(numbers, weights, strict=True) if weight != 0)
    return total / sum(weights) if sum(weights) != 0 else math.nan


def visits_of(counts: Mapping[str, Any]) -> int:
    """Clients that sent something, finite or not."""
    return sum(counts.get(name, 0) for name in ("clients_reported", "dropped_clients"))


def plain(value: Any) -> Any:
    """A JSON value: floats as the shortest decimals that read back to the same float, non-finite ones as strings."""
    if isinstance(value, Count):
        return value.total()
    value = np.asarray(value)
    if value.ndim:
        return [plain(x) for x in value]
    if not np.issubdtype(value.dtype, np.floating):
        return value.item()
    return float(str(value)) if np.isfinite(value) else str(value)


def as_record(round: int, infos: dict, row: int | None = None) -> dict[str, Any]:
    """The log record of a round, from infos stacked over rounds at `row`, or from one round's values."""
    record = {"round": round}
    for name, value in infos.items():
        if row is not None:
            value = Count(value.number[row], value.unit[row]) if isinstance(value, Count) else value[row]
        record[name] = plain(value)
    return record


def earlier_run(directory: Path) -> list[str]:
    """Names of what a folder holds of an earlier run; empty files, from a start that was interrupted, do not count."""
    logs = [name for name in (METRICS, TIMING) if (directory / name).exists() and (directory / name).stat().st_size]
    return logs + ["checkpoints"] * any((directory / "checkpoints").glob("*.ckpt"))


def check_logs(directory: Path) -> None:
    """Raises CheckpointError if a record that the newest checkpoint committed was changed since.

    Guarantees: every changed or missing byte is found
    (tests/running/test_checksums.py::test_every_changed_byte_is_found), and the error names the record
    (::test_a_page_of_changed_records_is_refused).
    """
    found = checkpoint.newest_meta(directory / "checkpoints")
    try:
        if found is not None:
            _check_logs(*found)
    except (checkpoint.CheckpointError, AttributeError, KeyError, TypeError):
        checkpoint.latest(directory / "checkpoints", check=_check_logs)  # or is it the checkpoint that was damaged?


def verified(directory: Path) -> int | None:
    """How many of the first records are as the run wrote them, by the CRC-32 in the timing log; None without any.

    Records after the last commit have no other checksum. A power failure may have truncated or lost them.

    Guarantees: tests/running/test_checksums.py::test_a_changed_tail_is_not_shown.
    """
    sums = []
    for line in _lines(directory / TIMING):  # read first: a run in progress appends records before their timing
        try:
            sums += json.loads(line)["crc32"]
        except (KeyError, RecursionError, TypeError, ValueError):
            break
    if not sums:
        return None
    same = [f"{zlib.crc32(line):08x}" == x for line, x in zip(_lines(directory / METRICS), sums, strict=False)]
    return same.index(False) if False in same else len(same)


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.is_file() else []


def _check_logs(path: Path, meta: dict) -> None:
    """Compares the logs with what a checkpoint committed."""
    for name, mark in meta["log"].items():
        file = path.parents[1] / name
        if GrowingFile(file).matches(mark):
            continue
        size = file.stat().st_size if file.is_file() else 0
        if size < mark["bytes"]:
            what = f"expected the {mark['bytes']:,} bytes that {path.name} committed, got {size:,}: cut or replaced"
        else:
            what = f"{_changed(path.parents[1], name)} was changed or damaged after {path.name} committed it"
        raise checkpoint.CheckpointError(f"{file}: {what}. Put the file back from a copy if there is one.")


def _changed(directory: Path, name: str) -> str:
    """Which record of a log was changed, as far as the CRC-32 in the timing log show it."""
    lines = (directory / name).read_bytes().splitlines(keepends=True)
    try:
        blocks = _read(directory / TIMING)
        sums = [f"{zlib.crc32(line):08x}" for line in lines]
        pairs = enumerate(zip(sums, [x for block in blocks for x in block["crc32"]], strict=False))
        if name == METRICS:
            return next(f"record {i + 1} (line {i + 1})" for i, (mine, written) in pairs if mine != written)
    except (KeyError, StopIteration, TypeError, ValueError):
        pass
    for i, line in enumerate(lines):
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            return f"record {i + 1}"
    return "one of its records"


class Log:
    """Records in memory and, given a directory, in its files, which process 0 alone reads and writes.

    `metrics.jsonl` holds a record of each round. `timing.jsonl` holds one of each block of rounds that ran together,
    with the CRC-32 of its records. Every checkpoint holds the SHA-256 of both.
    """

    def __init__(self, directory: str | Path | None):
        self.directory = Path(directory) if directory is not None and distributed.is_first() else None
        names = (METRICS, TIMING) if self.directory is not None else ()
        self.files = {name: GrowingFile(self.directory / name) for name in names}
        self.spending = None  # the privacy ledger, which a commit holds too
        self.metrics: tuple[Metric, ...] = ROUND_METRICS  # what the algorithm states of its numbers
        self.records: list[dict] = []
        self.seconds = self.elapsed = self.earlier = 0.0  # of the rounds; in total; in total before a resume

    def check_resumable(self) -> None:
        """Refuses a folder without a checkpoint; does not create it."""
        folder = self.directory and self.directory / "checkpoints"
        if folder and not any(folder.glob("*.ckpt")):
            raise FileNotFoundError(f"resume: expected a checkpoint in {folder}, found none. Start without resume.")

    def start(self) -> None:
        """Creates the files of a new run; refuses to overwrite an earlier one."""
        distributed.by_first(self._start)

    def _start(self) -> None:
        self.check_fresh()
        for file in self.files.values():
            file.create()

    def check_fresh(self) -> None:
        """Refuses a folder with an earlier run; does not create it."""
        found = earlier_run(self.directory)
        if found:
            raise FileExistsError(
                f"directory: expected a folder without a run, got {self.directory} with {', '.join(found)}. "
                "Resume that run, or choose another folder."
            )

    def resume(self, state: PyTree, identity: dict, allow_previous: bool) -> tuple[PyTree, int]:
        """State and round of the newest checkpoint; truncates the log to that round."""
        plain = engine.gathered(state, spec=True)
        saved, meta = distributed.by_first(lambda: self._read_back(plain, identity, allow_previous)) or (plain, None)
        if distributed.several():
            meta, self.records = distributed.from_first(lambda: (meta, self.records))
            saved = broadcast(saved)
        state = engine.scattered(saved, like=state)
        for file, version in engine.memory_files(state):
            file.resume(int(version), meta["client_memory"][file.path.name], file.written)
        self.seconds, self.earlier = (meta[name] for name in ("seconds", "elapsed_seconds"))
        self.elapsed = self.earlier
        if self.spending is not None:
            self.spending.resume(meta.get("privacy"), meta["round"])
        return state, meta["round"]

    def _read_back(self, plain: PyTree, identity: dict, allow_previous: bool) -> tuple[PyTree, dict]:
        folder = self.directory / "checkpoints"
        path = checkpoint.latest(folder, allow_previous=allow_previous, check=_check_logs)
        saved, meta = checkpoint.restore(path, plain)
        _same_run(meta["identity"], identity, path)
        for name, file in self.files.items():
            file.go_back(meta["log"][name])
        self.records = _read(self.directory / METRICS)
        return saved, meta

    def append(self, records: list[dict], seconds: float, elapsed: float) -> None:
        """Adds the records of a block of rounds, `seconds` long, `elapsed` seconds after the start."""
        self.records += records
        self.seconds += seconds
        self.elapsed = self.earlier + elapsed
        timing = {"round": records[-1]["round"], "seconds": self.seconds, "elapsed_seconds": self.elapsed}
        if self.directory is not None:
            lines = [_line(record) for record in records]
            timing["crc32"] = [f"{zlib.crc32(line):08x}" for line in lines]
            self.files[METRICS].append(b"".join(lines))
            self.files[TIMING].append(_line(timing))

    def commit(self, round: int, state: PyTree, identity: dict, keep: int) -> None:
        """Commits log, state and ledger together: the log is on disk before the checkpoint with its checksum."""
        state = whole(state)
        distributed.by_first(lambda: self._commit(round, state, identity, keep))

    def _commit(self, round: int, state: PyTree, identity: dict, keep: int) -> None:
        marks = {name: file.mark() for name, file in self.files.items()}
        meta = {"identity": identity, "log": marks, "seconds": self.seconds, "elapsed_seconds": self.elapsed}
        if self.spending is not None and (ledger := self.spending.state()) is not None:
            meta["privacy"] = ledger
        memory_files = engine.memory_files(jax.block_until_ready(state))
        for file, version in memory_files:
            file.sync(int(version))
            meta["client_memory"] = meta.get("client_memory", {}) | {file.path.name: file.mark.hex()}
        checkpoint.save(self.directory / "checkpoints", round, engine.gathered(state), meta, keep=keep)
        for file, _ in memory_files:
            file.advance(keep)
        for file in self.files.values():
            file.check_there()  # if the run's folder was deleted meanwhile, the checkpoint created it again

    def summary(self, compile_seconds: float, peak_memory_bytes: int) -> dict[str, Any]:
        """Totals of the run and its last evaluation."""
        totals = {name: 0 for name in ALWAYS} | totals_of(self.records, self.metrics)
        visits = visits_of(totals)
        totals.pop("clients_reported")
        stated = [x for x in self.metrics if x.name in totals and x.name not in KNOWN]
        own = {x.name: {"words": x.words, "unit": x.unit} | ({"besides": True} if x.besides else {}) for x in stated}
        losses = ("test_loss", "held_out_loss", "train_loss")
        evaluated = [record for record in self.records if any(name in record for name in losses)]
        last = evaluated[-1] if evaluated else {}
        return {
            **{name: last[name] for name in last if name.startswith(("test_", "held_out_", "train_", "attack_"))},
            "rounds": sum(record["round"] > 0 for record in self.records),
            "client_visits": visits,
            "rounds_seconds": self.seconds,
            "compile_seconds": compile_seconds,
            "clients_per_second": visits / self.seconds if self.seconds else 0.0,
            "peak_memory_bytes": peak_memory_bytes,
            **totals,
            **({"metrics": own} if own else {}),
        }


def _same_run(stored: dict, given: dict, path: Path) -> None:
    stored = tree.dotted(stored)
    given = tree.dotted(given)
    differing = [
        f"  {name}: {stored.get(name, 'absent')!r} in the checkpoint, {given.get(name, 'absent')!r} now"
        for name in sorted(stored.keys() | given.keys())
        if stored.get(name, "absent") != given.get(name, "absent")
    ]
    if stored.get("host_threads") != given.get("host_threads"):
        number = stored.get("host_threads", "as many as there were cores")
        setting = f"NPROC={number}"
        devices = jax.local_device_count()
        if isinstance(number, int) and devices > number:
            setting += (
                f" and JAX_NUM_CPU_DEVICES={number} or less, for each of the {devices} devices here has a thread,"
            )
        differing.append(f"  Threads change last bits: set {setting} in the environment before JAX starts.")
    named = [name.removeprefix("files.") for name in given if name.startswith("files.")]
    if any(isinstance(stored.get(name), str) for name in named):
        differing.append("  An earlier version wrote it, which compared paths: finish it there, or begin it anew.")
    if differing:
        raise checkpoint.CheckpointError(f"{path}: this checkpoint is of another run:\n" + "\n".join(differing))


def _read(path: Path) -> list[dict]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _line(record: dict) -> bytes:
    return (json.dumps(record) + "\n").encode()
