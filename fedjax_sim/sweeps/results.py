"""Holds what a sweep measured: rows, means with intervals over seeds, paired differences, and files of these."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.files.text_files import csv_text
from fedjax_sim.report.plots import recorded_number
from fedjax_sim.running.files import write_atomically
from fedjax_sim.sweeps.labels import Labels, labels_of

OWN = ("seed", "round")
OWN_MODELS = "personal_clients"  # in a row: how many clients' own models were judged; absent where there are none


class Paired(NamedTuple):
    """A `Paired` states the difference between the metric at two values, under the same seeds."""

    metric: str
    difference: float  # mean over seeds of metric at `a` minus metric at `b`
    standard_error: float
    low: float  # of the Student-t interval
    high: float
    p_value: float  # two-sided, of no difference
    seeds: int
    diverged: int  # seeds at which one of the two is not finite
    correlation: float  # of the metric at the two values over seeds: the higher, the more pairing gains


class Sweep(NamedTuple):
    """Rows of a sweep: one for each point and evaluated round, of JSON values ("nan", "inf", "-inf" as text)."""

    rows: list[dict[str, Any]]
    names: tuple[str, ...]  # names of the grid
    seeds: list[int]
    num_programs: int
    exact: bool  # whether every point has the bits of a single run
    compile_seconds: float = 0.0
    seconds: float = 0.0
    # Names whose values are other clients or another model: differences are taken where these are equal.
    apart: tuple[str, ...] = ()
    labels: Labels = Labels()

    def column(self, name: str) -> np.ndarray:
        """Returns a column of all rows; metrics as floats.

        Raises: ValueError for a name that no row has, with the nearest name.
        """
        self._check_known(name, self._columns())
        values = [row.get(name) for row in self.rows]
        is_label = name in (*OWN, *self.names)
        return np.array(values) if is_label else np.array([recorded_number(value) for value in values])

    def row_labels(self) -> dict[tuple, str]:
        """Returns a label for each combination, by its values of `names`; no two are alike."""
        combinations = (tuple(row[name] for name in self.names) for row in self.rows)
        return labels_of(self.names, combinations, self.labels)

    def numbers(self, metric: str) -> np.ndarray:
        """Returns the finite numbers of a metric in all rows."""
        numbers = np.array([recorded_number(row.get(metric)) for row in self.rows])
        return numbers[np.isfinite(numbers)]

    @property
    def last_round(self) -> int:
        """The number of the last evaluated round."""
        return max(row["round"] for row in self.rows)

    def lossy(self) -> list[dict[str, Any]]:
        """Returns the last rows of points that dropped non-finite updates or skipped rounds.

        Their metrics may hide this, because a run goes on without such updates.

        Guarantees: a point whose clients' updates overflow is among them
        (tests/sweeps/test_sweep.py::test_what_diverged_is_told).
        """
        counts = ("dropped_clients_so_far", "skipped_rounds_so_far")
        return [row for row in self.rows if row["round"] == self.last_round and any(row.get(name) for name in counts)]

    def summary(
        self,
        metric: str,
        *,
        by: str | Sequence[str] | None = None,
        round: int | None = None,
        confidence: float = 0.95,
        finite_only: bool = False,
    ) -> list[dict[str, Any]]:
        """Returns the mean over seeds, with its standard error and Student-t interval, for each value of `by`.

        Args:
          metric: a metric of the rows, such as "test_accuracy".
          by: a name or names of the grid; all by default. A seed is first averaged over the names that are left out: at
            one seed points share their random numbers, so only seeds are independent. Each value must occur with the
            same values of the other names.
          round: an evaluated round, by default the last.
          confidence: the level of the interval, in (0, 1).
          finite_only: average the seeds that stayed finite. By default a seed that did not makes the mean NaN.

        Returns: a dict for each value of `by`: its values, `seeds`, `diverged` (how many were not finite), `mean`,
          `median`, `standard_error`, `low`, `high`; an interval of one seed is NaN.

        Guarantees: mean and interval equal scipy's, and the interval covers the mean as often as it says
        (tests/sweeps/test_sweep.py::test_summary_and_pairs).
        """
        by = self.names if by is None else (by,) if isinstance(by, str) else tuple(by)
        for name in by:
            self._check_known(name, self.names, "by")
        validate.in_range("confidence", confidence, 0, 1, open_low=True, open_high=True)
        numbers_by_value: dict[tuple, dict[int, list[float]]] = {}  # values of `by` -> seed -> the metric
        other_values: dict[tuple, set] = {}  # values of `by` -> values of the names that are left out
        for row in self._at(metric, round):
            values = tuple(row[name] for name in by)
            numbers_by_value.setdefault(values, {}).setdefault(row["seed"], []).append(recorded_number(row[metric]))
            other_values.setdefault(values, set()).add(self._others(row, by))
        if len(set(map(frozenset, other_values.values()))) > 1:
            hint = "Means over other values cannot be compared: name more of the grid, or see paired."
            validate.fail("by", "names whose values all occur with the same values of the others", by, hint)
        summaries = []
        for values, numbers_of_seed in numbers_by_value.items():
            seed_means = np.array([np.mean(numbers) for numbers in numbers_of_seed.values()])
            finite = seed_means[np.isfinite(seed_means)]
            num_diverged = len(seed_means) - len(finite)
            used = finite if finite_only or not num_diverged else np.full(1, math.nan)
            mean, error, low, high = _interval(used, confidence)
            summaries.append({
                **dict(zip(by, values, strict=True)), "seeds": len(seed_means), "diverged": num_diverged, "mean": mean,
                "median": float(np.median(used)) if len(used) else math.nan, "standard_error": error,
                "low": low, "high": high,
            })  # fmt: skip
        return summaries

    def paired(
        self, metric: str, name: str, a: Any, b: Any, *, round: int | None = None, confidence: float = 0.95
    ) -> Paired:
        """Compares the metric at `name = a` with the metric at `name = b`, seed by seed.

        The difference is taken over the values of the other names at which both a and b occur. Seeds at which one of
        the two is not finite are left out, and counted.

        Args:
          metric: a metric of the rows.
          name: a name of the grid.
          a, b: two of its values; the difference is the metric at a minus the metric at b.
          round, confidence: as for `summary`.

        Guarantees: difference, p-value and interval equal those of scipy's paired t-test, and a seed at which a side is
        not finite is left out and counted (tests/sweeps/test_sweep.py::test_summary_and_pairs).
        """
        self._check_known(name, self.names, "name")
        sides: dict[Any, dict[tuple, float]] = {a: {}, b: {}}  # value -> (seed, the grid's other values) -> the metric
        if len(sides) < 2:
            validate.fail("a, b", "two different values", (a, b))
        validate.in_range("confidence", confidence, 0, 1, open_low=True, open_high=True)
        rows = self._at(metric, round)
        for row in rows:
            if row[name] in sides:
                sides[row[name]][row["seed"], self._others(row, (name,))] = recorded_number(row[metric])
        for value, numbers in sides.items():
            if not numbers:
                values = list(dict.fromkeys(row[name] for row in rows))
                validate.fail(name, "one of " + ", ".join(map(repr, values)), value)
        pairs_of_seed: dict[int, list[tuple[float, float]]] = {}
        for key in sides[a]:
            if key in sides[b]:
                pairs_of_seed.setdefault(key[0], []).append((sides[a][key], sides[b][key]))
        if not pairs_of_seed:
            validate.fail("a, b", "values that occur with the same values of the others", (a, b))
        # Only seeds are independent, so the pairs of a seed are averaged first.
        mean_pairs = [np.mean(pairs_of_seed[seed], axis=0) for seed in sorted(pairs_of_seed)]
        return _paired(metric, mean_pairs, confidence)

    def differences(self, metric: str, *, round: int | None = None, confidence: float = 0.95) -> list[dict[str, Any]]:
        """Compares every combination with the first one, seed by seed, so that shared randomness of a seed cancels.

        A combination with other values of `apart` is compared with the first that has the same values of these names,
        since other clients or another model share no randomness.

        Args:
          metric: a metric of the rows.
          round, confidence: as for `summary`.

        Returns: for each combination that is not itself a first one, in their order, its values and the fields of
          `Paired`, over the seeds that both combinations have. Of combinations that share no seed it is NaN.

        Guarantees: difference, p-value and interval equal those of scipy's paired t-test, and a seed at which a side is
        not finite is left out and counted; combinations over other data are compared among themselves
        (tests/sweeps/test_sweep.py::test_differences_are_paired).
        """
        differences = self.difference_of_each(metric, round=round, confidence=confidence)
        return [difference for difference in differences if difference is not None]

    def difference_of_each(
        self, metric: str, *, round: int | None = None, confidence: float = 0.95
    ) -> list[dict[str, Any] | None]:
        """Returns the entries of `differences` for all combinations, in the order of `summary`; None for first ones.

        Args:
          metric, round, confidence: as for `differences`.
        """
        validate.in_range("confidence", confidence, 0, 1, open_low=True, open_high=True)
        numbers_of_seed: dict[tuple, dict[int, float]] = {}  # combination -> seed -> the metric
        for row in self._at(metric, round):
            numbers_of_seed.setdefault(self._others(row, ()), {})[row["seed"]] = recorded_number(row[metric])
        first_of: dict[tuple, dict[int, float]] = {}  # values of `apart` -> seed -> the metric
        differences: list[dict[str, Any] | None] = []
        for values, numbers in numbers_of_seed.items():
            combination = dict(zip(self.names, values, strict=True))
            first = first_of.setdefault(tuple(combination[name] for name in self.apart), numbers)
            pairs = [(number, first[seed]) for seed, number in numbers.items() if seed in first]
            is_first = first is numbers
            differences.append(None if is_first else combination | _paired(metric, pairs, confidence)._asdict())
        return differences

    def write(self, directory: str | Path) -> tuple[Path, Path]:
        """Writes `results.jsonl` and `results.csv`, each completely or not at all, and returns their paths."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in self.rows)
        cells = ({name: _cell(value) for name, value in row.items()} for row in self.rows)
        texts = {"results.jsonl": lines, "results.csv": csv_text(self._columns(), cells)}
        jsonl_path, csv_path = (write_atomically(directory / name, [body.encode()]) for name, body in texts.items())
        return jsonl_path, csv_path

    def _columns(self) -> list[str]:
        """Returns the names of all columns, in the order in which rows first have them."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def _check_known(self, name: str, names: Iterable[str], argument: str = "name") -> None:
        """Raises ValueError for a name that is none of `names`."""
        names = list(names)
        if name not in names:
            validate.fail(argument, "one of " + ", ".join(names), name, validate.nearest(str(name), names))

    def _others(self, row: Mapping[str, Any], names: Sequence[str]) -> tuple:
        """Returns a row's values of the grid's names, without some of them."""
        return tuple(row[name] for name in self.names if name not in names)

    def _at(self, metric: str, round: int | None) -> list[dict[str, Any]]:
        """Returns the rows of a round, by default the last, after checking that each has a number for the metric."""
        self._check_known(metric, [name for name in self._columns() if name not in (*OWN, *self.names)], "metric")
        round = self.last_round if round is None else round
        rows = [row for row in self.rows if row["round"] == round]
        if not rows:
            rounds = sorted({row["round"] for row in self.rows})
            validate.fail("round", "one of " + ", ".join(map(str, rounds)), round)
        if any(metric not in row or isinstance(row[metric], list) for row in rows):
            common = [name for name in rows[0] if all(name in row for row in rows)]
            judged = [name for name in common if name.endswith(("_accuracy", "_loss"))]
            hint = f"All rows have {', '.join(judged)}." if judged else ""
            validate.fail("metric", "a number in each row of that round", metric, hint)
        return rows


def union_of_sweeps(results: Sequence[Sweep], combinations: Sequence[Mapping[str, Any]]) -> Sweep:
    """Returns sweeps over parts of a grid as one sweep.

    Args:
      results: sweeps with the same names and seeds.
      combinations: of the whole grid, in the order that rows are to have.

    Guarantees: no row is lost, and rows have the grid's order
    (tests/sweeps/test_config.py::test_axes_over_data_and_models).
    """
    rows_by_values: dict[tuple, list[dict[str, Any]]] = {}
    for result in results:
        for row in result.rows:
            rows_by_values.setdefault(tuple(row[name] for name in result.names), []).append(row)
    rows = [row for values in combinations for row in rows_by_values[tuple(values.values())]]
    first = results[0]
    return Sweep(
        rows=rows,
        names=first.names,
        seeds=first.seeds,
        num_programs=sum(result.num_programs for result in results),
        exact=all(result.exact for result in results),
        compile_seconds=sum(result.compile_seconds for result in results),
        seconds=sum(result.seconds for result in results),
    )


def shown_by_default(found: Sweep) -> str:
    """Returns the metric that is shown where none is asked for.

    Where clients of some combination have models of their own, it is the accuracy or loss of the model that each owner
    would use, on the owner's rows, which every combination has. Otherwise it is that of the shared model, or else any
    metric that all combinations have.

    Args:
      found: a sweep with at least one row.

    Guarantees: a sweep of local training and FedAvg is ranked by owners
    (tests/sweeps/test_own_models.py::test_owners_rank_a_sweep).
    """
    last_rows = [row for row in found.rows if row["round"] == found.last_round]
    has_own = any(OWN_MODELS in row for row in last_rows)
    places = ("owner", "personal", "test", "held_out") if has_own else ("personal", "test", "held_out")
    preferred = [f"{place}_{metric}" for metric in ("accuracy", "loss") for place in places]
    labels = ("seed", "round", *found.names)
    names = [name for name in (*preferred, "local_loss", *last_rows[0]) if name in last_rows[0] and name not in labels]
    return next((name for name in names if all(name in row for row in last_rows)), names[0])


def _interval(values: np.ndarray, confidence: float) -> tuple[float, float, float, float]:
    """Returns (mean, standard error, low, high) of independent values; all but the mean are NaN for a single value."""
    from scipy import stats

    count = len(values)
    mean = float(np.mean(values)) if count else math.nan
    if count < 2:
        return mean, math.nan, math.nan, math.nan
    error = float(np.std(values, ddof=1) / math.sqrt(count))
    half_width = float(stats.t.ppf(0.5 + confidence / 2, count - 1)) * error
    return mean, error, mean - half_width, mean + half_width


def _paired(metric: str, pairs: Sequence[Any], confidence: float) -> Paired:
    """Returns the mean of a - b over pairs (a, b) of independent seeds, without pairs that are not finite.

    With mean g of n gaps and standard error s, the interval is g -+ t s with Student's t of n - 1 degrees of freedom.

    Args:
      metric: its name.
      pairs: [S, 2] the metric of each seed at the two values.
      confidence: the level of the interval, in (0, 1).
    """
    both = np.reshape(np.array(pairs, float), (-1, 2))
    finite = both[np.isfinite(both).all(axis=1)]
    gaps = finite[:, 0] - finite[:, 1]
    mean, error, low, high = _interval(gaps, confidence)
    # A correlation needs two pairs, and a side that varies.
    spread = finite.std(axis=0) if len(finite) else np.zeros(2)
    correlation = float(np.corrcoef(finite.T)[0, 1]) if (spread > 0).all() and len(finite) > 1 else math.nan
    p_value = _p_value(mean, error, len(gaps))
    num_diverged = len(both) - len(gaps)
    return Paired(
        metric=metric,
        difference=mean,
        standard_error=error,
        low=low,
        high=high,
        p_value=p_value,
        seeds=len(gaps),
        diverged=num_diverged,
        correlation=correlation,
    )


def _p_value(mean: float, error: float, count: int) -> float:
    """Returns the two-sided p-value of a t-test that the mean is 0; NaN for fewer than two values."""
    from scipy import stats

    if count < 2:
        return math.nan
    # Equal values have no error: they differ from 0 for certain, or not at all.
    if not error:
        return 1.0 if mean == 0 else 0.0
    return float(2 * stats.t.sf(abs(mean / error), count - 1))


def _cell(value: Any) -> Any:
    """Returns a value as CSV holds it: lists, truth values and None as JSON."""
    return json.dumps(value) if isinstance(value, (list, bool, type(None))) else value
