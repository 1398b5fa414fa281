"""Draws curves of a sweep or of compared runs: a metric over rounds, over bytes sent, and over simulated time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.report import charts, plots
from fedjax_sim.report.numbers import in_percent, recorded_number, scaled_seconds
from fedjax_sim.sweeps.results import Sweep
from fedjax_sim.sweeps.table import shown_value

MOST_ROUNDS = 60  # evaluated rounds that a curve shows


@plots.style()
def curves_figure(found: Sweep, metric: str, *, confidence: float = 0.95) -> Any:
    """Draws a curve for each combination: the mean over seeds, in a band of its Student-t interval.

    There is a panel for rounds, one for bytes (up and down, where rows have `uplink_bytes_so_far`), and one for
    simulated time (`round_seconds_so_far`). A curve's place on an axis is the mean over its seeds.

    Args:
      found: a sweep with several evaluated rounds.
      metric: a metric of its rows.
      confidence: the level of the intervals, in (0, 1).

    Returns: a matplotlib Figure.

    Raises: ValueError for more than eight combinations; ImportError without matplotlib.
    """
    rounds = sorted({row["round"] for row in found.rows})
    rounds = [rounds[i] for i in np.unique(np.linspace(0, len(rounds) - 1, MOST_ROUNDS).round().astype(int))]
    cells_of_round = [found.summary(metric, round=round, confidence=confidence) for round in rounds]
    if len(cells_of_round[0]) > len(charts.LOOKS):
        hint = "Compare fewer runs, or see the table."
        validate.fail("found", f"at most {len(charts.LOOKS)} combinations to draw", len(cells_of_round[0]), hint)
    axes = _axes(found)
    factor, metric_name = in_percent(metric)
    figure, panels = charts.panels(1, len(axes), height=3.2, sharey=True)
    for panel, (words, place) in zip(panels, axes, strict=True):
        rows = [
            {"combination": label_of(found.names, values), "place": place(values, round)}
            | {name: factor * cell[name] for name in ("mean", "low", "high")}
            for round, cells in zip(rounds, cells_of_round, strict=True)
            for cell in cells
            for values in [tuple(cell[name] for name in found.names)]
        ]
        charts.lines(panel, rows, "place", "mean", by="combination", band=True, cross="diverged", xlabel=words,
                     ylabel=metric_name)  # fmt: skip
        panel.label_outer()
    # Intervals of two or three seeds are wide. The panels show what was measured, and bands may leave them.
    measured = factor * np.array([recorded_number(row[metric]) for row in found.rows])
    finite = measured[np.isfinite(measured)] if np.isfinite(measured).any() else np.zeros(1)
    low, high = finite.min(), finite.max()
    margin = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    panels[0].set_ylim(low - margin, high + margin)
    plots.legend(figure, panels)
    return figure


def label_of(names: tuple[str, ...], values: tuple) -> str:
    """Returns a combination as a label: its values, with the last word of each option that is no name of a part.

    Options that a combination has not are left out. Of two options with the same last word the whole path is shown.

    Args:
      names: dotted paths of the options, such as "sampler.name".
      values: a value for each name; "none" where the combination has no such option.

    >>> label_of(("algorithm.name", "transform.quantize.bits"), ("scaffold", 8))
    'scaffold, bits = 8'
    >>> label_of(("algorithm.name", "transform.quantize.bits"), ("fedavg", "none"))
    'fedavg'
    >>> label_of(("up.bits", "down.bits"), (8, "none"))
    'up.bits = 8'
    """
    last_words = [name.rpartition(".")[2] for name in names]
    words = [word if word == "name" or last_words.count(word) == 1 else name
             for name, word in zip(names, last_words, strict=True)]  # fmt: skip
    texts = [
        shown_value(value) if word == "name" or str(value).startswith("{") else f"{word} = {value}"
        for word, value in zip(words, values, strict=True)
        if value != "none"
    ]
    return ", ".join(texts) or ", ".join(f"no {word}" for word in words)


def _axes(found: Sweep) -> list[tuple[str, Callable[[tuple, int], float]]]:
    """Returns the horizontal axes that rows have values for.

    Args:
      found: a sweep with rows for several rounds.

    Returns: for each axis (label with its unit, (combination, round) -> place). Bytes, in the unit of the label, and
      simulated time are sums until the round, as means over seeds.
    """
    rows: dict[tuple, list] = {}
    for row in found.rows:
        rows.setdefault((tuple(row[name] for name in found.names), row["round"]), []).append(row)

    def mean(columns: tuple[str, ...], unit: float) -> Callable[[tuple, int], float]:
        return lambda values, round: float(
            np.mean([sum(recorded_number(row[name]) for name in columns) for row in rows[values, round]]) / unit
        )

    def largest(columns: tuple[str, ...]) -> float:
        return max(sum(recorded_number(row[name]) for name in columns) for row in found.rows)

    axes: list[tuple[str, Callable]] = [("round", lambda _, round: float(round))]
    sent = ("uplink_bytes_so_far", "downlink_bytes_so_far")
    if all(name in row for row in found.rows for name in sent) and largest(sent) > 0:
        unit, name = plots.scaled_bytes(largest(sent))
        axes.append((f"{name} sent, up and down", mean(sent, unit)))
    time = ("round_seconds_so_far",)
    if all(time[0] in row for row in found.rows) and largest(time) > 0:
        unit, name = scaled_seconds(largest(time))
        axes.append((f"simulated {name}", mean(time, unit)))
    return axes
