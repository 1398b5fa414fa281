"""This module holds the sums over a population's updates that variance formulas need, whatever the population size."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim import validate

_ROWS = 1 << 20  # array elements that become float64 at a time, which bounds the memory


def checked_values(values: Any, weights: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Checks values and weights.

    Args:
      values: [N] or [N, d] real numbers.
      weights: [N] finite numbers >= 0, not all 0; None for equal weights.

    Returns: ([N, d] values in their own dtype, [N] float64 weights >= 0, which are ones if None).

    Raises: ValueError for other shapes or dtypes, and for weights that are negative, not finite, or all zero.
    """
    rows = np.asarray(values)
    rows = rows[:, None] if rows.ndim == 1 else rows
    if rows.ndim != 2 or not rows.size or rows.dtype.kind not in "iuf":
        validate.fail("values", "an array [N] or [N, d] of real numbers", values)
    weights = np.ones(len(rows)) if weights is None else np.asarray(weights)
    is_vector = weights.shape == (len(rows),) and weights.dtype.kind in "iuf"
    if not is_vector or not ((weights >= 0) & (weights < math.inf)).all() or not weights.any():
        validate.fail("weights", f"{len(rows)} finite numbers >= 0, not all 0", weights)
    return rows, weights.astype(np.float64)


class Moments(NamedTuple):
    """Sums over clients with updates u_i and weights n_i. Sums of disjoint sets of clients add up (`merge`).

    Fields may have a leading axis of blocks of clients. Squares are of raw values. So the relative error of a variance
    is about 2^-52 |mean|^2 / variance. `design_variance` takes its own sums about the mean.

    >>> first = Moments.of([[1.0], [2.0]])
    >>> second = Moments.of([[6.0]])
    >>> first.merge(second) == Moments.of([[1.0], [2.0], [6.0]])
    True
    """

    count: Any  # N
    weight: Any  # sum n_i
    squared_weight: Any  # sum n_i^2
    weighted_sum: Any  # [d] sum n_i u_i
    squared_weighted_sum: Any  # [d] sum n_i^2 u_i
    square: Any  # sum n_i^2 |u_i|^2

    @classmethod
    def of(cls, values: Any, weights: Any = None, multipliers: Any = None, origin: Any = 0.0) -> Moments:
        """Sums over [N] or [N, d] values of any real dtype.

        Sums are taken in blocks of clients, so the values may lie in a file.

        Args:
          values: u.
          weights: n, [N] numbers >= 0; None = 1.
          multipliers: [N] the factor of each client in every sum; None = 1.
          origin: [d] a vector that is subtracted from every value.

        Raises: ValueError for shapes that do not fit, and for numbers that are not finite.

        Guarantees: The sums equal sums that are taken at once
        (tests/theory/test_sampling_variance.py::test_moments_are_sums).
        """
        rows, weights = checked_values(values, weights)
        multipliers_64 = np.ones(len(rows)) if multipliers is None else np.asarray(multipliers, np.float64)
        weighted_sum = np.zeros(rows.shape[1])
        squared_weighted_sum = np.zeros(rows.shape[1])
        square = 0.0
        # Blocks bound the memory: only one of them is float64 at a time.
        block_size = max(1, _ROWS // rows.shape[1])
        for start in range(0, len(rows), block_size):
            block_slice = slice(start, start + block_size)
            block = rows[block_slice].astype(np.float64) - origin
            block_weights = multipliers_64[block_slice] * weights[block_slice]
            block_squared_weights = multipliers_64[block_slice] * np.square(weights[block_slice])
            weighted_sum += block_weights @ block
            squared_weighted_sum += block_squared_weights @ block
            square += float(block_squared_weights @ np.einsum("nd,nd->n", block, block))
        # A single NaN or infinity makes the sum of squares not finite, so one check suffices.
        if not math.isfinite(square):
            validate.fail("values", "finite numbers, whose squares are finite", "NaN or inf")
        weight = float(multipliers_64 @ weights)
        squared_weight = float(multipliers_64 @ np.square(weights))
        return cls(
            count=len(rows),
            weight=weight,
            squared_weight=squared_weight,
            weighted_sum=weighted_sum,
            squared_weighted_sum=squared_weighted_sum,
            square=square,
        ).checked()

    @classmethod
    def from_mean_and_variance(cls, population_size: int, mean: Any, variance: float) -> Moments:
        """Computes moments of N clients with weight one and a given mean and variance.

        Args:
          population_size: N.
          mean: [d] or a number.
          variance: sigma^2, a trace over coordinates, with divisor N.

        >>> Moments.from_mean_and_variance(10, 3.0, 1.0).square
        100.0
        """
        validate.integer("population_size", population_size)
        validate.in_range("variance", variance, 0)
        mean = np.atleast_1d(np.asarray(mean, np.float64))
        size = population_size
        return cls(
            count=size,
            weight=size,
            squared_weight=size,
            weighted_sum=size * mean,
            squared_weighted_sum=size * mean,
            square=size * (float(mean @ mean) + variance),
        ).checked()

    def checked(self) -> Moments:
        """Returns itself. Raises ValueError if a sum is not finite."""
        if not all(np.isfinite(field).all() for field in self):
            validate.fail("values", "finite numbers, whose squares are finite", "NaN or inf")
        return self

    def merge(self, other: Moments) -> Moments:
        """Computes the moments of the union of both sets of clients, which must be disjoint."""
        return Moments(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def scaled(self, share: float) -> Moments:
        """Multiplies every sum except the count by `share`."""
        return Moments(self.count, *(share * field for field in self[1:]))

    def ratio(self) -> np.ndarray:
        """Computes the weighted mean, [..., d]; 0 if no client has a weight."""
        weight = np.asarray(self.weight)[..., None]
        return np.divide(self.weighted_sum, weight, out=np.zeros_like(self.weighted_sum), where=weight > 0)

    def residual(self) -> tuple[np.ndarray, np.ndarray]:
        """Computes (sum |z_i|^2, [d] sum n_i z_i), with z_i = n_i (u_i - ratio)."""
        ratio = self.ratio()
        squared = np.asarray(self.squared_weight)
        square = self.square - 2 * (ratio * self.squared_weighted_sum).sum(-1) + squared * np.square(ratio).sum(-1)
        # Rounding may make a sum of squares that is zero slightly negative.
        return np.maximum(square, 0), self.squared_weighted_sum - squared[..., None] * ratio

    def spread(self, origin: Any, size: Any) -> tuple[np.ndarray, np.ndarray]:
        """Computes (sum |x_i|^2 - |sum x_i|^2 / size, [d] sum x_i), with x_i = n_i (u_i + origin)."""
        weight = np.asarray(self.weight)
        weighted_sum = np.asarray(self.weighted_sum)
        square = self.square - np.square(weighted_sum).sum(-1) / size
        cross = self.squared_weighted_sum - (weight / size)[..., None] * weighted_sum
        weight_spread = self.squared_weight - np.square(weight) / size
        # A smaller variance of the weights is rounding, which a large origin would magnify.
        weight_spread = np.where(weight_spread > 1e-12 * np.asarray(self.squared_weight), weight_spread, 0)
        spread = square + 2 * (cross * origin).sum(-1) + weight_spread * np.square(origin).sum()
        return spread, weighted_sum + weight[..., None] * origin

    def equal_weights(self) -> bool:
        """Tells whether all weights are the same, as far as float64 shows."""
        spread = np.asarray(self.count) * self.squared_weight - np.square(self.weight)
        return bool((spread <= 1e-12 * np.square(self.weight)).all())
