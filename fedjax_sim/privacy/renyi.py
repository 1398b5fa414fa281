"""This module gives the Renyi divergences of one release at fixed orders, for mechanisms without a loss distribution.

The curves are dp-accounting's, if it has one. For integer noise, let Delta_1 and Delta_2 be the largest L1 and L2 norm
by which a unit moves a sum of integers. Let s^2 be the noise's variance, all in units of the grid. At order a:

    m discrete Gaussians of parameter sigma   the least of  a/2 D^2 + tau d,  a/2 (D^2 + 2 tau Delta_1/s + tau^2 d)  and
                                              a/2 (D + tau sqrt(d))^2,  where D = Delta_2/s, s = sqrt(m) sigma and
                                              tau = 10 sum_{k<m} exp(-2 pi^2 sigma^2 k/(k+1))
    Skellam                                   a/2 D^2 + the least of ((2a-1) Delta_2^2 + 6 Delta_1) / (4 s^4)  and
                                              3 Delta_1 / (2 s^2)

For a fixed-size sample without replacement, the bound is the one that holds for every mechanism with a known curve.

References: Kairouz, Liu and Steinke 2021, proposition 14; Agarwal, Kairouz and Liu 2021, theorem 3.5; Wang, Balle and
Kasiviswanathan 2019, theorem 9; Mironov, Talwar and Zhang 2019.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from typing import cast

import numpy as np
from scipy.special import gammaln, logsumexp

from fedjax_sim.privacy.mechanism import INTEGERS, PURE, Mechanism

# An upper bound on the rounding error of float64 for each term of an order's sum: at most four times the error that is
# observed.
_ROUNDING = 2.0**-50


@functools.cache
def all_orders() -> np.ndarray:
    """Returns the orders of all curves, float64: those of dp-accounting, and three larger ones.

    dp-accounting is imported where it is used, because it imports large parts of SciPy. That takes a second, for which
    a run without noise need not wait.
    """
    from dp_accounting.rdp import rdp_privacy_accountant

    orders = np.array([*rdp_privacy_accountant.DEFAULT_RDP_ORDERS, 2048, 4096, 8192], np.float64)
    orders.flags.writeable = False  # all callers share it
    return orders


@functools.lru_cache(maxsize=64)
def curve(mechanism: Mechanism) -> np.ndarray | None:
    """Bounds the Renyi divergence of one release, in nats, at each order of `all_orders()`.

    Args:
      mechanism: of any kind; its noise multiplier may be 0.

    Returns: [orders] float64, infinite at orders without a bound and for a mechanism without noise. None if no bound is
    known at any order (truncated samples, and replaced units of a Poisson sample). All callers share the array.

    Guarantees: The curve equals that of dp-accounting's accountant, which takes half the noise multiplier if a unit is
    replaced (tests/privacy/test_accountant.py::test_equals_dp_accounting_by_hand,
    ::test_accountants_agree_on_replacing). On samples it is never below the true divergence nor negative, however small
    the divergence is (tests/privacy/test_renyi.py::test_tiny_divergences_are_rounded_up).
    """
    import dp_accounting as dp

    if mechanism.noise_multiplier == 0:
        return np.full(all_orders().size, np.inf)
    z = mechanism.noise_multiplier / mechanism.moves
    law = mechanism.law
    # Noise without a delta is local, which no sampling amplifies. Its multiplier is 1 / epsilon, wherever a unit moves.
    if mechanism.kind in PURE:
        return pure_curve(all_orders(), 1 / mechanism.noise_multiplier)
    if mechanism.kind in INTEGERS:
        divergences = _integer_curve(mechanism)
    elif not known(mechanism):
        return None
    elif law == "without_replacement":
        divergences = _fixed_size_curve(mechanism.population_size, int(mechanism.cohort_size), z)
    else:
        event = dp.GaussianDpEvent(z)
        with _quiet():
            event = dp.PoissonSampledDpEvent(mechanism.drawn_from[1], event) if law == "poisson" else event
            divergences = dp.rdp.RdpAccountant(all_orders().tolist()).compose(event).rdp
    if law == "always":
        return divergences
    # A sampled divergence is the logarithm of a sum near one, which loses everything below 1e-16. The bound on this
    # error is added, so that the result is never too small.
    orders = all_orders()
    divergences = np.maximum(divergences, 0) + _ROUNDING * orders / (orders - 1)
    # Of integer noise, `sampled_curve` has taken this minimum already.
    if mechanism.kind in INTEGERS:
        return divergences
    # Sampling never costs privacy, so the unsampled divergence a / (2 z^2) is an upper bound too.
    return np.minimum(divergences, orders / 2 / z**2)


def known(mechanism: Mechanism) -> bool:
    """Tells whether `curve` has a bound for this mechanism. This is immediate, whereas `curve` may take a second."""
    return mechanism.law != "truncated_poisson" and not (mechanism.law == "poisson" and mechanism.moves == 2)


def pure_curve(orders: np.ndarray, epsilon: float) -> np.ndarray:
    """Bounds the Renyi divergence of a mechanism that is epsilon-differentially private without a delta.

    No such mechanism has a larger divergence than randomised response between two answers, whose probabilities have the
    ratio e^epsilon. The bound on the rounding error of float64 is added.

    Args:
      orders: [n], above 1.
      epsilon: positive.

    Returns: [n] float64, in nats, at most epsilon.

    Guarantees: it is the divergence of two answers, and at most epsilon
    (tests/privacy/test_renyi.py::test_pure_privacy_is_randomised_response).

    References: Kairouz, Oh and Viswanath 2015, theorem 3.1 (all such mechanisms simulate from two answers).
    """
    log_p = -np.log1p(np.exp(-epsilon))
    log_q = log_p - epsilon
    joined = np.logaddexp(orders * log_p + (1 - orders) * log_q, orders * log_q + (1 - orders) * log_p)
    divergences = np.maximum(joined, 0) / (orders - 1) + _ROUNDING * orders * (1 + epsilon) / (orders - 1)
    return np.minimum(divergences, epsilon)


@functools.lru_cache(maxsize=64)
def _fixed_size_curve(population_size: int, cohort_size: int, z: float) -> np.ndarray:
    """Computes the Renyi divergence of Gaussian noise on a sample of fixed size; infinite at orders above 1024."""
    import dp_accounting as dp

    # Larger orders take long, and give the least bound only for epsilons below 0.01.
    orders = all_orders()
    small_orders = orders[orders <= 1024]
    event = dp.SampledWithoutReplacementDpEvent(population_size, cohort_size, dp.GaussianDpEvent(z))
    with _quiet():
        accountant = dp.rdp.RdpAccountant(small_orders.tolist(), dp.NeighboringRelation.REPLACE_ONE)
        divergences = accountant.compose(event).rdp
    return np.concatenate([divergences, np.full(orders.size - small_orders.size, np.inf)])


def epsilon(total: np.ndarray, delta: float) -> tuple[float, float]:
    """Converts a sum of curves into (epsilon at `delta`, the order that gives this epsilon)."""
    from dp_accounting.rdp import compute_epsilon

    value, order = compute_epsilon(all_orders().tolist(), total.tolist(), delta)
    return float(value), float(order)


def discrete_gaussian_curve(
    orders: np.ndarray, *, l2: float, l1: float, message_std: float, num_messages: int, dimension: int
) -> np.ndarray:
    """Computes the curve of a sum of `num_messages` discrete Gaussians in each of d coordinates.

    Args:
      orders: [k] orders above 1.
      l2, l1: the largest L2 and L1 norm by which a unit moves the sum, in units of the grid.
      message_std: sigma, the noise's parameter in one message, in units of the grid.
      num_messages: m.
      dimension: d.

    Returns: [k] divergences.

    Guarantees: The curve is never below the exact divergence in one dimension
    (tests/privacy/test_renyi.py::test_integer_curves_bound_the_exact_divergence).
    """
    std = message_std * math.sqrt(num_messages)
    k = np.arange(1, min(num_messages, 10_000))
    tau = 10 * float(np.exp(-2 * math.pi**2 * message_std**2 * k / (k + 1)).sum())
    # The remaining terms are bounded by one with the exponent of k = 10,000, which is the largest among them.
    if num_messages > 10_000:
        tau += 10 * (num_messages - 10_000) * math.exp(-2 * math.pi**2 * message_std**2 * (1 - 1e-4))
    relative_shift = l2 / std
    first_bound = orders / 2 * relative_shift**2 + tau * dimension
    second_bound = orders / 2 * (relative_shift**2 + 2 * tau * l1 / std + tau**2 * dimension)
    third_bound = orders / 2 * (relative_shift + tau * math.sqrt(dimension)) ** 2
    return np.minimum(first_bound, np.minimum(second_bound, third_bound))


def skellam_curve(orders: np.ndarray, *, l2: float, l1: float, variance: float) -> np.ndarray:
    """Computes the curve of Skellam noise with this variance in each coordinate.

    Args:
      orders: [k] whole orders above 1.
      l2, l1: as in `discrete_gaussian_curve`.
      variance: s^2, in squared units of the grid.

    Returns: [k] divergences.

    Guarantees: The curve is not below the exact divergence in one dimension, at orders 2 and 4, standard deviations 2
    and 6, and shifts 1 and 3 (tests/privacy/test_renyi.py::test_integer_curves_bound_the_exact_divergence).
    """
    excess_over_gaussian = np.minimum(((2 * orders - 1) * l2**2 + 6 * l1) / (4 * variance**2), 3 * l1 / (2 * variance))
    return orders * l2**2 / (2 * variance) + excess_over_gaussian


def sampled_curve(unsampled: np.ndarray, rate: float) -> np.ndarray:
    """Computes divergences at whole orders on a uniform sample without replacement.

    Args:
      unsampled: [A + 1] divergences; entry a is for order a. Entries 0 and 1 are not read.
      rate: m / N.

    Returns: [A + 1] divergences; entries 0 and 1 are those of `unsampled`.

    Guarantees: The divergences are above zero and below those without sampling
    (tests/privacy/test_renyi.py::test_sampling_amplifies). They are not below dp-accounting's own bound for the
    Gaussian (::test_sampled_curve_is_the_general_bound).
    """
    orders = np.arange(2, unsampled.size)
    sampled = unsampled.astype(np.float64).copy()
    order_two = unsampled[2]
    with np.errstate(divide="ignore", over="ignore"):
        # The terms of theorem 9 in logarithms, because e^((j - 1) epsilon_j) overflows.
        log_pair_term = min(math.log(4) + _log_expm1(order_two), order_two + math.log(2))
        j = np.arange(3, unsampled.size)
        log_high_terms = (j - 1) * unsampled[3:] + math.log(2) + j * math.log(rate)
        for order in orders:
            terms = [0.0, 2 * math.log(rate) + _log_choose(order, 2) + log_pair_term]
            orders_up_to = j[j <= order]
            log_terms = np.concatenate([terms, log_high_terms[: orders_up_to.size] + _log_choose(order, orders_up_to)])
            # SciPy states no types; logsumexp returns a pair only if the sign is asked for.
            total = cast(float, logsumexp(log_terms))
            sampled[order] = min(unsampled[order], total / (order - 1))
    return sampled


def _integer_curve(mechanism: Mechanism) -> np.ndarray:
    """Computes the Renyi divergence of integer noise at whole orders from 2 to 512; infinite elsewhere.

    All lengths are in units of the grid. Each of m messages carries noise of the standard deviation

        sigma = z c / sqrt(m),

    so that the sum has z times the clip norm c.

    Args:
      mechanism: of a kind in `INTEGERS`, with z above 0. Its details give m ("cohort_size"), c ("clip_units"), and the
        norms of a rounded update, of which a unit moves the sum by `moves`.

    Returns: divergences at `all_orders()`.
    """
    moves = mechanism.moves
    num_messages = int(mechanism.detail("cohort_size"))  # m
    lengths = {"l2": moves * mechanism.detail("l2_units"), "l1": moves * mechanism.detail("l1_units")}
    message_std = mechanism.noise_multiplier * mechanism.detail("clip_units") / math.sqrt(num_messages)  # sigma

    def unsampled(orders):
        """Computes the divergences [k] at orders [k] if every client takes part."""
        if mechanism.kind == "skellam":
            return skellam_curve(orders, **lengths, variance=message_std**2 * num_messages)
        dimension = int(mechanism.detail("dimension"))
        return discrete_gaussian_curve(
            orders, **lengths, message_std=message_std, num_messages=num_messages, dimension=dimension
        )

    # Amplification by sampling needs the divergences at all whole orders up to the largest.
    whole_orders = np.arange(513, dtype=np.float64)
    divergences = unsampled(whole_orders)
    if mechanism.law == "without_replacement":
        divergences = sampled_curve(divergences, mechanism.rate)
    orders = all_orders()
    curve_values = np.full(orders.size, np.inf)
    usable = (orders >= 2) & (orders < whole_orders.size) & (np.floor(orders) == orders)
    curve_values[usable] = divergences[orders[usable].astype(int)]
    return curve_values


def _log_expm1(x: float) -> float:
    """Computes log(e^x - 1); -inf at x <= 0."""
    return x + math.log(-math.expm1(-x)) if x > 0 else -math.inf


def _log_choose(n, k):
    """Computes the logarithm of the binomial coefficient n over k."""
    return gammaln(n + 1) - gammaln(np.asarray(k) + 1) - gammaln(n - np.asarray(k) + 1)


@contextlib.contextmanager
def _quiet():
    """Silences dp-accounting's warnings about orders that it leaves out."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
