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
from fedjax_sim.prng import client_key, shuffled, stream

draw = jax.jit(jax.vmap(lambda key, mask: shuffled(key, jnp.arange(mask.shape[0]), mask), in_axes=(0, None)))


def test_stage_names_do_not_collide():
    """Catches two stages that read one stream: every name used in the package, and 2,000 others."""
    source = pathlib.Path(fedjax_sim.__path__[0]).rglob("*.py")
    names = {name for path in source for name in re.findall(r'stream\([^()]*, "([^"]+)"\)', path.read_text())}
    assert {"sampling", "client", "aggregation", "server", "order"} <= names
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


def test_shuffled_is_a_uniform_permutation():
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


def test_long_rows_are_permuted_too():
    """The branch that sorts. Catches invalid rows in front of valid ones past 512 rows."""
    mask = np.arange(600) % 3 != 0
    order = np.asarray(draw(jax.random.split(jax.random.key(2), 2), jnp.array(mask)))
    assert (np.sort(order[:, :400], axis=1) == np.flatnonzero(mask)).all()
    assert (order[0] != order[1]).any()
    middle = order[0, :400].mean()
    assert abs(middle - 300) < 5 * 173 / math.sqrt(400)


def test_order_ignores_padding_rows():
    """Catches draws that depend on the padded length of a client."""
    key = jax.random.key(5)[None]
    short, long = jnp.ones(5, bool), jnp.arange(9) < 5
    assert draw(key, short)[0].tolist() == draw(key, long)[0, :5].tolist()


@pytest.mark.parametrize("positions", [[0, 1], [4, 0]])
def test_positions_choose_from_one_order(positions):
    """Catches a fresh shuffle per batch: positions must read the same order."""
    key, mask = jax.random.key(8), jnp.ones(5, bool)
    whole = shuffled(key, jnp.arange(5), mask)
    assert shuffled(key, jnp.array(positions), mask).tolist() == [int(whole[i]) for i in positions]


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_generators_that_mix_clients_are_refused(impl):
    """Fault: a client's draws that depend on its batch mates, in silence."""
    with pytest.raises(ValueError, match="key: expected a threefry key"):
        client_key(jax.random.key(0, impl=impl), jnp.int32(3))
