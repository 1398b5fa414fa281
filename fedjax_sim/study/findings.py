"""This module defines `Findings`, the result of a study: measured numbers with intervals and predictions beside them.

A study is one function with keyword options that returns `Findings`. The command `fedjax-sim study NAME` finds the
function by its name in `fedjax_sim.study`. The intervals of one study are simultaneous: with probability
`CONFIDENCE` all of them contain the truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.report import plots
from fedjax_sim.study.claims import Claim as Claim, selected

# The probability that all intervals of one study contain the truth (Bonferroni's correction, in `critical_value`).
CONFIDENCE = 0.99
# What a prediction claims. An "estimate" is shown beside the measured number and never judged.
PREDICTION_KINDS = ("exact", "leading order", "upper bound", "estimate")

FEW = "A mean of fewer squares is far from normal, and its interval misses more often than its level says."


def least_runs(dimension: int) -> int:
    """Returns how many runs are needed before an interval for the mean of |x|^2 can be trusted.

    Squares have a skewed distribution, so the mean of a few squares is far from normal. With the number returned here,
    at most 2 % of studies with 60 intervals have an interval that misses the truth.

    Args:
      dimension: the dimension of x. Each coordinate adds a square, so fewer runs suffice in higher dimensions.

    Guarantees: at this size, at most 16 of 500 studies of a chi-square variable with one degree of freedom miss a true
    value (tests/study/test_findings.py::test_squares).

    >>> least_runs(1), least_runs(8)
    (2000, 250)
    """
    return -(-2000 // dimension)  # rounded up


class Comparison(NamedTuple):
    """A measured number, its uncertainty, and the number that theory predicts.

    Fields:
      conditions: the settings of the measurement, such as sampler and cohort size. "part" names a section of the study.
      quantity: the name of the number, such as "variance".
      measured: the number, as a rule the mean of independent samples.
      standard_error: the standard error of `measured`; 0 without randomness, NaN without an interval.
      degrees: degrees of freedom behind the standard error.
      predicted: the value of the closed form; None where there is none.
      kind: what the prediction claims, an entry of `PREDICTION_KINDS`.
      resolution: how far rounding alone may have moved `measured`; the interval is wider by it on both sides.
    """

    conditions: Mapping[str, Any]
    quantity: str
    measured: float
    standard_error: float
    degrees: float = math.inf
    predicted: float | None = None
    kind: str = "exact"
    resolution: float = 0.0


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
    """Compares the mean of independent samples with its prediction.

    Args:
      conditions: the settings under which the samples were drawn, by name.
      quantity: the name of what is measured.
      samples: [R] independent numbers of one distribution. A single number stands for a value without randomness.
      predicted: the value that theory gives for the mean; None where there is no closed form.
      kind: what the prediction claims: "exact", "leading order", an "upper bound" of the mean, or an "estimate".
      resolution: >= 0, by how much rounding in float32 may have moved the mean.

    Returns: a `Comparison` with the mean, its standard error and R - 1 degrees of freedom.

    Raises: ValueError for NaN or infinite samples: a diverged run has no mean.

    Guarantees: where means are nearly normal, the interval covers the truth at its nominal rate
    (tests/study/test_findings.py::test_coverage). Means of squares are nearly normal from `least_runs` samples on
    (::test_squares).

    >>> measured({"cohort_size": 2}, "variance", [1.0, 2.0, 3.0], 2.1).measured
    2.0
    """
    samples = _finite(samples, quantity)
    if predicted is not None and not math.isfinite(predicted):
        validate.fail("predicted", "a finite number", predicted, f"Of {quantity}.")
    standard_error = float(samples.std(ddof=1)) / math.sqrt(samples.size) if samples.size > 1 else 0.0
    mean = float(samples.mean())
    prediction = None if predicted is None else float(predicted)
    degrees = max(samples.size - 1, 1)
    return Comparison(
        conditions=dict(conditions),
        quantity=quantity,
        measured=mean,
        standard_error=standard_error,
        degrees=degrees,
        predicted=prediction,
        kind=kind,
        resolution=resolution,
    )


def few(conditions: Mapping[str, Any], quantity: str, samples: Any) -> Comparison:
    """Returns the mean of runs that are too few for an interval.

    The spread of the runs is reported instead, as `standard_deviation` among the conditions.

    Args:
      conditions: the settings under which the samples were drawn, by name.
      quantity: the name of what is measured.
      samples: [R] one number a run.

    Raises: ValueError for fewer than two runs, and for NaN or infinite samples.

    >>> few({"part": "digits"}, "test accuracy", [0.8, 0.9]).conditions["standard_deviation"].__round__(4)
    0.0707
    """
    samples = _finite(samples, quantity)
    validate.integer("samples", samples.size, 2)
    conditions = dict(conditions) | {"standard_deviation": float(samples.std(ddof=1))}
    return Comparison(conditions, quantity, float(samples.mean()), math.nan)


def _finite(samples: Any, quantity: str) -> np.ndarray:
    """Returns samples as float64, [R]; refuses none, and those that are NaN or infinite."""
    samples = np.asarray(samples, np.float64).reshape(-1)
    if not samples.size or not np.isfinite(samples).all():
        num_not_finite = int((~np.isfinite(samples)).sum())
        validate.fail(
            "samples", "finite numbers", f"{num_not_finite} of {samples.size} that are not", f"Of {quantity}."
        )
    return samples


def comparisons_of(
    found: Sequence[Comparison], part: str, quantity: str | None = None, **conditions: Any
) -> list[Comparison]:
    """Selects the comparisons of one part of a study, in their order.

    Args:
      found: all comparisons of the study.
      part: the part, that is `conditions["part"]` of a comparison.
      quantity: keeps only comparisons of this quantity; None keeps all.
      **conditions: further conditions that a comparison must have been measured under.

    >>> comparisons = [measured({"part": "floor", "bits": bits}, "loss", 1.0) for bits in (2, 4)]
    >>> [comparison.conditions["bits"] for comparison in comparisons_of(comparisons, "floor", "loss", bits=4)]
    [4]
    """
    required_conditions = conditions | {"part": part}
    return [
        comparison
        for comparison in found
        if quantity in (None, comparison.quantity)
        and all(comparison.conditions.get(name) == value for name, value in required_conditions.items())
    ]


def rows_of(comparisons: Sequence[Comparison], **conditions: Any) -> list[dict[str, Any]]:
    """Returns a table: one dict for each comparison that was measured under the given conditions.

    The keys are the conditions, then quantity, measured, low, high, predicted, kind, ratio, ratio_low, ratio_high and
    holds:

    - low and high are the ends of the interval.
    - ratio is measured / predicted. If the prediction is zero up to rounding, it is 1 where the interval contains the
      prediction, and None elsewhere. It is None without a prediction and without an interval.
    - holds says whether the interval contains the prediction. It is None without a prediction, without an interval, and
      for an estimate.

    Args:
      comparisons: all of a study. The width of an interval depends on their number, so none may be left out.
      **conditions: values that a row must have, by name; `quantity` may be among them.
    """
    # Rows are made before they are selected, because intervals are joint over the whole study.
    rows = [_row(comparison, len(comparisons)) for comparison in comparisons]
    return selected(rows, **conditions)


def _row(comparison: Comparison, num_intervals: int) -> dict[str, Any]:
    """Returns a comparison as a row of the table, see `rows_of`.

    The interval is x -+ (t s + r), with x the measured number, s its standard error, t Student's critical value
    (`critical_value`) and r the resolution.

    Args:
      comparison: one of a study.
      num_intervals: the comparisons of the study, which decide the width of all intervals.
    """
    mean = comparison.measured
    predicted = comparison.predicted
    half_width = critical_value(comparison.degrees, num_intervals) * comparison.standard_error + comparison.resolution
    row = dict(comparison.conditions) | {"quantity": comparison.quantity}
    row |= {"measured": mean, "low": None, "high": None}
    row |= {"predicted": predicted, "kind": comparison.kind, "ratio": None, "ratio_low": None, "ratio_high": None}
    # A standard error of NaN marks a number without an interval.
    if math.isnan(half_width):
        return row | {"holds": None}
    low, high = mean - half_width, mean + half_width
    row |= {"low": low, "high": high}
    # A prediction that is zero up to rounding cannot be divided by.
    if predicted and abs(predicted) > comparison.resolution:
        # Sorted, since dividing by a negative prediction exchanges the two ends.
        ratios = mean / predicted, *sorted((low / predicted, high / predicted))
        row |= dict(zip(("ratio", "ratio_low", "ratio_high"), ratios, strict=True))
    elif predicted is not None and low <= predicted <= high:
        # The prediction is zero and holds, so it is shown like other predictions that hold.
        row |= {"ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0}
    if predicted is None or comparison.kind == "estimate":
        return row | {"holds": None}
    # An upper bound may lie anywhere above the interval: only a bound below it is refuted.
    return row | {"holds": low <= predicted and (comparison.kind == "upper bound" or predicted <= high)}


def critical_value(degrees: float, num_intervals: int) -> float:
    """Returns Student's critical value, in standard errors, at which so many intervals hold together."""
    from scipy import stats

    # Bonferroni: each of the n two-sided intervals may miss with probability (1 - CONFIDENCE) / n.
    return float(stats.t.isf((1 - CONFIDENCE) / 2 / max(num_intervals, 1), degrees))


