"""Bounds on epsilon from two samples of scores, with a canary and without."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

__all__ = [
    "Estimate",
    "best_threshold",
    "epsilon_at",
    "gaussian_profile",
    "parametric",
    "power_excess",
    "subsampled_profile",
]

THRESHOLDS = 400
CELLS = 64
REFUTED = 1e-6  # level of the test of fit
FEW = 5000  # releases that are too few for the curvature of a mixture's likelihood


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The bounds of one test on epsilon."""

    method: str
    lower: float
    upper: float  # infinite where the method bounds from below only
    note: str
    at: float | None = None  # the score at which an alarm is raised


def gaussian_profile(epsilon: np.ndarray, mu: float) -> np.ndarray:
    """delta(epsilon) of N(0, 1) against N(mu, 1), exactly.

    References: Balle and Wang 2018, theorem 8.
    """
    from scipy import special

    epsilon = np.asarray(epsilon, np.float64)
    if not mu > 0:
        return np.zeros_like(epsilon)
    far = np.exp(epsilon + special.log_ndtr(-epsilon / mu - mu / 2))
    return np.maximum(special.ndtr(-epsilon / mu + mu / 2) - far, 0)


def subsampled_profile(epsilon: np.ndarray, rate: float, mu: float) -> np.ndarray:
    """delta(epsilon) of N(0, 1) against the mixture (1 - rate) N(0, 1) + rate N(mu, 1), the worse of both directions.

    The likelihood ratio rises with the score, so the best tests are thresholds (Neyman and Pearson), in closed form.
    """
    from scipy import special

    epsilon = np.asarray(epsilon, np.float64)
    if not (mu > 0 and rate > 0):
        return np.zeros_like(epsilon)
    up = (np.log1p(np.expm1(epsilon) / rate) + mu**2 / 2) / mu  # the ratio is e^epsilon here
    removed = rate * special.ndtr(mu - up) + (1 - rate) * special.ndtr(-up) - np.exp(epsilon + special.log_ndtr(-up))
    inner = 1 + np.expm1(-epsilon) / rate
    down = np.where(inner > 0, (np.log(np.where(inner > 0, inner, 1)) + mu**2 / 2) / mu, -np.inf)
    mixture = rate * special.ndtr(down - mu) + (1 - rate) * special.ndtr(down)
    return np.maximum(np.maximum(removed, special.ndtr(down) - np.exp(epsilon) * mixture), 0)


def epsilon_at(profile: Callable, delta: float) -> float:
    """The smallest epsilon with profile(epsilon) <= delta, rounded up by at most 1e-9 of it; infinite beyond 700."""
    low, high = 0.0, 1.0
    if profile(np.array([0.0]))[0] <= delta:
        return 0.0
    while profile(np.array([high]))[0] > delta:
        low, high = high, 2 * high
        if high > 700:
            return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if profile(np.array([middle]))[0] > delta else (low, middle)
    return high


