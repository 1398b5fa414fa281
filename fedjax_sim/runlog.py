"""The metric log of a run and its commits: every round once, also after a kill."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_sim import checkpoint, distributed, engine
from fedjax_sim.types import Count, PyTree

__all__ = ["Log", "as_record", "earlier_run", "plain"]

METRICS, TIMING = "metrics.jsonl", "timing.jsonl"
TOTALS = ("clients_invited", "clients_reported", "uplink_bytes", "downlink_bytes", "skipped_rounds", "dropped_clients")
SOME_TOTALS = ("uplink_coded_bytes",)  # of rounds that have it


def plain(value: Any) -> Any:
    """A JSON value: shortest decimals that give the float back, non-finite numbers as strings."""
    if isinstance(value, Count):
        return value.total()
    value = np.asarray(value)
    if value.ndim:
        return [plain(x) for x in value]
    if not np.issubdtype(value.dtype, np.floating):
        return value.item()
    return float(str(value)) if np.isfinite(value) else str(value)


def as_record(round: int, infos: dict, row: int | None = None) -> dict[str, Any]:
    """The record of a round from stacked infos at `row`, or from one round's values."""
    record = {"round": round}
    for name, value in infos.items():
        if row is not None:
            value = Count(value.number[row], value.unit[row]) if isinstance(value, Count) else value[row]
        record[name] = plain(value)
    return record


def earlier_run(directory: Path) -> list[str]:
    """What a folder holds of an earlier run; files without a byte, from a start that was stopped, do not count."""
    logs = [name for name in (METRICS, TIMING) if (directory / name).exists() and (directory / name).stat().st_size]
    return logs + ["checkpoints"] * any((directory / "checkpoints").glob("*.ckpt"))


