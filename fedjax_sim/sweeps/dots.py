"""Draws means over seeds as dots with intervals, and beside them the paired differences from the first combination."""

from __future__ import annotations

from typing import Any

from fedjax_sim import validate
from fedjax_sim.report import axes, charts, plots
from fedjax_sim.report.numbers import bounds_of
from fedjax_sim.sweeps.labels import metric_words
from fedjax_sim.sweeps.results import Sweep

MOST_COMBINATIONS = 60
NO_GAP: dict[str, Any] = {"difference": 0.0, "low": 0.0, "high": 0.0, "diverged": 0}  # of the first from itself
SHARE_OF_NAMES = 0.34  # of the width, at most


@plots.style()
def dots_figure(found: Sweep, metric: str, *, confidence: float = 0.95) -> Any:
    """Draws a row for each combination of the grid.

    The left panel has the mean over seeds with its Student-t interval. The right panel has the difference from the
    first combination (of the same data and model), taken seed by seed, with its interval. The first itself lies at 0.
    Combinations whose interval leaves out 0 are filled dots, and others open ones. A combination of which a seed
    diverged has a cross and no mean. An axis ends where the metric does.

    Args:
      found: a sweep over a grid, or compared runs.
      metric: a metric of its rows; accuracies are drawn in percent.
      confidence: the level of the intervals, in (0, 1).

    Returns: a matplotlib Figure.

    Raises: ValueError for more than 60 combinations; ImportError without matplotlib.

    Guarantees: dots and intervals are those of `Sweep.summary` and `Sweep.differences`
    (tests/sweeps/test_pages.py::test_dots_are_means_and_differences).
    """
    cells = found.summary(metric, confidence=confidence)
    gaps = found.difference_of_each(metric, confidence=confidence)
    if len(cells) > MOST_COMBINATIONS:
        hint = "Draw parts of the sweep, or see the table."
        validate.fail("found", f"at most {MOST_COMBINATIONS} combinations to draw", len(cells), hint)
    factor, name = metric_words(metric, found.labels)
    width = axes.width()
    labels = [axes.fitted(label, SHARE_OF_NAMES * width) for label in found.row_labels().values()]
    means = [
        {"combination": i} | {name: factor * cell[name] for name in ("mean", "low", "high")}
        for i, cell in enumerate(cells)
    ]
    differences: list[dict[str, Any]] = []
    for i, gap in enumerate(gaps):
        gap = gap or NO_GAP
        differs = gap["low"] > 0 or gap["high"] < 0
        difference = {name: factor * gap[name] for name in ("difference", "low", "high")}
        differences.append({"combination": i, "differs": differs} | difference)
        if gap["diverged"]:
            # A cross stands beside the dot of the seeds that are left.
            differences.append({"combination": i, "difference": None})
    num_lines = len(labels) * max(2, *(1 + label.count("\n") for label in labels))
    figure, (left, right) = charts.panels(1, 2, height=1.0 + 0.13 * max(num_lines, 6), sharey=True)
    room = (1 - SHARE_OF_NAMES) * width / 2
    words = axes.fitted(f"{name} after {found.last_round:,} rounds", room)
    charts.dots(left, means, "combination", "mean", label=words, cross="diverged")
    words = axes.fitted("Difference from the first" + (", in points" if factor == 100 else ""), room)
    charts.dots(right, differences, "combination", "difference", filled="differs", label=words, cross="diverged")
    left.set_yticks(range(len(labels)), labels, fontsize=charts.LEGEND_FONT_SIZE)
    right.axvline(0, color=charts.INK, linewidth=0.9)
    low, high = (factor * end for end in bounds_of(metric, found.numbers(metric)))
    axes.keep_within(left, "x", low, high)
    axes.keep_within(right, "x", low - high, high - low)
    for panel in (left, right):
        axes.few_ticks(panel, room)
    plots.legend(figure, (left, right))
    return figure
