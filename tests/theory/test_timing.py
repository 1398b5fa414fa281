"""Lengths of rounds: closed forms and simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import special, stats

from fedjax_sim import network, theory

EXPONENTIAL = theory.exponential_quantile


def test_harmonic_numbers():
    """K1's anchors. Catches a sum that begins or ends elsewhere."""
    anchors = {10: 2.928968, 100: 5.187378, 1000: 7.485471, 10_000: 9.787606}
    assert {m: round(theory.harmonic(m), 6) for m in anchors} == anchors and theory.harmonic(0) == 0


@pytest.mark.parametrize("k, m", [(1, 1), (1, 10), (10, 10), (100, 130), (3, 7), (1000, 1000), (10_000, 10_000)])
def test_order_statistics(k, m):
    """Exponential: H_m - H_(m-k); uniform: k / (m + 1); Pareto: a ratio of gamma functions. To 1e-6."""
    closed = theory.harmonic(m) - theory.harmonic(m - k)
    assert theory.expected_order_statistic(k, m) == pytest.approx(closed, rel=1e-11)
    assert theory.expected_order_statistic(k, m, EXPONENTIAL) == pytest.approx(closed, rel=1e-6)
    uniform = network.uniform(2.0, 5.0).quantile
    assert theory.expected_order_statistic(k, m, uniform) == pytest.approx(2 + 3 * k / (m + 1), rel=1e-6)
    shape = 3.0  # E X_(k:m) = m! Gamma(m - k + 1 - 1/a) / ((m - k)! Gamma(m + 1 - 1/a))
    logs = special.gammaln([m + 1, m - k + 1 - 1 / shape, m - k + 1, m + 1 - 1 / shape])
    pareto = 2 * np.exp(logs @ [1, 1, -1, -1])
    assert theory.expected_order_statistic(k, m, network.pareto(2.0, shape).quantile) == pytest.approx(pareto, rel=1e-5)


def test_laws_of_devices():
    """Lognormal times against 20,000 simulated cohorts, 5 standard errors; tiers exactly, to 1e-3."""
    rng = np.random.default_rng(0)
    draws = np.sort(rng.lognormal(np.log(3.0), 0.8, (20_000, 20)), axis=1)
    for k in (1, 15, 20):
        mean, error = draws[:, k - 1].mean(), draws[:, k - 1].std() / np.sqrt(20_000)
        found = theory.expected_order_statistic(k, 20, network.lognormal(3.0, 0.8).quantile)
        assert abs(found - mean) < 5 * error < 0.05 * mean
    tiers = network.tiers([0.9, 0.1], [1.0, 10.0]).quantile
    slow = 1 - 0.9**20  # one of 20 is slow
    assert theory.expected_order_statistic(20, 20, tiers) == pytest.approx(10 * slow + 1 - slow, rel=1e-3)
    assert theory.expected_order_statistic(3, 9, network.constant(4.0).quantile) == pytest.approx(4, rel=1e-9)


def test_over_selection():
    """100 of 130 as Bonawitz et al. invite them, clients who fail to report included; 5 standard errors."""
    rng, rounds = np.random.default_rng(0), 20_000
    times = rng.exponential(size=(rounds, 130))
    times[rng.random(times.shape) < 0.1] = np.inf
    for invited in (130, 110):  # of 110 every other round falls short
        ends = np.sort(times[:, :invited], axis=1)[:, 99]
        enough = np.isfinite(ends)
        mean, error = ends[enough].mean(), ends[enough].std() / np.sqrt(enough.sum())
        assert abs(theory.expected_round_time(100, invited, response_rate=0.9) - mean) < 5 * error
    slow = theory.expected_round_time(100, 130, EXPONENTIAL, response_rate=0.9)
    assert slow == pytest.approx(theory.expected_round_time(100, 130, response_rate=0.9), rel=1e-6)
    short = theory.shortfall_probability(100, 110, 0.9)
    assert short == pytest.approx(stats.binom.cdf(99, 110, 0.9)) and 0.4 < short < 0.6
    assert theory.expected_round_time(100, 100) == pytest.approx(theory.harmonic(100), rel=1e-12)


def test_throughput():
    """K8: exp(1) has H_m, 5.187 at m = 100; uniform times by hand; clients who are alike gain nothing."""
    assert theory.throughput_ratio(100) == pytest.approx(5.187378, rel=1e-6)
    rng = np.random.default_rng(0)
    rounds = rng.exponential(size=(20_000, 100))  # synchronous: each round waits for the slowest
    renewals = np.cumsum(rng.exponential(size=(100, 40_000)), axis=1)  # asynchronous: none waits
    horizon = 20_000.0
    measured = (renewals < horizon).sum() / horizon / (100 / rounds.max(1).mean())
    assert measured == pytest.approx(theory.throughput_ratio(100), rel=0.02)
    assert theory.throughput_ratio(9, network.uniform(1.0, 3.0).quantile) == pytest.approx(2.8 / 2, rel=1e-6)
    assert theory.throughput_ratio(9, network.constant(2.0).quantile) == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda: theory.expected_order_statistic(3, 2), "k: expected an integer in"),
        (
            lambda: theory.expected_order_statistic(5, 5, network.pareto(1.0, 0.9).quantile),
            "quantile: expected times wh",
        ),
        (lambda: theory.expected_order_statistic(1, 1, lambda u: u / 0 * 1.0), "quantile: expected finite times"),
        (lambda: theory.expected_round_time(5, 4), "num_reports: expected an integer in"),
        (lambda: theory.expected_round_time(5, 9, response_rate=0.0), "response_rate: expected a number in"),
        (lambda: theory.shortfall_probability(5, 9, float("nan")), "response_rate: expected a number in"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_wrong_input(call, told):
    """Catches an infinite mean that is stated as a number."""
    with pytest.raises(ValueError, match=told):
        call()


def test_cohorts_of_a_population():
    """The mean over all cohorts. Catches a rank that is one off, and draws with replacement."""
    times = np.array([3.0, 1.0, 4.0, 1.5, 9.0, 2.6])
    for m in range(1, 7):
        cohorts = np.sort([times[list(who)] for who in itertools.combinations(range(6), m)], axis=1)
        for k in range(1, m + 1):
            assert theory.sampled_order_statistic(times, k, m) == pytest.approx(cohorts[:, k - 1].mean(), rel=1e-12)
    for wrong in ([], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="times: expected finite numbers"):
            theory.sampled_order_statistic(wrong, 1, 1)
