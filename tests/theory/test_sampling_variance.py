"""Closed forms of sampling against exact enumeration, and the law of a cohort against the real samplers."""

import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import sampling
from fedjax_sim.theory.cohorts import (
    enumerate_cohorts,
    joint_inclusion_probability,
    num_cohorts,
    report_counts,
)
from fedjax_sim.theory.moments import Moments
from fedjax_sim.theory.sampling_variance import (
    cohort_mean_variance,
    finite_population_correction,
    horvitz_thompson_variance,
    noise_to_signal_ratio,
    population_variance,
    required_cohort_size,
)

RNG = np.random.default_rng(7)
VALUES = RNG.normal(size=(7, 3)) + 1


def test_finite_population_correction():
    """Cochran 1977, section 2.6; catches 1 - m/N, which is off by 1/N, and the belief that it is 1 for large N."""
    pairs = {(10, 1): 1, (10, 5): 0.555556, (10, 9): 0.111111, (10, 10): 0, (1, 1): 0}
    pairs |= {(10_000, 1000): 0.900090, (10_000, 1500): 0.850085, (10**6, 1000): 0.999001}
    for sizes, expected in pairs.items():
        assert abs(finite_population_correction(*sizes) - expected) < 5e-7
    for wrong in ((10, 11), (10, 0), (0, 1), (10, True), (10, 2.0)):
        with pytest.raises((ValueError, TypeError), match="expected"):
            finite_population_correction(*wrong)


def test_both_divisors_agree():
    """Catches a divisor that is applied twice or not at all: sigma^2 and S^2 differ by N / (N - 1)."""
    sigma, unbiased = population_variance(VALUES), population_variance(VALUES, divisor="N-1")
    assert np.isclose(unbiased / sigma, 7 / 6) and np.isclose(sigma, VALUES.var(0).sum())
    for m in range(1, 8):
        assert np.isclose(cohort_mean_variance(sigma, 7, m), cohort_mean_variance(unbiased, 7, m, divisor="N-1"))
        assert np.isclose(cohort_mean_variance(unbiased, 7, m, divisor="N-1"), unbiased / m * (1 - m / 7))
    for wrong in ([np.nan, 1.0], [], np.zeros((2, 2, 2)), 1.0):
        with pytest.raises(ValueError, match="values"):
            population_variance(wrong)
    with pytest.raises(ValueError, match="N-1"):
        population_variance([1.0], divisor="N-1")


@pytest.mark.parametrize("m", range(1, 8))
def test_cohort_mean_variance_over_all_subsets(m):
    """Cochran 1977, theorem 2.2: all subsets, and all draws with replacement. Catches a lost or doubled correction."""
    means = np.array([VALUES[list(c)].mean(0) for c in itertools.combinations(range(7), m)])
    sigma = population_variance(VALUES)
    assert abs(cohort_mean_variance(sigma, 7, m) - means.var(0).sum()) < 1e-14
    if m <= 4:
        means = np.array([VALUES[list(c)].mean(0) for c in itertools.product(range(7), repeat=m)])
        assert abs(cohort_mean_variance(sigma, 7, m, replacement=True) - means.var(0).sum()) < 1e-14
    assert cohort_mean_variance(sigma, 7, 7) == 0


