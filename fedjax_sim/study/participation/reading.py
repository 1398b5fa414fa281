"""This module writes the reading of `participation`: paragraphs in plain words from the measured numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedjax_sim.study.findings import Comparison, comparisons_of
from fedjax_sim.study.participation.clients import FLOOR_STEP_SIZE, SPREAD


def participation_reading(found: Sequence[Comparison], required: dict[int, int], tolerance: float) -> Iterator[str]:
    """Yields paragraphs in plain words that say what the numbers of the study mean.

    Args:
      found: the comparisons of the study.
      required: the smallest tolerable cohort size, by population size.
      tolerance: the largest tolerable standard deviation of the mean, as a share of the mean's norm.
    """
    yield (
        f"The variance of a cohort's mean is (sigma^2 / m) (N - m) / (N - 1), sigma^2 = {SPREAD**2:g} with divisor N. "
        "The last factor, the finite population correction, is about 1 - m/N for N of a hundred and more: it depends "
        "on the participation rate and not on the size of the population. That it is about 1 because N is large is a "
        "mistake: at 10 to 15 % participation it is 0.9 to 0.85. With few clients it is more, 1 - (m - 1)/(N - 1) and "
        "so exactly 1 at N = 10, m = 1; at m = N there is no variance."
    )
    sizes = ", ".join(
        f"{cohort:,} of {size:,} ({cohort / size:.{1 if cohort * 1000 >= size else 3}%})"
        for size, cohort in required.items()
    )
    smallest_size = min(required)
    cross_silo_text = " In a small population (cross-silo) nearly everybody must take part."
    silo = cross_silo_text if required[smallest_size] >= 0.8 * smallest_size else ""
    yield (
        f"For a standard deviation of at most {tolerance:g} of the mean's length, the smallest cohorts are {sizes}. "
        "What a large population saves is not variance at a given m but the participation rate: the same few clients "
        f"are a small share of many.{silo}"
    )
    designs = {
        (comparison.conditions["sampler"], comparison.conditions["estimator"]): comparison
        for comparison in comparisons_of(found, "designs")
    }
    poisson = [designs.get(("truncated poisson", name)) for name in ("fixed mean", "mean")]
    if all(poisson):
        ratio = poisson[0].measured / poisson[1].measured
        yield (
            f"Poisson cohorts divided by their expected size vary {ratio:.2f} times as much as divided by their actual "
            "size: the number of clients is noise as well. Privacy needs the fixed divisor, and pays for it here."
        )
    if designs:
        yield (
            "The mean by examples over a uniform cohort is a ratio estimator: slightly biased for the population's "
            "weighted mean, and less noisy than the unbiased Horvitz-Thompson estimate wherever updates are far from "
            "zero, for that estimate also has the noise of the weights. Its variance is predicted to first order in "
            "1/m."
        )
    if comparisons_of(found, "final loss"):
        yield (
            f"With a constant step of {FLOOR_STEP_SIZE:g} the runs end at an excess loss of eta / (2 - eta) times half "
            "of the variance: the error floor falls with participation exactly as the variance does, and vanishes at "
            "m = N. It is a property of constant steps: with steps that decay as 1/t it vanishes."
        )
