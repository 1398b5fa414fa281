"""What the findings of `robustness` say, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fedjax_sim.study.findings import Comparison, comparisons_of

__all__ = ["robustness_reading"]


def robustness_reading(found: Sequence[Comparison], options: dict[str, Any]) -> Iterator[str]:
    """Paragraphs, from the numbers that were found."""
    for f in options["attackers"]:
        worst = sorted(comparisons_of(found, "worst case", attackers=f), key=lambda one: -one.measured)
        told = "; ".join(f"{one.conditions['rule']} {one.measured:.3f} ({one.conditions['attack']})" for one in worst)
        yield f"With {f} attackers among {options['num_clients']} clients the worst cases are, best rule first: {told}."
    if "none" in options["attacks"]:
        least = min(options["attackers"])
        honest = comparisons_of(found, "accuracy", attackers=least, attack="none")
        told = "; ".join(f"{one.conditions['rule']} {one.measured:.3f}" for one in honest)
        yield f"What the rules, set for {least} attackers, reach if nobody attacks: {told}."
    yield (
        f"Numbers are means of {options['num_runs']} runs, and deviations are over these runs; all compositions share "
        "clients, first models and minibatches, run by run. A worst case is the least of the attacks that were tried: "
        "it bounds what a rule can be trusted with from above only, and the ranks of rules change with the data, with "
        "how unlike clients are (alpha), and with local work."
    )
