"""This module draws the conclusions of `hierarchy` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from fedjax_sim.study.claims import Claim, Row, every, is_below, rising, selected, shown
from fedjax_sim.study.hierarchy.digits import WAYS
from fedjax_sim.study.hierarchy.quadratics import GROUPINGS


def hierarchy_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about the fixed points of edges, cloud rounds, and a model of digits.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    yield from _fixed_points(rows)
    yield from _rounds(rows)
    yield from _digits(rows)


def _fixed_points(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about the distance of the fixed point to the optimum.

    Args:
      rows: the rows of the study.
    """
    alike, mixed = (rising(rows, "edge_rounds", part="fixed point", groups=groups) for groups in GROUPINGS)
    columns = ("groups", "edge_rounds")
    yield Claim(
        "With one edge round in a cloud round it does not matter which clients share an edge: the distances of the "
        "fixed points to the optimum differ by less than 1 %.",
        every([is_below(alike[0], mixed[0], 1.01), is_below(mixed[0], alike[0], 1.01)]),
        shown([alike[0], mixed[0]], *columns),
    )
    yield Claim(
        "More edge rounds in a cloud round end further from the optimum.",
        every(is_below(few, many) for found in (alike, mixed) for few, many in pairwise(found)),
        shown([*alike, *mixed], *columns),
    )
    yield Claim(
        "With several edge rounds, edges whose clients are alike end more than 1.5 times as far from the optimum as "
        "edges with clients of every kind.",
        every(is_below(near, far, 1 / 1.5) for far, near in zip(alike[1:], mixed[1:], strict=True)),
        shown([*alike[1:], *mixed[1:]], *columns),
    )


def _rounds(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about the cloud rounds until 1 % of the way is left.

    Args:
      rows: the rows of the study.
    """
    by_groups = [rising(rows, "edge_rounds", part="speed", groups=groups) for groups in GROUPINGS]
    numbers = shown([row for found in by_groups for row in found], "groups", "edge_rounds")
    yield Claim(
        "More edge rounds in a cloud round take fewer cloud rounds until 1 % of the way is left.",
        every(is_below(many, few) for found in by_groups for few, many in pairwise(found)),
        numbers,
    )
    yield Claim(
        "More edge rounds in a cloud round do not take fewer edge rounds in all, so the traffic between clients and "
        "edges does not fall.",
        # Below 1.01 times as many: the numbers are whole, and may be equal.
        every(is_below(found[0], row, 1.01 * row["edge_rounds"]) for found in by_groups for row in found[1:]),
        numbers,
    )


def _digits(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about a model of digits; its bytes to the cloud do not depend on edge rounds.

    Args:
      rows: the rows of the study. Gains are differences of paired runs.
    """
    one_edge_round = selected(rows, part="one edge round")
    yield Claim(
        "On digits, edges with one edge round in a cloud round end at the model of flat FedAvg, up to a thousandth of "
        "the way from the first model.",
        every(is_below(row, 1e-3) for row in one_edge_round),
        shown(one_edge_round, "groups"),
    )
    gains = [rising(rows, "edge_rounds", part="gain", groups=way) for way in WAYS]
    most = [found[-1] for found in gains if found]
    yield Claim(
        "On digits, the most edge rounds reach a higher accuracy than a single one for the same bytes to the cloud, "
        "whichever clients share an edge.",
        every(is_below(0.0, row) for row in most),
        shown(most, "groups", "edge_rounds"),
    )
