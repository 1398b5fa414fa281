"""What the findings of `central_local` say, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fedjax_sim.study.charts import rows_of
from fedjax_sim.study.findings import Comparison

__all__ = ["central_local_reading"]


def central_local_reading(found: Sequence[Comparison], options: dict[str, Any]) -> Iterator[str]:
    """Paragraphs, from the numbers that were found."""
    least, most = options["cohort_sizes"][0], options["cohort_sizes"][-1]
    slopes = {row["place"]: row["measured"] for row in rows_of(found, part="slope")}
    yield (
        "The variance of a coordinate of the mean is (z C / m)^2 with noise once on the sum, or in shares that add "
        f"up to it, and (z C)^2 / m with noise on every letter: slopes {slopes['central']:.3f}, "
        f"{slopes['distributed']:.3f} and {slopes['local']:.3f} in m. Of the mean, at fixed z and C: on the sum the "
        "same noise is O(1) against O(m), and whoever quotes O(1/m^2) against O(1/m) has to say of what."
    )
    yield (
        f"At one multiplier local noise costs m times as much variance, {most:,} times at m = {most:,}; and four times "
        "that if it has to hide which letter was sent among all possible ones (sensitivity 2 C) where central noise "
        "hides whether one was sent (C)."
    )
    small, large = ({row["place"]: row for row in rows_of(found, part="equal epsilon", cohort_size=size)}
                    for size in (least, most))  # fmt: skip
    factors = [at["local"]["predicted"] / at["central, fixed-size"]["predicted"] for at in (small, large)]
    z = {name: row["noise_multiplier"] for name, row in large.items()}
    yield (
        f"One multiplier is not one epsilon. At epsilon {options['epsilon']:g} and delta {options['delta']:g} after "
        f"{options['num_rounds']:,} rounds with {most:,} of {options['num_clients']:,} clients, central noise "
        f"needs z = {z['central, fixed-size']:.3g} (fixed-size cohorts, a replaced client; {z['central, Poisson']:.3g} "
        f"for Poisson ones and an absent client) and local noise {z['local']:.3g}, for a letter is its own release and "
        f"sampling amplifies nothing for who sees it: {factors[1]:,.0f} times the variance, and {factors[0]:,.0f} "
        f"times with cohorts of {least:,}. The multipliers come from accountants: sqrt(2 ln(1.25 / delta)) / "
        "epsilon holds for epsilon < 1 only, and is loose."
    )
    yield (
        "What it buys is trust: central noise needs a server that sees every letter and keeps the cohort secret, "
        "shares need secure aggregation in which all letters arrive, local noise needs nobody. These are three "
        "mechanisms, not three words for one."
    )
