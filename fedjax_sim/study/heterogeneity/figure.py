"""The figure of `heterogeneity`: rounds on quadratics, measures of labels, slowdowns, and rank correlations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import plots
from fedjax_sim.study.charts import DASHED, DOTTED, MARKERS, chart, rows_of
from fedjax_sim.study.findings import Comparison
from fedjax_sim.study.heterogeneity.ranks import FAMILIES, RANKS, by_population

__all__ = ["heterogeneity_figure"]

LOOKS = (("-", plots.BLUE, "o"), (DASHED, plots.ORANGE, "s"), (DOTTED, plots.BLACK, "^"))
LABELS = {  # measure of labels: its scale, so that the largest is 1, and its name
    "total variation": (1.0, "total variation"),
    "jensen shannon": (1 / np.log(2), "Jensen-Shannon / ln 2"),
    "earth mover distance": (1 / 9, "earth mover's distance / 9"),
}


def heterogeneity_figure(found: Sequence[Comparison], *, spreads: Sequence[float], path: Callable) -> Any:
    """Rounds of quadratics, measures against alpha, slowdowns, rank correlations.

    Args:
      found: what the study compared.
      spreads: of the quadratic clients' optima. path: spread -> rounds to the target with the best step, by theory.
    """
    figure, (rounds, labels, slow, ranks) = chart(2, 2)
    _rounds(rounds, found, spreads, path)
    _labels(labels, found)
    _slowdowns(slow, found)
    _ranks(ranks, found)
    return figure


def _rounds(axes, found: Sequence[Comparison], spreads: Sequence[float], path: Callable) -> None:
    known = by_population(found, "quadratics", "gradient dissimilarity")
    unit = next((one.measured / float(name.split()[1]) ** 2 for name, one in known.items() if one.measured > 1e-6), 1.0)
    given = [spread for spread in spreads if spread > 0]
    grid = np.unique([*np.geomspace(max(0.1, min(given, default=0.1)), max([*given, 0.2]), 16), *given])
    axes.plot(
        unit * grid**2, [path(float(s)) for s in grid], color=plots.BLUE, linewidth=1.3, label="theory, best step"
    )
    ones = by_population(found, "quadratics", "rounds to target")
    shown = [(known[name].measured, one.measured) for name, one in ones.items() if known[name].measured > 1e-6]
    if shown:
        axes.plot(*zip(*shown, strict=True), "o", color=plots.BLUE, label="measured", **MARKERS)
    alike = [one.measured for name, one in ones.items() if known[name].measured <= 1e-6]
    if alike:
        axes.axhline(alike[0], color=plots.GREY, linewidth=0.9, linestyle=DASHED, label="clients with one optimum")
    axes.set(xlabel="Gradient dissimilarity, quadratics", ylabel="Rounds to the target")
    plots.logarithmic(axes)
    axes.legend(fontsize=7.5)


def _labels(axes, found: Sequence[Comparison]) -> None:
    for (measure, (scale, title)), (line, colour, marker) in zip(LABELS.items(), LOOKS, strict=True):
        ones = by_population(found, "digits MLP", measure)
        at = [float(name.split()[1]) for name in ones]
        axes.plot(at, [scale * one.measured for one in ones.values()], marker=marker, linestyle=line, color=colour,
                  linewidth=1.0, label=title, **MARKERS)  # fmt: skip
    axes.set(xlabel="Dirichlet alpha of the digits", ylabel="From the pooled labels")
    if by_population(found, "digits MLP", "total variation"):
        plots.logarithmic(axes, "x")
        axes.legend(fontsize=7.5)


def _slowdowns(axes, found: Sequence[Comparison]) -> None:
    for part, (_, colour, marker) in zip(FAMILIES, LOOKS, strict=False):
        ones = rows_of(found, part=part, quantity="slowdown")
        if not ones:
            continue
        dissimilarity = by_population(found, part, "gradient dissimilarity")
        at = [dissimilarity[row["population"]].measured for row in ones]
        middle = np.array([row["measured"] for row in ones])
        error = np.array([max(row["high"] - row["measured"], 0) for row in ones])
        spread = [np.minimum(error, middle), error]
        axes.errorbar(at, middle, spread, fmt=marker, color=colour, capsize=2, elinewidth=1, label=part, **MARKERS)
        for x, y, row in zip(at, middle, ones, strict=True):
            axes.annotate(row["population"], (x, y), xytext=(5, 3), textcoords="offset points", fontsize=7)
    axes.axhline(1, color=plots.GREY, linewidth=0.8)
    axes.set(xlabel="Gradient dissimilarity at the first model", ylabel="Slowdown")
    if axes.containers:
        plots.logarithmic(axes, "x")
        axes.set_ylim(0)
        axes.legend(fontsize=7.5, loc="upper left")


def _ranks(axes, found: Sequence[Comparison]) -> None:
    ranked = [one for one in found if one.conditions["part"].startswith(RANKS)]
    parts = list(dict.fromkeys(one.conditions["part"] for one in ranked))
    names = list(dict.fromkeys(one.quantity for one in ranked))
    for i, (part, (_, colour, _)) in enumerate(zip(parts, LOOKS, strict=False)):
        values = {one.quantity: one.measured for one in ranked if one.conditions["part"] == part}
        places = [names.index(name) + 0.36 * i - 0.18 for name in values]
        axes.barh(places, list(values.values()), height=0.34, color=colour, label=part.removeprefix(RANKS),
                  hatch=("", "///")[i], edgecolor="white")  # fmt: skip
    axes.set_yticks(range(len(names)), names, fontsize=7.5)
    axes.axvline(0, color=plots.INK, linewidth=0.8)
    axes.set(xlabel="Rank correlation with the slowdown", xlim=(-1.05, 1.05), ylim=(len(names) - 0.4, -0.6))
    axes.grid(False, axis="y")
    if names:
        axes.legend(fontsize=7.5, loc="upper left")
