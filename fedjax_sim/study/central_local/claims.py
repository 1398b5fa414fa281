"""This module draws the conclusions of `central_local` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_sim.study.claims import Claim, Row, every, is_below, is_within, rising, selected, shown


def central_local_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about three places for noise, at one noise multiplier and at one epsilon.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    yield from _at_one_multiplier(rows)
    yield from _at_one_epsilon(rows, options)


def _at_one_multiplier(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about variances of the mean when all places have the same noise multiplier.

    Args:
      rows: the rows of the study.
    """
    slopes = {row["place"]: row for row in selected(rows, part="slope")}
    yield Claim(
        "The variance of the mean falls faster than m^-1.9 with noise once on the sum, or in shares that add up to it, "
        "and slower than m^-1.1 with noise on every update.",
        every(
            [is_below(slopes["central"], -1.9), is_below(slopes["distributed"], -1.9), is_below(-1.1, slopes["local"])]
        ),
        shown(list(slopes.values()), "place"),
    )
    central, shares = (
        rising(rows, "cohort_size", part="equal multiplier", place=place) for place in ("central", "distributed")
    )
    yield Claim(
        "Shares that add up to the noise have its variance, up to a quarter.",
        every(
            is_below(share, whole, 1.25) and is_below(whole, share, 1.25)
            for whole, share in zip(central, shares, strict=True)
        ),
        shown([*central, *shares], "place", "cohort_size"),
    )
    for place, words, factor in (
        ("local", "Noise on every update costs 0.8 m to 1.25 m times the variance of central noise", 1),
        ("local, replaced message", "Noise that hides which message was sent costs 3.2 m to 5 m times as much", 4),
    ):
        ratios = selected(rows, part="ratio", place=place)
        yield Claim(
            f"{words}, at one noise multiplier.",
            every(
                is_within(row, 0.8 * factor * row["cohort_size"], 1.25 * factor * row["cohort_size"]) for row in ratios
            ),
            shown(ratios, "cohort_size"),
        )


def _at_one_epsilon(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields claims about variances of the mean when all places spend the same epsilon.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    poisson, fixed, local = (
        rising(rows, "cohort_size", part="equal epsilon", place=place)
        for place in ("central, Poisson", "central, fixed-size", "local")
    )
    columns = ("place", "cohort_size", "noise_multiplier")
    yield Claim(
        f"At epsilon {options['epsilon']:g} of {options['num_rounds']:,} rounds, noise on every update costs more than "
        "10 m times the variance of central noise: sampling amplifies no message of its own.",
        every(
            is_below(one, many, 0.1 / one["cohort_size"])
            for central in (poisson, fixed)
            for one, many in zip(central, local, strict=True)
        ),
        shown([*poisson, *fixed, *local], *columns),
    )
    yield Claim(
        "Poisson cohorts that hide an absent client take less than a fifth of the variance of fixed-size cohorts that "
        "hide a replaced one.",
        every(is_below(one, other, 0.2) for one, other in zip(poisson, fixed, strict=True)),
        shown([*poisson, *fixed], *columns),
    )
