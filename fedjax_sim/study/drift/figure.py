"""This module draws the figure of `drift`: fixed points, FedProx, the parts of the bias, and a model's bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim import theory
from fedjax_sim.report import plots
from fedjax_sim.study.charts import DASHED, DOTTED, MARKERS, chart
from fedjax_sim.study.drift.parts import BIAS_PARTS, PAIR, proximal_theory
from fedjax_sim.study.findings import Comparison, comparisons_of
from fedjax_sim.study.quadratic_settings import Base, Problem, two_kinds

LOOKS = (
    ("-", plots.BLUE, "o"),
    (DASHED, plots.ORANGE, "s"),
    (DOTTED, plots.BLACK, "^"),
    ((0, (6, 1.5, 1.5, 1.5)), plots.GREY, "D"),
)


def drift_figure(base: Base, found: Sequence[Comparison], steps: Sequence[int], etas: Sequence[float]) -> Any:
    """Draws four panels: fixed points against K, FedProx against lambda, the bias's parts, and the model's bias.

    Args:
      base: the base setting of the study.
      found: the comparisons of the study.
      steps: K, rising.
      etas: step sizes of local steps, rising.
    """
    figure, (fixed, proximal, parts, model) = chart(2, 2)
    grid = np.unique(np.geomspace(1, max(steps[-1], 2), 60).astype(int))
    _fixed_points(fixed, base, found, steps=steps, etas=etas, grid=grid)
    _proximal(proximal, two_kinds(base.problem, PAIR), found)
    _parts(parts, base, found, steps, grid)
    _model(model, found)
    return figure


def _points(axes, comparisons, name, *, colour, marker, key="local_steps", **look) -> None:
    """Draws measured numbers against a condition; `look` changes the markers of `charts.MARKERS`."""
    look = {**MARKERS, **look}
    x_values = [comparison.conditions[key] for comparison in comparisons]
    values = [comparison.measured for comparison in comparisons]
    axes.plot(x_values, values, marker, color=colour, label=name, **look)


def _ticks(axes, values: Sequence[float]) -> None:
    """Puts ticks at the given values only."""
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()


def _fixed_points(
    axes,
    base: Base,
    all_comparisons: Sequence[Comparison],
    *,
    steps: Sequence[int],
    etas: Sequence[float],
    grid: np.ndarray,
) -> None:
    """Draws the distance of fixed points to the optimum against K.

    A line is |w_inf - w*| of FedAvg, with w_inf = (sum p_i M_i)^-1 sum p_i M_i a_i and M_i = I - (I - eta H_i)^K.

    Args:
      axes: the panel to draw on.
      base: the base setting; its problem has the H_i and a_i.
      all_comparisons: the comparisons of the study; those of the part "fixed point" are the points.
      steps: K that were measured, rising, where the axis has its ticks.
      etas: eta of local steps, rising; each has a line.
      grid: [G] int, K of the lines.
    """
    for eta, (line, colour, marker) in zip(etas, LOOKS * 9, strict=False):
        distances = [base.problem.bias(num_steps=int(k), step_size=eta) for k in grid]
        label = f"FedAvg, step {eta:g}: theory"
        axes.plot(grid, distances, color=colour, linestyle=line, linewidth=1.3, label=label)
        fedavg = comparisons_of(
            all_comparisons, "fixed point", "distance to the optimum", algorithm="FedAvg", step_size=eta
        )
        _points(axes, fedavg, None, colour=colour, marker=marker)
    names = dict.fromkeys(
        comparison.conditions["algorithm"] for comparison in comparisons_of(all_comparisons, "fixed point")
    )
    for name, marker in zip([name for name in names if name != "FedAvg"], ("x", "+", "1"), strict=False):
        comparisons = comparisons_of(all_comparisons, "fixed point", algorithm=name)
        _points(
            axes,
            comparisons,
            f"{name}, all steps",
            colour=plots.INK,
            marker=marker,
            markeredgecolor=plots.INK,
            markeredgewidth=1.2,
        )
    axes.set(xscale="log", xlabel="Local steps K", ylabel="Distance of the fixed point to the optimum")
    _ticks(axes, steps)
    axes.legend(fontsize=7.5)


def _proximal(axes, pair: Problem, all_comparisons: Sequence[Comparison]) -> None:
    """Draws the bias and the contraction of FedProx against its proximal weight."""
    for quantity, line, colour, marker in (("distance to the optimum", "-", plots.BLUE, "o"),
                                           ("contraction of a round", DASHED, plots.ORANGE, "s")):  # fmt: skip
        comparisons = comparisons_of(all_comparisons, "FedProx", quantity)
        largest_weight = max(0.1, comparisons[-1].conditions["proximal_weight"])
        weights = np.concatenate([[0], np.geomspace(0.02, largest_weight, 60)])
        values = [proximal_theory(pair, float(weight))[quantity] for weight in weights]
        axes.plot(weights, values, color=colour, linestyle=line, linewidth=1.3, label=f"{quantity}: theory")
        _points(axes, comparisons, None, colour=colour, marker=marker, key="proximal_weight")
    axes.set_xscale("symlog", linthresh=0.1)  # linear near zero, so that weight 0 has a place
    _ticks(axes, [comparison.conditions["proximal_weight"] for comparison in comparisons])
    axes.set(xlabel="Proximal weight \N{GREEK SMALL LETTER LAMDA} of FedProx", ylabel="Bias, and contraction")
    axes.legend(fontsize=7.5)


def _parts(axes, base: Base, comparisons: Sequence[Comparison], steps: Sequence[int], grid: np.ndarray) -> None:
    """Draws the lengths of the drift bias and of its parts against K.

    The bias is the clients' mean gradient at the end of local work minus the gradient at w, at the first model w.

    Args:
      axes: the panel to draw on.
      base: the base setting, with problem, first model and eta.
      comparisons: the comparisons of the study; those of the part "drift bias" are the points.
      steps: K that were measured, rising, where the axis has its ticks.
      grid: [G] int, K of the lines.
    """
    drifts = [
        theory.quadratic_drift(*base.problem, point=base.problem.start, num_steps=int(k), step_size=base.step_size)
        for k in grid
    ]
    for (field, name), (line, colour, marker) in zip(BIAS_PARTS.items(), LOOKS, strict=True):
        lengths = [np.linalg.norm(getattr(drift, field)) for drift in drifts]
        axes.plot(grid, lengths, color=colour, linestyle=line, linewidth=1.3, label=f"{name}: theory")
        _points(axes, comparisons_of(comparisons, "drift bias", name), None, colour=colour, marker=marker)
    length = np.linalg.norm(drifts[0].gradient)
    # The length of the gradient is the scale: a bias of this length is as large as the gradient itself.
    axes.axhline(length, color=plots.GREY, linewidth=0.7)
    axes.annotate("length of the gradient", (grid[0], length), xytext=(0, 2), textcoords="offset points", fontsize=7)
    axes.set(xlabel=f"Local steps K (step {base.step_size:g})", ylabel="Length, at the start")
    plots.logarithmic(axes)
    _ticks(axes, steps)
    axes.legend(fontsize=7.5)


def _model(axes, comparisons: Sequence[Comparison]) -> None:
    """Draws the share of a model's drift bias that its leading term does not explain, against the step size.

    A point is |bias - leading term| / |bias|, with the Euclidean norm over all parameters.

    Args:
      axes: the panel to draw on.
      comparisons: the comparisons of the study. The part "logistic regression" has both lengths for each K and eta, in
        one order; without this part the panel stays empty.
    """
    remainders = comparisons_of(comparisons, "logistic regression", "bias less leading term")
    biases = comparisons_of(comparisons, "logistic regression", "drift bias")
    ratios = [
        (remainder.conditions, remainder.measured / bias.measured)
        for remainder, bias in zip(remainders, biases, strict=True)
    ]
    for k, (line, colour, marker) in zip(
        dict.fromkeys(conditions["local_steps"] for conditions, _ in ratios), LOOKS, strict=False
    ):
        curve = [(conditions["step_size"], ratio) for conditions, ratio in ratios if conditions["local_steps"] == k]
        axes.plot(*zip(*curve, strict=True), marker=marker, color=colour, linestyle=line, linewidth=1.0, markersize=5,
                  markeredgecolor="white", label=f"K = {k}")  # fmt: skip
    if ratios:
        # The remainder is of second order in the step, so its share of the bias is proportional to the step.
        guide = np.array([0.025, 0.1])
        lowest_ratio = min(ratio for _, ratio in ratios)
        axes.plot(
            guide,
            0.5 * lowest_ratio * guide / guide[0],
            color=plots.INK,
            linewidth=0.8,
            label="in proportion to the step",
        )
        axes.legend(fontsize=7.5)
    axes.set(xlabel="Step size, logistic regression on digits", ylabel="(bias \N{MINUS SIGN} leading term) / bias")
    plots.logarithmic(axes)
