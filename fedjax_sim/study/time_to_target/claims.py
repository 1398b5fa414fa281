"""This module draws the conclusions of `time_to_target` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_sim.study.claims import Claim, Row, every, is_below, selected, shown


def time_to_target_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about times of rounds, updates a second, staleness, and seconds to the target.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    yield from _steps(rows, options)
    yield from _seconds_to_target(rows)


def _steps(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields claims about the steps of servers that wait and of those that do not.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    rounds = selected(rows, quantity="seconds a round")
    waiting, ending = _parted(rounds)
    yield Claim(
        "A round that waits for all lasts more than one and a half times as long as one that ends at a deadline or "
        "with the first of 130 %.",
        every(is_below(early, late, 1 / 1.5) for late in waiting for early in ending),
        shown(rounds, "server"),
    )
    # A round that waits for all makes an update for each client of its cohort.
    updates, share = selected(rows, quantity="seconds an update"), 1 / options["cohort_size"]
    yield Claim(
        "An asynchronous server makes more than twice as many updates a second as rounds that wait for all.",
        every(is_below(row, round_of_all, share / 2) for row in updates for round_of_all in waiting),
        shown(updates, "server"),
    )
    staleness = {row["server"]: row for row in selected(rows, quantity="staleness")}
    buffered, single = (staleness.get(name) for name in ("FedBuff", "FedAsync"))
    yield Claim(
        "Updates are less than half as stale in FedBuff, which makes a version of several, as in FedAsync.",
        every([is_below(buffered, single, 0.5)] if buffered and single else []),
        shown(list(staleness.values()), "server"),
    )


def _seconds_to_target(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about the simulated seconds until the target accuracy.

    Args:
      rows: the rows of the study; a server of which not all runs reached the target has no seconds.
    """
    seconds = selected(rows, quantity="seconds to target")
    waiting, others = _parted(seconds)
    yield Claim(
        "Rounds that wait for all take more seconds to the target than every other server that reaches it.",
        every(is_below(row, late) for late in waiting for row in others),
        shown(seconds, "server"),
    )
    fedbuff = selected(seconds, server="FedBuff")
    deadlines = [row for row in seconds if row["server"].startswith("deadline")]
    yield Claim(
        "FedBuff takes fewer seconds to the target than rounds that end at a deadline.",
        every(is_below(asynchronous, row) for asynchronous in fedbuff for row in deadlines),
        shown([*fedbuff, *deadlines], "server"),
    )


def _parted(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Returns the row of the server that waits for all, and the rows of the others."""
    return selected(rows, server="waits for all"), [row for row in rows if row["server"] != "waits for all"]
