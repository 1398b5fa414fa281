"""This module computes privacy loss distributions of the sampled Gaussian mechanism, on a grid of losses, rounded up.

The construction is dp-accounting's (connect the dots), but over arrays. That is about ten times faster, which matters
for truncated cohorts and for a progress line. Float64 FFTs leave errors of about 1e-17 T in delta after T rounds.
Because of these errors, dp-accounting 0.6.0 reports too small an epsilon from delta = 1e-10 on. Here negative mass is
cut, and `FLOOR` T of delta is reserved.

Symbols, all of one round and of one direction:

    q        the probability that a unit is drawn
    s        standard deviation of the noise over the clip norm
    x        an outcome: the noisy sum along the unit's message, in clip norms
    P, Q     the distributions of x on two neighbouring data sets
    L(x)     = log P(x) / Q(x), of densities: the privacy loss of the outcome x
    p_i      the probability under P of the loss l_i; p_inf is the probability of an infinite loss
    l_i      = grid (lower + i), the losses on the grid
    delta(e) = max over sets S of P(S) - exp(e) Q(S), the hockey-stick divergence at epsilon = e
             = p_inf + sum of p_i (1 - exp(e - l_i)) over all l_i > e

The first form of delta(e) gives the p_i (`_dots_connected`), and the second form gives epsilon (`_epsilon`).

References: Doroshenko, Ghazi, Kamath, Kumar and Manurangsi 2022 (Connect the Dots); Ganesh 2025 (truncated Poisson).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from scipy import fft
from scipy.special import log_ndtr, ndtr, ndtri

GRIDS = (1e-2, 1e-3, 1e-4)
FLOOR = 1e-16  # the part of delta that each round reserves for the errors of float64
_TAIL = math.exp(-50)  # probability beyond the grid, which counts as infinite loss
_TRUNCATED = 1e-15  # probability that is cut when rounds are composed, which counts as infinite loss
_LARGEST = 600.0  # losses beyond it count as infinite, because their exponential is no float64
_MOST_LOSSES = 1 << 23  # longer distributions count as infinite loss: there is next to no privacy


class _Half(NamedTuple):
    """A `_Half` is one direction of a privacy loss distribution, on a grid of losses.

    Args:
      lower: an integer; the smallest loss l_0 is `grid` times `lower`.
      mass: [n] float64, the probabilities p_0, ..., p_(n - 1) of the losses l_i = grid (lower + i).
      infinite: p_inf in [0, 1], the probability of an infinite loss.
    """

    lower: int
    mass: np.ndarray
    infinite: float


class PrivacyLoss(NamedTuple):
    """A `PrivacyLoss` is a privacy loss distribution on a grid, in both directions: a unit removed, and a unit added.

    Args:
      grid: the distance between neighbouring losses, such as 1e-3.
      halves: (a unit removed, a unit added); one entry if both directions have the same distribution.
    """

    grid: float
    halves: tuple[_Half, ...]

    def repeated(self, rounds: int) -> PrivacyLoss:
        """Computes the privacy loss of `rounds` adaptive repetitions of this mechanism."""
        return self if rounds == 1 else PrivacyLoss(self.grid, tuple(_repeated(half, rounds) for half in self.halves))

    def with_other(self, other: PrivacyLoss) -> PrivacyLoss:
        """Computes the privacy loss of this mechanism followed by another one, whose losses are on the same grid."""
        half_pairs = zip(_both(self.halves), _both(other.halves), strict=True)
        return PrivacyLoss(self.grid, tuple(_joined(first, second) for first, second in half_pairs))

    def epsilon(self, delta: float) -> float:
        """Computes the least epsilon at `delta`.

        It is infinite if the probability of an infinite loss is above `delta`.
        """
        return max(_epsilon(half, self.grid, delta) for half in self.halves)


@functools.lru_cache(maxsize=8)
def poisson_loss(rate: float, multiplier: float, replace: bool, grid: float) -> PrivacyLoss:
    """Computes the privacy loss of one round of the Gaussian mechanism on a Poisson sample.

    Args:
      rate: q in (0, 1].
      multiplier: standard deviation of the noise over the clip norm.
      replace: True if a unit is replaced, which moves the sum by up to two clip norms; False if a unit is added or
        removed.
      grid: distance between neighbouring losses of the grid.

    Returns: `PrivacyLoss`.

    Guarantees: The distribution equals dp-accounting's
    (tests/privacy/test_accountant.py::test_equals_dp_accounting_by_hand). At q = 1 its epsilon is never below the
    analytic Gaussian, down to delta = 1e-10 (::test_never_below_the_analytic_gaussian).
    """
    if replace:
        return PrivacyLoss(grid, (_loss_of_replacing(rate, multiplier, grid, _TAIL),))
    removed = _loss_of_moving(rate, multiplier, grid, added=False)
    # Without sampling, adding and removing a unit give the same distribution.
    if rate == 1:
        return PrivacyLoss(grid, (removed,))
    return PrivacyLoss(grid, (removed, _loss_of_moving(rate, multiplier, grid, added=True)))


@functools.lru_cache(maxsize=8)
def truncated_loss(
    population_size: int, rate: float, num_slots: int, *, multiplier: float, replace: bool, grid: float
) -> PrivacyLoss:
    """Bounds the privacy loss of one round on a Poisson sample, of which at most `num_slots` units are kept.

    The kept units are chosen uniformly.

    A unit that enters a full cohort takes another unit's slot. So with the probability of a full cohort, the sum moves
    by up to two clip norms. With B(n) for a binomial number of n trials with probability q,

        p_full = P[B(N - 1) >= m]                  the other units fill all slots
        q_full = P[B(N) > m] (m / N) / p_full      the unit is kept, given that the others fill all slots

    The loss is a mixture: with probability p_full that of a replaced unit, at the rate q_full and half the multiplier;
    otherwise that of the Poisson sample.

    Args:
      population_size: N, the number of units.
      num_slots: m, the most units that are kept.
      rate, multiplier, replace, grid: as in `poisson_loss`.

    Returns: `PrivacyLoss`.

    Guarantees: The distribution equals that of dp-accounting's event
    (tests/privacy/test_accountant.py::test_equals_dp_accounting_by_hand). Its epsilon is never below that without
    truncation (::test_truncated_is_never_below_poisson).
    """
    from scipy import stats  # not above: with `scipy.signal` it takes a second to import

    untruncated = poisson_loss(rate, multiplier, replace, grid)
    p_full = float(stats.binom.sf(num_slots - 1, population_size - 1, rate))
    # So small a probability is added to the infinite loss, where it changes no epsilon at a useful delta.
    if p_full < 1e-18:
        return PrivacyLoss(grid, tuple(half._replace(infinite=half.infinite + p_full) for half in untruncated.halves))
    q_full = stats.binom.sf(num_slots, population_size, rate) * num_slots / p_full / population_size
    # The mixture multiplies the cut tail by p_full, so the tail may be larger if full cohorts are rare.
    tail = min(1e-3, max(_TAIL, 1e-17 / p_full))
    # In a full cohort a unit moves the sum by two clip norms instead of one, so the noise multiplier is halved. The
    # loss of a replaced unit bounds that of a unit that is added or removed.
    swapped = _loss_of_replacing(min(1.0, float(q_full)), multiplier / 2, grid, tail)
    return PrivacyLoss(grid, tuple(_mixed(swapped, half, p_full) for half in untruncated.halves))


def _gaussian_delta(epsilon: np.ndarray, s: float) -> np.ndarray:
    """Computes the hockey-stick divergence of N(1, s^2) from N(0, s^2).

    With the normal distribution function Phi,

        delta(e) = Phi(1 / (2 s) - e s) - exp(e) Phi(-1 / (2 s) - e s).

    Args:
      epsilon: [n] e, any sign.
      s: above 0.

    Returns: [n] delta(e) in [0, 1].
    """
    middle = 0.5 / s
    shift = epsilon * s
    # Rounding may make the difference of two nearly equal numbers negative.
    return np.maximum(ndtr(middle - shift) - np.exp(epsilon + log_ndtr(-middle - shift)), 0)


def _unsampled(epsilon: np.ndarray, q: float) -> np.ndarray:
    """Computes u(e) = log(1 + (exp(e) - 1) / q), the unsampled epsilon that sampling turns into e.

    It is the inverse of `_log_sampled`.

    Args:
      epsilon: [n] e; u(e) is defined for e > log(1 - q). Below, the result means nothing, and is not used.
      q: in (0, 1].

    Returns: [n].
    """
    # exp(e) overflows for large e, so above 30 the equal form e - log(q) + log(1 + (q - 1) exp(-e)) is taken.
    large = np.maximum(epsilon, 30)
    small = np.minimum(epsilon, 30)
    u_of_small = np.log1p(np.maximum(np.expm1(small) / q, -1 + 1e-300))
    u_of_large = large - math.log(q) + np.log1p((q - 1) * np.exp(-large))
    return np.where(epsilon > 30, u_of_large, u_of_small)


def _log_sampled(q: float, loss: float) -> float:
    """Computes log(1 - q + q exp(l)): the loss that sampling at the rate q makes of an unsampled loss l."""
    log_not_drawn = math.log1p(-q) if q < 1 else -math.inf
    return float(np.logaddexp(log_not_drawn, math.log(q) + loss))


def _loss_of_moving(q: float, s: float, grid: float, *, added: bool) -> _Half:
    """Computes the direction in which one unit is removed or `added`.

    A drawn unit moves the mean of the noisy sum by 1. The sign of the mean changes no loss, so -1 stands for a unit
    that is removed, and 1 for a unit that is added:

        removed    P = (1 - q) N(0, s^2) + q N(-1, s^2),    Q = N(0, s^2)
                   L(x) = log(1 - q + q exp((-1/2 - x) / s^2))
                   delta(e) = q G(u(e)) for e > log(1 - q), else 1 - exp(e)

        added      P = N(0, s^2),    Q = (1 - q) N(0, s^2) + q N(1, s^2)
                   L(x) = -log(1 - q + q exp((x - 1/2) / s^2))
                   delta(e) = (1 - (1 - q) exp(e)) G(-u(-e)) for e < -log(1 - q), else 0

    G is `_gaussian_delta`, and u is `_unsampled`. L(x) decreases in x in both directions.

    Args:
      q: in (0, 1].
      s: above 0.
      grid: the distance between losses.
      added: True for a unit that is added, False for one that is removed.

    Returns: `_Half`; its losses cover all outcomes but those of two tails of `_TAIL` / 2.
    """
    # Outside of [low, high] either distribution has a probability of at most _TAIL.
    half_width = -s * ndtri(_TAIL / 2)
    if added:
        low = -half_width
        high = half_width + 1
        largest_loss = -_log_sampled(q, (low - 0.5) / s**2)
        smallest_loss = -_log_sampled(q, (high - 0.5) / s**2)
    else:
        low = -half_width - 1
        high = half_width
        largest_loss = _log_sampled(q, (-0.5 - low) / s**2)
        smallest_loss = _log_sampled(q, (-0.5 - high) / s**2)
    lower = math.floor(smallest_loss / grid)
    upper = math.ceil(largest_loss / grid)
    epsilon = np.arange(lower, upper + 1) * grid
    # -log(1 - q): the largest loss that adding a unit can have, and minus the least loss of removing one.
    end = -math.log1p(-q) if q < 1 else math.inf
    # The formulas are evaluated beyond the end too, where they overflow, and are then replaced.
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        if added:
            delta = (1 - np.exp(epsilon) * (1 - q)) * _gaussian_delta(-_unsampled(-epsilon, q), s)
            # Beyond the end no probability is left.
            delta = np.where(epsilon < end, delta, 0.0)
        else:
            delta = q * _gaussian_delta(_unsampled(epsilon, q), s)
            # Below the end every outcome has a larger loss.
            delta = np.where(epsilon > -end, delta, -np.expm1(epsilon))
    return _dots_connected(lower, delta, grid)


def _loss_of_replacing(q: float, s: float, grid: float, tail: float) -> _Half:
    """Computes the direction in which a unit is replaced by its opposite; the other direction is the same.

        P = (1 - q) N(0, s^2) + q N(-1, s^2),    Q = (1 - q) N(0, s^2) + q N(1, s^2)
        L(x) = log(1 - q + q exp((-1/2 - x) / s^2)) - log(1 - q + q exp((x - 1/2) / s^2))

    L(x) decreases in x, so the outcomes with a loss above e are those below x_e, where L(x_e) = e:

        delta(e) = P[X <= x_e] - exp(e) Q[X <= x_e]
        x_e = s^2 (-sign(e) asinh(r) - e / 2),    r = sinh(|e| / 2) exp(1 / (2 s^2)) (1 - q) / q

    The equation for x_e is quadratic in exp(x / s^2).

    Args:
      q: in (0, 1].
      s: above 0; the distance between a unit and its opposite is two clip norms.
      grid: the distance between losses.
      tail: in (0, 1), probability under P of the outcomes that the grid of losses need not reach.

    Returns: `_Half`.
    """

    def loss_at(x):
        """Computes L(x)."""
        return _log_sampled(q, (-0.5 - x) / s**2) - _log_sampled(q, (x - 0.5) / s**2)

    # P has at most `tail` outside of [-half_width - 1, half_width].
    half_width = -s * ndtri(tail / 2)
    lower = math.floor(loss_at(half_width) / grid)
    upper = math.ceil(loss_at(-half_width - 1) / grid)
    epsilon = np.arange(lower, upper + 1) * grid
    if q == 1:
        x = -epsilon * s**2 / 2
    else:
        # r and its inverse hyperbolic sine are taken in logarithms, so that nothing overflows:
        # asinh(r) = log(r + sqrt(1 + r^2)).
        magnitude = np.abs(epsilon)
        with np.errstate(divide="ignore"):  # r = 0 at e = 0
            log_sinh = magnitude / 2 + np.log1p(-np.exp(-magnitude)) - math.log(2)
        log_r = log_sinh + 0.5 / s**2 + math.log1p(-q) - math.log(q)
        log_sqrt = 0.5 * np.logaddexp(0, 2 * log_r)
        asinh_r = np.logaddexp(log_sqrt, log_r)
        x = s**2 * (-np.sign(epsilon) * asinh_r - epsilon / 2)

    def log_below(mean):
        """Computes log P[X <= x] of (1 - q) N(0, s^2) + q N(mean, s^2), [n]."""
        with np.errstate(divide="ignore"):
            log_not_drawn = np.log1p(-q) if q < 1 else -math.inf
            return np.logaddexp(math.log(q) + log_ndtr((x - mean) / s), log_not_drawn + log_ndtr(x / s))

    delta = np.exp(log_below(-1.0)) - np.exp(epsilon + log_below(1.0))
    return _dots_connected(lower, delta, grid)


def _dots_connected(lower: int, delta: np.ndarray, grid: float) -> _Half:
    """Connects the dots: computes the p_i whose hockey-stick divergence at each l_i is delta_i = delta(l_i).

        p_i = ((delta_(i+1) - delta_i) - exp(grid) (delta_i - delta_(i-1))) / (exp(grid) - 1)
        p_0 = 1 - delta_0 + (delta_1 - delta_0) / (exp(grid) - 1)
        p_n = (delta_n - delta_(n-1)) / (exp(-grid) - 1),    p_inf = delta_n

    Between the losses of the grid, the divergence of the result is larger, so the result is pessimistic.

    Args:
      lower: l_0 in units of the grid.
      delta: [n + 1] delta_0, ..., delta_n. NaN counts as 0.
      grid: the distance between losses.

    Returns: `_Half` with p_0, ..., p_n and p_inf.
    """
    # A hockey-stick divergence decreases in epsilon; rounding may break this by a little.
    delta = np.minimum.accumulate(np.clip(np.nan_to_num(delta), 0, 1))
    if delta.size == 1:
        return _Half(lower=lower, mass=np.array([1 - delta[0]]), infinite=float(delta[0]))
    differences = np.diff(delta)  # delta_(i+1) - delta_i
    relative_step = math.expm1(grid)
    mass = np.empty_like(delta)
    mass[0] = 1 - delta[0] + differences[0] / relative_step
    mass[1:-1] = (differences[1:] - differences[:-1] * math.exp(grid)) / relative_step
    mass[-1] = differences[-1] / math.expm1(-grid)
    return _Half(lower=lower, mass=np.maximum(mass, 0), infinite=float(delta[-1]))


def _mixed(first: _Half, second: _Half, weight: float) -> _Half:
    """Computes the mixture weight * first + (1 - weight) * second of two distributions on the same grid.

    Args:
      first, second: the distributions; their losses may start and end at different places of the grid.
      weight: in [0, 1].
    """
    lower = min(first.lower, second.lower)
    end = max(half.lower + half.mass.size for half in (first, second))
    mass = np.zeros(end - lower)
    for half, half_weight in ((first, weight), (second, 1 - weight)):
        start = half.lower - lower
        mass[start : start + half.mass.size] += half_weight * half.mass
    infinite = weight * first.infinite + (1 - weight) * second.infinite
    return _Half(lower=lower, mass=mass, infinite=infinite)


def _repeated(half: _Half, rounds: int) -> _Half:
    """Computes the distribution of the sum of T independent losses.

    The mass of a sum is the T-fold convolution of p. It is computed as the inverse Fourier transform of the T-th power
    of p's transform. The sum is infinite with probability 1 - (1 - p_inf)^T.

    Args:
      half: the distribution p of one loss.
      rounds: T >= 1.

    Returns: `_Half`; up to `_TRUNCATED` of its mass, at both ends together, counts as infinite loss. Where it would
      have more than `_MOST_LOSSES` losses, every loss is infinite.
    """
    low, high = _reach(half.mass, rounds)
    num_losses = high - low + 1
    # So long a distribution arises only if there is next to no privacy, so it counts as infinite loss.
    if num_losses > _MOST_LOSSES:
        return _Half(lower=0, mass=np.zeros(1), infinite=1.0)
    length = fft.next_fast_len(max(num_losses, half.mass.size), real=True)
    cyclic_mass = np.fft.irfft(np.fft.rfft(half.mass, length) ** rounds, length)
    # The convolution is circular: the sum of places j stands at j modulo `length`. The roll brings the smallest kept
    # sum, `low`, to the front. The FFT's errors leave small negative mass, which is cut.
    mass = np.maximum(np.roll(cyclic_mass, -low)[:num_losses], 0)
    if half.infinite < 1:
        # 1 - (1 - p_inf)^T, and the mass beyond [low, high].
        infinite = _TRUNCATED - math.expm1(rounds * math.log1p(-half.infinite))
    else:
        infinite = 1.0
    return _Half(lower=half.lower * rounds + low, mass=mass, infinite=min(1.0, infinite))


def _reach(mass: np.ndarray, rounds: int) -> tuple[int, int]:
    """Computes bounds on the sum S of T draws, beyond which the mass is at most `_TRUNCATED`, by Chernoff's bound.

    With M(a) = sum_j p_j exp(a j) and any a > 0,

        P[S >= high] <= M(a)^T exp(-a high) = tau,      high = (T log M(a) - log tau) / a
        P[S <= low]  <= M(-a)^T exp(a low)  = tau,      low = -(T log M(-a) - log tau) / a

    with tau = `_TRUNCATED` / 2 for each end.

    Args:
      mass: [n] p_j, the probability of drawing the place j = 0, ..., n - 1.
      rounds: T.

    Returns: (low, high), integers within [0, (n - 1) T].
    """
    low = 0
    high = (mass.size - 1) * rounds
    log_tau = math.log(_TRUNCATED / 2)
    a = 0.25 / mass.size
    exponentials = np.exp(a * np.arange(mass.size))  # exp(a j)
    # Nine values of a, each twice the one before: the bound holds for every a, and the tightest is kept.
    for _ in range(9):
        # Sums of products rather than `@`, because BLAS would start threads.
        log_mgf_up = math.log((exponentials * mass).sum())
        log_mgf_down = math.log((mass / exponentials).sum())
        high = min(high, math.ceil((rounds * log_mgf_up - log_tau) / a))
        low = max(low, math.floor(-(rounds * log_mgf_down - log_tau) / a))
        exponentials = exponentials * exponentials
        a = 2 * a
    return low, high


def _both(halves: tuple[_Half, ...]) -> tuple[_Half, _Half]:
    """Returns both directions; a single entry stands for both."""
    return (halves[0], halves[-1])


def _joined(first: _Half, second: _Half) -> _Half:
    """Computes the distribution of the sum of two independent losses: the convolution of their masses."""
    from scipy.signal import fftconvolve

    mass = np.maximum(fftconvolve(first.mass, second.mass), 0)
    # The sum is infinite if either loss is.
    infinite = first.infinite + second.infinite - first.infinite * second.infinite
    return _Half(lower=first.lower + second.lower, mass=mass, infinite=infinite)


def _epsilon(half: _Half, grid: float, delta: float) -> float:
    """Computes the least e >= 0 with delta(e) <= `delta`, of one direction.

    Let A_i = p_inf + sum_(j >= i) p_j, and B_i = sum_(j >= i) p_j exp(l_0 - l_j). Then for e in [l_(i-1), l_i],

        delta(e) = A_i - exp(e - l_0) B_i,

    which decreases in e. So the largest i with delta(l_(i-1)) > `delta` tells between which losses the wanted e lies,
    and there e = l_0 + log((A_i - delta) / B_i). Only losses above 0 are counted, and l_0 is the smallest of these.

    Args:
      half: the distribution p of the loss.
      grid: the distance between losses.
      delta: in (0, 1).

    Returns: epsilon; infinite if p_inf > `delta`.
    """
    if half.infinite > delta:
        return math.inf
    # Losses up to 0 cost nothing at an epsilon >= 0.
    first_positive = max(0, 1 - half.lower)
    loss = (half.lower + np.arange(first_positive, half.mass.size)) * grid
    mass = half.mass[first_positive:]
    if not loss.size:
        return 0.0
    # Exponentials of differences above _LARGEST overflow float64, so larger losses count as infinite.
    is_finite = loss < loss[0] + _LARGEST
    infinite = half.infinite + float(mass[~is_finite].sum())
    loss = loss[is_finite]
    mass = mass[is_finite]
    if infinite > delta:
        return math.inf
    l_0 = float(loss[0])
    # Sums from the far end, so that small masses are not lost beside large ones.
    A = infinite + np.cumsum(mass[::-1])[::-1]
    B = np.cumsum((mass * np.exp(l_0 - loss))[::-1])[::-1]
    deltas = A - np.exp(loss - grid - l_0) * B  # entry i: delta(l_(i-1))
    exceeding = np.flatnonzero(deltas > delta)
    if not exceeding.size:
        return 0.0
    i = exceeding[-1]
    return max(0.0, l_0 + math.log((A[i] - delta) / B[i]))
