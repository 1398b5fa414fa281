"""What the findings of `heterogeneity` say, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fedjax_sim.study.findings import Comparison
from fedjax_sim.study.heterogeneity.ranks import FAMILIES, RANKS, by_population

__all__ = ["heterogeneity_reading"]


def heterogeneity_reading(options: dict[str, Any], found: Sequence[Comparison]) -> Iterator[str]:
    """Paragraphs, from the numbers that were found."""
    yield (
        "Distances of label distributions measure how far apart the clients' optima are only if labels have positions: "
        "for labels 0, 1, 2 the best constants of (.2, .5, .3) and (.5, .3, .2) are 0.4 apart, which is their earth "
        "mover's distance too, for one dominates the other; (.5, 0, .5) and (0, 1, 0) are 1 apart by it and have the "
        "same best constant. Without positions there is total variation, whose double, L1, some papers call the earth "
        "mover's distance. The digits' positions are their values, which have no meaning for a classifier: that column "
        "is for comparison."
    )
    rounds = by_population(found, "quadratics", "rounds to target")
    spread = by_population(found, "quadratics", "gradient dissimilarity")
    if len(rounds) > 1:
        (first, least), (last, most) = (list(rounds.items())[i] for i in (0, -1))
        drifts = most.measured > least.measured
        why = "the more clients differ, the smaller the step must be for its fixed point to lie below the target"
        yield (
            f"On quadratics rounds have a closed form. With K = {options['num_steps']} and the best constant step, a "
            f"thousandth of the start's loss takes {least.measured:g} rounds at gradient dissimilarity "
            f"{spread[first].measured:.3g} (at the optimum) and {most.measured:g} at {spread[last].measured:.3g}"
            + (f": {why}." if drifts else ". One local step has no drift: how much clients differ changes nothing.")
        )
    for part in FAMILIES:
        slow = by_population(found, part, "slowdown")
        lost = by_population(found, part, "loss after the last round / target")
        shown = ", ".join(f"{name}: {one.measured:.3g}" for name, one in slow.items())
        words = f"{part}, rounds over those of the same examples shuffled: {shown}." if slow else f"{part}:"
        if lost:
            words += f" There is no slowdown for {', '.join(lost)}: some runs did not reach the target in time."
        if slow or lost:
            yield words
    ranks = {one.conditions["part"]: [] for one in found if one.conditions["part"].startswith(RANKS)}
    for one in found:
        if one.conditions["part"] in ranks:
            sign = -1 if one.quantity == "labels per client" else 1  # the only one that falls with heterogeneity
            ranks[one.conditions["part"]].append((sign * one.measured, one))
    for part, ones in ranks.items():
        best, worst = (pick(rank for rank, _ in ones) for pick in (max, min))
        first = ", ".join(one.quantity for rank, one in ones if rank > best - 1e-9)
        last = ", ".join(one.quantity for rank, one in ones if rank < worst + 1e-9)
        least = f"least with {last} ({worst:.2g})"
        words = least if worst < best - 1e-9 else "no measure is better than another"
        yield (
            f"{part[len(RANKS) :].capitalize()}, {ones[0][1].conditions['population']}: the order of the slowdowns "
            f"agrees best with {first} (rank correlation {best:.2g}); {words}. That was measured on a few populations "
            "and need not hold on others, and a rank does not give the number of rounds."
        )
    yield (
        "Gradient dissimilarity is measured at one model, here the first one, and changes as training goes on; B "
        "divides by the common gradient, and so grows without limit towards the optimum. In Synthetic(alpha, beta) "
        "every client has a labelling of its own even at (0, 0), which label shares do not show. Examples are compared "
        "with themselves, shuffled, so that the slowdown does not depend on how hard the problem is."
    )
