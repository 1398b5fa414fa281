"""This module draws the figure of `clip`: errors of a release, error floors and personal thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import plots
from fedjax_sim.study.charts import DASHED, DOTTED, chart, points, rows_of
from fedjax_sim.study.clip.clients import UnequalClients
from fedjax_sim.study.findings import Comparison

PERSONAL = "personal, no epsilon"


def clip_figure(
    problem: UnequalClients,
    best: dict[float, float],
    found: Sequence[Comparison],
    *,
    multiplier: float,
    step_size: float,
) -> Any:
    """Draws four panels against the clip norm, with theory as lines and measurements as points.

    Args:
      problem: the clients.
      best: the best clip norm for each noise multiplier.
      found: the comparisons of the study.
      multiplier: z that was held fixed along the clip norms.
      step_size: eta of the runs to the floor.
    """
    figure, panels = chart(2, 2)
    parts, around, floor, personal = panels
    norms = [comparison.conditions["clip_norm"] for comparison in found if comparison.conditions["part"] == "clip norm"]
    grid = np.geomspace(min(norms) / 1.2, max(norms) * 1.2, 200)
    errors = [problem.parts(C, multiplier) for C in grid]
    # Bias, sampling and noise add up to the total.
    for name, label, colour, line in (
        ("total", "theory", plots.BLUE, "-"),
        ("bias", "its bias", plots.BLACK, DASHED),
        ("sampling", "its sampling", plots.GREY, "-"),
        ("noise", "its noise", plots.ORANGE, DOTTED),
    ):
        parts.plot(grid, [getattr(error, name) for error in errors], color=colour, linestyle=line, label=label,
                   linewidth=1.4 if name == "total" else 1.1)  # fmt: skip
    points(parts, rows_of(found, part="clip norm"), "clip_norm", colour=plots.BLUE, marker="o", label="measured")
    points(
        parts,
        rows_of(found, part="bias alone"),
        "clip_norm",
        colour=plots.BLACK,
        marker="s",
        label="measured, all, no noise",
    )
    totals = [error.total for error in errors]
    # Bias and noise fall without end on one side of the panel; only what matters beside the total is shown.
    parts.set(ylim=(min(totals) / 100, 2 * max(totals)), title=f"One release, z = {multiplier:g}")
    styles = ((plots.BLUE, "o", "-"), (plots.BLACK, "s", DASHED), (plots.ORANGE, "^", DOTTED))
    for (z, C), (colour, marker, line) in zip(best.items(), styles * 9, strict=False):
        around.plot(grid, [problem.parts(x, z).total for x in grid], color=colour, linestyle=line, linewidth=1.3)
        rows = rows_of(found, part="around the best", noise_multiplier=z)
        points(around, rows, "clip_norm", colour=colour, marker=marker, label=f"z = {z:g}, best C = {C:.2g}")
    around.set(title="The best C, a third and three times of it")
    unclipped_norms = grid[grid >= problem.unclipped]
    # The floor has no closed form where updates are clipped.
    predicted_floors = [problem.floor(C, multiplier, step_size) for C in unclipped_norms]
    floor.plot(unclipped_norms, predicted_floors, color=plots.BLUE, linewidth=1.3,
               label="theory where nothing is clipped")  # fmt: skip
    points(floor, rows_of(found, part="floor"), "clip_norm", colour=plots.BLUE, marker="o", label="measured")
    floor.set(title=f"Runs to the floor, z = {multiplier:g}")
    # With personal thresholds the noise is that of the longest update: C = factor * longest.
    personal.plot(grid, totals, color=plots.BLUE, linewidth=1.3, label="one C for all: theory")
    personal_norms = grid[grid <= problem.longest]
    personal_errors = [problem.error(C, multiplier, C / problem.longest) for C in personal_norms]
    personal.plot(
        personal_norms,
        personal_errors,
        color=plots.BLACK,
        linewidth=1.1,
        linestyle=DASHED,
        label="own thresholds, NO epsilon",
    )
    points(personal, rows_of(found, part=PERSONAL), "clip_norm", colour=plots.BLACK, marker="s", label="measured")
    personal.set(title="Thresholds in proportion to each norm")
    for axes in panels:
        error = "Error floor: squared distance" if axes is floor else "Squared error of the mean"
        axes.set(xlabel="Clip norm C (median norms)", ylabel=error)
        plots.logarithmic(axes)
        axes.legend(fontsize=7.5)
    return figure
