"""Draws the means of a sweep over two options with numbers as a map."""

from __future__ import annotations

from typing import Any

from fedjax_sim import validate
from fedjax_sim.report import axes, charts, plots
from fedjax_sim.report.numbers import is_better_low
from fedjax_sim.sweeps.figure import are_numbers
from fedjax_sim.sweeps.labels import metric_words
from fedjax_sim.sweeps.results import Sweep
from fedjax_sim.sweeps.table import shown_metric

LEAST_VALUES = 3  # of each option; fewer are read more easily as lines


def map_axes(found: Sweep) -> tuple[str, str] | None:
    """Returns the two options of a sweep over exactly two, each with three numbers or more; None for other sweeps."""
    if len(found.names) != 2:
        return None
    x, y = found.names
    values = [list(dict.fromkeys(row[name] for row in found.rows)) for name in (x, y)]
    return (x, y) if all(are_numbers(each) and len(each) >= LEAST_VALUES for each in values) else None


@plots.style()
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
    x, y = names
    factor, words = metric_words(metric, found.labels)
    rows = [cell | {"shown": factor * cell["mean"]} for cell in found.summary(metric)]
    rows.sort(key=lambda row: (-row[y], row[x]))
    figure, (panel,) = charts.panels(1, 1, height=1.2 + 0.34 * len({row[y] for row in rows}))
    # Colours of a loss run the other way, so that darker is better for it too.
    charts.heat_map(panel, rows, x, y, "shown", less_is_darker=is_better_low(metric),
                    xlabel=found.labels.options.get(x, x), ylabel=found.labels.options.get(y, y),
                    shown=lambda mean: shown_metric(metric, mean, 4))  # fmt: skip
    title = f"{words} after {found.last_round:,} rounds, darker is better"
    panel.set_title(axes.fitted(title, 0.8 * axes.width()))
    return figure
