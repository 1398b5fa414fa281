"""Reads finished or stopped runs back as the rows of a sweep, so that they are compared as the points of one are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_sim import tree, validate
from fedjax_sim.config.document import NO_RESULT, load
from fedjax_sim.report.by_client import Row, read_by_client
from fedjax_sim.report.files import read_lines
from fedjax_sim.running import checksums
from fedjax_sim.running.log import check_logs, verified
from fedjax_sim.sweeps.finished import what_a_sweep_holds
from fedjax_sim.sweeps.results import Sweep

TOTALS = ("uplink_bytes", "downlink_bytes", "round_seconds")  # of rounds; a comparison shows their sums so far
NO_PART = "none"  # the value of an option that another run's parts have and this run's have not


class LoggedRun(NamedTuple):
    """The config and the log of a run's folder."""

    name: str  # of the folder
    seed: int
    options: dict[str, Any]  # that decide a result, by their paths; values that JSON has, lists as text
    records: list[dict[str, Any]]  # of the rounds, from round 0 on
    clients: Sequence[Row] = ()  # of by_client.csv, which is of the last evaluation

    @property
    def last_evaluated(self) -> int:
        """The last round with an evaluation; 0 without any."""
        return max(_rows(self), default=0)


def read_run(folder: str | Path) -> LoggedRun:
    """Reads a run's folder, whether the run has ended or not.

    Raises: FileNotFoundError for a folder without config.toml or metrics.jsonl, CheckpointError if one of them was
      changed since.
    """
    folder = Path(folder)
    records = read_records(folder)
    tables = load(folder / "config.toml").resolved()
    seed = tables.pop("seed")
    tables["run"] = {name: value for name, value in tables["run"].items() if name not in NO_RESULT}
    options = {path: _plain(value) for path, value in tree.dotted(tables).items()}
    return LoggedRun(folder.name, seed, options, records, read_by_client(folder))


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Returns the records of a run's rounds, whose config is not read: parts of a user's own need not be there.

    Raises: as `read_run`.
    """
    if not (folder / "config.toml").is_file() or not (folder / "metrics.jsonl").is_file():
        raise FileNotFoundError(
            f"RUN: expected a run's folder, with config.toml and metrics.jsonl, got {str(folder)!r}. "
            f"{what_a_sweep_holds(folder)}".strip()
        )
    checksums.check_files(folder, ["config.toml"])
    check_logs(folder)
    return read_lines(folder / "metrics.jsonl", [], verified(folder))


def sweep_of(runs: Sequence[LoggedRun]) -> Sweep:
    """Returns runs as a sweep whose grid is made of the options in which they differ.

    Rows are of the rounds in which every run was evaluated. A run whose seed differs and whose options do not is
    another seed of the same combination. Bytes and simulated seconds of the rounds so far are added up, as
    `uplink_bytes_so_far` and so on.

    Args:
      runs: from `read_run`, at least two. The first one's options are what differences are taken from.

    Raises: ValueError for fewer than two runs, for two runs with the same options and the same seed, and for runs that
      share no evaluated round.

    Guarantees: the rows are those of a sweep over the same grid
      (tests/sweeps/test_runs.py::test_runs_are_the_points_of_a_sweep).
    """
    if len(runs) < 2:
        validate.fail("runs", "at least two", len(runs))
    paths = list(dict.fromkeys(path for run in runs for path in run.options))
    names = [path for path in paths if len({run.options.get(path, NO_PART) for run in runs}) > 1]
    seen: dict[tuple, str] = {}
    for run in runs:
        point = (run.seed, *(run.options.get(name, NO_PART) for name in names))
        if point in seen:
            hint = "They are the same point, and would count twice."
            validate.fail("runs", "runs that differ in an option or in their seed", (seen[point], run.name), hint)
        seen[point] = run.name
    rows_of_runs = [_rows(run) for run in runs]
    rounds = [round for round in rows_of_runs[0] if all(round in rows for rows in rows_of_runs)]
    if not rounds:
        validate.fail("runs", "runs with a round in which all were evaluated", [run.name for run in runs])
    rows = [
        {"seed": run.seed, "round": round, **{name: run.options.get(name, NO_PART) for name in names}, **found[round]}
        for run, found in zip(runs, rows_of_runs, strict=True)
        for round in rounds
    ]
    seeds = list(dict.fromkeys(run.seed for run in runs))
    return Sweep(rows, tuple(names), seeds, len(runs), True)


def names_of_rows(runs: Sequence[LoggedRun], options: Sequence[str]) -> list[str]:
    """Returns a name for each row of a comparison: the run's folder, or the first and the last of several seeds."""
    folders: dict[tuple, list[str]] = {}
    for run in runs:
        folders.setdefault(tuple(run.options.get(name, NO_PART) for name in options), []).append(run.name)
    return [" ... ".join(dict.fromkeys((names[0], names[-1]))) for names in folders.values()]


def _rows(run: LoggedRun) -> dict[int, dict[str, Any]]:
    """Returns the metrics of each evaluated round, with totals of the rounds up to it."""
    rows: dict[int, dict[str, Any]] = {}
    totals: dict[str, float] = {}
    # An evaluated round has a metric that other rounds have not; the record of round 0 holds only those.
    evaluated = {name for record in run.records[:1] if record.get("round") == 0 for name in record} - {"round"}
    for record in run.records:
        for name in TOTALS:
            if isinstance(record.get(name), int | float):
                totals[name] = totals.get(name, 0) + record[name]
        if record["round"] > 0 and (not evaluated or evaluated & record.keys()):
            metrics = {name: value for name, value in record.items() if name != "round"}
            rows[record["round"]] = metrics | {f"{name}_so_far": total for name, total in totals.items()}
    return rows


def _plain(value: Any) -> Any:
    """Returns an option's value as a label: lists and tables as JSON."""
    if value is None:
        return NO_PART
    return json.dumps(value) if isinstance(value, list | Mapping) else value
