"""This module draws the figure of `hierarchy`: fixed points, speed and accuracy against edge rounds."""

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

LOOKS = {"alike": (plots.BLUE, "o", "-"), "mixed": (plots.ORANGE, "s", DASHED)}
MODEL_LOOKS = {"flat": (plots.BLACK, "^"), "labels": (plots.BLUE, "o"), "random": (plots.ORANGE, "s")}

WORDS = {"flat": "flat FedAvg", "labels": "edges by labels", "random": "random edges"}


def hierarchy_figure(found: Sequence[Comparison], problem: Problem, options: dict[str, Any]) -> Any:
    """Draws three panels, with theory as lines and measurements as points.

    Args:
      found: the comparisons of the study.
      problem: the quadratic clients.
      options: the study's options.
    """
    figure, (ends, speed, digits) = chart(1, 3)
    work = {"num_steps": options["num_steps"], "step_size": options["step_size"]}
    largest_kappa = max(options["edge_rounds"][-1], 2)
    grid = np.unique(np.geomspace(1, largest_kappa, 40).round().astype(int)).tolist()
    for name, edges in groupings(problem, options["num_edges"]).items():
        colour, marker, line = LOOKS[name]
        fixed_points = [theory.hierarchy_fixed_point(*problem, edges, edge_rounds=kappa, **work) for kappa in grid]
        distances = [np.linalg.norm(point - problem.optimum) for point in fixed_points]
        ends.plot(grid, distances, color=colour, linestyle=line, linewidth=1.3, label=f"{name} clients: theory")
        contractions = [theory.hierarchy_contraction(*problem, edges, edge_rounds=kappa, **work) for kappa in grid]
        rounds = [math.log(CLOSE) / math.log(contraction) for contraction in contractions]
        speed.plot(
            grid, rounds, color=colour, linestyle=line, linewidth=1.3, label=f"{name}: from the slowest direction"
        )
        for axes, part in ((ends, "fixed point"), (speed, "speed")):
            comparisons = comparisons_of(found, part, groups=name)
            kappas = [comparison.conditions["edge_rounds"] for comparison in comparisons]
            axes.plot(kappas, [comparison.measured for comparison in comparisons], marker, color=colour, **MARKERS)
    # Both panels share an axis of edge rounds, with ticks at the measured values only.
    ends.set(ylabel="Distance of the fixed point to the optimum")
    speed.set(ylabel="Cloud rounds until 1 % of the way is left")
    for axes in (ends, speed):
        axes.set(xscale="log", xlabel="Edge rounds \N{GREEK SMALL LETTER KAPPA} in a cloud round")
        axes.set_xticks(options["edge_rounds"], [str(kappa) for kappa in options["edge_rounds"]])
        axes.minorticks_off()
        axes.legend(fontsize=7.5)
    _digits(digits, found, options["edge_rounds"])
    return figure


def _digits(axes: Any, all_comparisons: Sequence[Comparison], edge_rounds: Sequence[int]) -> None:
    """Draws accuracy against edge rounds for each way of grouping, beside flat FedAvg.

    Bytes to the cloud are in the legend.

    Args:
      axes: the panel to draw on.
      all_comparisons: the comparisons of the study. Those of the part "digits" have the mean test accuracy over runs,
        in [0, 1], with its standard deviation.
      edge_rounds: kappa that were measured, rising from 1, where the axis has its ticks.
    """
    for index, (name, (colour, marker)) in enumerate(MODEL_LOOKS.items()):
        comparisons = comparisons_of(all_comparisons, "digits", groups=name)
        if not comparisons:
            continue
        label = f"{WORDS[name]}: {comparisons[0].conditions['cloud_bytes'] / 1e6:.2f} MB to the cloud"
        accuracies, deviations = (
            [get(comparison) for comparison in comparisons] for get in (lambda x: x.measured, _deviation)
        )
        if name == "flat":
            axes.axhline(accuracies[0], color=colour, linestyle=DASHED, linewidth=1.3, label=label)
            continue
        # The two ways of grouping, with index 1 and 2, are moved apart by a few per cent.
        shift = 1 + 0.04 * (2 * index - 3)
        positions = [comparison.conditions["edge_rounds"] * shift for comparison in comparisons]
        axes.errorbar(
            positions, accuracies, deviations, color=colour, marker=marker, linestyle="none", capsize=2, label=label
        )
    axes.set(xscale="log", xlabel="Edge rounds \N{GREEK SMALL LETTER KAPPA} in a cloud round")
    axes.set(ylabel="Test accuracy on digits")
    axes.set_xticks(edge_rounds, [str(kappa) for kappa in edge_rounds])
    axes.minorticks_off()
    if comparisons_of(all_comparisons, "digits"):
        low, high = axes.get_ylim()
        axes.set_ylim(low - 0.4 * (high - low), high)  # room below for the legend: accuracy rises
        axes.legend(fontsize=7.5, loc="lower right")


def _deviation(comparison: Comparison) -> float:
    """Returns the standard deviation over runs, as `findings.few` reports it."""
    return comparison.conditions["standard_deviation"]
