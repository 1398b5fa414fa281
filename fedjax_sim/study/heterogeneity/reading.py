"""This module writes the reading of `heterogeneity`: paragraphs in plain words from the measured numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fedjax_sim.study.findings import Comparison
from fedjax_sim.study.heterogeneity.ranks import FAMILIES, RANKS, by_population


def heterogeneity_reading(options: dict[str, Any], found: Sequence[Comparison]) -> Iterator[str]:
    """Yields paragraphs in plain words that say what the numbers of the study mean.

    Args:
      options: the study's options.
      found: the comparisons of the study.
    """
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
        # Spreads are rising, so the last population is the most heterogeneous one.
        (first, first_rounds), (last, last_rounds) = (list(rounds.items())[i] for i in (0, -1))
        drifts = last_rounds.measured > first_rounds.measured
        why = "the more clients differ, the smaller the step must be for its fixed point to lie below the target"
        yield (
            f"On quadratics rounds have a closed form. With K = {options['num_steps']} and the best constant step, a "
            f"thousandth of the start's loss takes {first_rounds.measured:g} rounds at gradient dissimilarity "
            f"{spread[first].measured:.3g} (at the optimum) and {last_rounds.measured:g} at {spread[last].measured:.3g}"
            + (f": {why}." if drifts else ". One local step has no drift: how much clients differ changes nothing.")
        )
    for part in FAMILIES:
        slowdowns = by_population(found, part, "slowdown")
        unreached = by_population(found, part, "loss after the last round / target")
        numbers = ", ".join(f"{name}: {slowdown.measured:.3g}" for name, slowdown in slowdowns.items())
        text = f"{part}, rounds over those of the same examples shuffled: {numbers}." if slowdowns else f"{part}:"
        if unreached:
            text += f" There is no slowdown for {', '.join(unreached)}: some runs did not reach the target in time."
        if slowdowns or unreached:
            yield text
    ranks = {
        comparison.conditions["part"]: [] for comparison in found if comparison.conditions["part"].startswith(RANKS)
    }
    for comparison in found:
        if comparison.conditions["part"] in ranks:
            # The number of labels per client is the only measure that falls with heterogeneity.
            sign = -1 if comparison.quantity == "labels per client" else 1
            ranks[comparison.conditions["part"]].append((sign * comparison.measured, comparison))
    for part, signed_ranks in ranks.items():
        best, worst = (pick(rank for rank, _ in signed_ranks) for pick in (max, min))
        # Measures may tie, so several can be the best or the worst.
        best_measures = ", ".join(comparison.quantity for rank, comparison in signed_ranks if rank > best - 1e-9)
        worst_measures = ", ".join(comparison.quantity for rank, comparison in signed_ranks if rank < worst + 1e-9)
        worst_text = f"least with {worst_measures} ({worst:.2g})"
        text = worst_text if worst < best - 1e-9 else "no measure is better than another"
        yield (
            f"{part[len(RANKS) :].capitalize()}, {signed_ranks[0][1].conditions['population']}: the order of the "
            f"slowdowns agrees best with {best_measures} (rank correlation {best:.2g}); {text}. That was measured on a "
            "few populations and need not hold on others, and a rank does not give the number of rounds."
        )
    yield (
        "Gradient dissimilarity is measured at one model, here the first one, and changes as training goes on; B "
        "divides by the common gradient, and so grows without limit towards the optimum. In Synthetic(alpha, beta) "
        "every client has a labelling of its own even at (0, 0), which label shares do not show. Examples are compared "
        "with themselves, shuffled, so that the slowdown does not depend on how hard the problem is."
    )