def test_required_cohort_size_is_the_smallest():
    """The rule in exact arithmetic. Catches floors, off-by-one and rounded floats at the boundary."""

    def holds(size, ratio, m):
        return m > 0 and (ratio / m) * Fraction(size - m, max(size - 1, 1)) <= 1

    ratios = [Fraction(k) for k in (0, 1, 2, 3, 7, 50, 199, 200, 1111, 10**9)]
    ratios += [Fraction(1, 3), Fraction(7, 2), Fraction(22, 7), Fraction(10**6, 999_999), Fraction(1, 10**9)]
    for size in range(1, 201):
        boundary = [m * Fraction(size - 1, size - m) for m in range(1, size, max(1, size // 9))]  # m is just enough
        for ratio in ratios + boundary:
            m = required_cohort_size(size, ratio)
            assert 1 <= m <= size and holds(size, ratio, m) and (m == 1 or not holds(size, ratio, m - 1))
        for m, ratio in zip(range(1, size, max(1, size // 9)), boundary, strict=True):
            assert required_cohort_size(size, ratio) == m


def test_required_cohort_sizes_of_small_and_large_populations():
    """Known sizes for N = 10 to 10^6; the form by signal and tolerance; decimals are read as written, 0.1 as 1/10."""
    assert {required_cohort_size(10, r) for r in range(1111, 1765)} == {10}
    expected = {10_000: (1001, 1380, 1500), 100: (92, 95, 95), 10**6: (1110, 1598, 1761)}
    for size, sizes in expected.items():
        assert tuple(required_cohort_size(size, r) for r in (1111.1, 1600, 1764)) == sizes
    assert noise_to_signal_ratio(16.0, 2.0, 0.05) == 1600
    assert noise_to_signal_ratio(0.3, 1, 0.1) == 30 and 0.3 / 0.1**2 != 30
    for wrong in (-1, math.nan, math.inf, True):
        with pytest.raises((ValueError, TypeError), match="ratio"):
            required_cohort_size(10, wrong)


def test_horvitz_thompson_over_all_subsets():
    """Independent inclusion with unequal chances, and subsets of a fixed size with unequal ones (dependent).

    Catches pi_i for pi_i (1 - pi_i), and pairs left out.
    """
    chances = np.array([0.2, 0.5, 0.9, 1.0, 0.35])
    x = VALUES[:5]
    masks = np.array(list(itertools.product((0.0, 1.0), repeat=5)))
    mass = np.prod(np.where(masks > 0, chances, 1 - chances), 1)
    for law in (mass, mass * (masks.sum(1) == 3) / mass[masks.sum(1) == 3].sum()):
        single, joint = law @ masks, np.einsum("s,si,sj->ij", law, masks, masks)
        estimates = (masks / single) @ x
        truth = law @ np.square(estimates).sum(1) - np.square(law @ estimates).sum()
        assert np.allclose(law @ estimates, x.sum(0))
        assert np.isclose(horvitz_thompson_variance(x, single, joint), truth)
    assert np.isclose(horvitz_thompson_variance(x, chances), mass @ np.square((masks / chances) @ x - x.sum(0)).sum(1))
    for wrong in (chances * 0, chances[:4], chances + 1):
        with pytest.raises(ValueError, match="inclusion"):
            horvitz_thompson_variance(x, wrong)
    with pytest.raises(ValueError, match="joint"):
        horvitz_thompson_variance(x, chances, np.ones((5, 5)))
    for high, number in ((0.9, 2), (0.5, 3)):  # two of 0.9 must meet; three of 0.5 that never meet are more than one
        with pytest.raises(ValueError, match="joint"):
            horvitz_thompson_variance(np.ones(number), np.full(number, high), high * np.eye(number))


def test_joint_inclusion():
    """Cochran 1977, section 2.9: the covariance, and pairs over all cohorts. Catches pi^2 for pi_ij."""
    assert round(joint_inclusion_probability(sampling.uniform(100, 10).design) - 0.01, 9) == -0.000909091
    dropping = sampling.with_dropout(sampling.uniform(6, 3), 0.25)
    samplers = [sampling.uniform(6, 3), dropping, sampling.poisson(6, 0.4, num_slots=6), sampling.full(6)]
    samplers += [
        sampling.poisson(6, 0.4, num_slots=3),
        sampling.with_replacement(6, 3),
        sampling.cyclic(6, 4, shuffled=True),
    ]
    samplers += [
        sampling.with_over_invitation(dropping, 2),
        sampling.with_dropout(sampling.with_replacement(5, 3), 0.2),
    ]
    for sampler in samplers:
        cohorts = list(enumerate_cohorts(sampler.design))
        pair = sum(float(p @ ((c[:, 0] > 0) & (c[:, 1] > 0))) for p, c in cohorts)
        assert np.isclose(joint_inclusion_probability(sampler.design), pair, rtol=1e-12)
    for wrong in (sampling.cyclic(6, 3), sampling.weighted([1, 2], 2), sampling.full(1)):
        with pytest.raises(ValueError, match="design"):
            joint_inclusion_probability(wrong.design)


def test_every_cohort_once():
    """Catches cohorts listed twice or never, wrong multinomial weights, and a refusal that comes too late."""
    weighted = sampling.weighted([1, 0, 3, 4], 3)
    wrapped = sampling.with_over_invitation(sampling.with_dropout(sampling.cyclic(6, 4), 0.3), 2)
    for sampler in (weighted, wrapped, sampling.with_dropout(weighted, 0.5), sampling.poisson(6, 0.2, num_slots=2)):
        chances, counts = (np.concatenate(x) for x in zip(*enumerate_cohorts(sampler.design), strict=True))
        assert len(chances) == num_cohorts(sampler.design) and np.isclose(chances.sum(), 1, rtol=1e-12)
        assert np.allclose(chances @ (counts > 0), sampler.design.inclusion_probabilities(), rtol=1e-9)
    distinct = {tuple(row) for _, c in enumerate_cohorts(sampling.uniform(9, 4).design) for row in c}
    assert len(distinct) == math.comb(9, 4) and all(sum(row) == 4 for row in distinct)
    for big in (sampling.uniform(100, 10), sampling.poisson(30, 0.5), sampling.with_replacement(10**6, 9)):
        with pytest.raises(ValueError, match="cohorts to enumerate"):
            enumerate_cohorts(big.design)
    with pytest.raises(ValueError, match="cohorts to enumerate"):
        enumerate_cohorts(sampling.uniform(100_000_000, 50_000_000).design)


COUNTED = {
    "invited to fit": sampling.with_over_invitation(sampling.with_dropout(sampling.uniform(20, 12), 0.25), 9),
    "dropout": sampling.with_dropout(sampling.uniform(20, 8), 0.25),
    "truncated, twice thinned": sampling.with_dropout(
        sampling.with_dropout(sampling.poisson(20, 0.3, num_slots=7), 0.25), 0.1
    ),
    "shuffled": sampling.cyclic(20, 6, shuffled=True),
    "over-invited, thinned": sampling.with_dropout(
        sampling.with_over_invitation(sampling.with_dropout(sampling.uniform(20, 9), 0.25), 6), 0.1
    ),
}


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", COUNTED)
def test_report_counts_are_those_of_the_samplers(name):
    """Frequencies of 20,000 rounds: a true law fails with chance 1e-5, 2 % of mass in a wrong place is seen.

    Catches a limit applied before the dropout or after it, and one that is taken for the dropout: of 12 invited 9 are
    expected, and 9 count.
    """
    sampler, rounds = COUNTED[name], 20_000

    @jax.jit
    def run(key, state):
        def step(state, key):
            cohort, state = sampler.sample(key, state)
            return state, cohort.reported.sum()

        return jax.lax.scan(step, state, jax.random.split(key, rounds))[1]

    counts, chances = report_counts(sampler.design)
    seen = np.bincount(np.asarray(run(jax.random.key(3), sampler.init())), minlength=21) / rounds
    law = np.zeros(21)
    law[counts] = chances
    assert np.isclose(law.sum(), 1)
    assert (np.abs(seen - law) <= 5 * np.sqrt(law * (1 - law) / rounds) + 5 / rounds).all()
    assert np.isclose(chances @ counts, sampler.design.inclusion_probabilities() * 20, rtol=1e-9)


def test_report_counts_at_scale():
    """A million clients: the law's moments are the binomial's. Catches tails cut too early, and loops over N."""
    sampler = sampling.with_dropout(sampling.poisson(10**6, 0.01, num_slots=10**4), 0.1)
    counts, chances = report_counts(sampler.design)
    assert len(counts) < 4000 and np.isclose(
        chances @ counts / 1e6, sampler.design.inclusion_probabilities(), rtol=1e-9
    )
    counts, chances = report_counts(sampling.with_dropout(sampling.full(10**6), 0.5).design)
    assert np.isclose(chances @ counts, 5e5) and np.isclose(chances @ np.square(counts - 5e5), 2.5e5)
    with pytest.raises(ValueError, match="without replacement"):
        report_counts(sampling.with_replacement(4, 2).design)
    with pytest.raises(TypeError, match="sampler carries it"):
        report_counts(sampling.full(4))


def test_moments_are_sums():
    """Blocks, dtypes and parts: equal to sums at once. Catches a last block left out and float32 sums."""
    values = (RNG.normal(size=(3000, 500)) + 3).astype(np.float32)  # more than one block
    weights = RNG.integers(0, 9, 3000)
    found, n, u = Moments.of(values, weights), weights.astype(float), values.astype(float)
    assert np.allclose(found.weighted_sum, n @ u, rtol=1e-12) and np.allclose(found.squared_weighted_sum, n**2 @ u)
    assert np.isclose(found.square, n**2 @ np.square(u).sum(1), rtol=1e-12) and found.squared_weight == (n**2).sum()
    both = Moments.of(values[:7], weights[:7]).merge(Moments.of(values[7:], weights[7:]))
    assert all(np.allclose(a, b, rtol=1e-12) for a, b in zip(both, found, strict=True))
    assert np.allclose(Moments.of(jnp.asarray(values[:5])).ratio(), u[:5].mean(0))
    half = Moments.of(u[:4], None, [0.5] * 4).scaled(2)
    assert all(np.allclose(a, b) for a, b in zip(half, Moments.of(u[:4]), strict=True))
    for wrong in (np.array([1.0, np.nan]), np.array([1e200]), np.array(["a"]), np.zeros((0, 2))):
        with pytest.raises(ValueError, match="values"):
            Moments.of(wrong)
    for wrong in ([1.0], [-1.0, 1.0], [0.0, 0.0], [np.inf, 1.0]):
        with pytest.raises(ValueError, match="weights"):
            Moments.of([1.0, 2.0], wrong)
