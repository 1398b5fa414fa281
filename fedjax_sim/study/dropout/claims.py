"""This module draws the conclusions of `dropout` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_sim.study.claims import Claim, Row, every, is_below, rising, selected, shown


def dropout_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about aborted rounds on two graphs, and about the messages in a sum.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    complete, circle = (
        rising(rows, "dropout", part=part, quantity="aborted share") for part in ("complete graph", "circle")
    )
    ends = [(found[0], found[-1]) for found in (complete, circle) if len(found) > 1]
    yield Claim(
        "More rounds are aborted at the largest probability of leaving than at the smallest, on both graphs.",
        every(is_below(least, most) for least, most in ends),
        shown([row for pair in ends for row in pair], "part", "dropout"),
    )
    upper_half = slice(len(complete) // 2, None)
    pairs = list(zip(complete[upper_half], circle[upper_half], strict=True))
    yield Claim(
        "A circle aborts more rounds than the complete graph at the same share of holders, at every probability of the "
        "upper half.",
        every(is_below(of_complete, of_circle) for of_complete, of_circle in pairs),
        shown([row for pair in pairs for row in pair], "part", "dropout"),
    )
    certain = [row for row in circle if row["predicted"] >= 1][:1]
    yield Claim(
        "On the circle most rounds still succeed at the first probability at which the upper bound is 1.",
        every(is_below(row, 0.5) for row in certain),
        shown(certain, "dropout"),
    )
    # Where nobody leaves, or everybody, both numbers are the same.
    messages = [row for row in selected(rows, quantity="messages in a sum") if 0 < row["dropout"] < 1]
    yield Claim(
        "A sum holds fewer messages than clients stay before a single step, m (1 - p): they leave before several.",
        every(is_below(row, options["num_clients"] * (1 - row["dropout"])) for row in messages),
        shown(messages, "part", "dropout"),
    )
