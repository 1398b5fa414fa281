"""This module writes the reading of `breakdown`: paragraphs in plain words from the measured numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fedjax_sim.study.findings import Comparison, comparisons_of


def breakdown_reading(found: Sequence[Comparison], options: dict[str, Any]) -> Iterator[str]:
    """Yields paragraphs in plain words that say what the numbers of the study mean.

    Args:
      found: the comparisons of the study.
      options: the study's options.
    """
    m = options["num_messages"]
    f = options["num_byzantine"]
    points = comparisons_of(found, "far messages")
    broken = ", ".join(f"{point.conditions['rule']} {point.measured:g}" for point in points if point.measured < m)
    unbroken = ", ".join(point.conditions["rule"] for point in points if point.measured >= m)
    unbroken_text = f"; none break {unbroken}, which moves by its radius at most" * bool(unbroken)
    yield (
        f"Fewest of {m} clients that break a rule by one far message which all of them send, where rules are told f = "
        f"{f}: {broken}{unbroken_text}. Rules that choose whole messages break later than they promise, for far "
        "messages are easily told; what they promise is f. The geometric median is that of 400 steps here: after few "
        "it has not followed a majority over this distance."
    )
    yield (
        "Attackers who stay near do not break a rule and still move it. What the worst of the attacks here does, in "
        "units of the honest messages' variance: "
        + "; ".join(
            f"{comparison.conditions['rule']}, {comparison.conditions['attackers']} attackers: "
            f"{comparison.measured:.2g} (at most {comparison.predicted:.3g})"
            for comparison in comparisons_of(found, "worst attack", attackers=max(options["attackers"]))
        )
        + ". The bounds hold for every attack and every set of honest messages; normal messages are kind to rules."
    )
