"""Renyi divergences of one release at a fixed list of orders, for mechanisms that `loss` has no distribution for.

dp-accounting's curves where it has one. Noise in integers, with Delta_1 and Delta_2 the most that a unit moves a sum of
integers by, and the noise's variance s^2 (all in units of the grid):

    m discrete Gaussians of parameter sigma   the least of  a/2 D^2 + tau d,  a/2 (D^2 + 2 tau Delta_1/s + tau^2 d)  and
                                              a/2 (D + tau sqrt(d))^2,  where D = Delta_2/s, s = sqrt(m) sigma and
                                              tau = 10 sum_{k<m} exp(-2 pi^2 sigma^2 k/(k+1))
    Skellam                                   a/2 D^2 + the least of ((2a-1) Delta_2^2 + 6 Delta_1) / (4 s^4)  and
                                              3 Delta_1 / (2 s^2)

On a fixed-size sample without replacement, the bound is that for any mechanism with a known curve.

References: Kairouz, Liu and Steinke 2021, proposition 14; Agarwal, Kairouz and Liu 2021, theorem 3.5; Wang, Balle and
Kasiviswanathan 2019, theorem 9; Mironov, Talwar and Zhang 2019.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math

import dp_accounting as dp
import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant
from scipy.special import gammaln, logsumexp

from fedjax_sim.privacy.mechanism import INTEGERS, Mechanism

__all__ = ["ORDERS", "curve", "discrete_gaussian_curve", "epsilon", "known", "sampled_curve", "skellam_curve"]

ORDERS = np.array([*rdp_privacy_accountant.DEFAULT_RDP_ORDERS, 2048, 4096, 8192], np.float64)
_ROUNDING = 2.0**-50  # of float64, for each term of an order's sum: at most four times what is seen


@functools.lru_cache(maxsize=64)
def curve(mechanism: Mechanism) -> np.ndarray | None:
    """[orders] Renyi divergence of one release; None where no bound is known (truncated samples, replaced units of a
    Poisson sample).

    Guarantees: equals dp-accounting's accountant, which takes half the noise multiplier where a unit is replaced
    (tests/privacy/test_accountant.py::test_equals_dp_accounting_by_hand, ::test_accountants_agree_on_replacing); on
    samples not below the truth, nor negative, however small it is (tests/privacy/test_renyi.py::
    test_tiny_divergences_are_rounded_up).
    """
    if mechanism.noise_multiplier == 0:
        return np.full(ORDERS.size, np.inf)
    z, law = mechanism.noise_multiplier / mechanism.moves, mechanism.law
    if mechanism.kind in INTEGERS:
        found = _integer_curve(mechanism)
    elif not known(mechanism):
        return None
    elif law == "without_replacement":
        found = _fixed_size_curve(mechanism.population_size, int(mechanism.cohort_size), z)
    else:
        event = dp.GaussianDpEvent(z)
        with _quiet():
            event = dp.PoissonSampledDpEvent(mechanism.drawn_from[1], event) if law == "poisson" else event
            found = dp.rdp.RdpAccountant(ORDERS).compose(event).rdp
    if law == "always":
        return found
    found = np.maximum(found, 0) + _ROUNDING * ORDERS / (ORDERS - 1)  # sums of terms near one lose what is below 1e-16
    return found if mechanism.kind in INTEGERS else np.minimum(found, ORDERS / 2 / z**2)  # sampling never costs privacy


def known(mechanism: Mechanism) -> bool:
    """Whether `curve` has a bound, without its second of computation."""
    return mechanism.law != "truncated_poisson" and not (mechanism.law == "poisson" and mechanism.moves == 2)


@functools.lru_cache(maxsize=64)
def _fixed_size_curve(population_size: int, cohort_size: int, z: float) -> np.ndarray:
    few = ORDERS[ORDERS <= 1024]  # the larger ones take long, and give the bound for epsilons below 0.01 only
    event = dp.SampledWithoutReplacementDpEvent(population_size, cohort_size, dp.GaussianDpEvent(z))
    with _quiet():
        found = dp.rdp.RdpAccountant(few, dp.NeighboringRelation.REPLACE_ONE).compose(event).rdp
    return np.concatenate([found, np.full(ORDERS.size - few.size, np.inf)])


def epsilon(total: np.ndarray, delta: float) -> tuple[float, float]:
    """(epsilon at `delta`, the order that gives it) from a sum of curves."""
    found, order = dp.rdp.compute_epsilon(ORDERS, total, delta)
    return float(found), float(order)


def discrete_gaussian_curve(
    orders: np.ndarray, *, l2: float, l1: float, message_std: float, num_messages: int, dimension: int
) -> np.ndarray:
    """The curve of a sum of `num_messages` discrete Gaussians in each of d numbers; lengths in units of the grid.

    Guarantees: never below the exact divergence in one dimension
    (tests/privacy/test_renyi.py::test_integer_curves_bound_the_exact_divergence).
    """
    std = message_std * math.sqrt(num_messages)
    k = np.arange(1, min(num_messages, 10_000))
    tau = 10 * float(np.exp(-2 * math.pi**2 * message_std**2 * k / (k + 1)).sum())
    if num_messages > 10_000:  # what is left out has exponents below that of the last
        tau += 10 * (num_messages - 10_000) * math.exp(-2 * math.pi**2 * message_std**2 * (1 - 1e-4))
    moved = l2 / std
    first = orders / 2 * moved**2 + tau * dimension
    second = orders / 2 * (moved**2 + 2 * tau * l1 / std + tau**2 * dimension)
    third = orders / 2 * (moved + tau * math.sqrt(dimension)) ** 2
    return np.minimum(first, np.minimum(second, third))


def skellam_curve(orders: np.ndarray, *, l2: float, l1: float, variance: float) -> np.ndarray:
    """The curve of Skellam noise with this variance in each number; lengths in units of the grid; whole orders above 1.

    Guarantees: as `discrete_gaussian_curve`.
    """
    extra = np.minimum(((2 * orders - 1) * l2**2 + 6 * l1) / (4 * variance**2), 3 * l1 / (2 * variance))
    return orders * l2**2 / (2 * variance) + extra


def sampled_curve(unsampled: np.ndarray, rate: float) -> np.ndarray:
    """[2 .. A] divergences at whole orders on a uniform sample without replacement, from those of the whole.

    Args:
      unsampled: [A + 1], entry a for order a; entries 0 and 1 are not read.
      rate: m / N.

    Guarantees: above zero and below the divergences of the whole
    (tests/privacy/test_renyi.py::test_sampling_amplifies), and not below dp-accounting's own bound for the Gaussian
    (::test_sampled_curve_is_the_general_bound).
    """
    orders = np.arange(2, unsampled.size)
    out = unsampled.astype(np.float64).copy()
    second = unsampled[2]
    with np.errstate(divide="ignore", over="ignore"):
        pair = min(math.log(4) + _log_expm1(second), second + math.log(2))
        j = np.arange(3, unsampled.size)
        high = (j - 1) * unsampled[3:] + math.log(2) + j * math.log(rate)
        for order in orders:
            terms = [0.0, 2 * math.log(rate) + _log_choose(order, 2) + pair]
            here = j[j <= order]
            total = logsumexp(np.concatenate([terms, high[: here.size] + _log_choose(order, here)]))
            out[order] = min(unsampled[order], total / (order - 1))
    return out


def _integer_curve(mechanism: Mechanism) -> np.ndarray:
    moves, m = mechanism.moves, int(mechanism.detail("cohort_size"))
    lengths = {"l2": moves * mechanism.detail("l2_units"), "l1": moves * mechanism.detail("l1_units")}
    message_std = mechanism.noise_multiplier * mechanism.detail("clip_units") / math.sqrt(m)

    def unsampled(orders):
        if mechanism.kind == "skellam":
            return skellam_curve(orders, **lengths, variance=message_std**2 * m)
        dimension = int(mechanism.detail("dimension"))
        return discrete_gaussian_curve(orders, **lengths, message_std=message_std, num_messages=m, dimension=dimension)

    whole = np.arange(513, dtype=np.float64)
    known = unsampled(whole)
    if mechanism.law == "without_replacement":
        known = sampled_curve(known, mechanism.rate)
    at = np.full(ORDERS.size, np.inf)
    usable = (ORDERS >= 2) & (ORDERS < whole.size) & (np.floor(ORDERS) == ORDERS)
    at[usable] = known[ORDERS[usable].astype(int)]
    return at


def _log_expm1(x: float) -> float:
    return x + math.log(-math.expm1(-x)) if x > 0 else -math.inf


def _log_choose(n, k):
    return gammaln(n + 1) - gammaln(np.asarray(k) + 1) - gammaln(n - np.asarray(k) + 1)


@contextlib.contextmanager
def _quiet():
    """Without dp-accounting's warnings about orders that it leaves out."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
