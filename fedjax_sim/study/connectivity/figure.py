"""This module draws the figure of `connectivity`: decay, rounds and bytes until agreement, and floors of D-PSGD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim import theory
from fedjax_sim.report import plots
from fedjax_sim.study.charts import DASHED, DOTTED, MARKERS, chart, points, rows_of
from fedjax_sim.study.connectivity.nodes import DECAYING, LEAST, eigenvalues_of
from fedjax_sim.study.findings import Comparison

LOOKS = [(plots.BLUE, "o"), (plots.ORANGE, "s"), (plots.BLACK, "^"), (plots.GREY, "D")]


def connectivity_figure(found: Sequence[Comparison]) -> Any:
    """Draws four panels, with theory as lines and measurements as points.

    Args:
      found: the comparisons of the study.

    Returns: a matplotlib Figure.
    """
    figure, (decay, bytes_, rounds, floor) = chart(2, 2)
    _decay(decay, rows_of(found, part="decay"))
    _agreement(bytes_, rounds, rows_of(found, part="agreement"))
    _floor(floor, rows_of(found, part="floor"))
    return figure


def _decay(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draws the squared distance from the mean against rounds, for each graph; estimates are dashed.

    A line is (1/N) sum_{k >= 2} |lambda_k|^(2 t) after t rounds, with lambda the eigenvalues of the mixing matrix.

    Args:
      axes: the panel to draw on.
      rows: those of the part "decay", with "graph", "nodes" (N) and "rounds" (t).
    """
    for name, (colour, marker) in zip(DECAYING, LOOKS, strict=True):
        graph_rows = [row for row in rows if row["graph"] == name]
        if not graph_rows:
            continue
        times = np.unique(np.geomspace(1, max(row["rounds"] for row in rows), 60).astype(int))
        squared_distances = theory.consensus_error(eigenvalues_of(name, graph_rows[0]["nodes"])[0], times)
        # Measurements end at LEAST, where rounding in float32 takes over; lines go on for one more decade.
        is_shown = squared_distances > LEAST / 10
        style = DASHED if graph_rows[0]["kind"] == "estimate" else "-"
        axes.plot(times[is_shown], squared_distances[is_shown], color=colour, linewidth=1.2, linestyle=style)
        points(axes, graph_rows, "rounds", colour=colour, marker=marker, label=name)
    axes.set(xlabel="Rounds", ylabel="Mean squared distance from the mean")
    plots.logarithmic(axes)
    axes.legend(title="points: measured, lines: theory", fontsize=7.5, title_fontsize=7.5)


def _agreement(bytes_: Any, rounds: Any, rows: list[dict[str, Any]]) -> None:
    """Draws two panels: bytes against rounds until nodes agree, and rounds against the spectral gap.

    The gap is 1 - |lambda_2|, with |lambda_2| the second largest modulus of an eigenvalue of the mixing matrix.

    Args:
      bytes_: the panel of bytes. Bytes are those of all nodes, for each number of the model.
      rounds: the panel of rounds against the gap.
      rows: those of the part "agreement": for each graph one of the quantity "rounds" and one of "bytes".
    """
    times, sent = (
        {row["graph"]: row for row in rows if row["quantity"] == quantity} for quantity in ("rounds", "bytes")
    )
    for name, row in times.items():
        for axes, x, y in ((bytes_, row["measured"], sent[name]["measured"]), (rounds, row["gap"], row["measured"])):
            axes.plot([x], [y], "o", color=plots.BLUE, **MARKERS)
            _annotate(axes, name, x, y)
    # Graphs have no order of their own; the line joins them by their spectral gap.
    by_gap = sorted(times.values(), key=lambda row: row["gap"])
    line = [row["gap"] for row in by_gap], [row["predicted"] for row in by_gap]
    rounds.plot(*line, color=plots.BLUE, linewidth=1.0, linestyle=DOTTED, label="theory")
    bytes_.set(xlabel="Rounds until nodes agree", ylabel="Bytes for each number of the model")
    rounds.set(xlabel="Spectral gap", ylabel="Rounds until nodes agree")
    for axes in (bytes_, rounds):
        plots.logarithmic(axes)
        axes.margins(x=0.18)
    rounds.legend(fontsize=7.5)


def _annotate(axes: Any, name: str, x: float, y: float) -> None:
    """Writes a name beside a point."""
    axes.annotate(name, (x, y), textcoords="offset points", xytext=(5, 4), fontsize=7.5)


def _floor(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draws the floor of D-PSGD against the spectral gap, with the part of it that every graph has.

    Args:
      axes: the panel to draw on.
      rows: those of the part "floor", one for each graph. The measured number is E (1/N) sum_i |x_i - w*|^2 over the
        nodes' models x_i. "gap" is 1 - |lambda_2|, and "of_mean" is what noise in the nodes' mean gives of the floor.
    """
    rows = sorted(rows, key=lambda row: row["gap"])
    if not rows:
        return
    gaps = [row["gap"] for row in rows]
    axes.plot(gaps, [row["predicted"] for row in rows], color=plots.BLUE, linewidth=1.2, label="theory")
    # Noise in the nodes' mean is the same on every graph; the rest of the floor is what keeps nodes apart.
    mean = [row["of_mean"] for row in rows]
    axes.plot(gaps, mean, color=plots.GREY, linewidth=1.0, linestyle=DASHED, label="noise of the mean alone")
    points(axes, rows, "gap", colour=plots.BLUE, marker="o", label="measured")
    for row in rows:
        axes.annotate(
            row["graph"], (row["gap"], row["measured"]), textcoords="offset points", xytext=(5, 4), fontsize=7.5
        )
    axes.set(xlabel="Spectral gap", ylabel="D-PSGD: squared distance of nodes")
    plots.logarithmic(axes)
    axes.margins(x=0.18)
    axes.legend(fontsize=7.5)
