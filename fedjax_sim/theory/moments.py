"""What a variance formula needs of a population of updates: a few sums, whatever N."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim import validate

__all__ = ["Moments", "checked_values"]

_ROWS = 1 << 20  # numbers of a block that becomes float64 at a time


def checked_values(values: Any, weights: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """([N, d] in the dtype they have, [N] float64 weights >= 0, ones if None)."""
    rows = np.asarray(values)
    rows = rows[:, None] if rows.ndim == 1 else rows
    if rows.ndim != 2 or not rows.size or rows.dtype.kind not in "iuf":
        validate.fail("values", "an array [N] or [N, d] of real numbers", values)
    weights = np.ones(len(rows)) if weights is None else np.asarray(weights)
    fits = weights.shape == (len(rows),) and weights.dtype.kind in "iuf"
    if not fits or not ((weights >= 0) & (weights < math.inf)).all() or not weights.any():
        validate.fail("weights", f"{len(rows)} finite numbers >= 0, not all 0", weights)
    return rows, weights.astype(np.float64)


class Moments(NamedTuple):
    """Sums over clients with updates u_i and weights n_i; those of disjoint clients add up (`merge`).

    Fields may have a leading axis of blocks of clients. Squares are of raw values: a variance is exact to about
    2^-52 |mean|^2 / variance, relatively; `design_variance` takes its own sums about the mean.

    >>> first, second = Moments.of([[1.0], [2.0]]), Moments.of([[6.0]])
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
        """Sums over [N] or [N, d] values of any real dtype, in blocks, so that they may lie in a file.

        Args:
          weights: n, [N] numbers >= 0; None = 1.
          multipliers: [N] each client's part in every sum; None = 1.
          origin: [d] what is subtracted from every value.

        Raises: ValueError for shapes that do not fit, and for numbers that are not finite.

        Guarantees: equal to sums at once (tests/theory/test_sampling_variance.py::test_moments_are_sums).
        """
        rows, weights = checked_values(values, weights)
        shares = np.ones(len(rows)) if multipliers is None else np.asarray(multipliers, np.float64)
        first, second, square = np.zeros(rows.shape[1]), np.zeros(rows.shape[1]), 0.0
        step = max(1, _ROWS // rows.shape[1])
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            block = rows[part].astype(np.float64) - origin
            once, twice = shares[part] * weights[part], shares[part] * np.square(weights[part])
            first += once @ block
            second += twice @ block
            square += float(twice @ np.einsum("nd,nd->n", block, block))
        if not math.isfinite(square):
            validate.fail("values", "finite numbers, whose squares are finite", "NaN or inf")
        weight, squared = float(shares @ weights), float(shares @ np.square(weights))
        return cls(len(rows), weight, squared, first, second, square).checked()

    @classmethod
    def from_mean_and_variance(cls, population_size: int, mean: Any, variance: float) -> Moments:
        """Of N clients of weight one with this mean ([d] or a number) and sigma^2 (divisor N, a trace).

        >>> Moments.from_mean_and_variance(10, 3.0, 1.0).square
        100.0
        """
        validate.integer("population_size", population_size)
        validate.in_range("variance", variance, 0)
        mean = np.atleast_1d(np.asarray(mean, np.float64))
        size = population_size
        return cls(size, size, size, size * mean, size * mean, size * (float(mean @ mean) + variance)).checked()

    def checked(self) -> Moments:
        """Itself, or ValueError where a sum is not finite."""
        if not all(np.isfinite(field).all() for field in self):
            validate.fail("values", "finite numbers, whose squares are finite", "NaN or inf")
        return self

    def merge(self, other: Moments) -> Moments:
        """Of both, disjoint, sets of clients."""
        return Moments(*(a + b for a, b in zip(self, other, strict=True)))

    def scaled(self, share: float) -> Moments:
        """Every sum but the count times `share`."""
        return Moments(self.count, *(share * field for field in self[1:]))

    def ratio(self) -> np.ndarray:
        """[..., d] the weighted mean; 0 where nobody has a weight."""
        weight = np.asarray(self.weight)[..., None]
        return np.divide(self.weighted_sum, weight, out=np.zeros_like(self.weighted_sum), where=weight > 0)

    def residual(self) -> tuple[np.ndarray, np.ndarray]:
        """With z_i = n_i (u_i - ratio): (sum |z_i|^2, [d] sum n_i z_i)."""
        ratio, squared = self.ratio(), np.asarray(self.squared_weight)
        square = self.square - 2 * (ratio * self.squared_weighted_sum).sum(-1) + squared * np.square(ratio).sum(-1)
        return np.maximum(square, 0), self.squared_weighted_sum - squared[..., None] * ratio

    def spread(self, origin: Any, size: Any) -> tuple[np.ndarray, np.ndarray]:
        """For x_i = n_i (u_i + origin): (sum |x_i|^2 - |sum x_i|^2 / size, [d] sum x_i)."""
        weight, first = np.asarray(self.weight), np.asarray(self.weighted_sum)
        square = self.square - np.square(first).sum(-1) / size
        cross = self.squared_weighted_sum - (weight / size)[..., None] * first
        unequal = self.squared_weight - np.square(weight) / size
        unequal = np.where(unequal > 1e-12 * np.asarray(self.squared_weight), unequal, 0)  # else rounding
        spread = square + 2 * (cross * origin).sum(-1) + unequal * np.square(origin).sum()
        return spread, first + weight[..., None] * origin

    def equal_weights(self) -> bool:
        """All weights are the same, as far as float64 shows."""
        spread = np.asarray(self.count) * self.squared_weight - np.square(self.weight)
        return bool((spread <= 1e-12 * np.square(self.weight)).all())
