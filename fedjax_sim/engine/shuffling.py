"""Random numbers that are computed once: the keys of a cohort's clients, and orders of a client's examples."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim.engine.arithmetic.barrier import computed_once
from fedjax_sim.prng import ROUNDS, client_key, counter_bits, feistel, hashed, threefry, walked
from fedjax_sim.types import Array

__all__ = ["client_keys", "shuffle"]

ORDER = zlib.crc32(b"order")  # first of the counters that orders use
SORTED = 64  # rows whose order comes from comparing all pairs


def client_keys(key: Array, ids: Array) -> Array:
    """The key data [m, words] of clients `ids` [m]: `prng.client_key` for all at once, far faster than one by one.

    Guarantees: tests/engine/test_shuffling.py::test_keys_of_clients_of_a_longer_key.
    """
    words = jax.random.key_data(key)
    words = computed_once(words, words)  # or XLA:CPU derives the stage's key anew in each step of each client
    if jax.random.key_impl(key) == "threefry2x32":  # `fold_in`, for all at once
        low = ids.astype(jnp.uint32)
        return jnp.stack(threefry(words, jnp.zeros_like(low), low), axis=-1)
    key = jax.random.wrap_key_data(words, impl=jax.random.key_impl(key))
    return jax.random.key_data(jax.vmap(client_key, (None, 0))(key, ids))


def shuffle(key: Array, mask: Array) -> Callable[[Array, Array], Array]:
    """Random orders of the rows where `mask` is True, one for each epoch.

    Args:
      key: one client's key.
      mask: [n] bool, the valid rows.

    Returns: (epoch, positions [b] int32) -> [b] int32, the rows that stand at these positions of that epoch's order;
    positions at or past the number of valid rows give arbitrary rows.

    Guarantees: positions 0..valid-1 enumerate the valid rows once each, in an order that is uniformly random up to 64
    valid rows, and one of a keyed network's beyond
    (tests/engine/test_shuffling.py::test_shuffle_is_a_uniform_permutation, ::test_long_rows_are_permuted_too,
    ::test_pairs_of_long_rows_are_uniform); padding behind the rows does not change it
    (::test_order_ignores_padding_rows).
    """
    rows = mask.shape[0]
    count = mask.sum(dtype=jnp.int32)
    if rows > SORTED:  # the valid rows first; only then is the number of padding rows without a trace
        target = jnp.where(mask, jnp.cumsum(mask) - 1, rows)
        place = jnp.zeros(rows, jnp.int32).at[target].set(jnp.arange(rows, dtype=jnp.int32), mode="drop")
        first, valid = place[:SORTED], jnp.arange(SORTED) < count
    else:
        place, first, valid = None, jnp.arange(rows, dtype=jnp.int32), mask

    def at(epoch: Array, positions: Array) -> Array:
        counters = jnp.uint32(ORDER) + 2 * epoch.astype(jnp.uint32) + jnp.arange(2, dtype=jnp.uint32)
        words = jax.lax.optimization_barrier(counter_bits(key, counters))  # hashed once, and not for each pair of rows
        # Comparing all pairs is a few vector operations, written out lest the compiler store them; XLA:CPU sorts short
        # rows an order of magnitude slower. A row's number in the low bits decides between equal hashes.
        row = jnp.arange(first.shape[0], dtype=jnp.uint32)
        bits = jnp.where(valid, hashed(words, first.astype(jnp.uint32)) >> 1, jnp.uint32(1) << 31)
        bits = jax.lax.optimization_barrier((bits & ~jnp.uint32(SORTED - 1)) | row)
        rank = sum((bits[i] < bits).astype(jnp.int32) for i in range(bits.shape[0]))
        rank = jax.lax.optimization_barrier(rank)
        few = jnp.where(rank[None, :] == positions[:, None], first[None, :], 0).sum(axis=1, dtype=jnp.int32)
        if place is None:
            return few
        size = jnp.maximum(count, 1)
        side = jnp.ceil(jnp.sqrt(size.astype(jnp.float32))).astype(jnp.int32)
        rounds = hashed(words, jnp.uint32(1 << 31) + jnp.arange(2 * ROUNDS, dtype=jnp.uint32)).reshape(ROUNDS, 2)
        network = functools.partial(feistel, rounds, side, -(-size // side))
        inside = jnp.clip(positions, 0, size - 1).astype(jnp.uint32)
        return jnp.where(count <= SORTED, few, place[walked(network, inside, size).astype(jnp.int32)])

    return at
