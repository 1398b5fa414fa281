"""Orders of examples are uniform permutations; keys of a cohort are those of its clients."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.engine import client_keys, shuffle, shuffling
from fedjax_sim.prng import client_key, stream
from tests.test_prng import chi_square

pytestmark = pytest.mark.optimised

EPOCH = jnp.int32(0)


@jax.jit
def _drawn(keys, mask, epoch):
    return jax.vmap(lambda key: shuffle(key, mask)(epoch, jnp.arange(mask.shape[0])))(keys)


def draw(keys, mask, epoch=EPOCH):
    """[keys, rows] orders; compiled once for each number of keys and of rows."""
    return _drawn(keys, mask, epoch)


def test_shuffle_is_a_uniform_permutation():
    """All 24 orders of 4 valid rows among 6, chi-square at 23 degrees of freedom over 24,000 draws.

    Both error rates are below 1e-6: the threshold 75 has P(chi2 > 75) = 2e-7, and an order that is 20 % too frequent
    (planted below by skipping the shuffle in one draw of 120) gives a statistic above 150.
    """
    mask = jnp.array([True, False, True, True, False, True])
    orders = np.asarray(draw(jax.random.split(jax.random.key(1), 24_000), mask))[:, :4]
    assert (np.sort(orders, axis=1) == [0, 2, 3, 5]).all()
    counts = collections.Counter(map(tuple, orders.tolist()))
    assert chi_square(counts.values(), 24_000, 24) < 75
    biased = counts.copy()
    for order in list(biased):
        biased[order] -= 40
    biased[0, 2, 3, 5] += 40 * 24
    assert chi_square(biased.values(), 24_000, 24) > 150


@pytest.mark.default_rows("network")
@pytest.mark.parametrize("valid", [40, 400], ids=["compared", "network"])
def test_long_rows_are_permuted_too(valid):
    """Past 64 rows. Catches invalid rows in front of valid ones, and an order that does not depend on the epoch."""
    mask = np.zeros(600, bool)
    mask[np.arange(valid) * 600 // valid] = True
    keys = jax.random.split(jax.random.key(2), 2)
    order, later = (np.asarray(draw(keys, mask, np.int32(epoch)))[:, :valid] for epoch in (0, 1))
    for orders in (order, later):
        assert (np.sort(orders, axis=1) == np.flatnonzero(mask)).all()
    assert (order[0] != order[1]).any() and (order[0] != later[0]).any()


@pytest.mark.parametrize("valid", [*(pytest.param(n, marks=pytest.mark.full) for n in (5, 70, 300)), 40])
def test_order_ignores_padding_rows(valid):
    """Catches draws, or a choice of method, that depend on the padded length of a client."""
    keys = jax.random.split(jax.random.key(5), 2)
    short, long = np.ones(valid, bool), np.arange(600) < valid
    assert np.array_equal(draw(keys, short), np.asarray(draw(keys, long))[:, :valid])


@pytest.mark.full
def test_pairs_of_long_rows_are_uniform():
    """(row at position 0, row at position 1) of 70 rows: all 4,830 ordered pairs, 400,000 draws.

    Chi-square with 4,829 degrees of freedom, deviation 98: beyond 5,400 (5.8 deviations) with probability below 1e-7.
    Catches a network of two rounds, planted below, whose statistic is over 10,000.
    """
    keys = jax.random.split(jax.random.key(6), 400_000)

    def statistic():
        def first(key):
            return shuffle(key, jnp.ones(70, bool))(EPOCH, jnp.arange(2))

        pairs = np.asarray(jax.jit(jax.vmap(first))(keys))
        counts = np.bincount(pairs[:, 0] * 70 + pairs[:, 1], minlength=4900).reshape(70, 70)
        assert np.diag(counts).sum() == 0
        return chi_square(counts[~np.eye(70, dtype=bool)], len(keys), 4830)

    assert statistic() < 5400
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffling, "FEISTEL_ROUNDS", 2)
        assert statistic() > 10_000


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("positions", [[0, 1], [4, 0]])
def test_positions_choose_from_one_order(positions):
    """Catches a fresh shuffle per batch: positions must read the same order."""
    key, mask = jax.random.key(8), np.ones(5, bool)
    some = jax.jit(lambda key, mask, positions: shuffle(key, mask)(EPOCH, positions))
    assert np.array_equal(some(key, mask, np.array(positions)), np.asarray(draw(key[None], mask))[0, positions])


def test_keys_of_clients_of_a_longer_key():
    """Catches a stage's key that is derived anew for each step of each client: two of them took 20 seconds."""
    key = stream(jax.random.key(0, impl="threefry4x32"), "client")
    many = jax.jit(lambda ids: client_keys(key, ids))(jnp.arange(3))
    one = jax.jit(lambda id: jax.random.key_data(client_key(key, id)))
    assert many.tolist() == [one(i).tolist() for i in range(3)]
