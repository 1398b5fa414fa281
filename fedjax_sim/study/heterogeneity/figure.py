"""The figure of `heterogeneity`: rounds on quadratics, measures of labels, slowdowns, and rank correlations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import plots
from fedjax_sim.study.findings import Comparison, Findings
from fedjax_sim.study.heterogeneity.ranks import FAMILIES, RANKS, by_population

__all__ = ["heterogeneity_figure"]

LOOKS = (("-", plots.BLUE, "o"), ((0, (4, 1.6)), plots.ORANGE, "s"), ((0, (1.5, 1.5)), plots.BLACK, "^"))


def heterogeneity_figure(found: Sequence[Comparison], *, spreads: Sequence[float], path: Callable) -> Any:
    """Rounds of quadratics, measures against alpha, slowdowns, rank correlations."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(plots.WIDTH, 6.2), layout="constrained")
    (rounds, labels), (slow, ranks) = figure.subplots(2, 2)
    rows = Findings("", "", found, (), lambda: None, {}).rows()
    look = {"markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.6, "zorder": 3}

    known = by_population(found, "quadratics", "gradient dissimilarity")
    unit = next((one.measured / float(name.split()[1]) ** 2 for name, one in known.items() if one.measured > 1e-6), 1.0)
    given = [spread for spread in spreads if spread > 0]
    grid = np.unique([*np.geomspace(max(0.1, min(given, default=0.1)), max([*given, 0.2]), 16), *given])
    rounds.plot(
        unit * grid**2, [path(float(s)) for s in grid], color=plots.BLUE, linewidth=1.3, label="theory, best step"
    )
    ones = by_population(found, "quadratics", "rounds to target")
    shown = [(known[name].measured, one.measured) for name, one in ones.items() if known[name].measured > 1e-6]
    if shown:
        rounds.plot(*zip(*shown, strict=True), "o", color=plots.BLUE, label="measured", **look)
    alike = [one.measured for name, one in ones.items() if known[name].measured <= 1e-6]
    if alike:
        rounds.axhline(
            alike[0], color=plots.GREY, linewidth=0.9, linestyle=(0, (4, 1.6)), label="clients with one optimum"
        )
    rounds.set(xlabel="Gradient dissimilarity, quadratics", ylabel="Rounds to the target")
    plots._logarithmic(rounds)
    rounds.legend(fontsize=7.5)

    measures = {"total variation": 1.0, "jensen shannon": 1 / np.log(2), "earth mover distance": 1 / 9}
    titles = ("total variation", "Jensen-Shannon / ln 2", "earth mover's distance / 9")
    for (measure, scale), title, (line, colour, marker) in zip(measures.items(), titles, LOOKS, strict=True):
        ones = by_population(found, "digits MLP", measure)
        at = [float(name.split()[1]) for name in ones]
        labels.plot(at, [scale * one.measured for one in ones.values()], marker=marker, linestyle=line, color=colour,
                    linewidth=1.0, label=title, **look)  # fmt: skip
    labels.set(xlabel="Dirichlet alpha of the digits", ylabel="From the pooled labels")
    if by_population(found, "digits MLP", "total variation"):
        plots._logarithmic(labels, "x")
        labels.legend(fontsize=7.5)

    for part, (_, colour, marker) in zip(FAMILIES, LOOKS, strict=False):
        ones = [row for row in rows if row["part"] == part and row["quantity"] == "slowdown"]
        at = [by_population(found, part, "gradient dissimilarity")[row["population"]].measured for row in ones]
        middle = np.array([row["measured"] for row in ones])
        error = np.array([max(row["high"] - row["measured"], 0) for row in ones])
        if ones:
            spread = [np.minimum(error, middle), error]
            slow.errorbar(at, middle, spread, fmt=marker, color=colour, capsize=2, elinewidth=1, label=part, **look)
            for x, y, row in zip(at, middle, ones, strict=True):
                slow.annotate(row["population"], (x, y), xytext=(5, 3), textcoords="offset points", fontsize=7)
    slow.axhline(1, color=plots.GREY, linewidth=0.8)
    slow.set(xlabel="Gradient dissimilarity at the first model", ylabel="Slowdown")
    if slow.containers:
        plots._logarithmic(slow, "x")
        slow.set_ylim(0)
        slow.legend(fontsize=7.5, loc="upper left")

    parts = list(dict.fromkeys(one.conditions["part"] for one in found if one.conditions["part"].startswith(RANKS)))
    names = list(dict.fromkeys(one.quantity for one in found if one.conditions["part"] in parts))
    for i, (part, (_, colour, _)) in enumerate(zip(parts, LOOKS, strict=False)):
        values = {one.quantity: one.measured for one in found if one.conditions["part"] == part}
        places = [names.index(name) + 0.36 * i - 0.18 for name in values]
        ranks.barh(places, list(values.values()), height=0.34, color=colour, label=part.removeprefix(RANKS),
                   hatch=("", "///")[i], edgecolor="white")  # fmt: skip
    ranks.set_yticks(range(len(names)), names, fontsize=7.5)
    ranks.axvline(0, color=plots.INK, linewidth=0.8)
    ranks.set(xlabel="Rank correlation with the slowdown", xlim=(-1.05, 1.05), ylim=(len(names) - 0.4, -0.6))
    ranks.grid(False, axis="y")
    if names:
        ranks.legend(fontsize=7.5, loc="upper left")
    return figure
