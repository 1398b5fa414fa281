"""This module draws the conclusions of `heterogeneity` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from fedjax_sim.study.claims import Claim, Row, every, is_below, selected, shown
from fedjax_sim.study.heterogeneity.ranks import MEASURES, RANKS

OF_LABELS = MEASURES[:4]  # measures that ignore the positions of labels


def heterogeneity_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about distances of labels, rounds on quadratics, slowdowns, and their ranks.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    yield _distances(rows)
    rounds = selected(rows, part="quadratics", quantity="rounds to target")  # spreads rise
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
    gaps = selected(found, quantity="gap of the fitted constants")
    distances = [selected(found, quantity=quantity) for quantity in ("total variation", "L1", "Jensen-Shannon")]
    return Claim(
        "Of two pairs of clients, the one whose optima are closer has the larger total variation, L1 distance and "
        "Jensen-Shannon divergence of labels.",
        every(
            is_below(closer, further) and is_below(smaller, larger)
            for further, closer in pairwise(gaps)
            for of_quantity in distances
            for smaller, larger in pairwise(of_quantity)
        ),
        shown([*gaps, *(row for of_quantity in distances for row in of_quantity)], "quantity", "population"),
    )


def _slowdowns(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about rounds over those of the same examples shuffled, and about what shuffling takes away.

    Args:
      rows: the rows of the study.
    """
    digits = selected(rows, part="digits MLP", quantity="slowdown")  # alphas rise
    yield Claim(
        "Clients of digits with the smallest Dirichlet alpha need more than 1.5 times the rounds of the same examples "
        "shuffled, and those with the largest less than 1.25 times.",
        every([is_below(1.5, digits[0]), is_below(digits[-1], 1.25)]) if len(digits) > 1 else None,
        shown(digits, "population"),
    )
    synthetic = selected(rows, part="Synthetic", quantity="slowdown")
    yield Claim(
        "Every Synthetic population needs more than 1.25 times the rounds of its examples shuffled, (0, 0) too.",
        every(is_below(1.25, row) for row in synthetic),
        shown(synthetic, "population"),
    )
    own, shuffled = (
        selected(rows, part="digits MLP", quantity=f"gradient dissimilarity{tail}")[:1] for tail in ("", ", shuffled")
    )
    yield Claim(
        "Shuffling the digits with the smallest alpha leaves less than a fifth of the gradient dissimilarity.",
        every(is_below(mixed, unlike, 0.2) for unlike, mixed in zip(own, shuffled, strict=True)),
        shown([*own, *shuffled], "quantity"),
    )


def _ranks(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about rank correlations of measures with the slowdown; they have no intervals.

    Args:
      rows: the rows of the study.
    """
    on_digits = selected(rows, part=f"{RANKS}digits MLP")
    yield Claim(
        "On digits alone every measure of heterogeneity orders the slowdowns: all rank correlations lie beyond 0.9 or "
        "-0.9.",
        every(is_below(0.9, row) or is_below(row, -0.9) for row in on_digits),
        shown(on_digits, "quantity"),
    )
    both = selected(rows, part=f"{RANKS}both families")
    of_labels = [row for row in both if row["quantity"] in OF_LABELS]
    of_gradients = selected(both, quantity="gradient dissimilarity")
    yield Claim(
        "Over digits and Synthetic together, gradient dissimilarity orders the slowdowns better than total variation, "
        "L1, Kullback-Leibler and Jensen-Shannon of labels.",
        every(is_below(labels, gradients) for gradients in of_gradients for labels in of_labels),
        shown([*of_gradients, *of_labels], "quantity"),
    )
