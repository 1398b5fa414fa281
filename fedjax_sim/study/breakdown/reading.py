"""What the findings of `breakdown` say, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fedjax_sim.study.findings import Comparison, comparisons_of

__all__ = ["breakdown_reading"]


def breakdown_reading(found: Sequence[Comparison], options: dict[str, Any]) -> Iterator[str]:
    """Paragraphs, from the numbers that were found."""
    m, f = options["num_messages"], options["num_byzantine"]
    points = comparisons_of(found, "far messages")
    told = ", ".join(f"{one.conditions['rule']} {one.measured:g}" for one in points if one.measured < m)
    never = ", ".join(one.conditions["rule"] for one in points if one.measured >= m)
    yield (
        f"Fewest of {m} clients that break a rule by one far message which all of them send, where rules are told "
        f"f = {f}: {told}{f'; none break {never}, which moves by its radius at most' * bool(never)}. Rules that choose "
        "whole messages break later than they promise, for far messages are easily told; what they promise is f. The "
        "geometric median is that of 400 steps here: after few it has not followed a majority over this distance."
    )
    yield (
        "Attackers who stay near do not break a rule and still move it. What the worst of the attacks here does, in "
        "units of the honest messages' variance: "
        + "; ".join(
            f"{one.conditions['rule']}, {one.conditions['attackers']} attackers: {one.measured:.2g} "
            f"(at most {one.predicted:.3g})"
            for one in comparisons_of(found, "worst attack", attackers=max(options["attackers"]))
        )
        + ". The bounds hold for every attack and every set of honest messages; normal messages are kind to rules."
    )
