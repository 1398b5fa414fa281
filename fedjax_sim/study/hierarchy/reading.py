"""This module writes the reading of `hierarchy`: paragraphs in plain words from the measured numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fedjax_sim.study.findings import Comparison, comparisons_of


def hierarchy_reading(found: Sequence[Comparison], options: dict[str, Any]) -> Iterator[str]:
    """Yields paragraphs in plain words that say what the numbers of the study mean.

    Args:
      found: the comparisons of the study.
      options: the study's options.
    """
    most_edge_rounds = options["edge_rounds"][-1]
    ends = {
        (name, kappa): comparisons_of(found, "fixed point", groups=name, edge_rounds=kappa)[0].measured
        for name in ("alike", "mixed")
        for kappa in (1, most_edge_rounds)
    }
    yield (
        "With one edge round in a cloud round and edges weighed by their data, a hierarchy is flat FedAvg, whatever "
        f"the groups: both end {ends['alike', 1]:.3g} from the optimum, which is FedAvg's own bias at "
        f"K = {options['num_steps']} local steps. It costs nothing, and the cloud hears {options['num_edges']} edges "
        f"in the place of {options['num_clients']} clients."
    )
    if most_edge_rounds > 1:
        yield (
            "More edge rounds are like more local steps, one level up: the cloud then averages what the edges converge "
            f"to by themselves. With {most_edge_rounds} of them it ends {ends['alike', most_edge_rounds]:.3g} from the "
            f"optimum where an edge's clients are alike, and {ends['mixed', most_edge_rounds]:.3g} where each edge has "
            "some of every kind. What counts is how much edges differ from each other, not how much clients do."
        )
        rounds = {
            kappa: comparisons_of(found, "speed", groups="mixed", edge_rounds=kappa)[0].measured
            for kappa in (1, most_edge_rounds)
        }
        yield (
            f"What it buys is cloud traffic: 1 % of the way is left after {rounds[1]:.0f} cloud rounds with one edge "
            f"round each, and after {rounds[most_edge_rounds]:.0f} with {most_edge_rounds} (mixed groups); the "
            "traffic between clients and edges does not fall."
        )
    if comparisons_of(found, "digits"):
        yield _digits(found, options)


def _digits(comparisons: Sequence[Comparison], options: dict[str, Any]) -> str:
    """Writes what edges do to the model of digits.

    Args:
      comparisons: the comparisons of the study; those of the part "digits" are quoted.
      options: the study's options; `model_rounds` and `edge_rounds` are quoted.

    Returns: a paragraph.
    """

    def accuracy(way, kappa):
        return comparisons_of(comparisons, "digits", groups=way, edge_rounds=kappa)[0]

    flat = accuracy("flat", 1)
    one_edge_round = accuracy("random", 1)
    text = (
        f"Softmax regression on digits after {options['model_rounds']} cloud rounds: flat FedAvg reaches "
        f"{flat.measured:.1%} with {flat.conditions['cloud_bytes'] / 1e6:.2f} MB to the cloud, edges with one round "
        f"each {one_edge_round.measured:.1%} with {one_edge_round.conditions['cloud_bytes'] / 1e6:.2f} MB."
    )
    if more_edge_rounds := options["edge_rounds"][1:]:
        numbers = {
            way: ", ".join(f"{accuracy(way, kappa).measured:.1%}" for kappa in more_edge_rounds)
            for way in ("random", "labels")
        }
        text += (
            f" For the same bytes to the cloud {', '.join(map(str, more_edge_rounds))} edge rounds in each of its "
            f"rounds reach {numbers['random']} where edges have random clients, and {numbers['labels']} where an "
            "edge's clients have labels that are alike."
        )
    return text
