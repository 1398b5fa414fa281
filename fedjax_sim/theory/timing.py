"""This module predicts how long rounds take, from order statistics of the clients' times, and compares throughputs."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fedjax_sim import validate
from fedjax_sim.validate import NonNegativeInt, PositiveInt, PositiveShare, Share

NUM_POINTS = 200_001  # number of points of the quadrature
LAST = 36.0  # the largest logit: beyond it 1 - u would be 0 in float64


@validate.named_arguments
def harmonic(m: NonNegativeInt) -> float:
    """Computes H_m = 1 + 1/2 + ... + 1/m: the expected maximum of m independent exponential times with mean 1.

    Args:
      m: >= 0.

    Guarantees: H_10, H_100, H_1000 and H_10000 equal known values to six decimals, and H_0 is 0
    (tests/theory/test_timing.py::test_harmonic_numbers).

    >>> round(harmonic(10), 6)
    2.928968
    """
    from scipy import special

    return float(special.digamma(m + 1) + np.euler_gamma)


def exponential_quantile(u: np.ndarray) -> np.ndarray:
    """Computes the quantile function of the exponential law with mean 1: -log(1 - u).

    Args:
      u: [...] in [0, 1).

    >>> round(float(exponential_quantile(np.array(0.5))), 6)
    0.693147
    """
    return -np.log1p(-np.asarray(u, np.float64))


@validate.named_arguments
def expected_order_statistic(k: int, m: PositiveInt, quantile: Callable | None = None) -> float:
    """Computes the mean of the k-th smallest of m independent times.

    It is the mean time until the k-th of m clients arrives.

    E T_(k:m) is the integral of Q(u) over the law Beta(k, m - k + 1) of u, on a grid of logits. For exponential times
    with mean 1 it is H_m - H_(m-k).

    Args:
      k, m: 1 <= k <= m.
      quantile: Q, (u in (0, 1), a float64 array) -> times, such as `network.lognormal(...).quantile`, or `ppf` of a
        SciPy distribution. None = exponential with mean 1, in closed form.

    Returns: the mean, to a relative 1e-6 for a smooth Q, and 1e-3 for a Q with jumps.

    Raises: ValueError for a time that is not finite, and if the mean is infinite or lies in a tail beyond 1 - 2e-16.

    Guarantees: The times equal closed forms for exponential, uniform and Pareto distributions
    (tests/theory/test_timing.py::test_order_statistics), and a simulation of lognormal times (::test_laws_of_devices).

    References: David and Nagaraja 2003, sections 2.1 and 2.5 (exponential spacings: Renyi 1953).

    >>> expected_order_statistic(2, 2) == harmonic(2)
    True
    """
    validate.integer("k", k, 1, m)
    if quantile is None:
        return harmonic(m) - harmonic(m - k)
    from scipy import special

    validate.function("quantile", quantile, "u")
    a = k
    b = m - k + 1
    # In logits the Beta density is smooth and close to a bell curve, so the trapezoid rule converges fast.
    centre = math.log(a / b)
    spread = math.sqrt(1 / a + 1 / b)
    low = centre - 45 * max(1 / a, spread)
    high = min(centre + 45 * max(1 / b, spread), LAST)
    logits = np.linspace(low, high, NUM_POINTS)
    u = special.expit(logits)
    density = np.exp(a * special.log_expit(logits) + b * special.log_expit(-logits) - special.betaln(a, b))
    times = np.asarray(quantile(np.clip(u, 1e-300, 1 - 2.0**-53)), np.float64)
    if times.shape != u.shape or not np.isfinite(times).all():
        validate.fail("quantile", "finite times, one for each u in (0, 1)", times)
    integrand = times * density
    total = float(np.trapezoid(integrand, logits))
    # The integrand must have vanished at the last point, or a heavy tail was cut off.
    if not abs(integrand[-1]) <= 1e-6 * max(abs(total), 1e-300):
        validate.fail("quantile", "times whose k-th smallest has a mean", "a heavy tail", "Cut it off, or take k < m.")
    return total


def sampled_order_statistic(times: np.ndarray, k: int, m: int) -> float:
    """Computes the mean of the k-th smallest time of m clients out of N clients with known times.

    The m clients are drawn without replacement.

    It is the j-th smallest of all times with probability C(j-1, k-1) C(N-j, m-k) / C(N, m). Clients of
    `expected_order_statistic` are drawn from a law; this function is exact for a given population.

    Args:
      times: [N] finite, in any order.
      k, m: 1 <= k <= m <= N.

    Guarantees: The time is the mean over all cohorts of a population of six
    (tests/theory/test_timing.py::test_cohorts_of_a_population).

    References: David and Nagaraja 2003, section 3.7 (sampling from a finite population).

    >>> round(sampled_order_statistic(np.array([1.0, 2.0, 6.0]), 2, 2), 6)  # (2 + 6 + 6) / 3
    4.666667
    """
    from scipy import special

    times = np.asarray(times, np.float64)
    if times.ndim != 1 or not times.size or not np.isfinite(times).all():
        validate.fail("times", "finite numbers [N]", times)
    validate.integer("m", m, 1, times.size)
    validate.integer("k", k, 1, m)

    def log_choose(n, r):
        return -np.log1p(n) - special.betaln(n - r + 1, r + 1)

    population_size = times.size
    # The k-th smallest of a cohort may have the ranks k to N - m + k among all clients.
    rank = np.arange(k, population_size - m + k + 1, dtype=np.float64)
    # In logarithms, because binomial coefficients overflow.
    log_probabilities = (
        log_choose(rank - 1, k - 1) + log_choose(population_size - rank, m - k) - log_choose(float(population_size), m)
    )
    return float(np.exp(log_probabilities) @ np.sort(times)[k - 1 : population_size - m + k])


@validate.named_arguments
def expected_round_time(
    num_reports: int, num_invited: PositiveInt, quantile: Callable | None = None, *, response_rate: PositiveShare = 1.0
) -> float:
    """Computes the mean length of a round that ends with the m-th report of m' invited clients.

    It is conditional on at least m reports.

    Args:
      num_reports: m.
      num_invited: m' >= m; Bonawitz et al. invite 130 %.
      quantile: of a client's time, as in `expected_order_statistic`.
      response_rate: probability in (0, 1] that an invited client reports at all, whatever its time.

    Guarantees: The mean equals that of simulated rounds (tests/theory/test_timing.py::test_over_selection).

    References: Bonawitz et al. 2019, sections 2.2 and 9 (over-selection of 130 %).

    >>> round(expected_round_time(100, 130) / expected_round_time(100, 100), 3)  # exponential times
    0.28
    """
    validate.integer("num_reports", num_reports, 1, num_invited)
    if response_rate == 1:
        return expected_order_statistic(num_reports, num_invited, quantile)
    from scipy import stats

    report_counts = np.arange(num_reports, num_invited + 1)
    probabilities = stats.binom.pmf(report_counts, num_invited, response_rate)
    if not probabilities.sum() > 0:
        validate.fail("response_rate", "a rate at which so many report", response_rate)
    # Each order statistic is an integral, so unlikely numbers of reports are left out.
    is_likely = probabilities > 1e-12 * probabilities.max()
    means = [
        expected_order_statistic(num_reports, int(num_reporting), quantile)
        for num_reporting in report_counts[is_likely]
    ]
    return float(np.dot(probabilities[is_likely], means) / probabilities[is_likely].sum())


@validate.named_arguments
def shortfall_probability(num_reports: int, num_invited: PositiveInt, response_rate: Share) -> float:
    """Computes the probability that fewer than m of m' invited clients report.

    Args:
      num_reports, num_invited, response_rate: as in `expected_round_time`.

    Guarantees: The probability is that of the binomial law, for over-selection of 110 clients
    (tests/theory/test_timing.py::test_over_selection).

    >>> shortfall_probability(100, 130, 0.9) < 1e-4 < shortfall_probability(100, 110, 0.9)
    True
    """
    from scipy import stats

    validate.integer("num_reports", num_reports, 1, num_invited)
    return float(stats.binom.cdf(num_reports - 1, num_invited, response_rate))


def throughput_ratio(m: int, quantile: Callable | None = None) -> float:
    """Computes the factor by which m clients make more updates in a second if none waits for the others: E max / E T.

    Synchronous rounds make m updates in E max. Asynchronous clients make m updates in E T. The server's own time is
    left out, and so is the cost of staleness.

    Args:
      m: the number of clients at work.
      quantile: as in `expected_order_statistic`; exponential times have the ratio H_m.

    Guarantees: Simulated rounds and renewals have this ratio (tests/theory/test_timing.py::test_throughput).

    >>> round(throughput_ratio(100), 3)
    5.187
    """
    return expected_order_statistic(m, m, quantile) / expected_order_statistic(1, 1, quantile)
