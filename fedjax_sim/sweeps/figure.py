"""Draws the figure of a sweep: mean and interval over seeds, along one axis of the grid; other axes make lines."""

from __future__ import annotations

from typing import Any

from fedjax_sim import validate
from fedjax_sim.report import axes, charts, plots
from fedjax_sim.report.numbers import bounds_of
from fedjax_sim.sweeps.labels import labels_of, metric_words
from fedjax_sim.sweeps.results import Sweep

LOGARITHMIC = 10  # from this ratio of largest to smallest value on, an axis is logarithmic


@plots.style()
def sweep_figure(found: Sweep, metric: str, *, x: str | None = None, round: int | None = None,
                 confidence: float = 0.95) -> Any:  # fmt: skip
    """Draws the mean of a metric over seeds with its Student-t interval; a cross marks values where a seed diverged.

    Args:
      found: the sweep.
      metric: a metric of its rows, such as "test_accuracy".
      x: a name of the grid for the horizontal axis; by default the first whose values are numbers.
      round, confidence: as for `Sweep.summary`.

    Returns: a matplotlib Figure.
    Raises: ValueError for more than eight lines, and for a sweep over seeds alone; ImportError without matplotlib.
    """
    if not found.names:
        validate.fail("found", "a sweep over a grid", "seeds alone", "They have no axis: see found.summary(metric).")
    cells = found.summary(metric, round=round, confidence=confidence)
    values_by_name = {name: list(dict.fromkeys(cell[name] for cell in cells)) for name in found.names}
    if x is None:
        numeric_names = [name for name, values in values_by_name.items() if are_numbers(values) and len(values) > 1]
        x = (numeric_names or [*values_by_name])[0]
    validate.one_of("x", x, found.names)
    other_names = [name for name, values in values_by_name.items() if name != x and len(values) > 1]
    factor, metric_name = metric_words(metric, found.labels)
    is_numeric = are_numbers(values_by_name[x])
    labels = labels_of((x,), [(value,) for value in values_by_name[x]], found.labels)
    lines = [tuple(cell[name] for name in other_names) for cell in cells]
    line_labels = labels_of(other_names, lines, found.labels)
    names = {point: axes.fitted(label, 0.3 * axes.width()) for point, label in labels.items()}
    rows = [
        {x: cell[x] if is_numeric else names[cell[x],], "line": line_labels[line]}
        | {name: factor * cell[name] for name in ("mean", "low", "high")}
        for cell, line in zip(cells, lines, strict=True)
    ]
    by = "line" if other_names else None
    if by and len({row["line"] for row in rows}) > len(charts.LOOKS):
        hint = "Choose another x, or draw parts of the sweep."
        validate.fail("x", f"an axis that leaves at most {len(charts.LOOKS)} lines", x, hint)
    height = 3.2 if axes.width() > 5 else 2.4
    if not is_numeric:
        height = max(height, 1.0 + 0.15 * len(names) * max(1 + name.count("\n") for name in names.values()))
    figure, (panel,) = charts.panels(1, 1, height=height)
    label = f"{metric_name} after {found.last_round if round is None else round} rounds"
    words = found.labels.options.get(x, x)
    low, high = (factor * end for end in bounds_of(metric, found.numbers(metric)))
    if is_numeric:
        lowest, highest = min(values_by_name[x]), max(values_by_name[x])
        log = "x" if lowest > 0 and highest / lowest >= LOGARITHMIC else ""
        label = axes.fitted(label, figure.get_figheight() - 0.9)
        charts.lines(panel, rows, x, "mean", by=by, log=log, apart=True, cross="diverged",
                     xlabel=axes.fitted(words, 0.8 * axes.width()), ylabel=label)  # fmt: skip
    else:
        label = axes.fitted(label, 0.6 * axes.width())
        charts.dots(panel, rows, x, "mean", by=by, cross="diverged", label=label)
        axes.few_ticks(panel, 0.6 * axes.width())
        panel.set_ylabel(axes.fitted(words, figure.get_figheight() - 0.9))
    axes.keep_within(panel, "y" if is_numeric else "x", low, high)
    panel.set_title(f"{len(found.seeds)} seeds, {confidence:.0%} intervals" if len(found.seeds) > 1 else "one seed")
    plots.legend(figure, (panel,))
    return figure


def are_numbers(values: list) -> bool:
    """Returns whether all values are numbers; truth values are not."""
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
