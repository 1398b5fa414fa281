"""This module gives errors of quantised updates in closed form, and their effect on a mean of updates.

For bounds see `theory.relative_error`. Two statements differ. For a fixed update, the error of stochastic rounding is
exactly sum u (1 - u) Delta^2, at positions u between levels. Its average over uniform positions is d Delta^2 / 6.
Without zero among the levels, small numbers lie midway and cost Delta^2 / 4 each, which is 1.5 times that average.
Nearest rounding has variance zero given the update. Over clients and rounds its error is random, and need not average
out.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.validate import Number, Positive, PositiveInt, Share


def _check_bits(bits: int, keeps_zeros: bool) -> None:
    """Checks the number of bits: zero among the levels needs two bits or more."""
    validate.integer("bits", bits, 1, 16)
    validate.truth("keeps_zeros", keeps_zeros)
    if keeps_zeros and bits == 1:
        validate.fail("bits", "at least 2 with keeps_zeros=True", bits, "Two levels leave none for zero.")


@validate.named_arguments
def level_distance(bits: int, range: Positive = 1.0, *, keeps_zeros: bool = True) -> float:
    """Computes Delta, the distance of neighbouring levels on [-s, s].

    With zero among the 2^b - 1 levels it is 2s / (2^b - 2). Otherwise it is the textbook's 2s / (2^b - 1).

    Args:
      bits: b in [1, 16], at least 2 with zero.
      range: s > 0.
      keeps_zeros: whether zero is a level, as in `transform.quantize`.

    Guarantees: The levels are those of that transform
    (tests/theory/test_quantization.py::test_levels_are_the_transforms).

    References: Suresh, Yu, Kumar and McMahan 2017, section 2.1 (without zero).

    >>> level_distance(2, keeps_zeros=False), level_distance(2)
    (0.6666666666666666, 1.0)
    """
    _check_bits(bits, keeps_zeros)
    return 2 * range / (2**bits - (2 if keeps_zeros else 1))


@validate.named_arguments
def expected_squared_error(
    num_values: PositiveInt,
    bits: int,
    range: float = 1.0,
    *,
    rounding: Literal["stochastic", "nearest"] = "stochastic",
    keeps_zeros: bool = True,
) -> float:
    """Computes E |Q(x) - x|^2 for uniform positions between levels.

    It is d Delta^2 / 6 for stochastic and d Delta^2 / 12 for nearest rounding.

    These are the means of u (1 - u) and of min(u, 1 - u)^2 over u in [0, 1]. They are exact for x uniform on [-s, s]^d.
    For an update with many numbers that are far smaller than Delta, see `quantization_error`.

    Args:
      num_values: d.
      bits, range, keeps_zeros: as in `level_distance`.
      rounding: "stochastic" or "nearest".

    Guarantees: The error has known values for 1 to 8 bits, and is that of simulated updates
    (tests/theory/test_quantization.py::test_expected_error_of_uniform_updates).

    References: Suresh et al. 2017, section 2 (there with the bound 1/4 for u (1 - u)).

    >>> round(expected_squared_error(1, 4, keeps_zeros=False), 8)
    0.00296296
    """
    delta = level_distance(bits, range, keeps_zeros=keeps_zeros)
    return num_values * delta**2 / (6 if rounding == "stochastic" else 12)


class QuantizationError(NamedTuple):
    """Bias and variance of fixed updates, over the randomness of rounding only.

    A mean of m such messages has the same bias and the variance divided by m.

    >>> error = quantization_error([0.3], 1, range=1.0, keeps_zeros=False)
    >>> error.bias.tolist(), float(error.squared.round(6))
    ([0.0], 0.91)
    """

    bias: np.ndarray  # [..., d] E Q(x) - x
    variance: np.ndarray  # [..., d] Var Q(x)

    @property
    def squared(self) -> np.ndarray:
        """[...] E |Q(x) - x|^2."""
        return self.of_mean(1)

    def of_mean(self, num_clients: int) -> np.ndarray:
        """Computes E |mean of Q(x) - x|^2 over m clients with this update that round independently, [...]."""
        validate.integer("num_clients", num_clients)
        return np.square(self.bias).sum(-1) + self.variance.sum(-1) / num_clients


@validate.named_arguments
def quantization_error(
    values: Any,
    bits: int = 8,
    *,
    range: float | None = None,
    levels: int | None = None,
    rounding: Literal["stochastic", "nearest"] = "stochastic",
    keeps_zeros: bool = True,
) -> QuantizationError:
    """Computes bias and variance of each number of fixed updates, exactly: u (1 - u) Delta^2, and the bias of clipping.

    Args:
      values: [..., d] updates; the numbers along the last axis share a scale.
      bits, rounding, keeps_zeros: as in `transform.quantize`.
      range: s > 0. Numbers outside of [-s, s] are clipped, which is a bias. None: each update's largest magnitude, so
        that s grows with the update (bits = 2 with zero is TernGrad).
      levels: QSGD's s in place of bits: Delta = norm / levels. None: by bits.

    Returns: `QuantizationError`.

    Raises: ValueError, TypeError for arguments that are out of range or contradict each other.

    Guarantees: The transforms declare this error as `squared_error`
    (tests/theory/test_quantization.py::test_the_transforms_declare_the_same_error). Errors of a fixed update and of
    nearest rounding have known values (::test_error_of_a_fixed_update, ::test_stochastic_against_nearest), and bias and
    variance are those of simulated messages (::test_real_messages_have_this_bias_and_variance).

    References: Suresh et al. 2017, section 2; Alistarh et al. 2017, section 3 (QSGD); Wen et al. 2017 (TernGrad).

    >>> quantization_error([0.0, 0.25], 2, range=1.0, rounding="nearest").bias.tolist()
    [0.0, -0.25]
    """
    x = np.asarray(values, np.float64)
    if x.ndim < 1 or not np.isfinite(x).all():
        validate.fail("values", "[..., d] finite numbers", values)
    if levels is not None:
        validate.integer("levels", levels, 1, 32767)
        if range is not None or rounding == "nearest" or not keeps_zeros:
            validate.fail("levels", "no range, nearest rounding or keeps_zeros=False beside it", levels)
        delta = np.linalg.norm(x, axis=-1, keepdims=True) / levels
        offset = 0.0
    else:
        # Levels lie at multiples of Delta, or half a Delta beside them if zero is no level.
        unit_delta = level_distance(bits, keeps_zeros=keeps_zeros)
        offset = 0.0 if keeps_zeros else 0.5
        if range is None:
            delta = np.abs(x).max(-1, keepdims=True, initial=0) * unit_delta
        else:
            validate.positive("range", range)
            delta = np.full((1,) * x.ndim, range * unit_delta)
    clipped = x if range is None else np.clip(x, -range, range)
    # An update of zeros has Delta = 0: its position is 0, and it costs nothing.
    position = np.divide(clipped, delta, out=np.zeros_like(x), where=delta > 0) - offset * (delta > 0)
    if rounding == "nearest":
        return QuantizationError((np.round(position) + offset * (delta > 0)) * delta - x, np.zeros_like(x))
    nearest = np.round(position)
    # A number that lies on a level up to float64 errors counts as exact, and has no variance.
    fraction = np.where(np.abs(position - nearest) < 1e-12 * (1 + np.abs(position)), 0.0, position - np.floor(position))
    return QuantizationError(clipped - x, fraction * (1 - fraction) * delta**2)


@validate.named_arguments
def crossover_cohort_size(position: Share) -> float:
    """Computes the cohort size above which averaged stochastic rounding of a number beats nearest rounding.

    It is max(u, 1-u) / min(u, 1-u).

    Nearest rounding keeps the squared bias min(u, 1-u)^2 Delta^2. Stochastic rounding leaves u (1-u) Delta^2 / m. The
    result is 1 midway between levels. It is infinite on a level, where both are exact.

    Args:
      position: u in [0, 1] between two levels.

    Guarantees: at u = 0.3, where the result is 7/3, the mean of two stochastically rounded numbers has a larger squared
    error than nearest rounding, and the mean of three a smaller one
    (tests/theory/test_quantization.py::test_stochastic_against_nearest).

    >>> round(crossover_cohort_size(0.3), 2)
    2.33
    """
    # The distances to the nearer and to the farther level.
    low, high = sorted((float(position), 1 - float(position)))
    return high / low if low else math.inf


@validate.named_arguments
def quantization_floor(
    num_values: int,
    bits: int,
    range: float,
    num_clients: PositiveInt,
    contraction: Annotated[float, Number(-1, 1, open_low=True, open_high=True)],
    *,
    keeps_zeros: bool = True,
) -> float:
    """Computes the error floor that stochastic quantisation of m updates adds to E |w - w*|^2.

    It is d Delta^2 / (6 m) / (1 - r^2).

    It is the fixed point of the round w <- w* + r (w - w*) + e with E |e|^2 = d Delta^2 / (6 m).

    Args:
      num_values, bits, range, keeps_zeros: as in `expected_squared_error`.
      num_clients: m clients, which round independently.
      contraction: r in (-1, 1), the factor of a round; (1 - eta h)^K for K local steps on curvature h.

    Guarantees: A simulated recursion with real messages converges to the floor
    (tests/theory/test_quantization.py::test_floor_of_a_simulated_recursion). Without zero among the levels, floors
    differ by (15/3)^2 from 2 to 4 bits and by (255/15)^2 from 4 to 8 bits (::test_ratios_of_floors).

    >>> round(quantization_floor(1, 2, 1.0, 10, 0.5, keeps_zeros=False), 6)
    0.009877
    """
    message_error = expected_squared_error(num_values, bits, range, keeps_zeros=keeps_zeros)
    return message_error / num_clients / (1 - contraction**2)
