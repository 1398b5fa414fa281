"""Laws of the keyed permutation. Unless said otherwise false alarms have probability below 1e-6, for fixed keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_sim import InvalidArgument, InvalidType
from fedjax_sim.engine.feistel import _shift, feistel
from fedjax_sim.sampling.permutation import _grid, others, permute
from tests.laws import cases
from tests.refusals import refused

ALPHA = 1e-6


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def cohorts(seed, num_trials, num_positions, size):
    """[trials, m] ids of independent keys."""
    keys = jax.random.split(jax.random.key(seed), num_trials)
    return jax.vmap(lambda key: permute(key, jnp.arange(num_positions), size))(keys)


def inclusion_p_value(ids, size):
    """Chi-square of inclusion counts; the factor allows for the fixed sum of each cohort."""
    trials, m = ids.shape
    counts = np.bincount(np.asarray(ids).ravel(), minlength=size)
    rate = m / size
    statistic = ((counts - trials * rate) ** 2).sum() / (trials * rate * (1 - rate)) * (size - 1) / size
    return stats.chi2.sf(statistic, size - 1)


def modulo_permute(key, positions, size):
    """A wrong one: folds the cells past N back instead of walking on."""
    rows, columns = _grid(size * 9 // 8)
    words = jax.random.bits(key, (8, 2), jnp.uint32)
    return feistel(words, rows, columns, positions.astype(jnp.uint32)) % size


@pytest.mark.parametrize("size", cases.rows([1, 2, 3, 1023, 1024, 1025, 1501, 4097], [1, 1025, 4097]))
def test_permutation_is_a_bijection(size):
    """Catches a hash sum that wraps, a half that the round does not keep, and a walk that leaves [0, N)."""
    ids = np.asarray(cohorts(size, 3, size, size))
    np.testing.assert_array_equal(np.sort(ids, axis=1), np.tile(np.arange(size), (3, 1)))
    assert ids.dtype == np.int32


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("size", [999_983, 10**9, 2**31 - 1])
def test_large_populations_stay_in_range_and_distinct(size):
    """Catches overflow of int32 near 2^31, at both ends of the positions."""
    half = np.arange(1024)
    positions = jnp.asarray(np.concatenate([half, size - 1 - half]), jnp.int32)
    draw = jax.jit(jax.vmap(lambda key: permute(key, positions, size)))
    ids = np.asarray(draw(jax.random.split(jax.random.key(1), 4)))
    assert (ids >= 0).all() and (ids < size).all()
    assert all(len(np.unique(row)) == 2048 for row in ids)
    # The low and the high half of the range are hit alike: Binomial(8192, 1/2) within 5 standard deviations.
    assert abs((ids < size // 2).sum() - 4096) < 5 * np.sqrt(8192 / 4)


def test_shifts_never_wrap():
    """Catches a 32-bit hash: hash + half would pass 2^32 for about one key in 2^16, and that round merge two values."""
    words = jax.random.bits(jax.random.key(9), (8, 2), jnp.uint32)
    hashes = np.asarray(jax.vmap(_shift, (0, None))(words, jnp.arange(2**16, dtype=jnp.uint32)))
    assert int(hashes.max()) + 2**16 < 2**32 and hashes.max() > 2**30


def test_every_grid_covers_its_population():
    """Catches a grid that is too small, or so large that halves or cells overflow."""
    sizes = [*range(1025, 1400), 10**6, 10**9, 2**31 - 1, 46_341**2 - 1, 46_340**2, 46_340**2 + 1]
    for size in sizes:
        rows, columns = _grid(size)
        assert size <= rows * columns < min(size + rows, 2**32)
        assert max(rows, columns) < 2**16


@pytest.mark.parametrize("size", cases.rows([1501, 2049], [1501]))
def test_single_inclusion_is_uniform(size):
    """Catches a bias towards some clients, as of folding modulo N instead of walking."""
    assert inclusion_p_value(cohorts(2, 20_000, 50, size), size) > ALPHA


def test_single_inclusion_rejects_folding():
    """The chi-square above has the power to see the usual wrong construction (missed with probability below 1e-6)."""
    keys = jax.random.split(jax.random.key(2), 20_000)
    wrong = jax.jit(jax.vmap(lambda key: modulo_permute(key, jnp.arange(50), 1500)))(keys)
    assert inclusion_p_value(wrong, 1500) < ALPHA


@pytest.mark.default_rows("31")
@pytest.mark.parametrize("size", cases.rows([31, 1025, 1501], [31, 1501]))
def test_pairs_are_uniform(size):
    """Catches neighbours that stay neighbours: the difference of two values is uniform on 1..N-1."""
    first, second, far = np.asarray(cohorts(3, 100_000, 3, size)).astype(np.int64).T
    for a, b in [(first, second), (second, far)]:
        counts = np.bincount((b - a) % size, minlength=size)
        assert counts[0] == 0
        assert stats.chisquare(counts[1:]).pvalue > ALPHA


def test_pairs_reject_a_random_rotation():
    """A random start and consecutive clients has right single inclusion; the pair test must refuse it."""
    start = np.asarray(cohorts(3, 2000, 1, 1500))[:, 0]
    pair = (start + 1 - start) % 1500
    assert stats.chisquare(np.bincount(pair, minlength=1500)[1:]).pvalue < ALPHA


@pytest.mark.full
@pytest.mark.parametrize("size", cases.rows([1501, 2049], [1501]))
def test_structured_sets_are_hypergeometric(size):
    """Catches correlations that follow the network's grid: the cohort's share of rows, columns, halves and parities."""
    ids = np.asarray(cohorts(2, 20_000, 50, size))
    _, columns = _grid(size)
    everyone = np.arange(size)
    sets = {
        "even": everyone % 2 == 0,
        "low half": everyone < size // 2,
        "two rows": everyone // columns < 2,
        "two columns": everyone % columns < 2,
        "checkerboard": (everyone // columns + everyone % columns) % 2 == 0,
    }
    for name, members in sets.items():
        law = stats.hypergeom(size, members.sum(), 50)
        counts = np.bincount(members[ids].sum(axis=1), minlength=51)
        expected = law.pmf(np.arange(51)) * len(ids)
        common = expected > 10
        observed = np.append(counts[common], counts[~common].sum())
        law_counts = np.append(expected[common], expected[~common].sum())
        statistic = ((observed - law_counts) ** 2 / np.maximum(law_counts, 1e-9)).sum()
        assert stats.chi2.sf(statistic, common.sum()) > ALPHA, name


@pytest.mark.full
@pytest.mark.parametrize("size", [1000, 1500])
def test_positions_are_independent_of_the_batch(size):
    """Catches a permutation that depends on which positions are asked for together, or on the batch of keys."""
    key, some = jax.random.key(4), np.array([[7, 3], [3, 900]])
    together = np.asarray(permute(key, jnp.arange(size), size))
    np.testing.assert_array_equal(permute(key, jnp.asarray(some), size), together[some])
    keys = jnp.stack([jax.random.key(0), key])
    np.testing.assert_array_equal(jax.vmap(lambda k: permute(k, jnp.arange(9), size))(keys)[1], together[:9])


def test_positions_out_of_range_end():
    """Catches a cycle walk that starts on a cycle wholly outside [0, N) and never ends."""
    positions = jnp.asarray([-1, -(2**31), 1501, 1521, 2**31 - 1], jnp.int32)
    draw = jax.jit(jax.vmap(lambda key: permute(key, positions, 1501)))
    ids = np.asarray(draw(jax.random.split(jax.random.key(8), 50)))
    assert (ids >= 0).all() and (ids < 1501).all()


@pytest.mark.parametrize("size", [0, -1, 2**31, True, 10.0, float("nan"), None, "10"])
def test_bad_population_size(size):
    with refused("population_size", value=size, rule="[1, 2147483647]", kind=(InvalidArgument, InvalidType)):
        permute(jax.random.key(0), jnp.arange(1), size)


@pytest.mark.default_rows(4)
@pytest.mark.parametrize(
    "size, number", [(5, 3), (32, 1), (33, 1), (64, 32), (96, 95), (1000, 32), (1024, 31), (4001, 999)]
)
def test_others_are_the_complement(size, number):
    """By bits and by a sort. Catches ids at the ends of words."""
    ids = np.random.default_rng(size).permutation(size)[:number].astype(np.int32)
    ranks = jnp.arange(size - number, dtype=jnp.int32)
    found = jax.jit(others, static_argnums=2)(ids, ranks[::-1], size)
    np.testing.assert_array_equal(found[::-1], np.setdiff1d(np.arange(size), ids))
