"""This module computes rank correlations between measures of heterogeneity and the slowdown of training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fedjax_sim.study.findings import Comparison, comparisons_of

FAMILIES = ("digits MLP", "Synthetic")  # parts of the study with models
RANKS = "rank correlation with the slowdown, "  # the start of a part's name
# Quantities of `model_rows` that measure heterogeneity.
MEASURES = (
    "total variation", "l1 distance", "kullback leibler", "jensen shannon", "earth mover distance", "labels per client",
    "gradient dissimilarity", "B dissimilarity", "gradient diversity",
)  # fmt: skip


def by_population(found: Sequence[Comparison], part: str, quantity: str) -> dict[str, Comparison]:
    """Selects the comparisons of a part and a quantity, and returns them by the name of their population.

    Args:
      found: all comparisons of the study.
      part: the part of the study.
      quantity: what was measured.
    """
    return {comparison.conditions["population"]: comparison for comparison in comparisons_of(found, part, quantity)}


def rank_correlations(found: Sequence[Comparison]) -> Iterator[Comparison]:
    """Computes Spearman's rank correlation of each measure with the slowdown, over populations.

    A population counts if it has a slowdown, that is, if all its runs reached the target. Correlations of fewer than
    four populations, or of equal slowdowns, are left out.

    Args:
      found: the comparisons of `model_rows`.

    Yields: for digits alone and for both families a correlation of each measure, in [-1, 1], without interval and
      prediction.
    """
    from scipy import stats

    for name, parts in (("digits MLP", ("digits MLP",)), ("both families", ("digits MLP", "Synthetic"))):
        values = {
            (comparison.conditions["part"], comparison.conditions["population"], comparison.quantity): (
                comparison.measured
            )
            for comparison in found
        }
        # A population is named by its part and its own name.
        populations = [key[:2] for key in values if key[0] in parts and key[2] == "slowdown"]
        slowdowns = [values[*population, "slowdown"] for population in populations]
        num_parts = len({part for part, _ in populations})
        if len(populations) < 4 or num_parts < len(parts) or len({*slowdowns}) < 2:
            continue
        for measure in MEASURES:
            correlation = stats.spearmanr([values[*population, measure] for population in populations], slowdowns)
            # SciPy makes the result's class as it runs, where type checkers do not see its fields.
            rank = correlation.statistic  # pyright: ignore[reportAttributeAccessIssue]
            conditions = {"part": RANKS + name, "population": f"{len(populations)} of them"}
            if math.isfinite(rank):
                # The correlation is random, but has no samples of its own that would give an interval.
                yield Comparison(conditions, measure, float(rank), math.nan)
