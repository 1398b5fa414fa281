"""This module draws the conclusions of `staleness` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from fedjax_sim.study.claims import Claim, Row, every, is_below, is_within, rising, selected, shown
from fedjax_sim.study.staleness.delays import STEP
from fedjax_sim.study.staleness.speeds import SLOWER

FACTOR, SQUARES = "factor per step", "squared distance"


def staleness_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about stability, floors and errors under delay, weights, speeds, and buffers.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    longest = max(options["delays"])
    yield from _limit(rows, longest)
    yield from _noise(rows)
    yield from _weights(rows, longest)
    yield from _speeds(rows)
    yield from _buffers(rows)


def _limit(rows: Sequence[Row], longest: int) -> Iterator[Claim]:
    """Yields claims about which steps converge, with FedBuff and with FedAsync.

    Args:
      rows: the rows of the study.
      longest: the longest delay, in versions.
    """
    limit = selected(rows, part="limit")
    yield Claim(
        "With curvature 1 and every gradient tau versions old, the error shrinks at 0.99 of the step "
        "2 sin(pi / (2 (2 tau + 1))) and grows at 1.01 of it, for every tau.",
        every(is_below(row, 1) if row["step_over_limit"] < 1 else is_below(1, row) for row in limit),
        # Near one, where `shown` has too few digits.
        "; ".join(f"{row['step_over_limit']:g}: {row['measured']:.5f}" for row in selected(limit, delay=longest)),
    )
    fedasync = rising(rows, "delay", part="same step", algorithm="fedasync", quantity=FACTOR)
    fedbuff = selected(rows, part="same step", algorithm="fedbuff", delay=longest)
    yield Claim(
        f"At the longest delay FedAsync converges with a mixing rate times local step of {STEP:g}, where FedBuff with "
        "a step of the same size diverges.",
        every(is_below(mixed, 1) and is_below(1, added) for mixed, added in zip(fedasync[-1:], fedbuff, strict=True)),
        shown([*fedasync[-1:], *fedbuff], "algorithm", "delay"),
    )
    yield Claim(
        "FedAsync slows down with the delay.",
        every(is_below(early, late) for early, late in pairwise(fedasync)),
        shown(fedasync, "delay"),
    )


def _noise(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about the floor under delay, and about the error of a stale gradient.

    Args:
      rows: the rows of the study.
    """
    at_one_step = _floors(rows)
    yield Claim(
        "At one step, stable at every delay, the longest delay has a higher floor than the shortest.",
        every(is_below(at_one_step[0], row) for row in at_one_step[1:][-1:]),
        shown([*at_one_step[:1], *at_one_step[1:][-1:]], "delay"),
    )
    # Without delay a gradient has no error, and its bound is zero.
    errors = [row for row in selected(rows, part="error", kind="upper bound") if row["predicted"]]
    yield Claim(
        "The error of a stale gradient is between a half and nine tenths of L times the distance that the model has "
        "gone since.",
        every(is_within(row, 0.5 * row["predicted"], 0.9 * row["predicted"]) for row in errors),
        "; ".join(f"delay {row['delay']}: {row['measured'] / row['predicted']:.0%}" for row in errors),
    )


def _weights(rows: Sequence[Row], longest: int) -> Iterator[Claim]:
    """Yields the claims that weights by staleness are a smaller step where all updates are equally stale.

    Args:
      rows: the rows of the study.
      longest: the longest delay, in versions, at which weights are measured.
    """
    factors, squares = (selected(rows, part="weights", quantity=quantity) for quantity in (FACTOR, SQUARES))
    constant = selected(rows, part="limit", delay=longest, step_over_limit=1.01)
    yield Claim(
        "Where all updates are equally stale, discounts by staleness converge at a step where constant weights "
        "diverge.",
        every(is_below(row, 1) and is_below(1, reference) for row in factors for reference in constant),
        shown([*constant, *factors], "weights"),
    )
    floors = selected(_floors(rows), delay=longest)
    yield Claim(
        "Where all updates are equally stale, discounts by staleness lower the floor of the same step.",
        every(is_below(row, reference) for row in squares for reference in floors),
        shown([*floors, *squares], "weights"),
    )


def _speeds(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields the claim about whose optimum is reached where speeds differ.

    Args:
      rows: the rows of the study.
    """
    shares = selected(rows, part="speeds")
    constant = selected(shares, weights="constant")
    discounts = [row for row in shares if row not in constant]
    yield Claim(
        f"Clients who take {SLOWER:g} times as long count less than half of their fair weight, and discounts by "
        "staleness take away more.",
        every(
            (is_below(row, 0.25) for row in constant),
            (is_below(row, reference) for row in discounts for reference in constant),
        ),
        shown(shares, "weights"),
    )


def _buffers(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields the claim that staleness is not delay.

    Args:
      rows: the rows of the study.
    """
    versions, seconds = (
        rising(rows, "buffer_size", part="buffers", quantity=quantity)
        for quantity in ("staleness, versions", "delay, seconds")
    )
    yield Claim(
        "In a larger buffer updates are less stale, though they wait longer before they are used.",
        every(
            [is_below(large, small) for small, large in pairwise(versions)]
            + [is_below(small, large) for small, large in pairwise(seconds)]
        ),
        shown([*versions, *seconds], "quantity", "buffer_size"),
    )


def _floors(rows: Sequence[Row]) -> list[Row]:
    """Returns the floors at one step for all delays; the others are at 3/4 of each delay's limit."""
    return [row for row in rising(rows, "delay", part="floor") if row["step_over_limit"] < 0.7]