class Log:
    """Records in memory and, given a directory, in its files, which process 0 alone reads and writes."""

    def __init__(self, directory: str | Path | None):
        self.directory = Path(directory) if directory is not None and distributed.is_first() else None
        self.spending = None  # the privacy ledger, which a commit holds too
        self.records: list[dict] = []
        self.seconds = self.elapsed = self.earlier = 0.0  # of the rounds; of everything; of everything before a resume
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Begins the files of a fresh run; refuses to write over an earlier one."""
        distributed.by_first(self._start)

    def _start(self) -> None:
        there = earlier_run(self.directory)
        if there:
            raise FileExistsError(
                f"directory: expected a folder without a run, got {self.directory} with {', '.join(there)}. "
                "Resume that run, or choose another folder."
            )
        for name in (METRICS, TIMING):
            (self.directory / name).touch()

    def resume(self, state: PyTree, identity: dict, allow_previous: bool) -> tuple[PyTree, int]:
        """State and round of the newest checkpoint; cuts off what the log says of later rounds."""
        plain = engine.gathered(state, spec=True)
        saved, meta = distributed.by_first(lambda: self._read_back(plain, identity, allow_previous)) or (plain, None)
        if distributed.several():
            meta, self.records = distributed.from_first(lambda: (meta, self.records))
            saved = distributed.broadcast(saved)
        state = engine.scattered(saved, like=state)
        for file, version in engine.memory_files(state):
            file.resume(int(version), meta["client_memory"][file.path.name])
        self.seconds, self.earlier = (meta[name] for name in ("seconds", "elapsed_seconds"))
        self.elapsed = self.earlier
        if self.spending is not None:
            self.spending.resume(meta.get("privacy"), meta["round"])
        return state, meta["round"]

    def _read_back(self, plain: PyTree, identity: dict, allow_previous: bool) -> tuple[PyTree, dict]:
        path = checkpoint.latest(self.directory / "checkpoints", allow_previous=allow_previous)
        if path is None:
            raise FileNotFoundError(
                f"resume: expected a checkpoint in {self.directory / 'checkpoints'}, found none. Start without resume."
            )
        saved, meta = checkpoint.restore(path, plain)
        _same_run(meta["identity"], identity, path)
        for name, bytes in meta["log_bytes"].items():
            file = self.directory / name
            if not file.exists() or file.stat().st_size < bytes:
                raise checkpoint.CheckpointError(
                    f"{file}: expected the {bytes} bytes that {path.name} committed. The log was cut or replaced."
                )
            with open(file, "r+b") as out:
                out.truncate(bytes)
        self.records = _read(self.directory / METRICS)
        return saved, meta

    def append(self, records: list[dict], seconds: float, elapsed: float) -> None:
        """Adds a block of rounds."""
        self.records += records
        self.seconds += seconds
        self.elapsed = self.earlier + elapsed
        timing = {"round": records[-1]["round"], "seconds": self.seconds, "elapsed_seconds": self.elapsed}
        if self.directory is not None:
            _extend(self.directory / METRICS, records)
            _extend(self.directory / TIMING, [timing])

    def commit(self, round: int, state: PyTree, identity: dict, keep: int) -> None:
        """One commit for everything: the log is on disk before the checkpoint that counts its bytes."""
        state = distributed.whole(state)
        distributed.by_first(lambda: self._commit(round, state, identity, keep))

    def _commit(self, round: int, state: PyTree, identity: dict, keep: int) -> None:
        sizes = {}
        for name in (METRICS, TIMING):
            with open(self.directory / name, "rb") as file:
                os.fsync(file.fileno())
                sizes[name] = os.fstat(file.fileno()).st_size
        meta = {"identity": identity, "log_bytes": sizes, "seconds": self.seconds, "elapsed_seconds": self.elapsed}
        if self.spending is not None and (ledger := self.spending.state()) is not None:
            meta["privacy"] = ledger
        memory_files = engine.memory_files(jax.block_until_ready(state))
        for file, version in memory_files:
            file.sync(int(version))
            meta["client_memory"] = meta.get("client_memory", {}) | {file.path.name: file.mark.hex()}
        checkpoint.save(self.directory / "checkpoints", round, engine.gathered(state), meta, keep=keep)
        for file, _ in memory_files:
            file.advance(keep)

    def summary(self, compile_seconds: float, peak_memory_bytes: int) -> dict[str, Any]:
        """Totals of the run and its last evaluation."""
        totals = {name: sum(record.get(name, 0) for record in self.records) for name in TOTALS}
        for name in SOME_TOTALS:
            if any(name in record for record in self.records):
                totals[name] = sum(record.get(name, record["uplink_bytes"]) for record in self.records)
        trained = totals.pop("clients_reported")
        evaluated = [record for record in self.records if "test_loss" in record or "held_out_loss" in record]
        last = evaluated[-1] if evaluated else {}
        return {
            **{name: last[name] for name in last if name.startswith(("test_", "held_out_"))},
            "rounds": len(self.records),
            "clients_trained": trained,
            "rounds_seconds": self.seconds,
            "compile_seconds": compile_seconds,
            "clients_per_second": trained / self.seconds if self.seconds else 0.0,
            "peak_memory_bytes": peak_memory_bytes,
            **totals,
        }


def _same_run(stored: dict, given: dict, path: Path) -> None:
    stored, given = _flat(stored), _flat(given)
    differing = [
        f"  {name}: {stored.get(name, 'absent')!r} in the checkpoint, {given.get(name, 'absent')!r} now"
        for name in sorted(stored.keys() | given.keys())
        if stored.get(name, "absent") != given.get(name, "absent")
    ]
    if differing:
        raise checkpoint.CheckpointError(f"{path}: this checkpoint is of another run:\n" + "\n".join(differing))


def _flat(tree: dict, prefix: str = "") -> dict:
    items = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        items |= _flat(value, path + ".") if isinstance(value, dict) else {path: value}
    return items


def _read(path: Path) -> list[dict]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _extend(path: Path, records: list[dict]) -> None:
    text = "".join(json.dumps(record) + "\n" for record in records)
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)
