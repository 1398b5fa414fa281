"""Draws curves of a sweep or of compared runs: a metric over rounds, over bytes sent, and over simulated time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.report import axes, charts, plots
from fedjax_sim.report.numbers import bounds_of, recorded_number, scaled_seconds
from fedjax_sim.sweeps.labels import metric_words
from fedjax_sim.sweeps.results import Sweep

MOST_ROUNDS = 60  # evaluated rounds that a curve shows


@plots.style()
def curves_figure(found: Sweep, metric: str, *, confidence: float = 0.95, x: str | None = None) -> Any:
    """Draws a curve for each combination: the mean over seeds, in a band of its Student-t interval.

    There is a panel for rounds, one for bytes (up and down, where rows have `uplink_bytes_so_far`), and one for
    simulated time (`round_seconds_so_far`). A curve's place on an axis is the mean over its seeds.

    Args:
      found: a sweep with several evaluated rounds.
      metric: a metric of its rows.
      confidence: the level of the intervals, in (0, 1).
      x: the one panel that is drawn, "rounds", "bytes" or "seconds"; None draws all that rows have values for.

    Returns: a matplotlib Figure.

    Raises: ValueError for more than eight combinations, and for an x that rows have no values for; ImportError without
      matplotlib.

    Guarantees: points are means of their own combination at their own place
    (tests/sweeps/test_drawing.py::test_curves_are_means_over_what_was_sent).
    """
    rounds = sorted({row["round"] for row in found.rows})
    rounds = [rounds[i] for i in np.unique(np.linspace(0, len(rounds) - 1, MOST_ROUNDS).round().astype(int))]
    cells_of_round = [found.summary(metric, round=round, confidence=confidence) for round in rounds]
    if len(cells_of_round[0]) > len(charts.LOOKS):
        hint = "Compare fewer runs, or see the table."
        validate.fail("found", f"at most {len(charts.LOOKS)} combinations to draw", len(cells_of_round[0]), hint)
    places = _axes(found)
    if x is not None:
        validate.one_of("x", x, tuple(places))
        places = {x: places[x]}
    factor, metric_name = metric_words(metric, found.labels)
    labels = found.row_labels()
    figure, panels = charts.panels(1, len(places), height=3.2 if axes.width() > 5 else 2.4, sharey=True)
    metric_name = axes.fitted(metric_name, figure.get_figheight() - 0.9)
    for panel, (words, place) in zip(panels, places.values(), strict=True):
        rows = [
            {"combination": labels[values], "place": place(values, round)}
            | {name: factor * cell[name] for name in ("mean", "low", "high")}
            for round, cells in zip(rounds, cells_of_round, strict=True)
            for cell in cells
            for values in [tuple(cell[name] for name in found.names)]
        ]
        charts.lines(panel, rows, "place", "mean", by="combination", band=True, cross="diverged", xlabel=words,
                     ylabel=metric_name)  # fmt: skip
        panel.label_outer()
        axes.few_ticks(panel, axes.width() / len(places) - 0.6)
    # Intervals of two or three seeds are wide. The panels show what was measured, and bands may leave them.
    numbers = found.numbers(metric)
    low, high = (factor * numbers.min(), factor * numbers.max()) if len(numbers) else (0.0, 0.0)
    margin = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    panels[0].set_ylim(low - margin, high + margin)
    axes.keep_within(panels[0], "y", *(factor * end for end in bounds_of(metric, numbers)))
    plots.legend(figure, panels)
    return figure


def _axes(found: Sweep) -> dict[str, tuple[str, Callable[[tuple, int], float]]]:
    """Returns the horizontal axes that rows have values for.

    Args:
      found: a sweep with rows for several rounds.

    Returns: name -> (label with its unit, (combination, round) -> place). Bytes, in the unit of the label, and
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

    shown: dict[str, tuple[str, Callable]] = {"rounds": ("round", lambda _, round: float(round))}
    sent = ("uplink_bytes_so_far", "downlink_bytes_so_far")
    if all(name in row for row in found.rows for name in sent) and largest(sent) > 0:
        unit, name = plots.scaled_bytes(largest(sent))
        shown["bytes"] = f"{name} sent, up and down", mean(sent, unit)
    time = ("round_seconds_so_far",)
    if all(time[0] in row for row in found.rows) and largest(time) > 0:
        unit, name = scaled_seconds(largest(time))
        shown["seconds"] = f"simulated {name}", mean(time, unit)
    return shown