class Findings(NamedTuple):
    """The answer to a study's question: numbers, claims and a figure.

    Fields:
      name: the study's name, as on the command line.
      question: the question that the study answers.
      comparisons: the measured numbers, each beside its prediction.
      figure: () -> a matplotlib Figure. It is called by `draw`, so a study runs without matplotlib.
      options: the options that the study ran with, the seed included.
      claims: the conclusions, each with whether it holds for these numbers.
    """

    name: str
    question: str
    comparisons: Sequence[Comparison]
    figure: Callable[[], Any]
    options: Mapping[str, Any]
    claims: Sequence[Claim] = ()

    def rows(self) -> list[dict[str, Any]]:
        """Returns a table: one dict for each comparison, see `rows_of`."""
        return rows_of(self.comparisons)

    def draw(self) -> Any:
        """Draws the figure in the style of this package.

        Returns: a matplotlib Figure.
        Raises: ImportError without matplotlib.
        """
        with plots.style():
            return self.figure()

    def verdict(self) -> str:
        """Says in one sentence how many predictions hold.

        >>> def figure(): ...
        >>> right, wrong = (measured({}, "x", [1.0, 2.0, 3.0], value) for value in (2.1, 90.0))
        >>> fields = {"name": "s", "question": "Is it so?", "figure": figure, "options": {}}
        >>> Findings(comparisons=[right, wrong], **fields).verdict()
        '1 of 2 predictions lie within the intervals of what was measured (99 % together); 1 do not.'
        """
        holds = [row["holds"] for row in self.rows() if row["holds"] is not None]
        if not holds:
            return f"{len(self.comparisons)} numbers were measured; no closed form predicts them."
        num_misses = holds.count(False)
        text = f"{holds.count(True)} of {len(holds)} predictions lie within the intervals of what was measured"
        return f"{text} ({100 * CONFIDENCE:g} % together)" + (f"; {num_misses} do not." if num_misses else ".")
