"""This module writes the reading of `robustness`: paragraphs in plain words from the measured numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fedjax_sim.study.findings import Comparison, comparisons_of


def robustness_reading(found: Sequence[Comparison], options: dict[str, Any]) -> Iterator[str]:
    """Yields paragraphs in plain words that say what the numbers of the study mean.

    Args:
      found: the comparisons of the study.
      options: the study's options.
    """
    for f in options["attackers"]:
        worst = sorted(comparisons_of(found, "worst case", attackers=f), key=lambda comparison: -comparison.measured)
        numbers = "; ".join(
            f"{comparison.conditions['rule']} {comparison.measured:.3f} ({comparison.conditions['attack']})"
            for comparison in worst
        )
        yield (
            f"With {f} attackers among {options['num_clients']} clients the worst cases are, best rule first: "
            f"{numbers}."
        )
    if "none" in options["attacks"]:
        fewest_attackers = min(options["attackers"])
        honest = comparisons_of(found, "accuracy", attackers=fewest_attackers, attack="none")
        numbers = "; ".join(f"{comparison.conditions['rule']} {comparison.measured:.3f}" for comparison in honest)
        yield f"What the rules, set for {fewest_attackers} attackers, reach if nobody attacks: {numbers}."
    yield (
        f"Numbers are means of {options['num_runs']} runs, and deviations are over these runs; all compositions share "
        "clients, first models and minibatches, run by run. A worst case is the least of the attacks that were tried: "
        "it bounds what a rule can be trusted with from above only, and the ranks of rules change with the data, with "
        "how unlike clients are (alpha), and with local work."
    )
