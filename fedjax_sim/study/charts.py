"""This module has what the figures of all studies share: panels, and measured points with their intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import plots
from fedjax_sim.study.findings import Comparison, Findings

DASHED = (0, (4, 1.6))
DOTTED = (0, (1.5, 1.5))
MARKERS = {"markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.6, "zorder": 3}


def rows_of(found: Sequence[Comparison], **conditions: Any) -> list[dict[str, Any]]:
    """Selects the rows of a study under the given conditions, with the joint intervals of all comparisons.

    Args:
      found: all comparisons of the study. The width of an interval depends on their number, so none may be left out.
      **conditions: values that a row must have, by name; `quantity` may be among them.
    """
    # Rows are made before they are selected, because intervals are joint over the whole study.
    rows = Findings(name="", question="", comparisons=found, reading=(), figure=lambda: None, options={}).rows()
    return [row for row in rows if all(row.get(name) == value for name, value in conditions.items())]


def chart(rows: int, columns: int) -> tuple[Any, list[Any]]:
    """Makes a figure as wide as a page, with a grid of panels.

    Args:
      rows: panels from top to bottom.
      columns: panels from left to right.

    Returns: (figure, panels): the matplotlib Figure, and its rows x columns axes in row-major order.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(plots.WIDTH, 3.1 * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def points(
    axes: Any,
    rows: Sequence[dict[str, Any]],
    x: str | Callable[[dict], float],
    *,
    colour: str,
    marker: str,
    label: str | None,
    scale: float = 1.0,
) -> None:
    """Draws the measured numbers that are above zero, with their intervals.

    Args:
      axes: the panel to draw on.
      rows: rows with intervals, as `rows_of` returns them.
      x: the horizontal position: a name in the rows, or a function of a row.
      colour: the colour of the points, as matplotlib takes it.
      marker: the shape of the points, as matplotlib takes it.
      label: the text in the legend; None leaves the points out of it.
      scale: multiplies the measured numbers and their intervals.
    """
    rows = [row for row in rows if row["measured"] > 0]
    if not rows:
        return
    positions = [x(row) if callable(x) else row[x] for row in rows]
    middle = scale * np.array([row["measured"] for row in rows])
    # The lower end stays above zero, for an axis may be logarithmic.
    low = np.maximum(scale * np.array([row["low"] for row in rows]), middle * 1e-3)
    errors = [middle - low, scale * np.array([row["high"] for row in rows]) - middle]
    axes.errorbar(
        positions, middle, errors, fmt=marker, color=colour, capsize=2, linestyle="none", label=label, **MARKERS
    )
