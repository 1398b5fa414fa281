"""This module writes the reading of `central_local`: paragraphs in plain words from the measured numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fedjax_sim.study.charts import rows_of
from fedjax_sim.study.findings import Comparison
from fedjax_sim.text.bounds import shown_up


def central_local_reading(found: Sequence[Comparison], options: dict[str, Any]) -> Iterator[str]:
    """Yields paragraphs in plain words that say what the numbers of the study mean.

    Args:
      found: the comparisons of the study.
      options: the study's options.
    """
    smallest_cohort = options["cohort_sizes"][0]
    largest_cohort = options["cohort_sizes"][-1]
    slopes = {row["place"]: row["measured"] for row in rows_of(found, part="slope")}
    yield (
        "The variance of a coordinate of the mean is (z C / m)^2 with noise once on the sum, or in shares that add up "
        f"to it, and (z C)^2 / m with noise on every update: slopes {slopes['central']:.3f}, "
        f"{slopes['distributed']:.3f} and {slopes['local']:.3f} in m. Of the mean, at fixed z and C: on the sum the "
        "same noise is O(1) against O(m): quoting O(1/m^2) against O(1/m) needs the quantity that is meant."
    )
    yield (
        f"At one multiplier local noise costs m times as much variance, {largest_cohort:,} times at m = "
        f"{largest_cohort:,}; and four times that if it has to hide which message of all possible ones was sent "
        "(sensitivity 2 C), while central noise hides whether one was sent (C)."
    )
    small_cohort_rows, large_cohort_rows = (
        {row["place"]: row for row in rows_of(found, part="equal epsilon", cohort_size=size)}
        for size in (smallest_cohort, largest_cohort)
    )
    factors = [
        rows["local"]["predicted"] / rows["central, fixed-size"]["predicted"]
        for rows in (small_cohort_rows, large_cohort_rows)
    ]
    z = {name: shown_up(row["noise_multiplier"], 3) for name, row in large_cohort_rows.items()}
    budget = f"epsilon {shown_up(options['epsilon'], 6)} and delta {shown_up(options['delta'], 6)}"
    yield (
        f"One multiplier is not one epsilon. At {budget} after "
        f"{options['num_rounds']:,} rounds with {largest_cohort:,} of {options['num_clients']:,} clients, central "
        f"noise needs z = {z['central, fixed-size']} (fixed-size cohorts, a replaced client; "
        f"{z['central, Poisson']} for Poisson ones and an absent client) and local noise {z['local']}, for "
        "every message is a release of its own, and sampling amplifies nothing against an observer of it: "
        f"{factors[1]:,.0f} times the variance, and {factors[0]:,.0f} times with cohorts of {smallest_cohort:,}. The "
        "multipliers come from accountants: sqrt(2 ln(1.25 / delta)) / epsilon holds for epsilon < 1 only, and is "
        "loose."
    )
    yield (
        "The difference is in who must be trusted: central noise needs a server that sees every update and keeps the "
        "cohort secret, shares need secure aggregation in which all messages arrive, local noise needs no trusted "
        "party. These are three mechanisms, not three words for one."
    )
