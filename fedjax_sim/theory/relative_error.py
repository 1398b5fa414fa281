"""This module bounds the error of compressors whose error grows with the message, and the largest stable step."""

from __future__ import annotations

import math

from fedjax_sim import validate
from fedjax_sim.theory.quantization import level_distance
from fedjax_sim.validate import NonNegative, Positive, PositiveInt


@validate.named_arguments
def stochastic_relative_variance(num_values: PositiveInt, bits: int, *, keeps_zeros: bool = True) -> float:
    """Computes omega with E |Q(x) - x|^2 <= omega |x|^2, for stochastic rounding.

    The levels of an update reach to its largest magnitude s, and lie Delta apart. Let t = s / Delta.

    A number at a share u of the way between two levels has the error u (1 - u) Delta^2, which is at most Delta^2 / 4.
    The largest number lies on a level, and s <= |x|. So a first bound is omega = (d - 1) / (4 t^2).

    If zero is a level, a number's error is also at most Delta |x_i|. Then the sum is at most
    Delta |x|_1 <= sqrt(d) |x|^2 / t, so a second bound is omega = sqrt(d) / t. For t = 1 (TernGrad) the supremum
    (sqrt(d) - 1) / 2 takes its place.

    Args:
      num_values: d.
      bits, keeps_zeros: as in `theory.level_distance`.

    Returns: omega, the least of these bounds.

    Guarantees: No update has a larger error, and TernGrad's bound is reached
    (tests/theory/test_quantization.py::test_relative_variances_bound_the_error).

    References: Alistarh et al. 2017, lemma 3.1, for the norm in place of the maximum.

    >>> stochastic_relative_variance(9, 2), stochastic_relative_variance(17, 3)
    (1.0, 0.4444444444444444)
    """
    t = 1 / level_distance(bits, keeps_zeros=keeps_zeros)
    # Each bound holds for all updates, so the least of them does.
    bounds = [(num_values - 1) / (4 * t**2)]
    # With zero among the levels, small numbers cost no more than Delta times their magnitude.
    if keeps_zeros:
        bounds.append((math.sqrt(num_values) - 1) / 2 if t == 1 else math.sqrt(num_values) / t)
    return min(bounds)


@validate.named_arguments
def qsgd_relative_variance(num_values: PositiveInt, levels: PositiveInt) -> float:
    """Computes omega of QSGD: min(d / s^2, sqrt(d) / s).

    Args:
      num_values: d.
      levels: s.

    Guarantees: No update has a larger error
    (tests/theory/test_quantization.py::test_relative_variances_bound_the_error).

    References: Alistarh et al. 2017, lemma 3.1.

    >>> qsgd_relative_variance(100, 20)
    0.25
    """
    return min(num_values / levels**2, math.sqrt(num_values) / levels)


def _check_count(num_values: int, count: int) -> None:
    """Checks that k of d numbers can be kept."""
    validate.integer("num_values", num_values)
    validate.integer("count", count, 1, num_values)


def random_k_relative_variance(num_values: int, count: int) -> float:
    """Computes omega = d/k - 1 of a compressor that keeps k random numbers of d, times d/k.

    It is unbiased, and E |R x - x|^2 = omega |x|^2 holds exactly.

    Args:
      num_values: d.
      count: k in [1, d].

    Guarantees: The transform declares this error (tests/theory/test_quantization.py::test_sparsifiers).

    References: Stich, Cordonnier and Jaggi 2018, section 2; Konecny and Richtarik 2018.

    >>> random_k_relative_variance(4, 2) * (9 + 1 + 0.25 + 4)
    14.25
    """
    _check_count(num_values, count)
    return num_values / count - 1


def top_k_contraction(num_values: int, count: int) -> float:
    """Computes 1 - k/d, with |x - T x|^2 <= (1 - k/d) |x|^2 for a compressor that keeps the k largest numbers of d.

    The bound is reached if all magnitudes are equal.

    Args:
      num_values: d.
      count: k in [1, d].

    Guarantees: It bounds the transform's error (tests/theory/test_quantization.py::test_sparsifiers).

    References: Stich et al. 2018, definition 2.1.

    >>> top_k_contraction(4, 2) * (9 + 1 + 0.25 + 4)
    7.125
    """
    _check_count(num_values, count)
    return 1 - count / num_values


@validate.named_arguments
def largest_stable_step(smoothness: Positive, relative_variance: NonNegative, num_clients: PositiveInt = 1) -> float:
    """Computes the largest stable step under noise in proportion to the gradient, 2 / (L (1 + omega / m)).

    Take one step w - eta (g + e) with E |e|^2 <= omega |g|^2 / m, on a quadratic with curvature L along g. It
    multiplies the mean squared distance by (1 - eta L)^2 + eta^2 L^2 omega / m. This is below 1 exactly for smaller
    steps.

    Args:
      smoothness: L > 0.
      relative_variance: omega >= 0 of one client's compressor.
      num_clients: m clients with equal updates that are rounded independently.

    Guarantees: The factor is one at this step
    (tests/theory/test_quantization.py::test_multiplicative_noise_limits_the_step).

    References: Alistarh et al. 2017, section 3, for the role of omega.

    >>> largest_stable_step(1.0, 3.0, num_clients=3)
    1.0
    """
    return 2 / (smoothness * (1 + relative_variance / num_clients))
