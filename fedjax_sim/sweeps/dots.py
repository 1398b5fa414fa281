"""Draws means over seeds as dots with intervals, and beside them the paired differences from the first combination."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.report import plots
from fedjax_sim.report.numbers import in_percent
from fedjax_sim.sweeps.curves import label_of
from fedjax_sim.sweeps.results import Sweep

MOST_COMBINATIONS = 60


def dots_figure(found: Sweep, metric: str, *, confidence: float = 0.95) -> Any:
    """Draws a row for each combination of the grid.

    The left panel has the mean over seeds with its Student-t interval. The right panel has the difference from the
    first combination (of the same data and model), taken seed by seed, with its interval. Combinations whose interval
    leaves out 0 are filled dots. A combination of which a seed diverged has a cross and no mean.

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
    factor, name = in_percent(metric)
    rows = range(len(cells))
    with plots.style():
        figure, (left, right) = plots.panels(2, 1.0 + 0.26 * max(len(cells), 3), sharey=True)
        for row, cell, gap in zip(rows, cells, gaps, strict=True):
            color = plots.BLACK if gap is None else plots.BLUE
            _dot(left, row, factor * np.array([cell["mean"], cell["low"], cell["high"]]), color, filled=True)
            if gap is not None:
                difference = factor * np.array([gap["difference"], gap["low"], gap["high"]])
                _dot(right, row, difference, color, filled=bool(difference[1] > 0 or difference[2] < 0))
            for panel, diverged in ((left, cell["diverged"]), (right, gap is not None and gap["diverged"])):
                if diverged:
                    bottom = panel.get_yaxis_transform()
                    panel.plot(0.02, row, "x", color=plots.ORANGE, transform=bottom, clip_on=False)
        right.axvline(0, color=plots.INK, linewidth=0.9)
        labels = [label_of(found.names, tuple(cell[name] for name in found.names)) for cell in cells]
        left.set_yticks(rows, labels or ["all seeds"])
        left.set_ylim(len(cells) - 0.5, -0.5)
        left.set(xlabel=f"{name} after {found.last_round:,} rounds")
        right.set(xlabel="Difference from the first" + (", in points" if factor == 100 else ""))
        for panel in (left, right):
            panel.grid(False, axis="y")
            panel.margins(x=0.08)
    return figure


def _dot(panel: Any, row: int, values: np.ndarray, color: str, filled: bool) -> None:
    """Draws (mean, low, high) as a dot on its interval; a single seed has no interval."""
    mean, low, high = values
    if np.isfinite([low, high]).all():
        panel.hlines(row, low, high, color=color, linewidth=1.6)
    panel.plot(
        mean, row, "o", color=color, markersize=6, markerfacecolor=color if filled else "white", markeredgewidth=1.3
    )
