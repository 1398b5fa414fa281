"""The figure of `hierarchy`: fixed points and speed against edge rounds, and a model's accuracy against cloud bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim import theory
from fedjax_sim.report import plots
from fedjax_sim.study.charts import DASHED, MARKERS, chart
from fedjax_sim.study.findings import Comparison, comparisons_of
from fedjax_sim.study.hierarchy.quadratics import CLOSE, groupings
from fedjax_sim.study.quadratic_settings import Problem

__all__ = ["hierarchy_figure"]

LOOKS = {"alike": (plots.BLUE, "o", "-"), "mixed": (plots.ORANGE, "s", DASHED)}
MODEL_LOOKS = {"flat": (plots.BLACK, "^"), "labels": (plots.BLUE, "o"), "random": (plots.ORANGE, "s")}

WORDS = {"flat": "flat FedAvg", "labels": "edges by labels", "random": "random edges"}


def hierarchy_figure(found: Sequence[Comparison], problem: Problem, options: dict[str, Any]) -> Any:
    """Three panels; theory as lines, measurement as points."""
    figure, (ends, speed, digits) = chart(1, 3)
    work = {"num_steps": options["num_steps"], "step_size": options["step_size"]}
    most = max(options["edge_rounds"][-1], 2)
    grid = np.unique(np.geomspace(1, most, 40).round().astype(int)).tolist()
    for name, edges in groupings(problem, options["num_edges"]).items():
        colour, marker, line = LOOKS[name]
        points = [theory.hierarchy_fixed_point(*problem, edges, edge_rounds=kappa, **work) for kappa in grid]
        away = [np.linalg.norm(point - problem.optimum) for point in points]
        ends.plot(grid, away, color=colour, linestyle=line, linewidth=1.3, label=f"{name} clients: theory")
        factors = [theory.hierarchy_contraction(*problem, edges, edge_rounds=kappa, **work) for kappa in grid]
        asked = [math.log(CLOSE) / math.log(factor) for factor in factors]
        speed.plot(
            grid, asked, color=colour, linestyle=line, linewidth=1.3, label=f"{name}: from the slowest direction"
        )
        for axes, part in ((ends, "fixed point"), (speed, "speed")):
            ones = comparisons_of(found, part, groups=name)
            at = [one.conditions["edge_rounds"] for one in ones]
            axes.plot(at, [one.measured for one in ones], marker, color=colour, **MARKERS)
    ends.set(ylabel="Distance of the fixed point to the optimum")
    speed.set(ylabel="Cloud rounds until 1 % of the way is left")
    for axes in (ends, speed):
        axes.set(xscale="log", xlabel="Edge rounds \N{GREEK SMALL LETTER KAPPA} in a cloud round")
        axes.set_xticks(options["edge_rounds"], [str(kappa) for kappa in options["edge_rounds"]])
        axes.minorticks_off()
        axes.legend(fontsize=7.5)
    _digits(digits, found, options["edge_rounds"])
    return figure


def _digits(axes: Any, found: Sequence[Comparison], edge_rounds: Sequence[int]) -> None:
    """Accuracy against edge rounds, by the way to group, beside flat FedAvg; bytes to the cloud are in the legend."""
    for shift, (name, (colour, marker)) in enumerate(MODEL_LOOKS.items()):
        ones = comparisons_of(found, "digits", groups=name)
        if not ones:
            continue
        label = f"{WORDS[name]}: {ones[0].conditions['cloud_bytes'] / 1e6:.2f} MB to the cloud"
        shares, spread = ([get(one) for one in ones] for get in (lambda x: x.measured, _deviation))
        if name == "flat":
            axes.axhline(shares[0], color=colour, linestyle=DASHED, linewidth=1.3, label=label)
            continue
        at = [one.conditions["edge_rounds"] * (1 + 0.04 * (2 * shift - 3)) for one in ones]  # side by side
        axes.errorbar(at, shares, spread, color=colour, marker=marker, linestyle="none", capsize=2, label=label)
    axes.set(xscale="log", xlabel="Edge rounds \N{GREEK SMALL LETTER KAPPA} in a cloud round")
    axes.set(ylabel="Test accuracy on digits")
    axes.set_xticks(edge_rounds, [str(kappa) for kappa in edge_rounds])
    axes.minorticks_off()
    if comparisons_of(found, "digits"):
        low, high = axes.get_ylim()
        axes.set_ylim(low - 0.4 * (high - low), high)  # room below for the legend: accuracy rises
        axes.legend(fontsize=7.5, loc="lower right")


def _deviation(one: Comparison) -> float:
    return one.conditions["standard_deviation"]
