"""This module draws the figure of `connectivity`: decay, rounds and bytes until agreement, and floors of D-PSGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim import theory
from fedjax_sim.report import charts
from fedjax_sim.study.claims import Row, selected
from fedjax_sim.study.connectivity.nodes import LEAST, eigenvalues_of


def connectivity_figure(rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    """Draws four panels, with theory as lines and measurements as points.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    figure, (decay, bytes_, rounds, floor) = charts.panels(2, 2)
    decaying = selected(rows, part="decay")
    charts.lines(decay, decaying, "rounds", by="graph", theory=_distances(decaying), log="xy", xlabel="Rounds",
                 ylabel="Mean squared distance from the mean")  # fmt: skip

    # What random starts may change is no interval of these points: it goes below zero for few rounds.
    bare = [row | {"low": None, "high": None} for row in selected(rows, part="agreement")]
    times, sent = (selected(bare, quantity=quantity) for quantity in ("rounds", "bytes"))
    num_rounds = {row["graph"]: row["measured"] for row in times}
    costs = [row | {"rounds": num_rounds[row["graph"]]} for row in sent]
    # Graphs have no order in which points could be joined.
    charts.lines(bytes_, costs, "rounds", theory=[], text="graph", log="xy", xlabel="Rounds until nodes agree",
                 ylabel="Bytes for each number of the model")  # fmt: skip
    charts.lines(rounds, times, "gap", theory=times, text="graph", log="xy", xlabel="Spectral gap",
                 ylabel="Rounds until nodes agree")  # fmt: skip

    floors = selected(rows, part="floor")
    # Noise in the nodes' mean is the same on every graph; the rest of the floor is what keeps nodes apart.
    levels = {"noise of the mean alone": floors[0]["of_mean"]} if floors else {}
    charts.lines(floor, floors, "gap", theory=floors, text="graph", levels=levels, log="xy", xlabel="Spectral gap",
                 ylabel="D-PSGD: squared distance of nodes")  # fmt: skip
    for panel in (bytes_, rounds, floor):
        panel.margins(x=0.18)  # room for names
    return figure


def _distances(decaying: Sequence[Row]) -> list[Row]:
    """Returns (1/N) sum_{k >= 2} |lambda_k|^(2 t) for each graph after t rounds, as rows of theory.

    lambda are the eigenvalues of the mixing matrix.

    Args:
      decaying: the measured rows, with "graph", "nodes" (N) and "rounds" (t).
    """
    sizes = {row["graph"]: row["nodes"] for row in decaying}
    most_rounds = max((row["rounds"] for row in decaying), default=1)
    times = np.unique(np.geomspace(1, most_rounds, 60).astype(int))
    curves = {name: theory.consensus_error(eigenvalues_of(name, size)[0], times) for name, size in sizes.items()}
    # Measurements end at LEAST, where rounding in float32 takes over; lines go on for one more decade.
    return [
        {"graph": name, "rounds": int(t), "predicted": float(distance)}
        for name, curve in curves.items()
        for t, distance in zip(times, curve, strict=True)
        if distance > LEAST / 10
    ]
