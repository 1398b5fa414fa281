"""This module draws the conclusions of `heterogeneity` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise, permutations
from typing import Any

from fedjax_sim.study.claims import Claim, Row, every, is_below, selected, shown
from fedjax_sim.study.heterogeneity.ranks import FAMILIES, MEASURES

OF_LABELS = MEASURES[:4]  # measures that ignore the positions of labels
FALLING = ("labels per client",)  # measures that are smaller for clients who differ more


def heterogeneity_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about distances of labels, rounds on quadratics, slowdowns, and their ranks.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    yield _distances(rows)
    rounds = sorted(selected(rows, part="quadratics", quantity="rounds to target"), key=_parameter)
    yield Claim(
        "On quadratics with several local steps, clients who differ more need more rounds at their best constant step.",
        every(is_below(alike, unlike) for alike, unlike in pairwise(rounds)) if options["num_steps"] > 1 else None,
        shown(rounds, "population"),
    )
    yield from _slowdowns(rows)
    yield from _ranks(rows)


def _distances(rows: Sequence[Row]) -> Claim:
    """Returns a claim about two pairs of label distributions, of which the second has one best constant.

    Args:
      rows: the rows of the study.
    """
    found = selected(rows, part="labels 0, 1, 2")
    gaps = sorted(selected(found, quantity="gap of the fitted constants"), key=lambda row: row["measured"])
    distances = [
        [row for gap in gaps for row in selected(found, quantity=quantity, population=gap["population"])]
        for quantity in ("total variation", "L1", "Jensen-Shannon")
    ]
    return Claim(
        "Of two pairs of clients, the one whose optima are closer has the larger total variation, L1 distance and "
        "Jensen-Shannon divergence of labels.",
        every(
            is_below(closer, further) and is_below(smaller, larger)
            for closer, further in pairwise(gaps)
            for of_quantity in distances
            for larger, smaller in pairwise(of_quantity)
        ),
        shown([*gaps, *(row for of_quantity in distances for row in of_quantity)], "quantity", "population"),
    )


def _slowdowns(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about rounds over those of the same examples shuffled, and about what shuffling takes away.

    Args:
      rows: the rows of the study.
    """
    digits, own, shuffled = (
        sorted(selected(rows, part="digits MLP", quantity=quantity), key=_parameter)
        for quantity in ("slowdown", "gradient dissimilarity", "gradient dissimilarity, shuffled")
    )
    # Each population has a dissimilarity, and no slowdown if a run did not reach the target.
    smallest, largest = (
        [row for end in ends for row in selected(digits, population=end["population"])]
        for ends in (own[:1], own[1:][-1:])
    )
    yield Claim(
        "Clients of digits with the smallest Dirichlet alpha need more than 1.5 times the rounds of the same examples "
        "shuffled, and those with the largest less than 1.25 times.",
        every((is_below(1.5, row) for row in smallest), (is_below(row, 1.25) for row in largest)),
        shown(digits, "population"),
    )
    synthetic = selected(rows, part="Synthetic", quantity="slowdown")
    yield Claim(
        "Every Synthetic population needs more than 1.25 times the rounds of its examples shuffled, (0, 0) too.",
        every(
            *((is_below(1.25, row) for row in found) for found in (synthetic, selected(synthetic, population="(0, 0)")))
        ),
        shown(synthetic, "population"),
    )
    yield Claim(
        "Shuffling the digits with the smallest alpha leaves less than a fifth of the gradient dissimilarity.",
        every(is_below(mixed, unlike, 0.2) for unlike, mixed in zip(own[:1], shuffled[:1], strict=True)),
        shown([*own[:1], *shuffled[:1]], "quantity"),
    )


def _ranks(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about measures that order the slowdowns, as far as runs tell slowdowns apart.

    Args:
      rows: the rows of the study. Rank correlations are left to the figure: they have no intervals, and depend on the
        order of slowdowns that are the same up to noise.
    """
    slowdowns = [row for part in FAMILIES for row in selected(rows, part=part, quantity="slowdown")]
    numbers = shown(slowdowns, "part", "population")
    yield Claim(
        "On digits alone every measure of heterogeneity orders all slowdowns that can be told apart.",
        every(*((is_below(*pair) for pair in _pairs(rows, FAMILIES[:1], measure)) for measure in MEASURES)),
        numbers,
    )
    of_gradients = _pairs(rows, FAMILIES, "gradient dissimilarity")
    of_labels = [_pairs(rows, FAMILIES, measure) for measure in OF_LABELS]
    yield Claim(
        "Over digits and Synthetic together, gradient dissimilarity orders all slowdowns that can be told apart, and "
        "total variation, L1, Kullback-Leibler and Jensen-Shannon of labels do not.",
        every(
            (is_below(*pair) for pair in of_gradients),
            *([any(is_below(large, small) for small, large in pairs)] if pairs else [] for pairs in of_labels),
        ),
        numbers,
    )


def _pairs(rows: Sequence[Row], parts: Sequence[str], measure: str) -> list[tuple[Row, Row]]:
    """Returns a measure's rows of each two populations whose slowdowns can be told apart.

    Args:
      rows: the rows of the study.
      parts: the families of populations; if one has no slowdowns, there are no pairs.
      measure: a quantity of `MEASURES`.

    Returns: pairs of which the second is the larger one if the measure orders slowdowns.
    """
    slowdowns = [selected(rows, part=part, quantity="slowdown") for part in parts]
    if not all(slowdowns):
        return []
    values = {(row["part"], row["population"]): row for row in selected(rows, quantity=measure)}
    told_apart = [(fast, slow) for fast, slow in permutations(chain(*slowdowns), 2) if is_below(fast, slow)]
    pairs = [tuple(values[row["part"], row["population"]] for row in pair) for pair in told_apart]
    return [(slow, fast) if measure in FALLING else (fast, slow) for fast, slow in pairs]


def _parameter(row: Row) -> float:
    """Returns the number in the name of a row's population, such as 0.1 of "alpha 0.1"."""
    return float(row["population"].split()[1])
