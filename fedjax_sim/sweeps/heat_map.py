"""Draws the means of a sweep over two options with numbers as a map."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.report import plots
from fedjax_sim.report.numbers import in_percent, is_better_low
from fedjax_sim.sweeps.figure import are_numbers, short_value
from fedjax_sim.sweeps.results import Sweep
from fedjax_sim.sweeps.table import shown_metric

LEAST_VALUES = 3  # of each option; fewer are read more easily as lines
MOST_NUMBERS = 120  # cells up to which each has its number


def map_axes(found: Sweep) -> tuple[str, str] | None:
    """Returns the two options of a sweep over exactly two, each with three numbers or more; None for other sweeps."""
    if len(found.names) != 2:
        return None
    x, y = found.names
    values = [list(dict.fromkeys(row[name] for row in found.rows)) for name in (x, y)]
    return (x, y) if all(are_numbers(each) and len(each) >= LEAST_VALUES for each in values) else None


def sweep_heat_map(found: Sweep, metric: str) -> Any:
    """Draws the mean over seeds for each pair of values of two options; darker is better or larger.

    Args:
      found: a sweep over two options with at least three numbers each (`map_axes`).
      metric: a metric of its rows; accuracies are in percent. A cell in which a seed diverged has a cross.

    Returns: a matplotlib Figure.

    Raises: ValueError for another sweep; ImportError without matplotlib.

    Guarantees: each cell has the mean of its own pair (tests/sweeps/test_pages.py::test_the_map_has_each_mean).
    """
    names = map_axes(found)
    if names is None:
        validate.fail("found", "a sweep over two options with three numbers each", ", ".join(found.names) or "seeds")
    x_values, y_values = (sorted({row[name] for row in found.rows}) for name in names)
    factor, words = in_percent(metric)
    means = np.full((len(y_values), len(x_values)), np.nan)
    for cell in found.summary(metric):
        means[y_values.index(cell[names[1]]), x_values.index(cell[names[0]])] = factor * cell["mean"]
    is_known = np.isfinite(means)
    # Colours of a loss run the other way, so that darker is better for it too.
    is_negated = is_better_low(metric)
    with plots.style():
        figure, axes = plots.panels(1, 1.2 + 0.34 * len(y_values))
        edges = np.arange(len(x_values) + 1) - 0.5, np.arange(len(y_values) + 1) - 0.5
        drawn = np.ma.masked_invalid(-means if is_negated else means)
        mesh = axes.pcolormesh(*edges, drawn, cmap="Blues", edgecolor="white", linewidth=0.6)
        low, high = mesh.get_clim() if is_known.any() else (0.0, 1.0)
        for row, column in np.ndindex(means.shape):
            is_dark = is_known[row, column] and drawn[row, column] > low + 0.6 * (high - low)
            text = shown_metric(metric, float(means[row, column]), 4) if is_known[row, column] else "×"
            if means.size <= MOST_NUMBERS or not is_known[row, column]:
                color = "white" if is_dark else plots.INK
                axes.text(column, row, text, ha="center", va="center", fontsize=8, color=color)
        axes.set_xticks(range(len(x_values)), [short_value(value) for value in x_values])
        axes.set_yticks(range(len(y_values)), [short_value(value) for value in y_values])
        axes.set(xlabel=names[0], ylabel=names[1], title=f"{words} after {found.last_round:,} rounds, darker is better")
        axes.grid(False)
    return figure
