"""This module draws the figure of `heterogeneity`: rounds on quadratics, label measures, slowdowns, and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import charts
from fedjax_sim.study.claims import Row, selected
from fedjax_sim.study.heterogeneity.best_step import best_step
from fedjax_sim.study.heterogeneity.ranks import FAMILIES, RANKS

# For each measure of labels: a factor that makes its largest value 1, and its name in the legend.
LABELS = {
    "total variation": (1.0, "total variation"),
    "jensen shannon": (1 / np.log(2), "Jensen-Shannon / ln 2"),
    "earth mover distance": (1 / 9, "earth mover's distance / 9"),
}
ROUNDING = 1e-6  # a smaller dissimilarity is that of clients with one optimum


def heterogeneity_figure(rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    """Draws four panels: rounds on quadratics, label measures against alpha, slowdowns, and rank correlations.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    figure, (rounds, labels, slow, ranks) = charts.panels(2, 2)
    on_quadratics = selected(_with_dissimilarity(rows, "quadratics"), quantity="rounds to target")
    # Clients with one optimum have no place on a logarithmic axis: a level shows their rounds.
    unlike = [row for row in on_quadratics if row["dissimilarity"] > ROUNDING]
    alike = [row["measured"] for row in on_quadratics if row not in unlike]
    # All such rows are of spread 0, and have one number of rounds.
    levels = {"clients with one optimum": alike[0]} if alike else {}
    charts.lines(rounds, unlike, "dissimilarity", theory=_rounds(options), levels=levels, line="theory, best step",
                 xlabel="Gradient dissimilarity, quadratics", ylabel="Rounds to the target", log="xy")  # fmt: skip
    label_measures = [
        # A population is called "alpha 0.1", see `models.digits_population`.
        {"alpha": float(row["population"].split()[1]), "measure": name, "measured": scale * row["measured"]}
        for measure, (scale, name) in LABELS.items()
        for row in selected(rows, part="digits MLP", quantity=measure)
    ]
    charts.lines(labels, label_measures, "alpha", by="measure", xlabel="Dirichlet alpha of the digits",
                 ylabel="From the pooled labels", log="x")  # fmt: skip
    slowdowns = [row for part in FAMILIES for row in selected(_with_dissimilarity(rows, part), quantity="slowdown")]
    # No theory predicts slowdowns, and points of unlike populations are not joined.
    charts.lines(slow, slowdowns, "dissimilarity", by="part", theory=[], text="population",
                 levels={"as fast as shuffled": 1.0}, xlabel="Gradient dissimilarity at the first model",
                 ylabel="Slowdown", log="x")  # fmt: skip
    slow.set_ylim(0)
    correlations = [row | {"set": row["part"].removeprefix(RANKS)} for row in rows if row["part"].startswith(RANKS)]
    charts.dots(ranks, correlations, "quantity", by="set", levels={"no correlation": 0.0},
                label="Rank correlation with the slowdown")  # fmt: skip
    ranks.set_xlim(-1.05, 1.05)
    return figure


def _with_dissimilarity(rows: Sequence[Row], part: str) -> list[Row]:
    """Returns the rows of a part, with the gradient dissimilarity of their population as a column."""
    found = selected(rows, part=part)
    dissimilarities = {row["population"]: row["measured"] for row in selected(found, quantity="gradient dissimilarity")}
    return [{**row, "dissimilarity": dissimilarities[row["population"]]} for row in found]


def _rounds(options: Mapping[str, Any]) -> list[Row]:
    """Returns the rounds to the target with the best step against the gradient dissimilarity, as rows of theory.

    The dissimilarity is (1/N) sum |grad f_i|^2 at the optimum.

    Args:
      options: the study's options.
    """
    positive = [spread for spread in options["spreads"] if spread > 0]
    ends = max(0.1, min(positive, default=0.1)), max([*positive, 0.2])
    predictions = []
    for spread in sorted({*np.geomspace(*ends, 16).tolist(), *positive}):
        problem, _, rounds = best_step(
            options["num_clients"], options["dimension"], options["num_steps"], spread, options["seed"]
        )
        gradients = np.einsum("nij,nj->ni", problem.hessians, problem.optimum - problem.centers)
        predictions.append({"dissimilarity": float((gradients**2).sum(1).mean()), "predicted": rounds})
    return predictions
