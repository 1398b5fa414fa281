"""This module draws the conclusions of `participation` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from fedjax_sim.study.claims import Claim, Row, every, is_below, is_within, rising, selected, shown
from fedjax_sim.study.participation.clients import SPREAD


def participation_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about the variance of a cohort's mean, required cohorts, and error floors.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    yield from _variances(rows)
    tolerated = selected(rows, part="tolerance")
    yield Claim(
        f"At tolerance {options['tolerance']:g} the required cohorts have between three quarters of the variance that "
        "is allowed and a tenth more than it.",
        every(is_within(row, 0.75, 1.1) for row in tolerated),
        shown(tolerated, "population_size", "cohort_size"),
    )
    designs = {row["estimator"]: row for row in selected(rows, part="designs", sampler="uniform")}
    yield Claim(
        "The mean by examples over a uniform cohort varies less than the unbiased Horvitz-Thompson estimate.",
        every([is_below(designs["mean by examples"], designs["horvitz thompson by examples"])]) if designs else None,
        shown(list(designs.values()), "estimator"),
    )
    floors = rising(rows, "cohort_size", part="final loss")
    yield Claim(
        "The error floor of constant steps falls faster than 1 / m with the cohort size m.",
        every(is_below(large, small, small["cohort_size"] / large["cohort_size"]) for small, large in pairwise(floors)),
        shown(floors, "cohort_size"),
    )
    digits = rising(rows, "cohort_size", part="digits MLP")  # cohorts of 10 and 100
    yield Claim(
        "On digits a cohort of 100 has less than a fifth of the variance of a cohort of 10.",
        every(is_below(large, small, 0.2) for small, large in pairwise(digits)),
        shown(digits, "cohort_size"),
    )


def _variances(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about the variance beside sigma^2 / m, that of a cohort from an infinite population.

    Args:
      rows: the rows of the study.
    """
    found = [
        (row["cohort_size"] / row["population_size"], SPREAD**2 / row["cohort_size"], row)
        for row in selected(rows, part="variance")
    ]
    few, many, all_clients = (
        [(infinite, row) for rate, infinite, row in found if is_chosen(rate)]
        for is_chosen in (lambda rate: rate <= 0.1, lambda rate: 0.5 <= rate < 1, lambda rate: rate == 1)
    )
    columns = ("population_size", "cohort_size")
    yield Claim(
        "A cohort of a tenth of the population or less has a variance within 15 % of sigma^2 / m, whatever the size of "
        "the population.",
        every(is_within(row, 0.85 * infinite, 1.15 * infinite) for infinite, row in few),
        shown([row for _, row in few], *columns),
    )
    yield Claim(
        "A cohort of half of the population or more has less than 60 % of sigma^2 / m.",
        every(is_below(row, 0.6 * infinite) for infinite, row in many),
        shown([row for _, row in many], *columns),
    )
    yield Claim(
        "A cohort of everybody has no variance: less than 1e-9 of sigma^2 / m.",
        every(is_below(row, 1e-9 * infinite) for infinite, row in all_clients),
        shown([row for _, row in all_clients], *columns),
    )
