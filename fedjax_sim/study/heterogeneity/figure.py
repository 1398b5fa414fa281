"""This module draws the figure of `heterogeneity`: rounds on quadratics, label measures, slowdowns, and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import plots
from fedjax_sim.study.charts import DASHED, DOTTED, MARKERS, chart, rows_of
from fedjax_sim.study.findings import Comparison
from fedjax_sim.study.heterogeneity.ranks import FAMILIES, RANKS, by_population

LOOKS = (("-", plots.BLUE, "o"), (DASHED, plots.ORANGE, "s"), (DOTTED, plots.BLACK, "^"))
# For each measure of labels: a factor that makes its largest value 1, and its name in the legend.
LABELS = {
    "total variation": (1.0, "total variation"),
    "jensen shannon": (1 / np.log(2), "Jensen-Shannon / ln 2"),
    "earth mover distance": (1 / 9, "earth mover's distance / 9"),
}


def heterogeneity_figure(found: Sequence[Comparison], *, spreads: Sequence[float], path: Callable) -> Any:
    """Draws four panels: rounds on quadratics, label measures against alpha, slowdowns, and rank correlations.

    Args:
      found: the comparisons of the study.
      spreads: spreads of the quadratic clients' optima.
      path: spread -> rounds to the target with the best step, by theory.
    """
    figure, (rounds, labels, slow, ranks) = chart(2, 2)
    _rounds(rounds, found, spreads, path)
    _labels(labels, found)
    _slowdowns(slow, found)
    _ranks(ranks, found)
    return figure


def _rounds(axes, comparisons: Sequence[Comparison], spreads: Sequence[float], path: Callable) -> None:
    """Draws the rounds to the target on quadratics against the gradient dissimilarity.

    The dissimilarity is (1/N) sum |grad f_i|^2 at the optimum. It is proportional to the squared spread of the optima.

    Args:
      axes: the panel to draw on.
      comparisons: the comparisons of the study; those of the part "quadratics" are the points.
      spreads: spreads of the clients' optima, >= 0, that were measured.
      path: spread -> rounds to the target with the best step, by theory; infinite if no step reaches it.
    """
    dissimilarities = by_population(comparisons, "quadratics", "gradient dissimilarity")
    # Dissimilarity is proportional to the squared spread: a measured point gives the factor.
    unit = next(
        (
            dissimilarity.measured / float(name.split()[1]) ** 2
            for name, dissimilarity in dissimilarities.items()
            if dissimilarity.measured > 1e-6
        ),
        1.0,
    )
    positive_spreads = [spread for spread in spreads if spread > 0]
    smallest = max(0.1, min(positive_spreads, default=0.1))
    largest = max([*positive_spreads, 0.2])
    grid = np.unique([*np.geomspace(smallest, largest, 16), *positive_spreads])
    axes.plot(
        unit * grid**2, [path(float(s)) for s in grid], color=plots.BLUE, linewidth=1.3, label="theory, best step"
    )
    rounds = by_population(comparisons, "quadratics", "rounds to target")
    measured_points = [
        (dissimilarities[name].measured, comparison.measured)
        for name, comparison in rounds.items()
        if dissimilarities[name].measured > 1e-6
    ]
    if measured_points:
        axes.plot(*zip(*measured_points, strict=True), "o", color=plots.BLUE, label="measured", **MARKERS)
    # Zero has no place on a logarithmic axis, so clients with one optimum are a horizontal line.
    rounds_of_one_optimum = [
        comparison.measured for name, comparison in rounds.items() if dissimilarities[name].measured <= 1e-6
    ]
    if rounds_of_one_optimum:
        axes.axhline(
            rounds_of_one_optimum[0],
            color=plots.GREY,
            linewidth=0.9,
            linestyle=DASHED,
            label="clients with one optimum",
        )
    axes.set(xlabel="Gradient dissimilarity, quadratics", ylabel="Rounds to the target")
    plots.logarithmic(axes)
    axes.legend(fontsize=7.5)


def _labels(axes, all_comparisons: Sequence[Comparison]) -> None:
    """Draws measures of label heterogeneity against the Dirichlet parameter."""
    for (measure, (scale, title)), (line, colour, marker) in zip(LABELS.items(), LOOKS, strict=True):
        comparisons = by_population(all_comparisons, "digits MLP", measure)
        alphas = [float(name.split()[1]) for name in comparisons]  # a population is called "alpha 0.1"
        values = [scale * comparison.measured for comparison in comparisons.values()]
        axes.plot(alphas, values, marker=marker, linestyle=line, color=colour, linewidth=1.0, label=title, **MARKERS)
    axes.set(xlabel="Dirichlet alpha of the digits", ylabel="From the pooled labels")
    if by_population(all_comparisons, "digits MLP", "total variation"):
        plots.logarithmic(axes, "x")
        axes.legend(fontsize=7.5)


def _slowdowns(axes, comparisons: Sequence[Comparison]) -> None:
    """Draws slowdowns against the gradient dissimilarity at the first model, with the name of each population.

    A slowdown is the rounds to the target over those of the same examples, shuffled over clients.

    Args:
      axes: the panel to draw on.
      comparisons: the comparisons of the study; populations that did not reach the target have no slowdown.
    """
    for part, (_, colour, marker) in zip(FAMILIES, LOOKS, strict=False):
        rows = rows_of(comparisons, part=part, quantity="slowdown")
        if not rows:
            continue
        dissimilarities = by_population(comparisons, part, "gradient dissimilarity")
        x_values = [dissimilarities[row["population"]].measured for row in rows]
        slowdowns = np.array([row["measured"] for row in rows])
        half_widths = np.array([max(row["high"] - row["measured"], 0) for row in rows])
        errors = [np.minimum(half_widths, slowdowns), half_widths]  # lower ends stay above zero
        axes.errorbar(
            x_values, slowdowns, errors, fmt=marker, color=colour, capsize=2, elinewidth=1, label=part, **MARKERS
        )
        for x, y, row in zip(x_values, slowdowns, rows, strict=True):
            axes.annotate(row["population"], (x, y), xytext=(5, 3), textcoords="offset points", fontsize=7)
    axes.axhline(1, color=plots.GREY, linewidth=0.8)
    axes.set(xlabel="Gradient dissimilarity at the first model", ylabel="Slowdown")
    if axes.containers:
        plots.logarithmic(axes, "x")
        axes.set_ylim(0)
        axes.legend(fontsize=7.5, loc="upper left")


def _ranks(axes, comparisons: Sequence[Comparison]) -> None:
    """Draws the rank correlation of each measure with the slowdown, with a bar for each set of populations.

    Args:
      axes: the panel to draw on.
      comparisons: the comparisons of the study. Those whose part begins with `RANKS` have a correlation in [-1, 1], and
        the name of the measure as their quantity.
    """
    correlations = [comparison for comparison in comparisons if comparison.conditions["part"].startswith(RANKS)]
    parts = list(dict.fromkeys(comparison.conditions["part"] for comparison in correlations))
    names = list(dict.fromkeys(comparison.quantity for comparison in correlations))
    for i, (part, (_, colour, _)) in enumerate(zip(parts, LOOKS, strict=False)):
        values = {
            comparison.quantity: comparison.measured
            for comparison in correlations
            if comparison.conditions["part"] == part
        }
        places = [names.index(name) + 0.36 * i - 0.18 for name in values]  # bars of one measure lie side by side
        axes.barh(places, list(values.values()), height=0.34, color=colour, label=part.removeprefix(RANKS),
                  hatch=("", "///")[i], edgecolor="white")  # fmt: skip
    axes.set_yticks(range(len(names)), names, fontsize=7.5)
    axes.axvline(0, color=plots.INK, linewidth=0.8)
    axes.set(xlabel="Rank correlation with the slowdown", xlim=(-1.05, 1.05), ylim=(len(names) - 0.4, -0.6))
    axes.grid(False, axis="y")
    if names:
        axes.legend(fontsize=7.5, loc="upper left")
