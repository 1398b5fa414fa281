"""This module draws the conclusions of `connectivity` from its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from fedjax_sim.study.claims import Claim, Row, every, is_below, named, rising, selected, shown

SPARSE, DENSE = ("path", "ring"), ("torus", "hypercube", "complete")  # graphs of the parts with few nodes
POWERS = {"ring": 0.5, "torus": 1.0}  # of one over the rounds, as which the squared distance falls


def connectivity_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about decay of distances, rounds and bytes to agreement, and floors of D-PSGD.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    yield from _decay(rows)
    yield from _agreement(rows)
    yield from _floors(rows)


def _decay(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about many nodes that start apart and average with their neighbours.

    Args:
      rows: the rows of the study.
    """
    by_graph: dict[str, list[Row]] = {}
    for row in rising(rows, "rounds", part="decay"):
        by_graph.setdefault(row["graph"], []).append(row)
    # The first row of a graph and its last one; none of a graph with a single row.
    ends = {name: [(found[0], found[-1])] for name in POWERS if len(found := by_graph.get(name, [])) > 1}
    yield Claim(
        "The squared distance from the mean falls as one over the root of the rounds on a ring, and as one over the "
        "rounds on a torus, up to the factor 2 from the first to the last.",
        every(*([_falls_as(*pair, power, 2) for pair in ends.get(name, [])] for name, power in POWERS.items())),
        shown([row for pairs in ends.values() for pair in pairs for row in pair], "graph", "rounds"),
    )
    # A graph is measured until its nodes agree, so the fast ones have fewer rounds.
    last = min((found[-1]["rounds"] for found in by_graph.values()), default=0)
    at_last = selected(rows, part="decay", rounds=last)
    of_slow, of_fast = named(at_last, "graph", "ring", "torus"), named(at_last, "graph", "exponential", "random")
    yield Claim(
        "On the exponential graph and on a random one nodes come more than a hundred times closer than on a ring or a "
        "torus in the same rounds.",
        every(is_below(near, far, 0.01) for near in of_fast for far in of_slow),
        shown([*of_slow, *of_fast], "graph", "rounds"),
    )


def _falls_as(first: Row, last: Row, power: float, factor: float) -> bool:
    """Returns whether a number falls as a power of the rounds, up to a factor, at every point of the intervals."""
    fall = (first["rounds"] / last["rounds"]) ** power
    return is_below(last, first, factor * fall) and is_below(first, last, factor / fall)


def _agreement(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about few nodes: rounds until they agree, and the bytes that they send by then.

    Args:
      rows: the rows of the study.
    """
    rounds = rising(rows, "gap", part="agreement", quantity="rounds")
    yield Claim(
        "Nodes agree in fewer rounds on a graph with a larger spectral gap.",
        # Few nodes have graphs of one gap: four of them are a ring, a torus and a hypercube.
        every(
            is_below(large_gap, small_gap)
            for small_gap, large_gap in combinations(rounds, 2)
            if not math.isclose(small_gap["gap"], large_gap["gap"])
        ),
        shown(rounds, "graph", "gap"),
    )
    sent = selected(rows, part="agreement", quantity="bytes")
    yield Claim(
        "A path and a ring cost more than five times the bytes of torus, hypercube and complete graph, although they "
        "have the fewest edges.",
        every(is_below(cheap, dear, 0.2) for cheap in _of(sent, DENSE) for dear in _of(sent, SPARSE)),
        shown(sent, "graph", "edges"),
    )


def _floors(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about D-PSGD with a constant step, where optima differ from node to node.

    Args:
      rows: the rows of the study.
    """
    floors = selected(rows, part="floor")
    yield Claim(
        "With gradients and a constant step, hypercube and complete graph leave less than a tenth of the squared "
        "distance from the optimum that path and ring leave.",
        every(is_below(low, high, 0.1) for low in _of(floors, DENSE[1:]) for high in _of(floors, SPARSE)),
        shown(floors, "graph"),
    )
    yield Claim(
        "Noise in the nodes' mean gives less than a tenth of this distance on every graph: the rest keeps nodes apart.",
        every(is_below(row["of_mean"], row, 0.1) for row in floors),
        "; ".join(f"{row['graph']}: {row['of_mean']:.3g} of {row['measured']:.3g}" for row in floors),
    )


def _of(rows: Sequence[Row], graphs: Sequence[str]) -> list[Row]:
    """Returns the rows of some graphs."""
    return [row for row in rows if row["graph"] in graphs]
