"""This module draws the conclusions of `availability` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from fedjax_sim.study.claims import Claim, Row, every, interval, is_below, is_within, rising, selected, shown


def availability_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about clients with rates of their own, who stay for long, and in time zones.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    yield from _by_client(rows)
    yield from _for_a_while(rows)
    yield from _by_hour(rows)


def _by_client(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about the bias of the mean over available clients, and about its correction and the price.

    Args:
      rows: the rows of the study.
    """

    def of(aggregate: str, quantity: str) -> list[Row]:
        return rising(rows, "correlation", part="by client", aggregate=aggregate, quantity=quantity)

    bias, corrected_bias = of("mean", "bias"), of("corrected", "bias")
    yield Claim(
        "The mean over available clients converges to a point away from the optimum, further away for a stronger "
        "correlation between a client's data and its response rate.",
        every(_is_small(weaker, stronger, 1) for weaker, stronger in pairwise(bias)),
        shown(bias, "correlation"),
    )
    yield Claim(
        "Weighting each update by 1 / (N x response rate) leaves less than a fifth of the bias at the strongest "
        "correlation.",
        every([_is_small(corrected_bias[-1], bias[-1], 0.2)]),
        shown([bias[-1], corrected_bias[-1]], "aggregate"),
    )
    loss, corrected_loss = of("mean", "excess loss"), of("corrected", "excess loss")
    yield Claim(
        "The correction has the larger excess loss at the weakest correlation, and the smaller one at the strongest.",
        every([is_below(loss[0], corrected_loss[0]), is_below(corrected_loss[-1], loss[-1])])
        if len(loss) > 1
        else None,
        shown([loss[0], corrected_loss[0], loss[-1], corrected_loss[-1]], "aggregate", "correlation"),
    )


def _for_a_while(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about clients who stay for several rounds, whatever their data.

    Args:
      rows: the rows of the study.
    """
    biased = selected(rows, part="by client", aggregate="mean", quantity="bias")
    worst_bias = max(biased, key=lambda row: row["correlation"])
    bias, loss = (rising(rows, "stay", part="for a while", quantity=quantity) for quantity in ("bias", "excess loss"))
    yield Claim(
        "Clients who are available half of the time whatever their data cause less than a fifth of the bias of the "
        "strongest correlation, however long they stay.",
        every(_is_small(row, worst_bias, 0.2) for row in bias),
        shown(bias, "stay"),
    )
    yield Claim(
        "Every longer stay has a larger excess loss than the shortest, although stays do not depend on clients' data.",
        every(is_below(loss[0], row) for row in loss[1:]),
        shown(loss, "stay"),
    )


def _by_hour(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about clients who are available at night, with data that go with their time zones.

    Args:
      rows: the rows of the study.
    """
    around_the_clock = selected(rows, part="by hour", training="around the clock")
    small_step, large_step = (
        {row["hour"]: row for row in selected(around_the_clock, step_size=step_size)}
        for step_size in sorted({row["step_size"] for row in around_the_clock})
    )
    yield Claim(
        "Where clients are available at night, a tenth of the step size more than halves the model's distance from the "
        "optimum at every hour.",
        every(is_below(small_step[hour], large_step[hour], 0.5) for hour in large_step),
        shown(around_the_clock, "step_size", "hour"),
    )
    at_one_hour = selected(rows, part="by hour", training="at one hour")
    yield Claim(
        "A server that trains at one hour only ends further from the optimum than around the clock.",
        every(
            is_below(row, once)
            for once in at_one_hour
            for row in selected(around_the_clock, step_size=once["step_size"])
        ),
        shown(at_one_hour, "step_size"),
    )


def _is_small(row: Row, high: Row, share: float) -> bool:
    """Returns whether a number's absolute value is below a share of another, at every point of their intervals."""
    most = share * interval(high)[0]
    return is_within(row, -most, most)
