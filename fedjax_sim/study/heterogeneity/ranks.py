"""Rank correlations of measures of heterogeneity with the slowdown, and the names of the parts that they compare."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fedjax_sim.study.findings import Comparison, comparisons_of

__all__ = ["FAMILIES", "MEASURES", "RANKS", "by_population", "rank_correlations"]

FAMILIES = ("digits MLP", "Synthetic")
RANKS = "rank correlation with the slowdown, "
MEASURES = (
    "total variation", "l1 distance", "kullback leibler", "jensen shannon", "earth mover distance", "labels per client",
    "gradient dissimilarity", "B dissimilarity", "gradient diversity",
)  # fmt: skip


def by_population(found: Sequence[Comparison], part: str, quantity: str) -> dict[str, Comparison]:
    """The comparisons of a part and a quantity, by the population that they were measured on."""
    return {one.conditions["population"]: one for one in comparisons_of(found, part, quantity)}


def rank_correlations(found: Sequence[Comparison]) -> Iterator[Comparison]:
    """Spearman's rank correlation of each measure with the slowdown, over the populations that have a slowdown."""
    from scipy import stats

    for name, parts in (("digits MLP", ("digits MLP",)), ("both families", ("digits MLP", "Synthetic"))):
        known = {(one.conditions["part"], one.conditions["population"], one.quantity): one.measured for one in found}
        fields = [key[:2] for key in known if key[0] in parts and key[2] == "slowdown"]
        slow = [known[*field, "slowdown"] for field in fields]
        if len(fields) < 4 or len({field[0] for field in fields}) < len(parts) or len({*slow}) < 2:
            continue
        for measure in MEASURES:
            rank = stats.spearmanr([known[*field, measure] for field in fields], slow).statistic
            conditions = {"part": RANKS + name, "population": f"{len(fields)} of them"}
            if math.isfinite(rank):
                yield Comparison(conditions, measure, float(rank), math.nan)  # random, without an interval
