"""What a sweep found: tidy rows, means with intervals over seeds, paired differences, files."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.report.plots import recorded_number
from fedjax_sim.running.files import write_atomically

__all__ = ["Paired", "Sweep"]

OWN = ("seed", "round")


class Paired(NamedTuple):
    """The difference between two values under the same seeds."""

    metric: str
    difference: float  # mean over seeds of metric at `a` minus metric at `b`
    standard_error: float
    low: float  # of the Student-t interval
    high: float
    p_value: float  # two-sided, of no difference
    seeds: int
    diverged: int  # seeds at which one of the two is not finite
    correlation: float  # of the two over seeds: the higher, the more pairing gains


class Sweep(NamedTuple):
    """Rows of a sweep: one for each point and evaluated round, of JSON values ("nan", "inf", "-inf" as text)."""

    rows: list[dict[str, Any]]
    names: tuple[str, ...]  # of the grid
    seeds: list[int]
    num_programs: int
    exact: bool  # every point has the bits of a single run
    compile_seconds: float = 0.0
    seconds: float = 0.0

    def column(self, name: str) -> np.ndarray:
        """A column of all rows; metrics as floats."""
        self._known(name, self._columns())
        values = [row.get(name) for row in self.rows]
        return (
            np.array(values) if name in (*OWN, *self.names) else np.array([recorded_number(value) for value in values])
        )

    @property
    def last_round(self) -> int:
        """The last evaluated round."""
        return max(row["round"] for row in self.rows)

    def lossy(self) -> list[dict[str, Any]]:
        """Last rows of points that dropped non-finite updates or skipped rounds: their metrics may hide it.

        Guarantees: tests/sweeps/test_sweep.py::test_what_diverged_is_told.
        """
        lost = ("dropped_clients_so_far", "skipped_rounds_so_far")
        return [row for row in self.rows if row["round"] == self.last_round and any(row.get(name) for name in lost)]

    def summary(
        self,
        metric: str,
        *,
        by: str | Sequence[str] | None = None,
        round: int | None = None,
        confidence: float = 0.95,
        finite_only: bool = False,
    ) -> list[dict[str, Any]]:
        """Mean over seeds, with its standard error and Student-t interval, for each value of `by`.

        Args:
          by: a name or names of the grid; all by default. A seed is first averaged over the others: at one seed points
            share their random numbers, so only seeds are independent. Each value must occur with the same values of the
            others.
          round: an evaluated round, by default the last.
          finite_only: average the seeds that stayed finite. By default one that did not makes the mean NaN.

        Returns: a dict for each value of `by`: its values, `seeds`, `diverged` (how many were not finite), `mean`,
          `median`, `standard_error`, `low`, `high`; an interval of one seed is NaN.

        Guarantees: equals scipy's, and covers as often as it says
        (tests/sweeps/test_sweep.py::test_summary_and_pairs).
        """
        by = self.names if by is None else (by,) if isinstance(by, str) else tuple(by)
        for name in by:
            self._known(name, self.names, "by")
        validate.in_range("confidence", confidence, 0, 1, open_low=True, open_high=True)
        table: dict[tuple, dict[int, list[float]]] = {}
        beside: dict[tuple, set] = {}
        for row in self._at(metric, round):
            values = tuple(row[name] for name in by)
            table.setdefault(values, {}).setdefault(row["seed"], []).append(recorded_number(row[metric]))
            beside.setdefault(values, set()).add(self._others(row, by))
        if len(set(map(frozenset, beside.values()))) > 1:
            hint = "Means over other values cannot be compared: name more of the grid, or see paired."
            validate.fail("by", "names whose values all occur with the same values of the others", by, hint)
        found = []
        for values, cell in table.items():
            of_seeds = np.array([np.mean(x) for x in cell.values()])
            finite = of_seeds[np.isfinite(of_seeds)]
            lost = len(of_seeds) - len(finite)
            used = finite if finite_only or not lost else np.full(1, math.nan)
            mean, error, low, high = _interval(used, confidence)
            found.append({
                **dict(zip(by, values, strict=True)), "seeds": len(of_seeds), "diverged": lost, "mean": mean,
                "median": float(np.median(used)) if len(used) else math.nan, "standard_error": error,
                "low": low, "high": high,
            })  # fmt: skip
        return found

    def paired(
        self, metric: str, name: str, a: Any, b: Any, *, round: int | None = None, confidence: float = 0.95
    ) -> Paired:
        """Metric at `name = a` minus metric at `name = b`, seed by seed, over the values of the other names at which
        both occur.

        Seeds at which one of the two is not finite are left out, and counted.

        Guarantees: as `summary`.
        """
        self._known(name, self.names, "name")
        sides: dict[Any, dict[tuple, float]] = {a: {}, b: {}}  # by seed and the grid's other values
        if len(sides) < 2:
            validate.fail("a, b", "two different values", (a, b))
        validate.in_range("confidence", confidence, 0, 1, open_low=True, open_high=True)
        rows = self._at(metric, round)
        for row in rows:
            if row[name] in sides:
                sides[row[name]][row["seed"], self._others(row, (name,))] = recorded_number(row[metric])
        for value, seen in sides.items():
            if not seen:
                there = list(dict.fromkeys(row[name] for row in rows))
                validate.fail(name, "one of " + ", ".join(map(repr, there)), value)
        both: dict[int, list[tuple[float, float]]] = {}
        for key in sides[a]:
            if key in sides[b]:
                both.setdefault(key[0], []).append((sides[a][key], sides[b][key]))
        if not both:
            validate.fail("a, b", "values that occur with the same values of the others", (a, b))
        return _paired(metric, [np.mean(both[seed], axis=0) for seed in sorted(both)], confidence)

    def differences(self, metric: str, *, round: int | None = None, confidence: float = 0.95) -> list[dict[str, Any]]:
        """Every combination minus the first one, seed by seed, so that what they share under a seed cancels.

        Returns: for each combination but the first, in their order, its values and the fields of `Paired`.

        Guarantees: as `paired` (tests/sweeps/test_sweep.py::test_differences_are_paired).
        """
        validate.in_range("confidence", confidence, 0, 1, open_low=True, open_high=True)
        table: dict[tuple, dict[int, float]] = {}
        for row in self._at(metric, round):
            table.setdefault(self._others(row, ()), {})[row["seed"]] = recorded_number(row[metric])
        (_, first), *others = table.items()
        return [
            dict(zip(self.names, values, strict=True))
            | _paired(metric, [(x, first[seed]) for seed, x in cell.items()], confidence)._asdict()
            for values, cell in others
        ]

    def write(self, directory: str | Path) -> tuple[Path, Path]:
        """Writes `results.jsonl` and `results.csv`, each completely or not at all."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in self.rows)
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, self._columns(), lineterminator="\n")
        table.writeheader()
        table.writerows({name: _cell(value) for name, value in row.items()} for row in self.rows)
        named = {"results.jsonl": lines, "results.csv": text.getvalue()}
        first, second = (write_atomically(directory / name, [body.encode()]) for name, body in named.items())
        return first, second

    def _columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def _known(self, name: str, names: Iterable[str], argument: str = "name") -> None:
        names = list(names)
        if name not in names:
            validate.fail(argument, "one of " + ", ".join(names), name, validate.nearest(str(name), names))

    def _others(self, row: Mapping[str, Any], names: Sequence[str]) -> tuple:
        return tuple(row[name] for name in self.names if name not in names)

    def _at(self, metric: str, round: int | None) -> list[Mapping[str, Any]]:
        self._known(metric, [name for name in self._columns() if name not in (*OWN, *self.names)], "metric")
        round = self.last_round if round is None else round
        rows = [row for row in self.rows if row["round"] == round]
        if not rows:
            rounds = sorted({row["round"] for row in self.rows})
            validate.fail("round", "one of " + ", ".join(map(str, rounds)), round)
        if any(metric not in row or isinstance(row[metric], list) for row in rows):
            validate.fail("metric", "a number in each row of that round", metric)
        return rows


