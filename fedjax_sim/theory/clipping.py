"""This module computes the bias and noise that clipping causes in a released mean, and the best clip norm."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.validate import NonNegative, Number, OpenShare, Positive


@dataclasses.dataclass(frozen=True)
class ClippedMean:
    """The squared error of the released mean, measured against the mean of the unclipped updates, in three parts."""

    bias: float  # |mean clip(u_i) - mean u_i|^2; falls to 0 as C grows
    sampling: float  # variance from drawing a uniform cohort of the clipped updates without replacement
    noise: float  # d (z C / m)^2; falls to 0 as C falls

    @property
    def total(self) -> float:
        """E |release - mean u_i|^2."""
        return self.bias + self.sampling + self.noise


def _checked_updates(updates: Any, cohort_size: Any) -> np.ndarray:
    """Checks the updates and returns them as float64 [N, d]."""
    updates = np.asarray(updates, np.float64)
    updates = updates[:, None] if updates.ndim == 1 else updates
    if updates.ndim != 2 or not updates.size or not np.isfinite(updates).all():
        validate.fail("updates", "finite numbers [N, d]", updates.shape)
    validate.integer("cohort_size", cohort_size, 1, len(updates))
    return updates


@validate.named_arguments
def clipped_mean_error(
    updates: Any, *, clip_norm: Positive, noise_multiplier: NonNegative, cohort_size: int
) -> ClippedMean:
    """Computes the error of a cohort's noisy mean of updates that are clipped to norm C.

    The noise has the standard deviation z C / m.

    Args:
      updates: [N, d] updates of all clients (or [N]).
      clip_norm: C > 0.
      noise_multiplier: z >= 0.
      cohort_size: m of N clients, uniform without replacement; the aggregator is `fixed_mean(m)`.

    Returns: `ClippedMean`, whose parts add up to the error exactly.

    Guarantees: The simulator's rounds have this error, and the best clip norm lies in the interior
    (tests/theory/test_clipping.py::test_simulated_release, ::test_interior_optimum).

    References: McMahan et al. 2018 (DP-FedAvg), section 2; Andrew et al. 2021, section 1.

    >>> clipped_mean_error([3.0, 1.0], clip_norm=2.0, noise_multiplier=1.0, cohort_size=2)
    ClippedMean(bias=0.25, sampling=0.0, noise=1.0)
    """
    updates = _checked_updates(updates, cohort_size)
    num_clients, dimension = updates.shape
    norms = np.linalg.norm(updates, axis=1, keepdims=True)
    # A zero update stays zero: its norm is replaced by 1, so that nothing is divided by zero.
    clipped = updates * np.minimum(1, clip_norm / np.where(norms > 0, norms, 1))
    mean = clipped.mean(0)
    finite_population_correction = (num_clients - cohort_size) / max(num_clients - 1, 1)
    spread = ((clipped - mean) ** 2).sum(1).mean()
    return ClippedMean(
        bias=float(((mean - updates.mean(0)) ** 2).sum()),
        sampling=float(spread / cohort_size * finite_population_correction),
        noise=dimension * (noise_multiplier * clip_norm / cohort_size) ** 2,
    )


@validate.named_arguments
def best_clip_norm(updates: Any, *, noise_multiplier: Positive, cohort_size: int) -> float:
    """Finds the clip norm with the least total error, to a relative 1e-4.

    A grid of 200 clip norms is searched first, and golden sections refine the best of them.

    Args:
      updates, cohort_size: as in `clipped_mean_error`.
      noise_multiplier: z > 0; it is the noise that a smaller clip norm reduces.

    Returns: C in (0, the largest norm]. It depends on the clients' data, so a private run must not use it.

    Raises: ValueError if every release has a larger error than releasing zero.

    Guarantees: The optimum is interior (tests/theory/test_clipping.py::test_interior_optimum), also under much noise
    (::test_much_noise).

    >>> round(best_clip_norm([1.0, 1.0, 1.0, 10.0], noise_multiplier=1.0, cohort_size=4), 3)
    5.0
    """
    from scipy.optimize import minimize_scalar

    updates = _checked_updates(updates, cohort_size)
    norms = np.linalg.norm(updates, axis=1, keepdims=True)
    largest = float(norms.max())
    if not (largest > 0):
        validate.fail("updates", "one that is not zero", 0.0)

    options = {"noise_multiplier": noise_multiplier, "cohort_size": cohort_size}

    def error(logarithm: float) -> float:
        return clipped_mean_error(updates, clip_norm=float(np.exp(logarithm)), **options).total

    # Below the least norm every update is C times its direction e_i, and the error is a parabola in C. Under much noise
    # the optimum lies there, far below the grid, so the grid is extended to it.
    directions = updates / np.where(norms > 0, norms, 1)
    mean_direction = directions.mean(0)
    unit_error = clipped_mean_error(directions, clip_norm=1.0, **options)
    small_clip_optimum = float(updates.mean(0) @ mean_direction) / float(
        mean_direction @ mean_direction + unit_error.sampling + unit_error.noise
    )
    low = np.log(largest) - 12
    high = np.log(largest)
    low = min(low, np.log(small_clip_optimum) - 2) if small_clip_optimum > 0 else low
    grid = np.linspace(low, high, 200)
    best = int(np.argmin([error(logarithm) for logarithm in grid]))
    least_norm = float(norms[norms > 0].min())
    if 0 < small_clip_optimum < least_norm and grid[best] < np.log(least_norm):
        return small_clip_optimum
    if best == 0:
        validate.fail("noise_multiplier", "one at which a release is better than none", noise_multiplier)
    low = grid[max(best - 1, 0)]
    high = grid[min(best + 1, len(grid) - 1)]
    refined = minimize_scalar(error, bounds=(low, high), method="bounded", options={"xatol": 1e-5})
    return float(np.exp(refined.x if refined.fun < error(grid[best]) else grid[best]))


@validate.named_arguments
def largest_personal_factor(
    norms: Sequence[float], *, noise_std: Positive, epsilon: Annotated[float, Number(0, 1, open_low=True)],
    delta: OpenShare,
) -> float:  # fmt: skip
    """Computes the largest factor of personal thresholds C_i = factor |u_i| that noise of a given size allows.

    The factor is min(1, s N epsilon / (max_i |u_i| sqrt(2 ln(1.25 / delta)))): thresholds keep directions, and every
    client keeps the same share of its update. Noise protects what a client adds to the mean, at most
    factor max_i |u_i| / N. It does not protect the norms themselves, from which thresholds and factor follow: a run
    with personal thresholds states no epsilon.

    Args:
      norms: [N] the lengths of the clients' updates, >= 0 and finite.
      noise_std: s, the standard deviation of the noise in each coordinate of the mean.
      epsilon: in (0, 1], where the bound of the Gaussian mechanism that is used here holds.
      delta: in (0, 1).

    Returns: a number in (0, 1]; 1 if all updates are zero.

    Raises: ValueError for norms that are negative, not finite, or none.

    Guarantees: it is the worked case's, grows with the noise up to 1, and shares are the transform's
    (tests/theory/test_clipping.py::test_personal_factors).

    References: Dwork and Roth 2014, theorem A.1.

    >>> round(largest_personal_factor([0.5, 1.0, 2.0, 4.0], noise_std=0.5, epsilon=1.0, delta=1e-5), 6)
    0.103203
    """
    lengths = np.asarray(norms, np.float64)
    if lengths.ndim != 1 or not lengths.size or not (np.isfinite(lengths) & (lengths >= 0)).all():
        validate.fail("norms", "[N] finite numbers >= 0, one for each client", norms)
    allowed = noise_std * lengths.size * epsilon / math.sqrt(2 * math.log(1.25 / delta))
    longest = float(lengths.max())
    return min(1.0, allowed / longest) if longest > 0 else 1.0
