"""This module draws the conclusions of `privacy_utility` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from fedjax_sim import theory
from fedjax_sim.study.claims import Claim, Row, every, interval, is_below, rising, selected, shown
from fedjax_sim.study.privacy_utility.spending import STEP_SIZE


def privacy_utility_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about errors of a release, error floors, and accuracy on the digits.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    yield from _errors(rows, options)
    yield from _digits(rows)


def _errors(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields claims about the noise of a release, and about what it adds up to in runs with a constant step.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    errors, floors = ([row for part in ("noise multiplier", "epsilon")
                       for row in rising(rows, "noise_multiplier", part=part, quantity=quantity)]
                      for quantity in ("squared error", "floor"))  # fmt: skip
    doubled = [(one, two) for found in (errors, floors) for one in found for two in found
               if two["noise_multiplier"] == 2 * one["noise_multiplier"]]  # fmt: skip
    yield Claim(
        "Twice the noise multiplier has three to five times the squared error, of a release and at the floor.",
        every(is_below(one, two, 1 / 3) and is_below(two, one, 5) for one, two in doubled),
        shown(selected(rows, part="noise multiplier"), "quantity", "noise_multiplier"),
    )
    factor = theory.noise_floor(1.0, 1 - STEP_SIZE)
    yield Claim(
        f"Runs with a constant step of {STEP_SIZE:g} have a floor of {factor:.3g} times the squared error of a "
        "release, up to 15 %.",
        every(
            is_below(floor, error, 1.15 * factor) and is_below(error, floor, 1 / (0.85 * factor))
            for error, floor in zip(errors, floors, strict=True)
        ),
        shown([*errors, *floors], "quantity", "part", "noise_multiplier"),
    )
    of_epsilons = sorted(selected(errors, part="epsilon"), key=lambda row: row["epsilon"])
    yield Claim(
        "A larger epsilon has a smaller error.",
        every(is_below(large, small) for small, large in pairwise(of_epsilons)),
        shown(of_epsilons, "epsilon"),
    )


def _digits(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about the accuracy of an MLP on digits.

    Args:
      rows: the rows of the study. Without noise the multiplier is 0, and there is no epsilon.
    """
    accuracies = selected(rows, part="digits MLP", quantity="test accuracy")
    noiseless = selected(accuracies, noise_multiplier=0.0)
    noisy = sorted((row for row in accuracies if row not in noiseless), key=lambda row: row["epsilon"])
    yield Claim(
        "At the smallest epsilon the digits' MLP is less accurate than without noise.",
        every(is_below(row, reference) for row in noisy[:1] for reference in noiseless),
        shown([*noiseless, *noisy[:1]], "epsilon"),
    )
    yield Claim(
        "At the largest epsilon the digits' MLP loses less than 0.1 of accuracy to the noise.",
        every(is_below(interval(reference)[1] - 0.1, row) for row in noisy[-1:] for reference in noiseless),
        shown([*noiseless, *noisy[-1:]], "epsilon"),
    )
