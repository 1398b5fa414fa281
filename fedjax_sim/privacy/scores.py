"""This module bounds epsilon from two samples of scores: of releases with a canary and of releases without."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

THRESHOLDS = 400  # number of thresholds among which the best is chosen
CELLS = 64  # number of bins in the chi-square test of fit
REFUTED = 1e-6  # level of the chi-square test of fit
MIN_RELEASES = 5000  # fewer releases do not determine the curvature of a mixture's likelihood


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The bounds on epsilon that one test gives."""

    method: str
    lower: float
    upper: float  # infinite if the method bounds epsilon from below only
    note: str
    at: float | None = None  # the score at which an alarm is raised


def gaussian_profile(epsilon: np.ndarray, mu: float) -> np.ndarray:
    """Computes delta(epsilon) of N(0, 1) against N(mu, 1), exactly.

    Args:
      epsilon: [k].
      mu: distance of the means; <= 0 gives zeros.

    Returns: [k] deltas in [0, 1].

    References: Balle and Wang 2018, theorem 8.
    """
    from scipy import special

    epsilon = np.asarray(epsilon, np.float64)
    if not mu > 0:
        return np.zeros_like(epsilon)
    scaled_tail = np.exp(epsilon + special.log_ndtr(-epsilon / mu - mu / 2))
    return np.maximum(special.ndtr(-epsilon / mu + mu / 2) - scaled_tail, 0)


def subsampled_profile(epsilon: np.ndarray, rate: float, mu: float) -> np.ndarray:
    """Computes delta(epsilon) of N(0, 1) against (1 - rate) N(0, 1) + rate N(mu, 1); the larger one of both directions.

    The likelihood ratio rises with the score. So the best tests are thresholds (Neyman and Pearson), which have a
    closed form.

    Args:
      epsilon: [k].
      rate: probability that the canary takes part.
      mu: distance of the means.

    Returns: [k] deltas in [0, 1].
    """
    from scipy import special

    epsilon = np.asarray(epsilon, np.float64)
    if not (mu > 0 and rate > 0):
        return np.zeros_like(epsilon)
    # The likelihood ratio of the mixture equals e^epsilon at the score `up`, and e^-epsilon at the score `down`.
    up = (np.log1p(np.expm1(epsilon) / rate) + mu**2 / 2) / mu
    removed = rate * special.ndtr(mu - up) + (1 - rate) * special.ndtr(-up) - np.exp(epsilon + special.log_ndtr(-up))
    shifted_ratio = 1 + np.expm1(-epsilon) / rate
    # If 1 - rate > e^-epsilon, the ratio never falls so low: no threshold raises an alarm.
    down = np.where(
        shifted_ratio > 0, (np.log(np.where(shifted_ratio > 0, shifted_ratio, 1)) + mu**2 / 2) / mu, -np.inf
    )
    mixture_mass = rate * special.ndtr(down - mu) + (1 - rate) * special.ndtr(down)
    return np.maximum(np.maximum(removed, special.ndtr(down) - np.exp(epsilon) * mixture_mass), 0)


def epsilon_at(profile: Callable, delta: float) -> float:
    """Computes the least epsilon with profile(epsilon) <= delta; infinite beyond 700.

    Args:
      profile: (epsilons [k]) -> deltas [k], decreasing.
      delta: in (0, 1).

    Returns: epsilon, rounded up by at most 1e-9 of its value.
    """
    low = 0.0
    high = 1.0
    if profile(np.array([0.0]))[0] <= delta:
        return 0.0
    # The profile decreases: double until it is low enough, then bisect. e^700 is near the largest float64.
    while profile(np.array([high]))[0] > delta:
        low = high
        high = 2 * high
        if high > 700:
            return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if profile(np.array([middle]))[0] > delta else (low, middle)
    return high


def clopper_pearson(count: np.ndarray, number: int, error: float) -> tuple[np.ndarray, np.ndarray]:
    """Computes lower and upper bounds of a rate, each wrong with probability at most `error`.

    Args:
      count: [...] events that were counted.
      number: trials.
      error: in (0, 1).

    Returns: (lower [...], upper [...]).
    """
    from scipy import stats

    count = np.asarray(count)
    # Beta quantiles are undefined at counts of 0 and `number`, where the bounds are 0 and 1.
    lower = np.where(count > 0, stats.beta.ppf(error, np.maximum(count, 1), number - count + 1), 0)
    upper = np.where(count < number, stats.beta.isf(error, count + 1, np.maximum(number - count, 1)), 1)
    return lower, upper


