"""Laws of the uniform samplers. False alarms have probability below 1e-6, for fixed keys, unless said otherwise."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_sim.prng import stream
from fedjax_sim.sampling import cyclic, full, poisson, uniform, with_replacement
from fedjax_sim.sampling.permutation import permute
from tests.refusals import refused

ALPHA = 1e-6


def draw(sampler, num_trials, seed=0):
    """Cohorts of independent keys, leaves [trials, ...]."""
    keys = jax.random.split(jax.random.key(seed), num_trials)
    return jax.jit(jax.vmap(lambda key: sampler.sample(key, sampler.init())[0]))(keys)


def rounds(sampler, num_rounds, state=None, seed=0):
    """Cohorts of consecutive rounds, leaves [rounds, ...], and the last state."""
    key = jax.random.key(seed)

    @jax.jit
    def run(state):
        step = lambda state, t: sampler.sample(jax.random.fold_in(key, t), state)[::-1]  # noqa: E731
        return jax.lax.scan(step, state, jnp.arange(num_rounds))

    state, cohort = run(sampler.init() if state is None else state)
    return cohort, state


def subset_p_value(ids, size, m):
    """Chi-square over the ordered m-subsets."""
    code = np.asarray(ids) @ (size ** np.arange(m))
    codes = [sum(c * size**i for i, c in enumerate(p)) for p in itertools.permutations(range(size), m)]
    counts = np.bincount(code, minlength=size**m)
    return stats.chisquare(counts[codes]).pvalue if counts[codes].sum() == counts.sum() else 0.0


def test_every_subset_is_equally_likely():
    """Catches any bias at small N, of subsets and of their order in the slots; rejects consecutive clients."""
    for size, m in [(5, 2), (4, 4)]:
        assert subset_p_value(draw(uniform(size, m), 50_000).ids, size, m) > ALPHA
    assert subset_p_value(draw(with_replacement(5, 2), 50_000).ids, 5, 2) < ALPHA
    assert not draw(uniform(1, 1), 3).ids.any()


def pair_z_scores(member, size, m):
    """Standard scores of the mean of z_i z_j over 50 disjoint pairs: against cov -0.000909..., and against cov 0."""
    products = (member[:, 0::2] & member[:, 1::2]).mean(axis=1)
    error = products.std() / np.sqrt(len(products))
    return [(products.mean() - (m / size) ** 2 - covariance) / error for covariance in (-0.000909091, 0.0)]


def membership(cohort, size):
    ids, invited = np.asarray(cohort.ids), np.asarray(cohort.invited)
    member = np.zeros((len(ids), size), bool)
    trial, slot = np.nonzero(invited)
    member[trial, ids[trial, slot]] = True
    return member


@pytest.mark.full
def test_pair_covariance():
    """N=100, m=10: accepts cov(z_i, z_j) = -0.000909091 and rejects 0, the value of independent inclusion, which
    Poisson sampling has in turn (each wrong decision has probability below 1e-6)."""
    member = membership(draw(uniform(100, 10), 50_000), 100)
    assert (member.sum(axis=1) == 10).all()
    assert stats.chisquare(member.sum(axis=0)).pvalue > ALPHA
    right, independent = pair_z_scores(member, 100, 10)
    assert abs(right) < 5 and independent < -10
    right, independent = pair_z_scores(membership(draw(poisson(100, 0.1), 50_000), 100), 100, 10)
    assert abs(independent) < 5 and right > 10


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("size", [100, 1500])
def test_rounds_are_independent(size):
    """Overlap of rounds t and t+1 is m^2/N within 4 standard errors (6e-5), and resume draws the same cohort."""
    m, num_rounds = 30, 4000
    cohort, _ = rounds(uniform(size, m), num_rounds)
    member = membership(cohort, size)
    overlap = (member[1:] & member[:-1]).sum(axis=1)
    assert abs(overlap.mean() - m * m / size) < 4 * overlap.std() / np.sqrt(num_rounds - 1)
    again, _ = jax.jit(uniform(size, m).sample)(jax.random.fold_in(jax.random.key(0), 1234), ())
    np.testing.assert_array_equal(again.ids, cohort.ids[1234])


def test_draws_with_replacement_are_independent():
    """Catches draws without replacement, and a slot that repeats another: pairs of slots are uniform on N x N."""
    ids = np.asarray(draw(with_replacement(6, 3), 50_000).ids)
    for a, b in [(0, 1), (1, 2), (0, 2)]:
        assert stats.chisquare(np.bincount(ids[:, a] * 6 + ids[:, b], minlength=36)).pvalue > ALPHA
    many = np.asarray(draw(with_replacement(3, 10), 2).ids)  # a cohort may exceed the population
    assert many.shape == (2, 10) and set(many.ravel()) <= {0, 1, 2}


def test_full_participation_is_everyone():
    """Catches padding or an order that depends on the key: no sampling variance at all."""
    cohort = draw(full(7), 3)
    np.testing.assert_array_equal(cohort.ids, np.tile(np.arange(7), (3, 1)))
    assert cohort.invited.all() and cohort.reported.all()
    assert set(np.asarray(draw(uniform(7, 7), 1).ids)[0]) == set(range(7))


@pytest.mark.default_rows(2)
@pytest.mark.parametrize(("size", "m"), [(7, 3), (6, 3), (5, 5), (3, 1), (1, 1)])
def test_cyclic_covers_everyone_evenly(size, m):
    """Catches a wrap that skips or repeats a client: slots of consecutive rounds read 0, 1, ..., N-1, 0, 1, ..."""
    cohort, state = rounds(cyclic(size, m), 2 * size)
    np.testing.assert_array_equal(np.asarray(cohort.ids).ravel(), np.arange(2 * size * m) % size)
    assert cohort.invited.all() and int(state.position) == 0


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("shuffled", [False, True])
def test_cyclic_wraps_at_the_largest_population(shuffled):
    """Catches a counter that overflows int32 or uint32."""
    size = 2**31 - 1
    sampler = cyclic(size, 10, shuffled=shuffled)
    state = sampler.init()._replace(position=jnp.uint32(size - 7), seed=jnp.asarray([1, 2], jnp.uint32))
    cohort, state = rounds(sampler, 2, state)
    ids = np.asarray(cohort.ids)
    assert (ids >= 0).all() and (ids < size).all()
    if shuffled:
        np.testing.assert_array_equal(cohort.invited.sum(axis=1), [7, 10])
        assert int(state.position) == 10
    else:
        np.testing.assert_array_equal(ids[0], [*range(size - 7, size), 0, 1, 2])
        assert int(state.position) == 13


@pytest.mark.default_rows(2)
@pytest.mark.parametrize(("size", "m"), [(12, 4), (11, 4), (5, 5), (1500, 400)])
def test_shuffled_pass_covers_everyone_once(size, m):
    """Catches an order that changes within a pass, a client twice in a cohort, and a pass that repeats the last one."""
    length = -(-size // m)
    cohort, _ = rounds(cyclic(size, m, shuffled=True), 3 * length)
    ids, invited = np.asarray(cohort.ids), np.asarray(cohort.invited)
    assert (ids >= 0).all() and (ids < size).all()
    passes = [ids[i * length : (i + 1) * length][invited[i * length : (i + 1) * length]] for i in range(3)]
    for order in passes:
        np.testing.assert_array_equal(np.sort(order), np.arange(size))
    assert not np.array_equal(passes[0], passes[1]) and not np.array_equal(passes[1], passes[2])
    assert not np.array_equal(passes[0], np.arange(size))
    np.testing.assert_array_equal(cohort.reported, cohort.invited)


def test_shuffled_orders_follow_the_key():
    """Catches an order that ignores the run's seed, and orders that are not uniform (N=3: 6 orders)."""
    ids = draw(cyclic(3, 3, shuffled=True), 20_000).ids
    assert subset_p_value(ids, 3, 3) > ALPHA


