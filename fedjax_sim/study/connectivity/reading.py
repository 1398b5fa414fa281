"""This module writes the reading of `connectivity`: paragraphs in plain words from the measured numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedjax_sim.study.connectivity.nodes import AGREED, DEGREE, DPSGD_STEP_SIZE
from fedjax_sim.study.findings import Comparison, comparisons_of


def connectivity_reading(found: Sequence[Comparison]) -> Iterator[str]:
    """Yields paragraphs in plain words that say what the numbers of the study mean.

    Args:
      found: the comparisons of the study.
    """
    # The last comparison of each graph, after the most rounds.
    last = {comparison.conditions["graph"]: comparison for comparison in comparisons_of(found, "decay")}
    if last:
        size = next(iter(last.values())).conditions["nodes"]
        distances = ", ".join(
            f"{_with_article(name)} {comparison.measured:.2g} after {comparison.conditions['rounds']} rounds"
            for name, comparison in last.items()
        )
        yield (
            f"{size:,} nodes that start apart by 1 (mean squared distance) are apart by {distances}. All eigenvalues "
            "decide the first rounds: on a ring the distance falls as one over the root of the rounds, on a torus as "
            "one over the rounds, because many slow modes die one after the other. Only then the second eigenvalue "
            "takes over, which for a ring of this size is after about as many rounds as the square of its length. "
            f"Graphs whose gap does not shrink with N, such as a random one of degree {DEGREE}, agree within some tens "
            "of rounds."
        )
    rounds = {comparison.conditions["graph"]: comparison for comparison in comparisons_of(found, "agreement", "rounds")}
    sent = {comparison.conditions["graph"]: comparison for comparison in comparisons_of(found, "agreement", "bytes")}
    if rounds:
        ordered = sorted(sent, key=lambda name: sent[name].measured)
        size = rounds[ordered[0]].conditions["nodes"]
        numbers = ", ".join(f"{_with_article(name)} {comparison.measured:.0f}" for name, comparison in rounds.items())
        costs = ", ".join(f"{_with_article(name)} {sent[name].measured:,.0f}" for name in ordered)
        yield (
            f"Until {size} nodes agree to {AGREED:g} of their squared distance: {numbers} rounds. A round costs two "
            "messages an edge, so more edges are paid for in each round and saved in rounds: in bytes for each number "
            f"of the model, {costs}. Where a round has a latency rounds count, where links are slow bytes do; a path "
            "or a ring is dear in both."
        )
    floors = {comparison.conditions["graph"]: comparison for comparison in comparisons_of(found, "floor")}
    if floors:
        best, worst = (pick(floors, key=lambda name: floors[name].measured) for pick in (min, max))
        yield (
            f"With gradients, a constant rate of {DPSGD_STEP_SIZE:g} and optima that differ from node to node, models "
            f"stay at a mean squared distance of {floors[worst].measured:.2g} from the common optimum on "
            f"{_with_article(worst)} and {floors[best].measured:.2g} on {_with_article(best)}. Noise in the nodes' "
            f"mean gives {floors[best].conditions['of_mean']:.2g} of it on every graph; the rest is what keeps nodes "
            "apart, and falls with the gap. Most of it are the nodes' own optima, which gradient tracking takes away, "
            "or a rate that decays."
        )


def _with_article(name: str) -> str:
    """Returns the name of a graph as it is written in a sentence."""
    return {"complete": "the complete graph", "random": "the random graph"}.get(name, f"the {name}")