def _alarms(samples: Sequence[np.ndarray], thresholds: np.ndarray) -> np.ndarray:
    """Counts false and true alarms, [4, k, 2], of four kinds of tests at thresholds [k].

    An alarm is raised by the scores above the threshold, or by the other scores. It stands for the presence of the
    canary, or for its absence.
    """
    ranks = [np.searchsorted(np.sort(scores), thresholds, side="right") for scores in samples]
    above = [scores.size - rank for scores, rank in zip(samples, ranks, strict=True)]
    # Pairs (false alarms, true alarms). Where an alarm stands for absence, the two samples change places.
    tests = [(above[0], above[1]), (ranks[1], ranks[0]), (ranks[0], ranks[1]), (above[1], above[0])]
    return np.stack([np.stack(pair, -1) for pair in tests])


def _halves(without: np.ndarray, with_canary: np.ndarray):
    """Divides the scores into halves: (first halves, second halves, thresholds).

    Thresholds are quantiles of the first halves, and are dense in the tails, where small false alarm rates are found.
    """
    # Every other score goes to the same half, so that a drift over releases affects both alike.
    first, second = ([scores[parity::2] for scores in (without, with_canary)] for parity in range(2))
    tail_levels = np.geomspace(1 / first[0].size, 0.5, THRESHOLDS // 4)
    levels = np.concatenate([tail_levels, 1 - tail_levels])
    return first, second, np.unique(np.concatenate([np.quantile(scores, levels, method="nearest") for scores in first]))


def _lower_epsilon(alarms: np.ndarray, numbers: Sequence[int], delta: float, error: float) -> np.ndarray:
    """Computes lower bounds [...] of epsilon from counts of false and true alarms [..., 2]."""
    false_alarm_rate = clopper_pearson(alarms[..., 0], numbers[0], error / 2)[1]
    power = clopper_pearson(alarms[..., 1], numbers[1], error / 2)[0]
    # (epsilon, delta)-DP means power <= e^epsilon (false alarm rate) + delta.
    return np.where(power > delta, np.log(np.maximum(power - delta, 1e-300) / false_alarm_rate), -np.inf)


def best_threshold(without: np.ndarray, with_canary: np.ndarray, *, delta: float, error: float) -> Estimate:
    """Bounds epsilon from below by a threshold that one half of the releases chooses and the other half tests.

    Args:
      without, with_canary: [R] scores.
      delta: in (0, 1).
      error: the probability that the bound is wrong.

    Returns: `Estimate` with an infinite upper end.

    References: Jagielski, Ullman and Oprea 2020, section 4; Nasr et al. 2021, section 3.3.
    """
    first, second, thresholds = _halves(without, with_canary)
    candidates = _lower_epsilon(_alarms(first, thresholds), [scores.size for scores in first], delta, error)
    kind, best = np.unravel_index(np.argmax(candidates), (4, thresholds.size))
    # Counting on the other half keeps the bound valid, although the threshold is the best of many.
    alarms = _alarms(second, thresholds[best : best + 1])[kind]
    lower = float(_lower_epsilon(alarms, [scores.size for scores in second], delta, error)[0])
    false_alarm_rate, power = (alarms[0] / second[0].size).tolist()
    note = (
        f"at score {thresholds[best]:.4g}: false alarms {false_alarm_rate:.3e}, power {power:.3e}; no bound from above"
    )
    return Estimate("threshold", max(lower, 0.0), math.inf, note, float(thresholds[best]))


def power_excess(without, with_canary, power: Callable, *, error: float) -> tuple[float, tuple[float, float, float]]:
    """Bounds from below by how much a test's power exceeds the power that the claim allows.

    If the bound is positive, the claim is false.

    Args:
      without, with_canary: [R] scores.
      power: false alarm rates [...] -> the most power that the claim allows [...].
      error: the probability that a true claim gives a positive excess.

    Returns: the excess, and (largest false alarm rate, least power, power that the claim allows).
    """
    first, second, thresholds = _halves(without, with_canary)
    rates = _alarms(first, thresholds) / first[0].size
    allowed = power(rates[..., 0])
    # The threshold is chosen by excess over standard deviation, since the excess itself favours noisy counts.
    spread = np.sqrt((rates * (1 - rates)).sum(-1) + 1 / first[0].size)
    kind, best = np.unravel_index(np.argmax((rates[..., 1] - allowed) / spread), allowed.shape)
    alarms = _alarms(second, thresholds[best : best + 1])[kind, 0]
    false_alarm_rate = float(clopper_pearson(alarms[0], second[0].size, error / 2)[1])
    least_power = float(clopper_pearson(alarms[1], second[1].size, error / 2)[0])
    allowed_power = float(power(np.array(false_alarm_rate)))
    return least_power - allowed_power, (false_alarm_rate, least_power, allowed_power)


def parametric(
    without: np.ndarray, with_canary: np.ndarray, *, delta: float, error: float, law: str = "mixture"
) -> Estimate | None:
    """Bounds epsilon from both sides if scores are Gaussian, or a mixture of two Gaussians.

    A mixture arises if the canary takes part in some of the releases only.

    Args:
      without, with_canary: [R] scores.
      delta: in (0, 1).
      error: the probability that a bound is wrong, for each of the two.
      law: "gaussian" or "mixture". Scores that are refuted as Gaussian are tried as a mixture.

    Returns: `Estimate`; None if a test of fit refutes the law. A few releases refute nothing, so the law must be known
    beforehand.

    References: Dong, Roth and Su 2022, section 2.3; Nasr et al. 2023, section 4.3.
    """
    estimate = _gaussian(without, with_canary, delta, error) if law == "gaussian" else None
    return estimate or _mixture(without, with_canary, delta, error)


def _gaussian(without, with_canary, delta, error) -> Estimate | None:
    """Computes the interval of epsilon for Gaussian scores with a common variance.

    Scores without the canary follow N(a, s^2), and those with it N(a + mu s, s^2). Epsilon at delta depends on mu only
    (`gaussian_profile`). With R_0 and R_1 scores and f = R_0 + R_1 - 2 degrees of freedom,

        mu = (mean with the canary - mean without) / s
        standard error of mu = sqrt(1 / R_0 + 1 / R_1 + mu^2 / (2 f))

    Args:
      without: [R_0] scores without the canary.
      with_canary: [R_1] scores with it.
      delta: in (0, 1).
      error: in (0, 1/2), the probability that a bound is wrong, for each of the two.

    Returns: `Estimate`; None if a chi-square test of fit refutes the law at the level `REFUTED`, or if the scores do
      not vary.
    """
    from scipy import special, stats

    samples = (without, with_canary)
    means = [scores.mean() for scores in samples]
    sizes = [scores.size for scores in samples]
    degrees_of_freedom = sum(sizes) - 2
    deviation = math.sqrt(
        sum(((scores - mean) ** 2).sum() for scores, mean in zip(samples, means, strict=True)) / degrees_of_freedom
    )
    if not deviation > 0:
        return None
    # Bins with equal probability under the fitted law.
    edges = np.concatenate([[-np.inf], special.ndtri(np.arange(1, CELLS) / CELLS), [np.inf]])
    chi_square = 0.0
    for scores, mean in zip(samples, means, strict=True):
        counts = np.histogram((scores - mean) / deviation, edges)[0]
        chi_square += ((counts - scores.size / CELLS) ** 2).sum() / (scores.size / CELLS)
    # Three parameters were fitted: two means and a standard deviation.
    p_value = float(stats.chi2.sf(chi_square, 2 * (CELLS - 1) - 3))
    if p_value < REFUTED:
        return None
    mu = (means[1] - means[0]) / deviation
    # The standard error of mu: of the difference of means, and of the estimated standard deviation.
    half_width = special.ndtri(1 - error) * math.sqrt(1 / sizes[0] + 1 / sizes[1] + mu**2 / (2 * degrees_of_freedom))
    mu_interval = (max(abs(mu) - half_width, 0.0), abs(mu) + half_width)
    lower, upper = (epsilon_at(functools.partial(gaussian_profile, mu=end), delta) for end in mu_interval)
    return Estimate(
        "gaussian",
        lower,
        upper,
        f"mu {abs(mu):.5f} in [{mu_interval[0]:.5f}, {mu_interval[1]:.5f}], fit p = {p_value:.2g}",
    )


def _mixture(without, with_canary, delta, error) -> Estimate | None:
    """Computes the interval of epsilon for a mixture, by maximum likelihood on binned scores.

    In units of the standard deviation s of the scores without the canary, and relative to their mean,

        without the canary    N(shift, exp(2 scale))
        with it               (1 - q) N(shift, exp(2 scale)) + q N(shift + mu exp(scale), exp(2 scale))

    The four parameters are (shift, scale, q, mu), and epsilon at delta depends on q and mu only (`subsampled_profile`).
    The interval follows from the delta method: the variance of epsilon is g^T C g. C is the inverse curvature of the
    negative log-likelihood, and g is the gradient of epsilon in the parameters.

    Args:
      without: [R_0] scores without the canary.
      with_canary: [R_1] scores with it.
      delta: in (0, 1).
      error: in (0, 1/2), the probability that a bound is wrong, for each of the two.

    Returns: `Estimate`; None for fewer than `MIN_RELEASES` scores without the canary, for scores that do not vary, if a
      chi-square test of fit refutes the law at the level `REFUTED`, and if the likelihood has no curvature.
    """
    from scipy import optimize, special, stats

    mean = without.mean()
    deviation = without.std()
    if without.size < MIN_RELEASES or not deviation > 0:
        return None
    # Standardised scores, so that the parameters of the fit are of order one.
    samples = [(scores - mean) / deviation for scores in (without, with_canary)]
    low = min(scores.min() for scores in samples)
    high = max(scores.max() for scores in samples)
    edges = np.concatenate([[-np.inf], np.linspace(low, high, 4 * CELLS + 1)[1:-1], [np.inf]])
    counts = [np.histogram(scores, edges)[0] for scores in samples]

    def cells(values):
        """Computes the probabilities of the cells, without the canary and with it."""
        shift, scale, q, mu = values
        plain, moved = (np.diff(special.ndtr((edges - shift) / math.exp(scale) - center)) for center in (0.0, mu))
        return plain, (1 - q) * plain + q * moved

    def loss(values):
        """Computes the negative log-likelihood of the binned scores; infinite for q outside of (0, 1)."""
        if not 0 < values[2] < 1:
            return math.inf
        return -sum(
            (count * np.log(np.maximum(probability, 1e-300))).sum()
            for count, probability in zip(counts, cells(values), strict=True)
        )

    # The fit starts from the moments of the mixture: mean q mu, and variance 1 + q (1 - q) mu^2.
    second_mean = samples[1].mean()
    excess_variance = samples[1].var() - 1
    q = float(np.clip(second_mean**2 / (second_mean**2 + max(excess_variance, 1e-6)), 1e-3, 0.999))
    optimum = optimize.minimize(loss, [0.0, 0.0, q, second_mean / q], method="Nelder-Mead",
                              options={"xatol": 1e-7, "fatol": 1e-4, "maxiter": 4000, "adaptive": True})  # fmt: skip
    chi_square = 0.0
    # Four parameters are fitted: shift, scale, q and mu.
    degrees_of_freedom = -4
    for count, probability in zip(counts, cells(optimum.x), strict=True):
        expected = probability * count.sum()
        is_large = expected > 10
        # The chi-square law needs a few expected counts in each cell, so rare cells are pooled.
        pooled = (count[~is_large].sum() - expected[~is_large].sum()) ** 2 / max(expected[~is_large].sum(), 10.0)
        chi_square += ((count[is_large] - expected[is_large]) ** 2 / expected[is_large]).sum() + pooled
        degrees_of_freedom += int(is_large.sum())
    p_value = float(stats.chi2.sf(chi_square, max(degrees_of_freedom, 1)))
    if p_value < REFUTED:
        return None
    # Steps of the numerical derivatives stay inside of 0 < q < 1.
    step_sizes = np.array([1e-3, 1e-3, min(1e-3, optimum.x[2] / 10, (1 - optimum.x[2]) / 10), 1e-3])
    steps = np.diag(step_sizes)
    hessian = np.array([[_second(loss, optimum.x, a, b) for a in steps] for b in steps]) / np.outer(
        step_sizes, step_sizes
    )
    try:
        covariance = np.linalg.inv(hessian)
    except np.linalg.LinAlgError:
        return None

    def epsilon(values):
        """Computes epsilon at `delta` of the mixture with these parameters."""
        return epsilon_at(functools.partial(subsampled_profile, rate=values[2], mu=abs(values[3])), delta)

    # Delta method: the variance of epsilon is g^T C g.
    slope = np.array([epsilon(optimum.x + step) - epsilon(optimum.x - step) for step in steps]) / (2 * step_sizes)
    variance = float(slope @ covariance @ slope)
    if not variance >= 0:
        return None
    half_width = special.ndtri(1 - error) * math.sqrt(variance)
    estimate = epsilon(optimum.x)
    note = f"canary takes part with chance {optimum.x[2]:.4f}, mu {abs(optimum.x[3]):.4f}, fit p = {p_value:.2g}"
    return Estimate("mixture", float(max(estimate - half_width, 0.0)), float(estimate + half_width), note)


def _second(loss: Callable, at: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """Computes the mixed second difference of `loss` along the steps `a` and `b`."""
    return (loss(at + a + b) - loss(at + a - b) - loss(at - a + b) + loss(at - a - b)) / 4
