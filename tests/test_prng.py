"""Keys by name and identity, and the shuffle."""

from __future__ import annotations

import collections
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_sim
from fedjax_sim.prng import client_key, counter_bits, shuffle, stream

EPOCH = jnp.int32(0)
draw = jax.jit(jax.vmap(lambda key, mask: shuffle(key, mask)(EPOCH, jnp.arange(mask.shape[0])), in_axes=(0, None)))


def test_stage_names_do_not_collide():
    """Catches two stages that read one stream: every name used in the package, and 2,000 others."""
    source = pathlib.Path(fedjax_sim.__path__[0]).rglob("*.py")
    names = {name for path in source for name in re.findall(r'stream\([^()]*, "([^"]+)"\)', path.read_text())}
    assert {"sampling", "client", "aggregation", "server", "loss"} <= names
    key = jax.random.key(0)
    everything = sorted(names | {f"stage {i}" for i in range(2000)})
    assert len({tuple(np.asarray(jax.random.key_data(stream(key, name))).tolist()) for name in sorted(names)}) == len(
        names
    )
    import zlib

    assert len({zlib.crc32(name.encode()) for name in everything}) == len(everything)


def test_streams_survive_the_process():
    """Catches Python's salted hash() in place of a checksum: the bits are fixed for ever."""
    data = np.asarray(jax.random.key_data(stream(jax.random.key(0), "client")))
    expected = jax.random.key_data(jax.random.fold_in(jax.random.key(0), 3343123541))
    assert data.tolist() == np.asarray(expected).tolist()


def test_client_keys_are_independent_of_batch_mates():
    """Catches generators whose vmapped draws depend on the batch, and splitting by slot."""
    key = jax.random.key(3)
    ids = jnp.array([5, 0, 2**31 - 1, 7])
    together = jax.vmap(lambda id: jax.random.bits(client_key(key, id), (3,)))(ids)
    for row, id in zip(together, ids, strict=True):
        assert row.tolist() == jax.random.bits(client_key(key, id), (3,)).tolist()


def chi_square(counts, total, cells) -> float:
    expected = total / cells
    return (sum((count - expected) ** 2 for count in counts) + (cells - len(counts)) * expected**2) / expected


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


@pytest.mark.parametrize("valid", [40, 400], ids=["compared", "network"])
def test_long_rows_are_permuted_too(valid):
    """Past 64 rows. Catches invalid rows in front of valid ones, and an order that does not depend on the epoch."""
    mask = np.zeros(600, bool)
    mask[np.arange(valid) * 600 // valid] = True
    order = np.asarray(draw(jax.random.split(jax.random.key(2), 2), jnp.array(mask)))[:, :valid]
    assert (np.sort(order, axis=1) == np.flatnonzero(mask)).all()
    assert (order[0] != order[1]).any()
    key = jax.random.split(jax.random.key(2), 2)[0]
    later = shuffle(key, jnp.array(mask))(jnp.int32(1), jnp.arange(valid))
    assert sorted(later.tolist()) == sorted(order[0].tolist()) and later.tolist() != order[0].tolist()


@pytest.mark.parametrize("valid", [5, 40, 70, 300])
def test_order_ignores_padding_rows(valid):
    """Catches draws, or a choice of method, that depend on the padded length of a client."""
    key = jax.random.key(5)[None]
    short, long = jnp.ones(valid, bool), jnp.arange(valid + 400) < valid
    assert draw(key, short)[0].tolist() == draw(key, long)[0, :valid].tolist()


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
        patch.setattr(fedjax_sim.prng, "ROUNDS", 2)
        assert statistic() > 10_000


def test_counter_bits_are_uniform():
    """Bytes of words, differences of neighbouring counters and of neighbouring keys; and single bits that flip.

    Chi-square of 256 cells over 2^18 draws: P(statistic > 400) < 1e-8. Each input bit flips each output bit half of the
    time: 2^15 trials, 6 deviations. Catches one finaliser without its key, and a counter that is only multiplied.
    """

    def cells(words):
        return max(chi_square(np.bincount(words >> s & 255, minlength=256), words.size, 256) for s in (0, 8, 16, 24))

    keys = jax.random.wrap_key_data(jnp.stack([jnp.zeros(64, jnp.uint32), jnp.arange(64, dtype=jnp.uint32)], 1))
    counters = jnp.arange(4096, dtype=jnp.uint32)
    words = np.asarray(jax.vmap(counter_bits, (0, None))(keys, counters))
    assert cells(words.ravel()) < 400
    assert cells((words[:, 1:] - words[:, :-1]).ravel()) < 400
    assert cells((words[1:] ^ words[:-1]).ravel()) < 400
    assert len(np.unique(words[0])) == 4096
    limit = 6 * 0.5 / math.sqrt(2**15)
    base = np.asarray(counter_bits(keys[3], jnp.arange(2**15, dtype=jnp.uint32)))
    for bit in range(32):
        flipped = np.asarray(counter_bits(keys[3], jnp.arange(2**15, dtype=jnp.uint32) ^ jnp.uint32(1 << bit)))
        shares = ((base ^ flipped)[:, None] >> np.arange(32) & 1).mean(0)
        assert np.abs(shares - 0.5).max() < limit, bit


@pytest.mark.parametrize("positions", [[0, 1], [4, 0]])
def test_positions_choose_from_one_order(positions):
    """Catches a fresh shuffle per batch: positions must read the same order."""
    key, mask = jax.random.key(8), jnp.ones(5, bool)
    whole = shuffle(key, mask)(EPOCH, jnp.arange(5))
    assert shuffle(key, mask)(EPOCH, jnp.array(positions)).tolist() == [int(whole[i]) for i in positions]


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_generators_that_mix_clients_are_refused(impl):
    """Fault: a client's draws that depend on its batch mates, in silence."""
    with pytest.raises(ValueError, match="key: expected a threefry key"):
        client_key(jax.random.key(0, impl=impl), jnp.int32(3))
