"""The drift study's picture and its reading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fedjax_sim import theory
from fedjax_sim.report import plots
from fedjax_sim.study.drift.parts import PAIR, proximal_theory
from fedjax_sim.study.findings import Comparison
from fedjax_sim.study.quadratic_settings import Base, two_kinds

__all__ = ["drift_figure", "drift_reading"]

LINES = ("-", (0, (4, 1.6)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)))
COLOURS = (plots.BLUE, plots.ORANGE, plots.BLACK, plots.GREY)


def _of(found: Sequence[Comparison], part: str, quantity: str, **conditions: Any) -> list[Comparison]:
    wanted = conditions | {"part": part}
    return [
        one for one in found
        if one.quantity == quantity and all(one.conditions.get(name) == value for name, value in wanted.items())
    ]  # fmt: skip


def drift_reading(base: Base, found: Sequence[Comparison]) -> Iterator[str]:
    """Paragraphs, from the numbers that were found."""
    work = f"K = {base.num_steps}, step {base.step_size:g}"
    avg = [one for one in _of(found, "fixed point", "distance to the optimum", algorithm="FedAvg")
           if one.conditions["step_size"] == base.step_size]  # fmt: skip
    others = [one for one in found if one.conditions["part"] == "fixed point" and one.predicted == 0.0
              and one.conditions["algorithm"] != "FedAvg"]  # fmt: skip
    names = ", ".join(dict.fromkeys(one.conditions["algorithm"] for one in others))
    ends = {one.conditions["local_steps"]: one.measured for one in (avg[0], avg[-1])}
    shown = " and ".join(f"{distance:.3g} at K = {k}" for k, distance in ends.items())
    yield (
        "FedAvg of everybody, without any noise, comes to rest away from the optimum if clients that differ take "
        f"several steps, {shown}: at the point where sum p_i M_i (w - a_i) = 0, "
        "M_i = I - (I - eta H_i)^K, and no number of rounds helps. One "
        "full-batch step of plain SGD is centralised descent and has no bias (with Adam or weight decay in the clients "
        f"that is not so). {names} rest at the optimum for every K and step, at most "
        f"{max(one.measured for one in others):.1g} from it, which is rounding."
    )
    same = _of(found, "identical clients", "drift bias")[0]
    equal = _of(found, "equal Hessians", "distance to the optimum")[0]
    yield (
        "That drift is there because data are not IID is half of the truth. The bias of the gradients that clients "
        "meet at the end of their work has a curvature part, -sum p_i M_i grad F, which identical clients have too "
        f"({same.measured:.3g} at {work}, heterogeneity part 0), and which vanishes with grad F; and a heterogeneity "
        "part, minus the covariance over clients of local work and gradient. The first one only changes the speed; a "
        f"fixed point that moves needs Hessians that differ: with equal Hessians and different optima FedAvg rests "
        f"{equal.measured:.1g} from the optimum."
    )
    sent = _of(found, "one round", "pseudo-gradient")[0]
    end = theory.quadratic_drift(
        *base.problem, point=base.problem.start, num_steps=base.num_steps, step_size=base.step_size
    ).end_point_gradient
    yield (
        "Two things are called the gradient of a round. What the server receives, (w - w_next) / eta, is the sum of "
        f"all gradients on the way: {sent.measured:.3g} long at {work}. The mean gradient at the end points is "
        f"{np.linalg.norm(end):.3g} long. The bias in this study is that of the latter."
    )
    rest = [_of(found, part, "bias less leading term", local_steps=base.num_steps)
            for part in ("drift bias", "drift bias, half the step")]  # fmt: skip
    halving = words = ""
    if base.num_steps > 1:
        halving = (
            f" Half the step divides the rest by {rest[0][0].measured / max(rest[1][0].measured, 1e-12):.3g} at "
            f"K = {base.num_steps}; four is its limit for small eta K L, and where eta K L is near 1 the leading term "
            "says nothing."
        )
    model = _of(found, "logistic regression", "bias less leading term")
    if model:
        fine = [one for one in model if one.conditions["local_steps"] == model[0].conditions["local_steps"]]
        coarse = [one for one in model if one.conditions["local_steps"] == model[-1].conditions["local_steps"]]
        words = (
            f" On logistic regression, which has no closed form, half the step divides the rest by "
            f"{fine[-2].measured / fine[-1].measured:.3g} with {fine[-1].conditions['local_steps']} local step and by "
            f"{coarse[-2].measured / coarse[-1].measured:.3g} with {coarse[-1].conditions['local_steps']}."
        )
    yield (
        "To first order the bias is -eta K sum p_i H_i g_i, with one Hessian-vector product a client: exact for one "
        f"step on quadratics, and otherwise wrong by O(eta^2).{halving}{words}"
    )
    rows = _of(found, "unequal steps", "distance to the optimum")
    shown = {(one.conditions["algorithm"], one.conditions["step_size"]): one.measured for one in rows}
    yield (
        "Unequal numbers of steps, 1 and 10, move FedAvg even where all Hessians are equal: towards the optimum with "
        f"shares p_i K_i, {shown['FedAvg', 0.01]:.3g} away at step 0.01. FedNova takes that away, and what drift "
        f"leaves of it falls with eta K ({shown['FedNova', 0.1]:.3g} at step 0.1, {shown['FedNova', 0.01]:.3g} at "
        "0.01). Who trains for epochs and also weighs by examples counts large clients twice, with shares in "
        "proportion to n_i^2: "
        f"{shown['FedAvg by examples', 0.01]:.3g} from the optimum by examples. E is epochs in some papers and steps "
        "in others: a client takes E n_i / B steps."
    )
    yield (
        "FedProx buys its smaller bias with speed: with exact local solutions a large proximal weight rests near the "
        "optimum and contracts hardly at all. Its drift is at most G / (mu + lambda), measured from the minimum of "
        "F + (lambda / 2) |w - w_t|^2 with G taken there, and not from the minimum of F."
    )


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
        ones = _of(found, "fixed point", "distance to the optimum", algorithm="FedAvg", step_size=eta)
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
        ones = _of(found, "FedProx", quantity)
        along = np.concatenate([[0], np.geomspace(0.02, max(0.1, ones[-1].conditions["proximal_weight"]), 60)])
        values = [proximal_theory(pair, float(weight))[quantity] for weight in along]
        proximal.plot(along, values, color=colour, linestyle=line, linewidth=1.3, label=f"{quantity}: theory")
        points(proximal, ones, None, colour, marker, "proximal_weight")
    proximal.set_xscale("symlog", linthresh=0.1)
    weights = [one.conditions["proximal_weight"] for one in _of(found, "FedProx", "contraction of a round")]
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
        points(parts, _of(found, "drift bias", name), None, colour, marker)
    length = np.linalg.norm(known[0].gradient)
    parts.axhline(length, color=plots.GREY, linewidth=0.7)
    parts.annotate("length of the gradient", (grid[0], length), xytext=(0, 2), textcoords="offset points", fontsize=7)
    parts.set(xlabel=f"Local steps K (step {base.step_size:g})",
              ylabel="Length, at the start")  # fmt: skip
    plots.logarithmic(parts)
    parts.set_xticks(steps, [str(k) for k in steps])
    parts.minorticks_off()
    parts.legend(fontsize=7.5)

    ones = _of(found, "logistic regression", "bias less leading term")
    biases = _of(found, "logistic regression", "drift bias")
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
    plots.logarithmic(model)
    return figure
