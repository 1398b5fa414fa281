"""This module gives the variance of a cohort's mean in closed form, and the cohort size that a tolerance needs.

Notation: N clients have values g_i, and m of them are sampled. sigma^2 = (1/N) sum |g_i - mean|^2 has the divisor N
unless a function says N - 1. For vectors every variance is the trace of the covariance. For a sampler and an aggregator
of the simulator, use `design_variance`.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from fedjax_sim import validate
from fedjax_sim.validate import NonNegative, Positive, PositiveInt


def _check_sizes(population_size: int, cohort_size: int, replacement: bool = False) -> None:
    """Checks N and m; without replacement, m is at most N."""
    validate.integer("population_size", population_size)
    hint = f"Without replacement a cohort has at most N={population_size} clients."
    high = validate.INT32_MAX if replacement else population_size
    validate.integer("cohort_size", cohort_size, 1, high, hint=hint)


def finite_population_correction(population_size: int, cohort_size: int) -> float:
    """Computes (N - m) / (N - 1): the factor by which sampling without replacement reduces the variance sigma^2 / m.

    It is about 1 - m/N, so it depends on the participation rate alone. A large N does not make it 1; it is exactly 1 at
    m = 1. At N = m = 1 it is 0.

    Args:
      population_size: N.
      cohort_size: m in [1, N].

    Guarantees: The factor has known values for populations up to N = 10^6
    (tests/theory/test_sampling_variance.py::test_finite_population_correction).

    References: Cochran 1977, section 2.6 (there 1 - m/N, for the variance with divisor N - 1).

    >>> finite_population_correction(10, 5), finite_population_correction(10, 10)
    (0.5555555555555556, 0.0)
    """
    _check_sizes(population_size, cohort_size)
    return (population_size - cohort_size) / max(population_size - 1, 1)


@validate.named_arguments
def population_variance(values: Any, *, divisor: Literal["N", "N-1"] = "N") -> float:
    """Computes the trace of the population's covariance: sum |g_i - mean|^2 / N, or / (N - 1).

    Args:
      values: [N] or [N, d] finite numbers, one row for each client.
      divisor: "N" (sigma^2) or "N-1" (S^2; needs two clients).

    Guarantees: With either divisor the variance of the cohort's mean is the same
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
    """Computes the variance of the plain mean of m uniformly drawn clients, for a population variance.

    Without replacement it is (sigma^2 / m) (N - m) / (N - 1) = (S^2 / m) (1 - m/N). With replacement it is sigma^2 / m.

    Args:
      variance: sigma^2 (divisor N) or S^2 (divisor N - 1) of the population, >= 0.
      population_size: N.
      cohort_size: m.
      divisor: the divisor of `variance`, "N" or "N-1".
      replacement: whether a client may be drawn more than once.

    Guarantees: The variance equals that over all subsets, and over all draws
    (tests/theory/test_sampling_variance.py::test_cohort_mean_variance_over_all_subsets), and that of real rounds
    (tests/theory/test_design_variance.py::test_real_rounds_have_the_predicted_moments).

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
    """Reads the number as a fraction by its decimals: 0.1 is 1/10."""
    validate.in_range(name, value, 0)
    return validate.as_written(value)


@validate.named_arguments
def noise_to_signal_ratio(variance: float, signal_norm: Positive, tolerance: Positive) -> Fraction:
    """Computes r = sigma^2 / (alpha |g|)^2 as an exact fraction, of numbers that are read as decimals.

    The rule "the standard deviation of the cohort's mean is at most alpha |g|" means (r / m)(N - m)/(N - 1) <= 1.

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
    """Computes the smallest cohort size m at which the cohort's mean is precise enough.

    The standard deviation of the mean of m clients, drawn without replacement, is then at most alpha |g|. Here |g| is
    the norm of the population's mean, and alpha is the tolerance. The size is ceil(r N / (N - 1 + r)), at least 1.

    Args:
      population_size: N.
      ratio: r = sigma^2 / (alpha |g|)^2 >= 0 (`noise_to_signal_ratio`), with sigma^2 of divisor N. A float is read as
        its decimals: 0.1 is 1/10.

    Guarantees: The result has no rounding error: the rule (r / m)(N - m)/(N - 1) <= 1 holds at m and fails at m - 1
    (tests/theory/test_sampling_variance.py::test_required_cohort_size_is_the_smallest). The same tolerance needs nearly
    all of ten clients, and 10 to 15 % of ten thousand (::test_required_cohort_sizes_of_small_and_large_populations).

    References: solves Cochran 1977, section 4.6 for m.

    >>> required_cohort_size(10_000, 1600), required_cohort_size(10, 1600)
    (1380, 10)
    """
    ratio = _fraction("ratio", ratio)
    denominator = population_size - 1 + ratio
    # A population of one client without variance: any cohort will do.
    return 1 if denominator == 0 else max(1, math.ceil(ratio * population_size / denominator))


