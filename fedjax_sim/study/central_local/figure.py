"""This module draws the figure of `central_local`: variances and ratios at one multiplier, and at one budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim import theory
from fedjax_sim.report import plots
from fedjax_sim.study.charts import DASHED, DOTTED, chart, points, rows_of
from fedjax_sim.study.findings import Comparison


def central_local_figure(sizes: Sequence[int], multiplier: float, clip_norm: float, found: Sequence[Comparison]) -> Any:
    """Draws four panels against the cohort size, with theory as lines and measurements as points.

    Args:
      sizes: m.
      multiplier: z of the first two panels.
      clip_norm: C.
      found: the comparisons of the study.
    """
    figure, panels = chart(2, 2)
    variance, ratio, budget, multipliers = panels
    grid = np.unique(np.geomspace(sizes[0], sizes[-1], 40).round().astype(int)).tolist()
    styles = {
        "central": (plots.BLUE, "o", "-"),
        "distributed": (plots.ORANGE, "^", DOTTED),
        "local": (plots.BLACK, "s", "-"),
        "local, replaced message": (plots.GREY, "D", DASHED),
    }
    for name, (colour, marker, line) in styles.items():
        place = name.split(",")[0]
        replaced = name.endswith("message")
        variances = [theory.noise_variance(multiplier, clip_norm, m, place=place, replace_one=replaced) for m in grid]
        variance.plot(grid, variances, color=colour, linestyle=line, linewidth=1.3)
        rows = rows_of(found, part="equal multiplier", place=name)
        shift = 1.15 if name == "distributed" else 1.0  # beside central noise, which has the same variance
        points(
            variance,
            rows,
            lambda row, shift=shift: row["cohort_size"] * shift,
            colour=colour,
            marker=marker,
            label=name,
        )
        if place == "local":
            ratios = [theory.local_to_central_ratio(m, replace_one=replaced) for m in grid]
            ratio.plot(grid, ratios, color=colour, linestyle=line, linewidth=1.3)
            points(
                ratio, rows_of(found, part="ratio", place=name), "cohort_size", colour=colour, marker=marker, label=name
            )
    variance.set(title=f"At equal noise multiplier z = {multiplier:g}", ylabel="Variance of a coordinate of the mean")
    ratio.set(title="Lines: m and 4 m", ylabel="Variance, local / central")
    budget_styles = {
        "central, Poisson": (plots.BLUE, "o"),
        "central, fixed-size": (plots.GREY, "D"),
        "distributed": (plots.ORANGE, "^"),
        "local": (plots.BLACK, "s"),
    }
    for i, (name, (colour, marker)) in enumerate(budget_styles.items()):
        rows = rows_of(found, part="equal epsilon", place=name)
        # The four points of a cohort size lie side by side, centred at it on a logarithmic axis.
        positions = [row["cohort_size"] * 1.25 ** (i - 1.5) for row in rows]
        label = "theory" if i == len(budget_styles) - 1 else None
        budget.scatter(positions, [row["predicted"] for row in rows], s=160, marker="_", color=plots.INK, label=label)
        points(
            budget,
            rows,
            lambda row, i=i: row["cohort_size"] * 1.25 ** (i - 1.5),
            colour=colour,
            marker=marker,
            label=name,
        )
        multipliers.plot(positions, [row["noise_multiplier"] for row in rows], color=colour, linestyle="none",
                         marker=marker, markersize=5.5, markeredgecolor="white", label=name)  # fmt: skip
    budget.set(title="At equal epsilon and delta", ylabel="Variance of a coordinate of the mean")
    multipliers.set(title="What equal epsilon asks for", ylabel="Calibrated noise multiplier z")
    for axes in panels:
        axes.set(xlabel="Cohort size m", xlim=(sizes[0] / 2, sizes[-1] * 2))
        plots.logarithmic(axes)
        axes.legend(
            fontsize=7.5, loc="best" if axes is ratio else "center left" if axes is multipliers else "lower left"
        )
    return figure
