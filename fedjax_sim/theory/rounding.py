"""This module computes the variance of stochastic rounding for numbers that fluctuate around a position."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.validate import Positive

# Spread in levels. Above it the Fourier series needs few terms; below it no number crosses two levels.
MIN_SPREAD_OF_SERIES = 0.15
TERMS = 16  # number of terms of the Fourier series


@validate.named_arguments
def rounding_variance(mean: Any, spread: Any, distance: Positive) -> np.ndarray:
    """Computes the mean error of stochastic rounding for a number x ~ N(mean, spread^2).

    It is E[u (1 - u)] Delta^2, for levels at multiples of Delta and x at position u between two levels.

    Between two levels u (1 - u) is a parabola, and its slope jumps by 2 at each level. So for a small spread s (in
    levels) the mean is u (1 - u) - s^2 + 2 sum_levels E[(how far x is beyond the level)_+]. For a larger spread, the
    Fourier series 1/6 - sum_k cos(2 pi k x) exp(-2 (pi k s)^2) / (pi k)^2 converges fast. With a spread above half a
    level, the error is the textbook's Delta^2 / 6 to 1 %.

    Args:
      mean, spread: arrays of one shape; spread >= 0.
      distance: Delta > 0, the distance of levels; 0 is a level.

    Returns: an array of the same shape.

    Guarantees: The variance equals numerical integration, and Delta^2 / 6 for a large spread
    (tests/theory/test_quantization.py::test_rounding_variance).

    References: Widrow and Kollar 2008, chapter 4 (the characteristic function of quantised numbers).

    >>> print(rounding_variance([0.5, 0.5], [0.0, 10.0], 1.0).round(3))
    [0.25  0.167]
    """
    from scipy import stats

    mean, spread = np.broadcast_arrays(np.asarray(mean, np.float64), np.asarray(spread, np.float64))
    if not (np.isfinite(mean).all() and (spread >= 0).all()):
        validate.fail("mean, spread", "finite numbers, spread >= 0", (mean, spread))
    position = mean / distance
    s = spread / distance
    u = position - np.floor(position)
    with np.errstate(divide="ignore", invalid="ignore"):
        # E[(how far x is beyond a level)_+] for the levels below and above; only these two matter for a small spread.
        overshoot = sum(s * stats.norm.pdf(gap / s) - gap * stats.norm.sf(gap / s) for gap in (u, 1 - u))
    small_spread = u * (1 - u) - s**2 + 2 * np.where(s > 0, overshoot, 0)
    k = np.arange(1, TERMS + 1)
    fourier_terms = (
        np.cos(2 * np.pi * k * position[..., None]) * np.exp(-2 * (np.pi * k * s[..., None]) ** 2) / (np.pi * k) ** 2
    )
    # Both forms are computed for all entries, and the one that is accurate is chosen.
    return distance**2 * np.where(s < MIN_SPREAD_OF_SERIES, small_spread, 1 / 6 - fourier_terms.sum(-1))
