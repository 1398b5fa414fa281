"""This module draws the conclusions of `clip` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_sim import theory
from fedjax_sim.study.claims import Claim, Row, every, is_below, rising, selected, shown
from fedjax_sim.study.clip.figure import PERSONAL, fixed_multiplier


def clip_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about the best clip norm, its two limits, personal thresholds and error floors.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    multiplier = fixed_multiplier(options["noise_multipliers"])
    around = rising(rows, "clip_norm", part="around the best")
    # For each z a third of the best clip norm, the best, and three times of it.
    best = {z: selected(around, noise_multiplier=z) for z in options["noise_multipliers"]}
    yield Claim(
        "The error is smaller at the computed best clip norm than at a third and at three times of it, for each noise "
        "multiplier.",
        every(is_below(at_best, row) for third, at_best, thrice in best.values() for row in (third, thrice)),
        shown([row for found in best.values() for row in found], "noise_multiplier", "clip_norm"),
    )
    yield from _limits(rows, multiplier, options)
    personal, at_best = selected(rows, part=PERSONAL), best[multiplier][1]
    yield Claim(
        "Thresholds in proportion to each client's own norm, for which no epsilon can be stated, have more than 1.5 "
        "times the error of the best clip norm for all.",
        every(is_below(at_best, row, 1 / 1.5) for row in personal),
        shown([at_best, *personal], "part", "clip_norm"),
    )
    floors = rising(rows, "clip_norm", part="floor")
    lowest = sorted(floors[1:-1], key=lambda row: row["measured"])[:1]
    yield Claim(
        "Runs to the error floor come closest at a clip norm between the smallest and the largest.",
        every(is_below(row, end) for row in lowest for end in (floors[0], floors[-1])),
        shown(floors, "clip_norm"),
    )


def _limits(rows: Sequence[Row], multiplier: float, options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields claims about what the error consists of at the smallest and at the largest clip norm.

    Args:
      rows: the rows of the study.
      multiplier: z along the clip norms.
      options: the study's options.
    """
    releases, biases = (rising(rows, "clip_norm", part=part) for part in ("clip norm", "bias alone"))
    yield Claim(
        "At the smallest clip norm more than nine tenths of the error are the bias of clipping.",
        every([is_below(releases[0], biases[0], 1 / 0.9)]),
        shown([releases[0], biases[0]], "part", "clip_norm"),
    )
    largest = releases[-1]
    noise = theory.noise_variance(
        multiplier, largest["clip_norm"], options["cohort_size"], num_values=options["dimension"]
    )
    yield Claim(
        "At the largest clip norm more than nine tenths of the error are the noise, d (z C / m)^2.",
        every([is_below(largest, noise / 0.9)]),
        f"noise: {noise:.3g}; {shown([largest], 'part', 'clip_norm')}",
    )
