"""This module draws the conclusions of `bits` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from fedjax_sim import theory
from fedjax_sim.study.bits.messages import FEEDBACK_ROUNDS, GRID_NAMES
from fedjax_sim.study.claims import Claim, Row, every, is_below, is_within, rising, selected, shown


def bits_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about floors and bytes, the two roundings, and error feedback.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    yield from _floors(rows, options["bits"])
    yield from _roundings(rows)
    yield from _feedback(rows)


def _floors(rows: Sequence[Row], bits: Sequence[int]) -> Iterator[Claim]:
    """Yields claims about floors on the textbook's grid, and about bytes on the way to them.

    Args:
      rows: the rows of the study.
      bits: bits for each number, rising.
    """
    ratios = {row["messages"]: row for row in selected(rows, part="ratio of floors")}
    yield Claim(
        "Each extra bit divides the error floor by four or more.",
        every(is_below(4 ** (many - few), ratios[f"{few} and {many} bits"]) for few, many in pairwise(bits)),
        shown(list(ratios.values()), "messages"),
    )
    pairs = []
    for few, many in pairwise(bits):
        paths = [{row["bytes_sent"]: row for row in selected(rows, part="path", bits=b)} for b in (few, many)]
        fewest_bytes = sorted(paths[0].keys() & paths[1].keys())[:1]
        pairs += [(paths[0][sent], paths[1][sent]) for sent in fewest_bytes]
    yield Claim(
        "While the floor is far, fewer bits come closer to the optimum for the same bytes.",
        every(is_below(fewer, more) for fewer, more in pairs),
        shown([row for pair in pairs for row in pair], "bits", "bytes_sent"),
    )


def _roundings(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about single rounds: numbers near zero, and nearest beside stochastic rounding.

    Args:
      rows: the rows of the study.
    """
    near_zero = selected(rows, part="near zero", cohort_size=1)
    textbook, with_zero = (
        selected(near_zero, messages=f"stochastic, {GRID_NAMES[keeps_zeros]}") for keeps_zeros in (False, True)
    )
    formula = theory.expected_squared_error(1, 2, keeps_zeros=False)
    yield Claim(
        "For numbers near zero, the error is larger than Delta^2 / 6 on the textbook's grid, and smaller on a grid "
        "with zero.",
        every([*(is_below(formula, row) for row in textbook), *(is_below(row, formula) for row in with_zero)]),
        f"Delta^2 / 6 = {formula:.3g}; {shown([*textbook, *with_zero], 'messages')}",
    )
    alike, spread = (
        rising(rows, "cohort_size", part=part, messages=f"nearest, {GRID_NAMES[False]}")
        for part in ("alike, at 0.3", "spread")
    )
    yield Claim(
        "The error of nearest rounding does not average out over clients who share the position.",
        every(is_below(one, several, 1.01) for one, several in pairwise(alike)),
        shown(alike, "cohort_size"),
    )
    yield Claim(
        "The error of nearest rounding averages out over clients whose positions differ, to less than 3 / m of one "
        "client's.",
        every(is_below(several, one, 3 / several["cohort_size"]) for one, several in pairwise(spread)),
        shown(spread, "cohort_size"),
    )
    crossover = selected(rows, part="crossover", messages="alike, at 0.3")
    yield Claim(
        "At position 0.3, nearest rounding has the smaller error for a mean over two clients, and stochastic rounding "
        "for a mean over three.",
        every(is_within(row, 2, 3) for row in crossover),
        f"equal at m = {shown(crossover)}",
    )


def _feedback(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about runs of biased compressors with constant steps.

    Args:
      rows: the rows of the study.
    """
    by_name: dict[str, list[Row]] = {}
    for row in rising(rows, "step_size", part="feedback"):
        by_name.setdefault(row["messages"], []).append(row)
    biased = [name for name in ("top-k", "sign") if len(by_name[name]) > 1]
    # (at the largest step, at the smallest).
    without = [(by_name[name][-1], by_name[name][0]) for name in biased]
    with_feedback = [(by_name[f"{name}, error feedback"][-1], by_name[f"{name}, error feedback"][0]) for name in biased]
    yield Claim(
        "Without error feedback top-k and signs stall: the smallest step leaves more than half of the squared distance "
        f"that the largest leaves after {FEEDBACK_ROUNDS:,} rounds.",
        every(is_below(largest, smallest, 2) for largest, smallest in without),
        shown([row for pair in without for row in pair], "messages", "step_size"),
    )
    yield Claim(
        "With error feedback the squared distance falls with the step, and is less than a tenth of that without at the "
        "smallest.",
        every(
            is_below(smallest, largest) and is_below(smallest, stalled, 0.1)
            for (largest, smallest), (_, stalled) in zip(with_feedback, without, strict=True)
        ),
        shown([row for pair in with_feedback for row in pair], "messages", "step_size"),
    )
    ef21 = by_name["top-k, EF21"]
    yield Claim(
        "EF21 converges to the optimum at a constant step: to a squared distance below 1e-6 at every step.",
        every(is_below(row, 1e-6) for row in ef21),
        shown(ef21, "step_size"),
    )
