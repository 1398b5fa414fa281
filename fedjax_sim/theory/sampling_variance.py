"""Variance of a cohort's mean in closed form: finite populations, tolerances, inclusion probabilities.

Notation: N clients with values g_i, of which m are sampled. sigma^2 = (1/N) sum |g_i - mean|^2 has divisor N unless a
function says N - 1; for vectors every variance is the trace of the covariance. `design_variance` answers for a sampler
and an aggregator of the simulator.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from fedjax_sim import validate
from fedjax_sim.validate import NonNegative, Positive, PositiveInt

__all__ = [
    "cohort_mean_variance",
    "finite_population_correction",
    "horvitz_thompson_variance",
    "noise_to_signal_ratio",
    "population_variance",
    "required_cohort_size",
]


def _check_sizes(population_size: int, cohort_size: int, replacement: bool = False) -> None:
    validate.integer("population_size", population_size)
    hint = f"Without replacement a cohort has at most N={population_size} clients."
    high = validate.INT32_MAX if replacement else population_size
    validate.integer("cohort_size", cohort_size, 1, high, hint=hint)


def finite_population_correction(population_size: int, cohort_size: int) -> float:
    """(N - m) / (N - 1): what sampling without replacement saves of the variance sigma^2 / m with replacement.

    It is about 1 - m/N, a function of the rate alone: not 1 because N is large, and exactly 1 at m = 1. At N = m = 1
    it is 0.

    Guarantees: known values up to N = 10^6 (tests/theory/test_sampling_variance.py::test_finite_population_correction).

    References: Cochran 1977, section 2.6 (there 1 - m/N, for the variance with divisor N - 1).

    >>> finite_population_correction(10, 5), finite_population_correction(10, 10)
    (0.5555555555555556, 0.0)
    """
    _check_sizes(population_size, cohort_size)
    return (population_size - cohort_size) / max(population_size - 1, 1)


@validate.named_arguments
def population_variance(values: Any, *, divisor: Literal["N", "N-1"] = "N") -> float:
    """sum |g_i - mean|^2 / N, or / (N - 1): the trace of the population's covariance.

    Args:
      values: [N] or [N, d] finite numbers, one row a client.
      divisor: "N" (sigma^2) or "N-1" (S^2; needs two clients).

    Guarantees: with either divisor the variance of the cohort's mean is the same
    (tests/theory/test_sampling_variance.py::test_both_divisors_agree).

    >>> population_variance([0.0, 2.0]), population_variance([0.0, 2.0], divisor="N-1")
    (1.0, 2.0)
    """
    rows = np.asarray(values, np.float64)
    if rows.ndim not in (1, 2) or len(rows) < 1 + (divisor == "N-1") or not np.isfinite(rows).all():
        validate.fail("values", "[N] or [N, d] finite numbers, N >= 2 for divisor 'N-1'", values)
    return float(np.square(rows - rows.mean(0)).sum() / (len(rows) - (divisor == "N-1")))


@validate.named_arguments
def cohort_mean_variance(
    variance: NonNegative,
    population_size: int,
    cohort_size: int,
    *,
    divisor: Literal["N", "N-1"] = "N",
    replacement: bool = False,
) -> float:
    """Variance of the plain mean of m uniformly drawn clients, for a population variance.

    Without replacement (sigma^2 / m) (N - m) / (N - 1) = (S^2 / m) (1 - m/N); with replacement sigma^2 / m.

    Args:
      variance: sigma^2 (divisor N) or S^2 (divisor N - 1) of the population, >= 0.
      divisor: which of them, "N" or "N-1".
      replacement: one client may be drawn more than once.

    Guarantees: equals the variance over all subsets, and over all draws
    (tests/theory/test_sampling_variance.py::test_cohort_mean_variance_over_all_subsets), and that of real
    rounds (tests/theory/test_design_variance.py::test_real_rounds_have_the_predicted_moments).

    References: Cochran 1977, theorem 2.2 and section 2.10. Derivation: Cov(z_i, z_j) of the inclusion indicators is
    -pi (1 - pi) / (N - 1) for i != j, pi = m/N.

    >>> cohort_mean_variance(1.0, 10, 5)
    0.11111111111111112
    """
    _check_sizes(population_size, cohort_size, replacement)
    sigma_squared = variance if divisor == "N" else variance * (population_size - 1) / population_size
    correction = 1.0 if replacement else finite_population_correction(population_size, cohort_size)
    return float(sigma_squared / cohort_size * correction)


def _fraction(name: str, value: Any) -> Fraction:
    """The number as its decimals read: 0.1 is 1/10."""
    validate.in_range(name, value, 0)
    return validate.as_written(value)


@validate.named_arguments
def noise_to_signal_ratio(variance: float, signal_norm: Positive, tolerance: Positive) -> Fraction:
    """r = sigma^2 / (alpha |g|)^2, exactly, of numbers read as decimals.

    The rule "the standard deviation of the cohort's mean is at most alpha |g|" asks for (r / m)(N - m)/(N - 1) <= 1.

    Args:
      variance: sigma^2 of the population, divisor N, >= 0.
      signal_norm: |g| > 0 of the population's mean.
      tolerance: alpha > 0.

    >>> noise_to_signal_ratio(16.0, 1.0, 0.1)
    Fraction(1600, 1)
    """
    signal = _fraction("tolerance", tolerance) * _fraction("signal_norm", signal_norm)
    return _fraction("variance", variance) / signal**2


@validate.named_arguments
def required_cohort_size(population_size: PositiveInt, ratio: int | float | Fraction) -> int:
    """The smallest m whose cohort mean is within the tolerance: ceil(r N / (N - 1 + r)), at least 1.

    Args:
      population_size: N.
      ratio: r = sigma^2 / (alpha |g|)^2 >= 0 (`noise_to_signal_ratio`), sigma^2 with divisor N; a float is read as its
        decimals.

    Guarantees: exact integers, the rule (r / m)(N - m)/(N - 1) <= 1 holds at m and fails at m - 1
    (tests/theory/test_sampling_variance.py::test_required_cohort_size_is_the_smallest); nearly all of ten clients, and
    10 to 15 % of ten thousand (::test_required_cohort_sizes_of_small_and_large_populations).

    References: solves Cochran 1977, section 4.6 for m.

    >>> required_cohort_size(10_000, 1600), required_cohort_size(10, 1600)
    (1380, 10)
    """
    ratio = _fraction("ratio", ratio)
    denominator = population_size - 1 + ratio
    return 1 if denominator == 0 else max(1, math.ceil(ratio * population_size / denominator))


def horvitz_thompson_variance(values: Any, inclusion: Any, joint: Any = None) -> float:
    """Variance of sum_S x_i / pi_i, for any inclusion probabilities.

    sum_ij (pi_ij - pi_i pi_j) x_i . x_j / (pi_i pi_j); independent inclusion (Poisson) leaves sum (1 - pi_i)|x_i|^2 /
    pi_i.

    Args:
      values: x, [N] or [N, d]; for the weighted mean of updates x_i = w_i u_i / W.
      inclusion: pi, [N] in (0, 1].
      joint: [N, N] symmetric pi_ij with pi_i on the diagonal; None = independent inclusion.

    Returns: the variance, or for vectors its trace.

    Raises: ValueError for shapes or probabilities that cannot be.

    Guarantees: equals the variance over all subsets, for independent and for dependent inclusion
    (tests/theory/test_sampling_variance.py::test_horvitz_thompson_over_all_subsets).

    References: Horvitz and Thompson 1952; Cochran 1977, section 9A.7.

    >>> horvitz_thompson_variance([1.0, 3.0], [0.5, 0.75])
    4.0
    """
    rows, chances = np.asarray(values, np.float64), np.asarray(inclusion, np.float64)
    rows = rows[:, None] if rows.ndim == 1 else rows
    if rows.ndim != 2 or not np.isfinite(rows).all():
        validate.fail("values", "[N] or [N, d] finite numbers", values)
    if chances.shape != rows.shape[:1] or not ((chances > 0) & (chances <= 1)).all():
        hint = "A client with probability 0 is never sampled."
        validate.fail("inclusion", f"{len(rows)} probabilities in (0, 1]", inclusion, hint)
    scaled = rows / chances[:, None]
    if joint is None:
        return float(((1 - chances) * chances) @ np.square(scaled).sum(1))
    both = np.asarray(joint, np.float64)
    fits = both.shape == 2 * chances.shape and np.allclose(both, both.T) and np.allclose(np.diag(both), chances)
    least = np.maximum(np.add.outer(chances, chances) - 1, 0)
    if not fits or not ((both >= least - 1e-9) & (both <= np.minimum.outer(chances, chances) + 1e-9)).all():
        rule = "a symmetric [N, N] with max(0, pi_i + pi_j - 1) <= pi_ij <= min(pi_i, pi_j), pi_i on the diagonal"
        validate.fail("joint", rule, joint)
    variance = float(np.einsum("ij,ij->", both - np.outer(chances, chances), scaled @ scaled.T))
    if not (variance >= -1e-9 * np.square(scaled).sum()):
        validate.fail("joint", "probabilities that a law of cohorts can have", joint, "The variance is below zero.")
    return max(variance, 0.0)
