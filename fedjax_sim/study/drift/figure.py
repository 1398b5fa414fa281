"""The figure of `drift`: fixed points, FedProx, the parts of the bias, and a model's leading term."""

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

__all__ = ["drift_figure"]

LOOKS = (
    ("-", plots.BLUE, "o"),
    (DASHED, plots.ORANGE, "s"),
    (DOTTED, plots.BLACK, "^"),
    ((0, (6, 1.5, 1.5, 1.5)), plots.GREY, "D"),
)


def drift_figure(base: Base, found: Sequence[Comparison], steps: Sequence[int], etas: Sequence[float]) -> Any:
    """Fixed points against K, FedProx against lambda, the bias's parts, and the model's leading term."""
    figure, (fixed, proximal, parts, model) = chart(2, 2)
    grid = np.unique(np.geomspace(1, max(steps[-1], 2), 60).astype(int))
    _fixed_points(fixed, base, found, steps, etas, grid)
    _proximal(proximal, two_kinds(base.problem, PAIR), found)
    _parts(parts, base, found, steps, grid)
    _model(model, found)
    return figure


def _points(axes, ones, name, colour, marker, key="local_steps", **look) -> None:
    look = {**MARKERS, **look}
    at, values = [one.conditions[key] for one in ones], [one.measured for one in ones]
    axes.plot(at, values, marker, color=colour, label=name, **look)


def _ticks(axes, values: Sequence[float]) -> None:
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()


def _fixed_points(
    axes, base: Base, found: Sequence[Comparison], steps: Sequence[int], etas: Sequence[float], grid: np.ndarray
) -> None:
    for eta, (line, colour, marker) in zip(etas, LOOKS * 9, strict=False):
        values = [base.problem.bias(num_steps=int(k), step_size=eta) for k in grid]
        name = f"FedAvg, step {eta:g}: theory"
        axes.plot(grid, values, color=colour, linestyle=line, linewidth=1.3, label=name)
        ones = comparisons_of(found, "fixed point", "distance to the optimum", algorithm="FedAvg", step_size=eta)
        _points(axes, ones, None, colour, marker)
    names = dict.fromkeys(one.conditions["algorithm"] for one in comparisons_of(found, "fixed point"))
    for name, marker in zip([name for name in names if name != "FedAvg"], ("x", "+", "1"), strict=False):
        ones = comparisons_of(found, "fixed point", algorithm=name)
        _points(axes, ones, f"{name}, all steps", plots.INK, marker, markeredgecolor=plots.INK, markeredgewidth=1.2)
    axes.set(xscale="log", xlabel="Local steps K", ylabel="Distance of the fixed point to the optimum")
    _ticks(axes, steps)
    axes.legend(fontsize=7.5)


def _proximal(axes, pair: Problem, found: Sequence[Comparison]) -> None:
    for quantity, line, colour, marker in (("distance to the optimum", "-", plots.BLUE, "o"),
                                           ("contraction of a round", DASHED, plots.ORANGE, "s")):  # fmt: skip
        ones = comparisons_of(found, "FedProx", quantity)
        along = np.concatenate([[0], np.geomspace(0.02, max(0.1, ones[-1].conditions["proximal_weight"]), 60)])
        values = [proximal_theory(pair, float(weight))[quantity] for weight in along]
        axes.plot(along, values, color=colour, linestyle=line, linewidth=1.3, label=f"{quantity}: theory")
        _points(axes, ones, None, colour, marker, "proximal_weight")
    axes.set_xscale("symlog", linthresh=0.1)
    _ticks(axes, [one.conditions["proximal_weight"] for one in ones])
    axes.set(xlabel="Proximal weight \N{GREEK SMALL LETTER LAMDA} of FedProx", ylabel="Bias, and contraction")
    axes.legend(fontsize=7.5)


def _parts(axes, base: Base, found: Sequence[Comparison], steps: Sequence[int], grid: np.ndarray) -> None:
    known = [theory.quadratic_drift(*base.problem, point=base.problem.start, num_steps=int(k), step_size=base.step_size)
             for k in grid]  # fmt: skip
    for (field, name), (line, colour, marker) in zip(BIAS_PARTS.items(), LOOKS, strict=True):
        values = [np.linalg.norm(getattr(one, field)) for one in known]
        axes.plot(grid, values, color=colour, linestyle=line, linewidth=1.3, label=f"{name}: theory")
        _points(axes, comparisons_of(found, "drift bias", name), None, colour, marker)
    length = np.linalg.norm(known[0].gradient)
    axes.axhline(length, color=plots.GREY, linewidth=0.7)
    axes.annotate("length of the gradient", (grid[0], length), xytext=(0, 2), textcoords="offset points", fontsize=7)
    axes.set(xlabel=f"Local steps K (step {base.step_size:g})", ylabel="Length, at the start")
    plots.logarithmic(axes)
    _ticks(axes, steps)
    axes.legend(fontsize=7.5)


def _model(axes, found: Sequence[Comparison]) -> None:
    ones = comparisons_of(found, "logistic regression", "bias less leading term")
    biases = comparisons_of(found, "logistic regression", "drift bias")
    pairs = [(one.conditions, one.measured / bias.measured) for one, bias in zip(ones, biases, strict=True)]
    for k, (line, colour, marker) in zip(
        dict.fromkeys(conditions["local_steps"] for conditions, _ in pairs), LOOKS, strict=False
    ):
        shown = [(conditions["step_size"], ratio) for conditions, ratio in pairs if conditions["local_steps"] == k]
        axes.plot(*zip(*shown, strict=True), marker=marker, color=colour, linestyle=line, linewidth=1.0, markersize=5,
                  markeredgecolor="white", label=f"K = {k}")  # fmt: skip
    if pairs:
        guide = np.array([0.025, 0.1])
        low = min(ratio for _, ratio in pairs)
        axes.plot(
            guide, 0.5 * low * guide / guide[0], color=plots.INK, linewidth=0.8, label="in proportion to the step"
        )
        axes.legend(fontsize=7.5)
    axes.set(xlabel="Step size, logistic regression on digits", ylabel="(bias \N{MINUS SIGN} leading term) / bias")
    plots.logarithmic(axes)
