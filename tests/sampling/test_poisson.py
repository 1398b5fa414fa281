"""Laws of Poisson sampling. False alarms have probability below 1e-6, for fixed keys."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_sim import InvalidArgument, InvalidType
from fedjax_sim.sampling import poisson
from fedjax_sim.sampling.poisson import _binomial_table, _count_below
from tests.refusals import refused

ALPHA = 1e-6
TRIALS = 100_000


def draw(sampler, num_trials=TRIALS):
    keys = jax.random.split(jax.random.key(5), num_trials)
    return jax.jit(jax.vmap(lambda key: sampler.sample(key, ())[0]))(keys)


def chi_square(counts, mass):
    """p-value of counts of 0, 1, ... against `mass`; the rare tail is one cell."""
    expected = mass * counts.sum()
    common = expected > 10
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], max(counts.sum() - expected[common].sum(), 1e-9))
    return stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), common.sum())


def test_table_is_the_binomial_law():
    """Catches lost tails, limbs in the wrong order and sums that wrap at 2^64: exact against rational arithmetic."""
    for size, rate in [(1000, 0.02), (50, 0.3), (3, 0.5), (20, 0.99), (1000, 1e-9)]:
        first, table = _binomial_table(size, rate)
        first = int(first)
        q, cumulative = Fraction(rate), Fraction(0)
        for count in range(first + table.shape[1]):
            cumulative += math.comb(size, count) * q**count * (1 - q) ** (size - count)
            if count >= first:
                high, low = table[:, count - first].tolist()
                assert abs(Fraction(high * 2**32 + low, 2**64) - cumulative) < Fraction(1, 2**48)
        last = first + table.shape[1]
        cumulative += math.comb(size, last) * q**last * (1 - q) ** (size - last)
        assert 1 - cumulative < Fraction(1, 2**48)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize(("size", "rate"), [(10**9, 1e-5), (2**31 - 1, 0.01), (10**6, 0.5)])
def test_large_tables_are_small_and_centred(size, rate):
    """Catches a table that grows with N, and a mean off by more than 1e-9 relative."""
    first, table = _binomial_table(size, rate)
    assert table.nbytes < 2**20
    cumulative = table[0] / 2.0**32 + table[1] / 2.0**64
    mean = first + (1 - cumulative).sum()  # E K = first + the sum of P(K > count)
    assert abs(mean / (size * rate) - 1) < 1e-9


def test_counts_compare_all_64_bits():
    """Catches a comparison that looks at one limb: words just below, at and just above every threshold."""
    _, table = _binomial_table(30, 0.4)
    cumulative = [high * 2**32 + low for high, low in table.T.tolist()]
    words = [c + d for c in cumulative for d in (-1, 0, 1)] + [0, 2**64 - 1]
    limbs = jnp.asarray(np.array([[w >> 32, w & (2**32 - 1)] for w in words], np.uint32))
    counts = jax.vmap(lambda w: _count_below(w, table))(limbs)
    assert counts.tolist() == [sum(c <= w for c in cumulative) for w in words]


@pytest.mark.full
def test_number_of_clients_is_binomial():
    """Accepts q = 0.05 in the mean, the variance and the whole law; rejects q 1 % larger and a Poisson variance."""
    cohort = draw(poisson(1500, 0.05))
    number = np.asarray(cohort.invited).sum(axis=1)
    mean, variance = 75.0, 71.25
    mean_error, variance_error = np.sqrt(variance / TRIALS), variance * np.sqrt(2 / TRIALS) * 1.02
    assert abs(number.mean() - mean) < 5 * mean_error and abs(number.mean() - 1.01 * mean) > 10 * mean_error
    assert abs(number.var() - variance) < 5 * variance_error and abs(number.var() - mean) > 5 * variance_error
    counts, law = np.bincount(number, minlength=1501), stats.binom(1500, 0.05)
    assert chi_square(counts, law.pmf(np.arange(1501))) > ALPHA
    assert chi_square(counts, stats.binom.pmf(np.arange(1501), 1500, 0.0505)) < ALPHA
    assert not np.asarray(cohort.metrics["overflow"]).any()
    ids = np.sort(np.asarray(cohort.ids)[:2000], axis=1)
    assert (np.diff(ids, axis=1) > 0).all()  # nobody twice
    assert ids.min() >= 0 and ids.max() < 1500  # padding holds valid ids too


def test_overflow_is_the_binomial_tail():
    """Catches an overflow that is not counted, and slots beyond the cap."""
    sampler, trials = poisson(1500, 0.05, num_slots=80), TRIALS // 4
    cohort = draw(sampler, trials)
    overflow, number = np.asarray(cohort.metrics["overflow"]), np.asarray(cohort.invited).sum(axis=1)
    tail = stats.binom.sf(80, 1500, 0.05)
    assert sampler.design.overflow_probability == pytest.approx(tail, rel=1e-12) and tail > 0.2
    assert abs((overflow > 0).mean() - tail) < 5 * np.sqrt(tail * (1 - tail) / trials)
    counts = np.bincount(number + overflow, minlength=1501)
    assert chi_square(counts, stats.binom.pmf(np.arange(1501), 1500, 0.05)) > ALPHA
    np.testing.assert_array_equal(number, np.minimum(number + overflow, 80))
    expected = sampler.design.inclusion_probabilities() * 1500
    assert expected < 74.5 and abs(number.mean() - expected) < 5 * number.std() / np.sqrt(trials)


def test_pairs_are_independent():
    """N=4 in full: each of the 16 sets has probability q^k (1-q)^(4-k); catches a fixed-size cohort."""
    sampler = poisson(4, 0.3)
    assert (sampler.num_slots, sampler.design.scheme) == (4, "poisson")
    cohort = draw(sampler)
    sets = np.where(cohort.invited, 1 << np.asarray(cohort.ids), 0).sum(axis=1)
    size = np.array([bin(s).count("1") for s in range(16)])
    assert chi_square(np.bincount(sets, minlength=16), 0.3**size * 0.7 ** (4 - size)) > ALPHA
    assert chi_square(np.bincount(sets, minlength=16), 0.31**size * 0.69 ** (4 - size)) < ALPHA


def test_default_slots_are_the_fewest_that_hold_the_tail():
    """Catches an off-by-one of the quantile."""
    for size, rate in [(1000, 0.01), (10**9, 1e-6), (10, 0.9), (5, 1e-12)]:
        slots = poisson(size, rate).num_slots
        assert stats.binom.sf(slots, size, rate) < 1e-9
        assert slots == 1 or stats.binom.sf(slots - 1, size, rate) >= 1e-9


def test_extremes():
    """Catches a table without entries (q = 1), and an empty cohort that raises."""
    everyone, _ = jax.jit(poisson(6, 1).sample)(jax.random.key(0), ())
    assert everyone.invited.all() and sorted(everyone.ids.tolist()) == list(range(6))
    nobody, _ = jax.jit(poisson(6, 1e-300).sample)(jax.random.key(0), ())
    assert not nobody.invited.any() and not nobody.reported.any()
    huge, _ = jax.jit(poisson(10**9, 1e-8).sample)(jax.random.key(0), ())
    assert 0 <= int(huge.invited.sum()) <= huge.ids.shape[0] < 60


@pytest.mark.parametrize("rate", [0, -0.1, 1.1, float("nan"), float("inf"), True, "0.1", None])
def test_bad_rate(rate):
    with pytest.raises((ValueError, TypeError), match=r"rate: expected a number in \(0, 1\], got"):
        poisson(10, rate)


def test_bad_sizes():
    for slots in (0, 11, True, 2.0, float("nan")):
        with refused("num_slots", value=slots, rule="[1, 10]", kind=(InvalidArgument, InvalidType)):
            poisson(10, 0.5, num_slots=slots)
    with pytest.raises(ValueError, match="population_size: expected an integer"):
        poisson(2**31, 0.5)
    with pytest.raises(MemoryError, match="rate: expected at most 1,048,576 bytes"):
        poisson(2**31 - 1, 0.5)
    with pytest.raises(TypeError, match="made on the host"):
        jax.vmap(lambda rate: poisson(10, rate).sample(jax.random.key(0), ())[0].ids)(jnp.asarray([0.1, 0.2]))
