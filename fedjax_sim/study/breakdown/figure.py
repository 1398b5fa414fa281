"""This module draws the figure of `breakdown`: breakdown points, and shifts by fewer attackers with their bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedjax_sim.report import plots
from fedjax_sim.study.charts import DASHED, DOTTED, chart, points, rows_of
from fedjax_sim.study.findings import Comparison, comparisons_of

LOOKS = ((plots.BLUE, "o", "-"), (plots.ORANGE, "s", DASHED), (plots.BLACK, "^", DOTTED), (plots.GREY, "D", "-"),
         (plots.INK, "v", DASHED))  # fmt: skip


def breakdown_figure(found: Sequence[Comparison], options: dict[str, Any]) -> Any:
    """Draws breakdown points as bars, with the closed form as ticks, and shifts as points, with the bounds as lines.

    Args:
      found: the comparisons of the study.
      options: the study's options.
    """
    figure, (bars, shifts) = chart(1, 2)
    breakdown_points = comparisons_of(found, "far messages")[::-1]  # bars are drawn from below
    names = [point.conditions["rule"] for point in breakdown_points]
    predicted = [point.predicted for point in breakdown_points]
    bars.barh(names, [point.measured for point in breakdown_points], color=plots.BLUE, height=0.6, label="measured")
    bars.plot(predicted, range(len(breakdown_points)), "|", color=plots.ORANGE, markersize=13,
              markeredgewidth=2, label="closed form")  # fmt: skip
    bars.set_xlabel(f"Fewest attackers that break it, of {options['num_messages']} (all: none do)")
    bars.xaxis.get_major_locator().set_params(integer=True)
    bars.tick_params(axis="y", labelsize=7.5)
    bars.legend(fontsize=7.5)
    bounded_rules = dict.fromkeys(comparison.conditions["rule"] for comparison in comparisons_of(found, "worst attack"))
    for name, (colour, marker, line) in zip(bounded_rules, LOOKS, strict=True):
        rows = rows_of(found, part="worst attack", rule=name)
        points(shifts, rows, "attackers", colour=colour, marker=marker, label=name)
        shifts.plot([row["attackers"] for row in rows], [row["predicted"] for row in rows], color=colour,
                    linestyle=line, linewidth=1.1)  # fmt: skip
    shifts.set(xlabel="Attackers f", ylabel="Squared shift / variance (lines: bounds)")
    plots.logarithmic(shifts, "y")
    shifts.legend(fontsize=7.5)
    return figure