def test_keys_and_streams():
    """Catches a sampler that ignores its key, or uses the round's key itself, which other stages share."""
    key = jax.random.key(0)
    direct = jax.jit(permute, static_argnums=2)(key, jnp.arange(20), 1500)
    assert not np.array_equal(jax.jit(uniform(1500, 20).sample)(key, ())[0].ids, direct)
    for sampler in (uniform(1500, 20), uniform(900, 20), with_replacement(1500, 20)):
        sample = jax.jit(sampler.sample)
        one, _ = sample(key, ())
        same, _ = sample(jax.random.key(0), ())
        np.testing.assert_array_equal(one.ids, same.ids)
        for other in (jax.random.key(1), stream(key, "cohort"), stream(key, "client")):
            assert not np.array_equal(one.ids, sample(other, ())[0].ids)


@pytest.mark.parametrize("factory", [uniform, cyclic, functools.partial(cyclic, shuffled=True)])
def test_cohort_above_the_population_is_refused(factory):
    with refused("cohort_size", value=11, rule="[1, 10]", hint="with_replacement"):
        factory(10, 11)


@pytest.mark.parametrize("factory", [uniform, cyclic, with_replacement])
@pytest.mark.parametrize("bad", [0, -1, 2**31, True, 3.0, float("nan"), float("inf"), None, "3"])
def test_bad_sizes(factory, bad):
    """Catches bool for int, floats, NaN and sizes past int32, at build time and by name."""
    with pytest.raises((ValueError, TypeError), match="population_size: expected an integer"):
        factory(bad, 1)
    with pytest.raises((ValueError, TypeError), match="cohort_size: expected an integer"):
        factory(10, bad)


def test_bad_options():
    with pytest.raises(ValueError, match="shuffled: expected True or False, got 1"):
        cyclic(10, 2, shuffled=1)
    with pytest.raises(ValueError, match="population_size: expected an integer"):
        full(0)
