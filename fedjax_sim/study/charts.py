"""What the figures of studies share: panels, measured points with their intervals, rows by their conditions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import plots
from fedjax_sim.study.findings import Comparison, Findings

__all__ = ["DASHED", "DOTTED", "MARKERS", "chart", "points", "rows_of"]

DASHED, DOTTED = (0, (4, 1.6)), (0, (1.5, 1.5))
MARKERS = {"markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.6, "zorder": 3}


def rows_of(found: Sequence[Comparison], **conditions: Any) -> list[dict[str, Any]]:
    """The rows, with the intervals that all comparisons share, of those under these conditions (or this quantity)."""
    rows = Findings("", "", found, (), lambda: None, {}).rows()
    return [row for row in rows if all(row.get(name) == value for name, value in conditions.items())]


def chart(rows: int, columns: int) -> tuple[Any, list[Any]]:
    """A figure as wide as a page, and its panels row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(plots.WIDTH, 3.1 * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def points(
    axes: Any,
    rows: Sequence[dict[str, Any]],
    x: str | Callable[[dict], float],
    colour: str,
    marker: str,
    label: str | None,
    scale: float = 1.0,
) -> None:
    """Draws the measured numbers that are above zero, with their intervals.

    Args:
      x: a name in the rows, or a function of a row. scale: multiplies the measured numbers.
    """
    rows = [row for row in rows if row["measured"] > 0]
    if not rows:
        return
    at = [x(row) if callable(x) else row[x] for row in rows]
    middle = scale * np.array([row["measured"] for row in rows])
    low = np.maximum(scale * np.array([row["low"] for row in rows]), middle * 1e-3)
    errors = [middle - low, scale * np.array([row["high"] for row in rows]) - middle]
    axes.errorbar(at, middle, errors, fmt=marker, color=colour, capsize=2, linestyle="none", label=label, **MARKERS)
