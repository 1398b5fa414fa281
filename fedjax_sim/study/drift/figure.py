"""The figure of `drift`: fixed points, FedProx, the parts of the bias, and a model's leading term."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim import theory
from fedjax_sim.report import plots
from fedjax_sim.study.drift.parts import PAIR, proximal_theory
from fedjax_sim.study.findings import Comparison, comparisons_of
from fedjax_sim.study.quadratic_settings import Base, two_kinds

__all__ = ["drift_figure"]

LINES = ("-", (0, (4, 1.6)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)))
COLOURS = (plots.BLUE, plots.ORANGE, plots.BLACK, plots.GREY)


def drift_figure(base: Base, found: Sequence[Comparison], steps: Sequence[int], etas: Sequence[float]) -> Any:
    """Fixed points against K, FedProx against lambda, the bias's parts, and the model's leading term."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(plots.WIDTH, 6.2), layout="constrained")
    (rest, proximal), (parts, model) = figure.subplots(2, 2)

    def points(axes, ones, name, colour, marker, key="local_steps", **look):
        look = {"markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.6, "zorder": 3, **look}
        at, values = [one.conditions[key] for one in ones], [one.measured for one in ones]
        axes.plot(at, values, marker, color=colour, label=name, **look)

    grid = np.unique(np.geomspace(1, max(steps[-1], 2), 60).astype(int))
    looks = list(zip(LINES, COLOURS, "os^D", strict=True))
    for eta, (line, colour, marker) in zip(etas, looks * 9, strict=False):
        values = [base.problem.bias(num_steps=int(k), step_size=eta) for k in grid]
        name = f"FedAvg, step {eta:g}: theory"
        rest.plot(grid, values, color=colour, linestyle=line, linewidth=1.3, label=name)
        ones = comparisons_of(found, "fixed point", "distance to the optimum", algorithm="FedAvg", step_size=eta)
        points(rest, ones, None, colour, marker)
    others = [
        one for one in found if one.conditions["part"] == "fixed point" and one.conditions["algorithm"] != "FedAvg"
    ]
    for name, marker in zip(
        dict.fromkeys(one.conditions["algorithm"] for one in others), ("x", "+", "1"), strict=False
    ):
        ones = [one for one in others if one.conditions["algorithm"] == name]
        points(rest, ones, f"{name}, all steps", plots.INK, marker, markeredgecolor=plots.INK, markeredgewidth=1.2)
    rest.set(xscale="log", xlabel="Local steps K", ylabel="Distance to the optimum at rest")
    rest.set_xticks(steps, [str(k) for k in steps])
    rest.minorticks_off()
    rest.legend(fontsize=7.5)

    pair = two_kinds(base.problem, PAIR)
    for quantity, line, colour, marker in (("distance to the optimum", "-", plots.BLUE, "o"),
                                           ("contraction of a round", (0, (4, 1.6)), plots.ORANGE, "s")):  # fmt: skip
        ones = comparisons_of(found, "FedProx", quantity)
        along = np.concatenate([[0], np.geomspace(0.02, max(0.1, ones[-1].conditions["proximal_weight"]), 60)])
        values = [proximal_theory(pair, float(weight))[quantity] for weight in along]
        proximal.plot(along, values, color=colour, linestyle=line, linewidth=1.3, label=f"{quantity}: theory")
        points(proximal, ones, None, colour, marker, "proximal_weight")
    proximal.set_xscale("symlog", linthresh=0.1)
    weights = [one.conditions["proximal_weight"] for one in comparisons_of(found, "FedProx", "contraction of a round")]
    proximal.set_xticks(weights, [f"{weight:g}" for weight in weights])
    proximal.minorticks_off()
    proximal.set(xlabel="Proximal weight \N{GREEK SMALL LETTER LAMDA} of FedProx", ylabel="Bias, and contraction")
    proximal.legend(fontsize=7.5)

    names = ("drift bias", "curvature part", "heterogeneity part", "leading term")
    fields = ("bias", "curvature", "heterogeneity", "leading_term")
    known = [theory.quadratic_drift(*base.problem, point=base.problem.start, num_steps=int(k), step_size=base.step_size)
             for k in grid]  # fmt: skip
    for name, field, (line, colour, marker) in zip(names, fields, looks, strict=True):
        values = [np.linalg.norm(getattr(one, field)) for one in known]
        parts.plot(grid, values, color=colour, linestyle=line, linewidth=1.3, label=f"{name}: theory")
        points(parts, comparisons_of(found, "drift bias", name), None, colour, marker)
    length = np.linalg.norm(known[0].gradient)
    parts.axhline(length, color=plots.GREY, linewidth=0.7)
    parts.annotate("length of the gradient", (grid[0], length), xytext=(0, 2), textcoords="offset points", fontsize=7)
    parts.set(xlabel=f"Local steps K (step {base.step_size:g})",
              ylabel="Length, at the start")  # fmt: skip
    plots._logarithmic(parts)
    parts.set_xticks(steps, [str(k) for k in steps])
    parts.minorticks_off()
    parts.legend(fontsize=7.5)

    ones = comparisons_of(found, "logistic regression", "bias less leading term")
    biases = comparisons_of(found, "logistic regression", "drift bias")
    for k, (line, colour, marker) in zip(
        dict.fromkeys(one.conditions["local_steps"] for one in ones), looks, strict=False
    ):
        shown = [(one.conditions["step_size"], one.measured / bias.measured)
                 for one, bias in zip(ones, biases, strict=True) if one.conditions["local_steps"] == k]  # fmt: skip
        model.plot(*zip(*shown, strict=True), marker=marker, color=colour, linestyle=line, linewidth=1.0, markersize=5,
                   markeredgecolor="white", label=f"K = {k}")  # fmt: skip
    if ones:
        guide = np.array([0.025, 0.1])
        low = min(one.measured / bias.measured for one, bias in zip(ones, biases, strict=True))
        model.plot(
            guide, 0.5 * low * guide / guide[0], color=plots.INK, linewidth=0.8, label="in proportion to the step"
        )
        model.legend(fontsize=7.5)
    model.set(xlabel="Step size, logistic regression on digits",
              ylabel="(bias \N{MINUS SIGN} leading term) / bias")  # fmt: skip
    plots._logarithmic(model)
    return figure
