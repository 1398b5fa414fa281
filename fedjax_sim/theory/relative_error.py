"""Compressors whose error grows with the message: its bound omega |x|^2, and what it does to the stable step."""

from __future__ import annotations

import math

from fedjax_sim import validate
from fedjax_sim.theory.quantization import level_distance
from fedjax_sim.validate import NonNegative, Positive, PositiveInt

__all__ = [
    "largest_stable_step",
    "qsgd_relative_variance",
    "random_k_relative_variance",
    "stochastic_relative_variance",
    "top_k_contraction",
]


@validate.named_arguments
def stochastic_relative_variance(num_values: PositiveInt, bits: int, *, keeps_zeros: bool = True) -> float:
    """omega with E |Q(x) - x|^2 <= omega |x|^2, for stochastic rounding within each update's largest magnitude.

    The largest number lies on a level and the others cost Delta^2 / 4 at most, Delta = s / t, s <= |x|:
    (d - 1) / (4 t^2) with t = s / Delta. With zero among the levels also u (1 - u) Delta^2 <= Delta |x_i|, so the error
    is at most Delta |x|_1 <= sqrt(d) |x|^2 / t; for t = 1 (TernGrad) the supremum is (sqrt(d) - 1) / 2.

    Returns: the least of these bounds.

    Guarantees: no update has more, and TernGrad's is reached
    (tests/theory/test_quantization.py::test_relative_variances_bound_the_error).

    References: Alistarh et al. 2017, lemma 3.1, for the norm in place of the maximum.

    >>> stochastic_relative_variance(9, 2), stochastic_relative_variance(17, 3)
    (1.0, 0.4444444444444444)
    """
    top = 1 / level_distance(bits, keeps_zeros=keeps_zeros)
    bounds = [(num_values - 1) / (4 * top**2)]
    if keeps_zeros:
        bounds.append((math.sqrt(num_values) - 1) / 2 if top == 1 else math.sqrt(num_values) / top)
    return min(bounds)


@validate.named_arguments
def qsgd_relative_variance(num_values: PositiveInt, levels: PositiveInt) -> float:
    """omega of QSGD: min(d / s^2, sqrt(d) / s).

    Guarantees: no update has more (tests/theory/test_quantization.py::test_relative_variances_bound_the_error).

    References: Alistarh et al. 2017, lemma 3.1.

    >>> qsgd_relative_variance(100, 20)
    0.25
    """
    return min(num_values / levels**2, math.sqrt(num_values) / levels)


def _check_count(num_values: int, count: int) -> None:
    validate.integer("num_values", num_values)
    validate.integer("count", count, 1, num_values)


def random_k_relative_variance(num_values: int, count: int) -> float:
    """omega = d/k - 1 of k random numbers of d, times d/k: E |R x - x|^2 = omega |x|^2 exactly, unbiased.

    Guarantees: the transform's declared error (tests/theory/test_quantization.py::test_sparsifiers).

    References: Stich, Cordonnier and Jaggi 2018, section 2; Konecny and Richtarik 2018.

    >>> random_k_relative_variance(4, 2) * (9 + 1 + 0.25 + 4)
    14.25
    """
    _check_count(num_values, count)
    return num_values / count - 1


def top_k_contraction(num_values: int, count: int) -> float:
    """|x - T x|^2 <= (1 - k/d) |x|^2 for the k largest of d; reached where all magnitudes are equal.

    Guarantees: bounds the transform's error (tests/theory/test_quantization.py::test_sparsifiers).

    References: Stich et al. 2018, definition 2.1.

    >>> top_k_contraction(4, 2) * (9 + 1 + 0.25 + 4)
    7.125
    """
    _check_count(num_values, count)
    return 1 - count / num_values


@validate.named_arguments
def largest_stable_step(smoothness: Positive, relative_variance: NonNegative, num_clients: PositiveInt = 1) -> float:
    """2 / (L (1 + omega / m)): noise in proportion to the gradient also shortens the stable steps.

    One step w - eta (g + e), E |e|^2 <= omega |g|^2 / m, of a quadratic with curvature L along g multiplies the mean
    squared distance by (1 - eta L)^2 + eta^2 L^2 omega / m, which is below 1 exactly for smaller steps.

    Args:
      smoothness: L > 0.
      relative_variance: omega >= 0 of one client's compressor.
      num_clients: m with equal updates that are rounded independently.

    Guarantees: that factor is one there (tests/theory/test_quantization.py::test_multiplicative_noise_limits_the_step).

    References: Alistarh et al. 2017, section 3, for the role of omega.

    >>> largest_stable_step(1.0, 3.0, num_clients=3)
    1.0
    """
    return 2 / (smoothness * (1 + relative_variance / num_clients))
