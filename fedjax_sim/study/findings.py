"""What a study returns: measured numbers with intervals, the closed form beside each, and how to read them.

A study is one function with keyword options that returns `Findings`; `fedjax-sim study NAME` finds it by its name in
`fedjax_sim.study.__all__`. The intervals of one study hold together: with probability `CONFIDENCE` all of them contain
the truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.report import plots

__all__ = ["CONFIDENCE", "FEW", "KINDS", "Comparison", "Findings", "comparisons_of", "few", "least_runs", "measured"]

CONFIDENCE = 0.99  # that every interval of a study contains the truth, together (Bonferroni)
KINDS = ("exact", "leading order", "upper bound", "estimate")  # the last one is shown and not judged

FEW = "A mean of fewer squares is far from normal, and its interval misses more often than its level says."


def least_runs(dimension: int) -> int:
    """How many runs make the mean of |x|^2, x of this dimension, so nearly normal that its intervals can be trusted: at
    most 2 % of studies with 60 intervals have one that misses.

    Guarantees: the worst case, chi-square with one degree of freedom (tests/study/test_findings.py::test_squares).

    >>> least_runs(1), least_runs(8)
    (2000, 250)
    """
    return -(-2000 // dimension)


class Comparison(NamedTuple):
    """One measured number beside its prediction."""

    conditions: Mapping[str, Any]  # under which it was measured: sampler, cohort size, ...
    quantity: str
    measured: float
    standard_error: float  # of `measured`; 0 for a number without randomness, NaN for one without an interval
    degrees: float = math.inf  # of freedom behind the standard error
    predicted: float | None = None  # by the closed form; None where there is none
    kind: str = "exact"  # of the prediction, one of KINDS
    resolution: float = 0.0  # how far rounding alone may have moved `measured`


@validate.named_arguments
def measured(
    conditions: Mapping[str, Any],
    quantity: str,
    samples: Any,
    predicted: float | None = None,
    *,
    kind: Literal["exact", "leading order", "upper bound", "estimate"] = "exact",
    resolution: float = 0.0,
) -> Comparison:
    """The mean of independent samples, beside its prediction.

    Args:
      samples: [R] independent numbers of one law; a single one stands for a number without randomness.
      kind: what the prediction is: "exact", "leading order", an "upper bound" of the mean, or an "estimate".
      resolution: >= 0, by how much rounding in float32 may have moved the mean.

    Raises: ValueError for NaN or infinite samples: a diverged run has no mean.

    Guarantees: where means are nearly normal the interval covers the truth at its nominal rate
    (tests/study/test_findings.py::test_coverage), as those of squares are from `least_runs` on (::test_squares).

    >>> measured({"cohort_size": 2}, "variance", [1.0, 2.0, 3.0], 2.1).measured
    2.0
    """
    samples = np.asarray(samples, np.float64).reshape(-1)
    if not samples.size or not np.isfinite(samples).all():
        lost = int((~np.isfinite(samples)).sum())
        validate.fail("samples", "finite numbers", f"{lost} of {samples.size} that are not", f"Of {quantity}.")
    if predicted is not None and not math.isfinite(predicted):
        validate.fail("predicted", "a finite number", predicted, f"Of {quantity}.")
    error = float(samples.std(ddof=1)) / math.sqrt(samples.size) if samples.size > 1 else 0.0
    mean, prediction = float(samples.mean()), None if predicted is None else float(predicted)
    return Comparison(dict(conditions), quantity, mean, error, max(samples.size - 1, 1), prediction, kind, resolution)


def few(conditions: Mapping[str, Any], quantity: str, samples: Any) -> Comparison:
    """The mean of runs that are too few for an interval, with their `standard_deviation` among the conditions.

    Raises: ValueError for fewer than two.

    >>> few({"part": "digits"}, "test accuracy", [0.8, 0.9]).conditions["standard_deviation"].__round__(4)
    0.0707
    """
    samples = np.asarray(samples, np.float64).reshape(-1)
    validate.integer("samples", samples.size, 2)
    conditions = dict(conditions) | {"standard_deviation": float(samples.std(ddof=1))}
    return Comparison(conditions, quantity, float(samples.mean()), math.nan)


def comparisons_of(
    found: Sequence[Comparison], part: str, quantity: str | None = None, **conditions: Any
) -> list[Comparison]:
    """The comparisons of a part of a study, in their order: those of this quantity, if one is named, under these
    conditions.

    >>> found = [measured({"part": "floor", "bits": bits}, "loss", 1.0) for bits in (2, 4)]
    >>> [one.conditions["bits"] for one in comparisons_of(found, "floor", "loss", bits=4)]
    [4]
    """
    wanted = conditions | {"part": part}
    return [
        one for one in found
        if quantity in (None, one.quantity) and all(one.conditions.get(name) == value for name, value in wanted.items())
    ]  # fmt: skip


class Findings(NamedTuple):
    """The answer to a study's question."""

    name: str
    question: str
    comparisons: Sequence[Comparison]
    reading: Sequence[str]  # paragraphs in plain words
    figure: Callable[[], Any]  # draws it: () -> a matplotlib Figure
    options: Mapping[str, Any]  # that the study ran with, seed included

    def rows(self) -> list[dict[str, Any]]:
        """One dict a comparison: its conditions, then quantity, measured, low, high, predicted, kind, ratio, its low
        and high, and `holds`: whether the interval contains the prediction (None without one, and for an estimate).

        The ratio is measured / predicted; 1 where both are zero up to rounding, None where the prediction alone is.
        """
        return [self._row(comparison) for comparison in self.comparisons]

    def _row(self, comparison: Comparison) -> dict[str, Any]:
        mean, predicted = comparison.measured, comparison.predicted
        half = self._critical(comparison.degrees) * comparison.standard_error + comparison.resolution
        low, high = (None, None) if math.isnan(half) else (mean - half, mean + half)
        row = dict(comparison.conditions) | {"quantity": comparison.quantity}
        row |= {"measured": mean, "low": low, "high": high}
        row |= {"predicted": predicted, "kind": comparison.kind, "ratio": None, "ratio_low": None, "ratio_high": None}
        if low is None:
            return row | {"holds": None}
        if predicted and abs(predicted) > comparison.resolution:
            ratios = mean / predicted, *sorted((low / predicted, high / predicted))
            row |= dict(zip(("ratio", "ratio_low", "ratio_high"), ratios, strict=True))
        elif predicted is not None and low <= predicted <= high:
            row |= {"ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0}
        if predicted is None or comparison.kind == "estimate":
            return row | {"holds": None}
        return row | {"holds": low <= predicted and (comparison.kind == "upper bound" or predicted <= high)}

    def _critical(self, degrees: float) -> float:
        from scipy import stats

        return float(stats.t.isf((1 - CONFIDENCE) / 2 / max(len(self.comparisons), 1), degrees))

    def draw(self) -> Any:
        """The figure in the style of this package.

        Returns: a matplotlib Figure.
        Raises: ImportError without matplotlib.
        """
        with plots.style():
            return self.figure()

    def verdict(self) -> str:
        """How many predictions hold, in one sentence.

        >>> def figure(): ...
        >>> right, wrong = (measured({}, "x", [1.0, 2.0, 3.0], value) for value in (2.1, 90.0))
        >>> Findings("s", "Is it so?", [right, wrong], [], figure, {}).verdict()
        '1 of 2 predictions lie within the intervals of what was measured (99 % together); 1 do not.'
        """
        holds = [row["holds"] for row in self.rows() if row["holds"] is not None]
        if not holds:
            return f"{len(self.comparisons)} numbers were measured; no closed form predicts them."
        lost = holds.count(False)
        words = f"{holds.count(True)} of {len(holds)} predictions lie within the intervals of what was measured"
        return f"{words} ({100 * CONFIDENCE:g} % together)" + (f"; {lost} do not." if lost else ".")