def _interval(values: np.ndarray, confidence: float) -> tuple[float, float, float, float]:
    """(mean, standard error, low, high) of independent values."""
    from scipy import stats

    count = len(values)
    mean = float(np.mean(values)) if count else math.nan
    if count < 2:
        return mean, math.nan, math.nan, math.nan
    error = float(np.std(values, ddof=1) / math.sqrt(count))
    half = float(stats.t.ppf(0.5 + confidence / 2, count - 1)) * error
    return mean, error, mean - half, mean + half


def _paired(metric: str, pairs: Sequence[Any], confidence: float) -> Paired:
    """The mean of a - b over pairs (a, b) of independent seeds."""
    pairs = np.array(pairs)
    kept = pairs[np.isfinite(pairs).all(axis=1)]
    gaps = kept[:, 0] - kept[:, 1]
    mean, error, low, high = _interval(gaps, confidence)
    spread = kept.std(axis=0) if len(kept) else np.zeros(2)
    correlation = float(np.corrcoef(kept.T)[0, 1]) if (spread > 0).all() and len(kept) > 1 else math.nan
    p_value = _p_value(mean, error, len(gaps))
    lost = len(pairs) - len(gaps)
    return Paired(metric, mean, error, low, high, p_value, len(gaps), lost, correlation)


def _p_value(mean: float, error: float, count: int) -> float:
    from scipy import stats

    if count < 2:
        return math.nan
    if not error:
        return 1.0 if mean == 0 else 0.0
    return float(2 * stats.t.sf(abs(mean / error), count - 1))


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (list, bool, type(None))) else value
