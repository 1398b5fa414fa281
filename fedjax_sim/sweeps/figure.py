"""Draws the figure of a sweep: mean and interval over seeds, along one axis of the grid; other axes make lines."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.report import plots
from fedjax_sim.report.numbers import in_percent
from fedjax_sim.sweeps.results import Sweep

LOOKS = (
    {"color": plots.BLUE, "linestyle": "-", "marker": "o"},
    {"color": plots.ORANGE, "linestyle": (0, (4, 1.6)), "marker": "s"},
    {"color": plots.BLACK, "linestyle": (0, (1.2, 1.2)), "marker": "^"},
    {"color": plots.GREY, "linestyle": "-", "marker": "D"},
    {"color": "#009E73", "linestyle": (0, (6, 1.5, 1.2, 1.5)), "marker": "v"},
    {"color": "#CC79A7", "linestyle": (0, (3, 1, 1, 1, 1, 1)), "marker": "P"},
    {"color": "#56B4E9", "linestyle": (0, (8, 2)), "marker": "X"},
    {"color": "#B08900", "linestyle": (0, (2, 2)), "marker": "*"},
)
APART = 5.0  # points between lines whose intervals would lie over each other
TICKS = 9  # an axis with more values shows no tick for each
LOGARITHMIC = 10  # from this ratio of largest to smallest value on, an axis is logarithmic


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
    lines: dict[tuple, list[dict]] = {}
    for cell in cells:
        lines.setdefault(tuple(cell[name] for name in other_names), []).append(cell)
    if len(lines) > len(LOOKS):
        hint = "Choose another x, or draw parts of the sweep."
        validate.fail("x", f"an axis that leaves at most {len(LOOKS)} lines", x, hint)
    factor, metric_name = in_percent(metric)
    from matplotlib.transforms import ScaledTranslation

    with plots.style():
        figure, panel = plots.panels(1, 3.2)
        values = values_by_name[x]
        numeric = are_numbers(values)
        for i, (look, (key, line)) in enumerate(zip(LOOKS, lines.items(), strict=False)):
            # Values that are no numbers stand at 0, 1, ...
            positions = np.array([cell[x] if numeric else values.index(cell[x]) for cell in line], float)
            order = np.argsort(positions)
            mean, low, high = (
                factor * np.array([cell[name] for cell in line])[order] for name in ("mean", "low", "high")
            )
            positions = positions[order]
            diverged = np.array([cell["diverged"] for cell in line])[order] > 0
            # One seed has no interval: its ends are NaN.
            reach = np.nan_to_num(np.stack([mean - low, high - mean]))
            name = ", ".join(
                f"{_last_word(other)} = {short_value(value)}" for other, value in zip(other_names, key, strict=True)
            )
            # Between names there is nothing: they get dots beside each other, and no line.
            shift = 0.0 if numeric else 0.5 * ((i + 0.5) / len(lines) - 0.5)
            line_look = look if numeric else look | {"linestyle": "none"}
            drawn = panel.errorbar(positions + shift, mean, reach, label=name or None, capsize=2.5, markersize=4,
                           elinewidth=1.1, markeredgecolor="white", markeredgewidth=0.5, **line_look)  # fmt: skip
            if numeric:
                # On an axis of numbers lines stand a little apart, so that intervals do not hide each other.
                apart = ScaledTranslation(APART * (i - (len(lines) - 1) / 2) / 72, 0, figure.dpi_scale_trans)
                for part in drawn.get_children():
                    part.set_transform(panel.transData + apart)
            if diverged.any():
                # Crosses stand at the bottom of the panel, each line's a little higher; the first of them is labelled.
                bottom = panel.get_xaxis_transform()
                first_with_crosses = min(j for j, cells in enumerate(lines.values()) if _any_diverged(cells))
                label = "diverged" if i == first_with_crosses else None
                heights = np.full(diverged.sum(), 0.02 + 0.03 * i)
                panel.plot(positions[diverged], heights, "x", color=look["color"], transform=bottom, label=label,
                           clip_on=False)  # fmt: skip
        if not numeric:
            panel.set_xticks(range(len(values)), [short_value(value) for value in values])
        elif min(values) > 0 and max(values) / min(values) >= LOGARITHMIC:
            panel.set_xscale("log")
            if len(values) <= TICKS:
                panel.set_xticks(values, [short_value(value) for value in values])
                panel.set_xticks([], minor=True)
        evaluated_round = found.last_round if round is None else round
        seeds = f"{len(found.seeds)} seeds, {confidence:.0%} intervals" if len(found.seeds) > 1 else "one seed"
        panel.set(xlabel=x, ylabel=f"{metric_name} after {evaluated_round} rounds")
        panel.set_title(seeds)
        plots.legend(figure, (panel,))
    return figure


def _any_diverged(cells: list[dict]) -> bool:
    """Returns whether a seed diverged in any of the cells."""
    return any(cell["diverged"] for cell in cells)


def are_numbers(values: list) -> bool:
    """Returns whether all values are numbers; truth values are not."""
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def _last_word(name: str) -> str:
    """Returns the last word of an option's path."""
    return name.rpartition(".")[2]


def short_value(value: Any) -> str:
    """Returns a value as a short text."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
