"""This module draws the figure of `breakdown`: breakdown points, and shifts by fewer attackers with their bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_sim.report import charts
from fedjax_sim.study.claims import Row, selected


def breakdown_figure(rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    """Draws the fewest attackers that break each rule, and how far fewer attackers move it.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    figure, (points, shifts) = charts.panels(1, 2)
    charts.dots(
        points,
        selected(rows, part="far messages"),
        "rule",
        label=f"Fewest attackers that break it, of {options['num_messages']} (all: none do)",
        line="closed form",
    )
    moved = selected(rows, part="worst attack")
    charts.lines(
        shifts,
        moved,
        "attackers",
        by="rule",
        theory=moved,
        line="bounds",
        xlabel="Attackers f",
        ylabel="Squared shift / variance",
        log="y",
    )
    return figure
