"""This module has what is left of the old figures of studies: points. New figures use `fedjax_sim.report.charts`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report.charts import MARKERS as MARKERS, panels
from fedjax_sim.study.findings import rows_of as rows_of

chart = panels
DASHED = (0, (4, 1.6))
DOTTED = (0, (1.5, 1.5))


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
