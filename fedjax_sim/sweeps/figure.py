"""The figure of a sweep: mean and interval over seeds against one axis of the grid, a line for each of the others."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.report import plots
from fedjax_sim.sweeps.results import Sweep

__all__ = ["sweep_figure"]

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
TICKS = 9  # most values that an axis shows as ticks
LOGARITHMIC = 10  # largest / smallest value from which an axis is logarithmic


def sweep_figure(found: Sweep, metric: str, *, x: str | None = None, round: int | None = None,
                 confidence: float = 0.95) -> Any:  # fmt: skip
    """Mean of a metric over seeds with its Student-t interval; a cross below marks values at which a seed diverged.

    Args:
      x: a name of the grid; by default the first whose values are numbers.
      round, confidence: as for `Sweep.summary`.

    Returns: a matplotlib Figure.
    Raises: ValueError for more than eight lines, and for a sweep over seeds alone; ImportError without matplotlib.
    """
    if not found.names:
        validate.fail("found", "a sweep over a grid", "seeds alone", "They have no axis: see found.summary(metric).")
    cells = found.summary(metric, round=round, confidence=confidence)
    axes_of = {name: list(dict.fromkeys(cell[name] for cell in cells)) for name in found.names}
    if x is None:
        numeric = [name for name, values in axes_of.items() if _numeric(values) and len(values) > 1]
        x = (numeric or [*axes_of])[0]
    validate.one_of("x", x, found.names)
    others = [name for name, values in axes_of.items() if name != x and len(values) > 1]
    lines: dict[tuple, list[dict]] = {}
    for cell in cells:
        lines.setdefault(tuple(cell[name] for name in others), []).append(cell)
    if len(lines) > len(LOOKS):
        hint = "Choose another x, or draw parts of the sweep."
        validate.fail("x", f"an axis that leaves at most {len(LOOKS)} lines", x, hint)
    with plots.style():
        figure, panel = plots.panels(1, 3.2)
        values = axes_of[x]
        numeric = _numeric(values)
        for i, (look, (key, line)) in enumerate(zip(LOOKS, lines.items(), strict=False)):
            at = np.array([cell[x] if numeric else values.index(cell[x]) for cell in line], float)
            order = np.argsort(at)
            mean, low, high = (np.array([cell[name] for cell in line])[order] for name in ("mean", "low", "high"))
            at = at[order]
            lost = np.array([cell["diverged"] for cell in line])[order] > 0
            reach = np.nan_to_num(np.stack([mean - low, high - mean]))  # no interval from one seed
            name = ", ".join(f"{_last(other)} = {_word(value)}" for other, value in zip(others, key, strict=True))
            panel.errorbar(at, mean, reach, label=name or None, capsize=2.5, markersize=4, elinewidth=1.1,
                           markeredgecolor="white", markeredgewidth=0.5, **look)  # fmt: skip
            if lost.any():
                drawn = panel.get_xaxis_transform()
                label = "diverged" if i == min(j for j, cells in enumerate(lines.values()) if _lost(cells)) else None
                panel.plot(at[lost], np.full(lost.sum(), 0.02 + 0.03 * i), "x", color=look["color"], transform=drawn,
                           label=label, clip_on=False)  # fmt: skip
        if not numeric:
            panel.set_xticks(range(len(values)), [_word(value) for value in values])
        elif min(values) > 0 and max(values) / min(values) >= LOGARITHMIC:
            panel.set_xscale("log")
            if len(values) <= TICKS:
                panel.set_xticks(values, [_word(value) for value in values])
                panel.set_xticks([], minor=True)
        when = found.last_round if round is None else round
        seeds = f"{len(found.seeds)} seeds, {confidence:.0%} intervals" if len(found.seeds) > 1 else "one seed"
        panel.set(xlabel=x, ylabel=f"{metric} after {when} rounds")
        panel.set_title(seeds)
        plots.legend(figure, (panel,))
    return figure


def _lost(cells: list[dict]) -> bool:
    return any(cell["diverged"] for cell in cells)


def _numeric(values: list) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _word(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