def horvitz_thompson_variance(values: Any, inclusion: Any, joint: Any = None) -> float:
    """Computes the variance of sum_S x_i / pi_i, for any inclusion probabilities.

    It is sum_ij (pi_ij - pi_i pi_j) x_i . x_j / (pi_i pi_j). For independent inclusion (Poisson) it is sum (1 -
    pi_i)|x_i|^2 / pi_i.

    Args:
      values: x, [N] or [N, d]. For the weighted mean of updates, x_i = w_i u_i / W.
      inclusion: pi, [N] in (0, 1].
      joint: [N, N] symmetric pi_ij with pi_i on the diagonal; None = independent inclusion.

    Returns: the variance, or its trace for vectors.

    Raises: ValueError for shapes or probabilities that are impossible.

    Guarantees: The variance equals that over all subsets, for independent and for dependent inclusion
    (tests/theory/test_sampling_variance.py::test_horvitz_thompson_over_all_subsets).

    References: Horvitz and Thompson 1952; Cochran 1977, section 9A.7.

    >>> horvitz_thompson_variance([1.0, 3.0], [0.5, 0.75])
    4.0
    """
    rows = np.asarray(values, np.float64)
    probabilities = np.asarray(inclusion, np.float64)
    rows = rows[:, None] if rows.ndim == 1 else rows
    if rows.ndim != 2 or not np.isfinite(rows).all():
        validate.fail("values", "[N] or [N, d] finite numbers", values)
    if probabilities.shape != rows.shape[:1] or not ((probabilities > 0) & (probabilities <= 1)).all():
        hint = "A client with probability 0 is never sampled."
        validate.fail("inclusion", f"{len(rows)} probabilities in (0, 1]", inclusion, hint)
    # Every formula below is in terms of x_i / pi_i.
    scaled = rows / probabilities[:, None]
    if joint is None:
        return float(((1 - probabilities) * probabilities) @ np.square(scaled).sum(1))
    joint_probabilities = np.asarray(joint, np.float64)
    is_consistent = (
        joint_probabilities.shape == 2 * probabilities.shape
        and np.allclose(joint_probabilities, joint_probabilities.T)
        and np.allclose(np.diag(joint_probabilities), probabilities)
    )
    # Frechet's bounds: two events with these probabilities have at least and at most such a joint one.
    lower_bounds = np.maximum(np.add.outer(probabilities, probabilities) - 1, 0)
    if (
        not is_consistent
        or not (
            (joint_probabilities >= lower_bounds - 1e-9)
            & (joint_probabilities <= np.minimum.outer(probabilities, probabilities) + 1e-9)
        ).all()
    ):
        rule = "a symmetric [N, N] with max(0, pi_i + pi_j - 1) <= pi_ij <= min(pi_i, pi_j), pi_i on the diagonal"
        validate.fail("joint", rule, joint)
    variance = float(
        np.einsum("ij,ij->", joint_probabilities - np.outer(probabilities, probabilities), scaled @ scaled.T)
    )
    # The bounds above are necessary only: joint probabilities may pass them and still belong to no design.
    if not (variance >= -1e-9 * np.square(scaled).sum()):
        validate.fail("joint", "probabilities that a law of cohorts can have", joint, "The variance is below zero.")
    return max(variance, 0.0)
