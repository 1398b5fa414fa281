"""This module draws the figure of `budget`: the error of each choice against the cohort size, for each budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_sim.report import charts
from fedjax_sim.study.budget.sensors import UNITS
from fedjax_sim.study.claims import Row, selected


def budget_figure(rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    """Draws a panel for each budget: errors against cohort sizes, theory as lines and measurements as points.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    figure, panels = charts.panels(len(UNITS), 1)
    # Each number of bits has two series, without and with a deadline.
    shown_bits = [bits or 32 for bits in options["bits"]][: len(charts.LOOKS) // 2]
    for panel, unit in zip(panels, UNITS, strict=True):
        distances = selected(rows, part=unit, quantity="squared distance")
        errors: list[Row] = [row | {"series": _series(row)} for row in distances if row["bits"] in shown_bits]
        least = {"least by theory": min(row["predicted"] for row in errors)} if errors else None
        charts.lines(panel, errors, "cohort_size", by="series", theory=errors, levels=least, log="xy",
                     xlabel="Cohort size m", ylabel="Squared distance")  # fmt: skip
        panel.set(title=f"{options[unit]:,.6g} {unit}")
    return figure


def _series(row: Row) -> str:
    """Returns what the choices of a line have in common."""
    bits = "floats" if row["bits"] == 32 else f"{row['bits']} bits"
    return bits if row["deadline"] is None else f"{bits}, {row['deadline']:.2g} s"
