"""Stochastic rounding of numbers that fluctuate: from the error at one position to the textbook's average over all."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.validate import Positive

__all__ = ["rounding_variance"]

FAR = 0.15  # spread in levels from which the series needs few terms; below, no number crosses two levels
TERMS = 16


@validate.named_arguments
def rounding_variance(mean: Any, spread: Any, distance: Positive) -> np.ndarray:
    """E[u (1 - u)] Delta^2 for x ~ N(mean, spread^2) rounded to multiples of Delta, u its position between two levels.

    Between two levels u (1 - u) is a parabola, and its slope jumps by 2 at each level: for a small spread s (in levels)
    the mean is u (1 - u) - s^2 + 2 sum_levels E[(how far x is beyond the level)_+]. For a larger one its Fourier series
    1/6 - sum_k cos(2 pi k x) exp(-2 (pi k s)^2) / (pi k)^2 converges at once: above half a level of spread the error is
    the textbook's Delta^2 / 6 to 1 %.

    Args:
      mean, spread: arrays of one shape; spread >= 0.
      distance: Delta > 0, between levels; 0 is a level.

    Guarantees: numerical integration, and both limits (tests/theory/test_quantization.py::test_rounding_variance).

    References: Widrow and Kollar 2008, chapter 4 (the characteristic function of quantised numbers).

    >>> print(rounding_variance([0.5, 0.5], [0.0, 10.0], 1.0).round(3))
    [0.25  0.167]
    """
    from scipy import stats

    mean, spread = np.broadcast_arrays(np.asarray(mean, np.float64), np.asarray(spread, np.float64))
    if not (np.isfinite(mean).all() and (spread >= 0).all()):
        validate.fail("mean, spread", "finite numbers, spread >= 0", (mean, spread))
    at, s = mean / distance, spread / distance
    u = at - np.floor(at)
    with np.errstate(divide="ignore", invalid="ignore"):
        beyond = sum(s * stats.norm.pdf(gap / s) - gap * stats.norm.sf(gap / s) for gap in (u, 1 - u))
    near = u * (1 - u) - s**2 + 2 * np.where(s > 0, beyond, 0)
    k = np.arange(1, TERMS + 1)
    wave = np.cos(2 * np.pi * k * at[..., None]) * np.exp(-2 * (np.pi * k * s[..., None]) ** 2) / (np.pi * k) ** 2
    return distance**2 * np.where(s < FAR, near, 1 / 6 - wave.sum(-1))
