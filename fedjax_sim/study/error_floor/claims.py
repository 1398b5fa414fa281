"""This module draws the conclusions of `error_floor` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from fedjax_sim.study.claims import Claim, Row, every, is_below, is_within, selected, shown
from fedjax_sim.study.error_floor.base import NAMES, base_setting


def error_floor_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about the causes of a floor, and about what raises and lowers it.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    yield from _causes(rows)
    yield from _settings(rows)
    yield from _bits(rows, base_setting(options).bits)
    network = selected(rows, part="digits MLP")
    yield Claim(
        "The floor of a small network on digits lies within a factor of 1.5 of the estimate from three matrices.",
        every(is_within(row, row["predicted"] / 1.5, 1.5 * row["predicted"]) for row in network),
        shown([row | {"setting": f"{row['value']}, estimated {row['predicted']:.3g}"} for row in network], "setting"),
    )


def _causes(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about the floor with one cause alone."""
    alone = {row["value"]: row for row in selected(rows, part="each alone")}
    sampling, drift = alone[NAMES["client_sampling"]], alone[NAMES["drift"]]
    yield Claim(
        "Client sampling alone has a higher floor than any other cause alone.",
        every(is_below(row, sampling) for row in alone.values() if row is not sampling),
        shown(list(alone.values()), "value"),
    )
    yield Claim(
        "Client drift leaves a floor without any noise: an excess loss above 1e-5.",
        every([is_below(1e-5, drift)]),
        shown([drift]),
    )


def _settings(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about the floor of all causes together, where one setting is varied.

    Args:
      rows: the rows of the study.
    """
    for name, words in (
        ("step_size", "A larger step size has a higher floor."),
        ("num_steps", "More local steps have a higher floor."),
        ("noise_multiplier", "More privacy noise has a higher floor."),
    ):
        floors = _by_value(rows, name)
        yield Claim(words, every(is_below(low, high) for low, high in pairwise(floors)), shown(floors, name))
    cohorts = _by_value(rows, "cohort_size")
    yield Claim(
        "The floor falls faster than 1 / m with the cohort size m.",
        every(is_below(large, small, small["value"] / large["value"]) for small, large in pairwise(cohorts)),
        shown(cohorts, "cohort_size"),
    )


def _bits(rows: Sequence[Row], base_bits: int) -> Iterator[Claim]:
    """Yields a claim about the bits of a number: few raise the floor, and many do not lower it much."""
    floors = _by_value(rows, "bits")
    (base,) = selected(floors, bits=base_bits)
    fewer, more = ([row for row in floors if sign * (row["bits"] - base_bits) > 0] for sign in (-1, 1))
    yield Claim(
        f"With fewer than {base_bits} bits a number the floor is higher by a quarter or more, and with more bits it is "
        "at least half as high: other causes remain.",
        every((is_below(base, row, 0.8) for row in fewer), (is_below(base, row, 2) for row in more)),
        shown(floors, "bits"),
    )


def _by_value(rows: Sequence[Row], name: str) -> list[Row]:
    """Returns a floor for each value of a setting, sorted by the values, which also stand in the setting's column."""
    floors = {row["value"]: {**row, name: row["value"]} for row in selected(rows, part=name)}
    return [floors[value] for value in sorted(floors)]