def clopper_pearson(count: np.ndarray, number: int, error: float) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of a rate, each wrong with probability at most `error`."""
    from scipy import stats

    count = np.asarray(count)
    lower = np.where(count > 0, stats.beta.ppf(error, np.maximum(count, 1), number - count + 1), 0)
    upper = np.where(count < number, stats.beta.isf(error, count + 1, np.maximum(number - count, 1)), 1)
    return lower, upper


def _alarms(samples: Sequence[np.ndarray], thresholds: np.ndarray) -> np.ndarray:
    """[4, k, 2]: false and true alarms of four kinds of tests at thresholds [k].

    An alarm is raised by scores above the threshold, or by the others; it stands for the canary's presence, or for its
    absence.
    """
    ranks = [np.searchsorted(np.sort(x), thresholds, side="right") for x in samples]
    above = [x.size - rank for x, rank in zip(samples, ranks, strict=True)]
    tests = [(above[0], above[1]), (ranks[1], ranks[0]), (ranks[0], ranks[1]), (above[1], above[0])]
    return np.stack([np.stack(x, -1) for x in tests])


def _halves(without: np.ndarray, with_canary: np.ndarray):
    """(first halves, second halves, thresholds): thresholds are quantiles of the first halves, dense in the tails."""
    first, second = ([x[i::2] for x in (without, with_canary)] for i in range(2))
    tail = np.geomspace(1 / first[0].size, 0.5, THRESHOLDS // 4)
    levels = np.concatenate([tail, 1 - tail])
    return first, second, np.unique(np.concatenate([np.quantile(x, levels, method="nearest") for x in first]))


def _lower_epsilon(alarms: np.ndarray, numbers: Sequence[int], delta: float, error: float) -> np.ndarray:
    """Lower bounds [...] of epsilon from false and true alarms [..., 2]."""
    false = clopper_pearson(alarms[..., 0], numbers[0], error / 2)[1]
    true = clopper_pearson(alarms[..., 1], numbers[1], error / 2)[0]
    return np.where(true > delta, np.log(np.maximum(true - delta, 1e-300) / false), -np.inf)


def best_threshold(without: np.ndarray, with_canary: np.ndarray, *, delta: float, error: float) -> Estimate:
    """A lower bound of epsilon from one threshold, chosen on one half of the releases and counted on the other.

    References: Jagielski, Ullman and Oprea 2020, section 4; Nasr et al. 2021, section 3.3.
    """
    first, second, thresholds = _halves(without, with_canary)
    kind, at = np.unravel_index(
        np.argmax(_lower_epsilon(_alarms(first, thresholds), [x.size for x in first], delta, error)),
        (4, thresholds.size),
    )
    alarms = _alarms(second, thresholds[at : at + 1])[kind]
    lower = float(_lower_epsilon(alarms, [x.size for x in second], delta, error)[0])
    false, true = (alarms[0] / second[0].size).tolist()
    note = f"at score {thresholds[at]:.4g}: false alarms {false:.3e}, power {true:.3e}; no bound from above"
    return Estimate("threshold", max(lower, 0.0), math.inf, note, float(thresholds[at]))


def power_excess(without, with_canary, power: Callable, *, error: float) -> tuple[float, tuple[float, float, float]]:
    """By how much a test exceeds the power that the claim allows, at least; if positive, the claim is false.

    Returns: the excess, and (false alarm rate at most, power at least, power allowed).
    """
    first, second, thresholds = _halves(without, with_canary)
    rates = _alarms(first, thresholds) / first[0].size
    allowed = power(rates[..., 0])
    spread = np.sqrt((rates * (1 - rates)).sum(-1) + 1 / first[0].size)
    kind, at = np.unravel_index(np.argmax((rates[..., 1] - allowed) / spread), allowed.shape)
    alarms = _alarms(second, thresholds[at : at + 1])[kind, 0]
    false = float(clopper_pearson(alarms[0], second[0].size, error / 2)[1])
    true = float(clopper_pearson(alarms[1], second[1].size, error / 2)[0])
    most = float(power(np.array(false)))
    return true - most, (false, true, most)


def parametric(
    without: np.ndarray, with_canary: np.ndarray, *, delta: float, error: float, law: str = "mixture"
) -> Estimate | None:
    """Both bounds of epsilon if scores are Gaussian, or a mixture of two where the canary takes part at times.

    Each end is wrong with probability `error`. None where a test of fit refutes the law; refuted Gaussians are tried as
    a mixture first. A few releases refute nothing, so the law must be known beforehand.

    References: Dong, Roth and Su 2022, section 2.3; Nasr et al. 2023, section 4.3.
    """
    found = _gaussian(without, with_canary, delta, error) if law == "gaussian" else None
    return found or _mixture(without, with_canary, delta, error)


def _gaussian(without, with_canary, delta, error) -> Estimate | None:
    from scipy import special, stats

    samples = (without, with_canary)
    means, sizes = [x.mean() for x in samples], [x.size for x in samples]
    freedom = sum(sizes) - 2
    deviation = math.sqrt(sum(((x - mean) ** 2).sum() for x, mean in zip(samples, means, strict=True)) / freedom)
    if not deviation > 0:
        return None
    edges = np.concatenate([[-np.inf], special.ndtri(np.arange(1, CELLS) / CELLS), [np.inf]])
    misfit = 0.0
    for x, mean in zip(samples, means, strict=True):
        counts = np.histogram((x - mean) / deviation, edges)[0]
        misfit += ((counts - x.size / CELLS) ** 2).sum() / (x.size / CELLS)
    fit = float(stats.chi2.sf(misfit, 2 * (CELLS - 1) - 3))
    if fit < REFUTED:
        return None
    mu = (means[1] - means[0]) / deviation
    half = special.ndtri(1 - error) * math.sqrt(1 / sizes[0] + 1 / sizes[1] + mu**2 / (2 * freedom))
    ends = (max(abs(mu) - half, 0.0), abs(mu) + half)
    lower, upper = (epsilon_at(functools.partial(gaussian_profile, mu=x), delta) for x in ends)
    return Estimate("gaussian", lower, upper, f"mu {abs(mu):.5f} in [{ends[0]:.5f}, {ends[1]:.5f}], fit p = {fit:.2g}")


def _mixture(without, with_canary, delta, error) -> Estimate | None:
    """Maximum likelihood on binned scores; the interval is from the likelihood's curvature, by the delta method."""
    from scipy import optimize, special, stats

    mean, deviation = without.mean(), without.std()
    if without.size < FEW or not deviation > 0:
        return None
    samples = [(x - mean) / deviation for x in (without, with_canary)]
    low, high = min(x.min() for x in samples), max(x.max() for x in samples)
    edges = np.concatenate([[-np.inf], np.linspace(low, high, 4 * CELLS + 1)[1:-1], [np.inf]])
    counts = [np.histogram(x, edges)[0] for x in samples]

    def cells(values):
        shift, scale, rate, mu = values
        plain, moved = (np.diff(special.ndtr((edges - shift) / math.exp(scale) - x)) for x in (0.0, mu))
        return plain, (1 - rate) * plain + rate * moved

    def loss(values):
        if not 0 < values[2] < 1:
            return math.inf
        return -sum((c * np.log(np.maximum(p, 1e-300))).sum() for c, p in zip(counts, cells(values), strict=True))

    first, second = samples[1].mean(), samples[1].var() - 1
    rate = float(np.clip(first**2 / (first**2 + max(second, 1e-6)), 1e-3, 0.999))
    found = optimize.minimize(loss, [0.0, 0.0, rate, first / rate], method="Nelder-Mead",
                              options={"xatol": 1e-7, "fatol": 1e-4, "maxiter": 4000, "adaptive": True})  # fmt: skip
    misfit, freedom = 0.0, -4
    for count, probability in zip(counts, cells(found.x), strict=True):
        expected = probability * count.sum()
        kept = expected > 10
        rest = (count[~kept].sum() - expected[~kept].sum()) ** 2 / max(expected[~kept].sum(), 10.0)
        misfit += ((count[kept] - expected[kept]) ** 2 / expected[kept]).sum() + rest
        freedom += int(kept.sum())
    fit = float(stats.chi2.sf(misfit, max(freedom, 1)))
    if fit < REFUTED:
        return None
    sizes = np.array([1e-3, 1e-3, min(1e-3, found.x[2] / 10, (1 - found.x[2]) / 10), 1e-3])
    steps = np.diag(sizes)
    hessian = np.array([[_second(loss, found.x, a, b) for a in steps] for b in steps]) / np.outer(sizes, sizes)
    try:
        covariance = np.linalg.inv(hessian)
    except np.linalg.LinAlgError:
        return None

    def epsilon(values):
        return epsilon_at(functools.partial(subsampled_profile, rate=values[2], mu=abs(values[3])), delta)

    slope = np.array([epsilon(found.x + step) - epsilon(found.x - step) for step in steps]) / (2 * sizes)
    variance = float(slope @ covariance @ slope)
    if not variance >= 0:
        return None
    half, centre = special.ndtri(1 - error) * math.sqrt(variance), epsilon(found.x)
    note = f"canary takes part with chance {found.x[2]:.4f}, mu {abs(found.x[3]):.4f}, fit p = {fit:.2g}"
    return Estimate("mixture", float(max(centre - half, 0.0)), float(centre + half), note)


def _second(loss: Callable, at: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """Mixed second difference."""
    return (loss(at + a + b) - loss(at + a - b) - loss(at - a + b) + loss(at - a - b)) / 4
