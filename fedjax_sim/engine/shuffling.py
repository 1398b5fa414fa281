"""Derives the keys of a cohort's clients, and random orders of a client's examples.

An order comes from a keyed hash of a counter. With threefry2x32, which XLA:CPU runs in small pieces as a loop of tiny
kernels, the orders took half of a round. The keys of clients remain threefry keys.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim.engine.arithmetic.barrier import computed_once
from fedjax_sim.engine.feistel import FEISTEL_ROUNDS, feistel, walked
from fedjax_sim.prng import client_key, counter_bits, hashed
from fedjax_sim.types import Array

ORDER = zlib.crc32(b"order")  # the first of the counters that orders use
SORTED = 64  # the most rows whose order comes from comparing all pairs
COMPARED = 16  # rows that are compared with all others at once


def client_keys(key: Array, ids: Array) -> Array:
    """Returns the keys of clients in a stage as key data, far faster than one client after the other would derive them.

    Args:
      key: the key of a stage of the round.
      ids: [m] int32, the clients.

    Returns: [m, words] uint32, the data of m keys of the kind of `key`.

    Guarantees:
      The keys are those of `prng.client_key`
      (tests/engine/test_shuffling.py::test_keys_of_clients_of_a_longer_key).
    """
    words = jax.random.key_data(key)
    # Without this, XLA:CPU would derive the stage's key anew in each step of each client.
    key = jax.random.wrap_key_data(computed_once(words, words), impl=jax.random.key_impl(key))
    return jax.random.key_data(client_key(key, ids))


def shuffle(key: Array, mask: Array) -> Callable[[Array, Array], Array]:
    """Returns a function that gives the random order in which a client visits its valid rows in an epoch.

    Args:
      key: the key of one client.
      mask: [n] bool, the valid rows.

    Returns: (epoch [] int32, positions [b] int32) -> [b] int32, the rows that stand at these positions of the epoch's
      order. Positions at or past the number of valid rows give arbitrary rows.

    Guarantees:
      Positions 0 to valid - 1 enumerate the valid rows once each. Up to 64 valid rows the order is uniformly random,
      and beyond 64 it is given by a keyed network
      (tests/engine/test_shuffling.py::test_shuffle_is_a_uniform_permutation, ::test_long_rows_are_permuted_too,
      ::test_pairs_of_long_rows_are_uniform).
      Padding behind the rows does not change the order (::test_order_ignores_padding_rows).

    >>> draw = jax.jit(lambda key, mask: shuffle(key, mask)(jnp.int32(0), jnp.arange(3)))
    >>> sorted(draw(jax.random.key(0), jnp.array([True, True, True, False])).tolist())
    [0, 1, 2]
    """
    num_rows = mask.shape[0]
    num_valid = mask.sum(dtype=jnp.int32)
    if num_rows > SORTED:
        # The valid rows are moved to the front. Only then does the number of padding rows leave no trace.
        target = jnp.where(mask, jnp.cumsum(mask) - 1, num_rows)
        valid_rows = jnp.zeros(num_rows, jnp.int32).at[target].set(jnp.arange(num_rows, dtype=jnp.int32), mode="drop")
        first_rows = valid_rows[:SORTED]
        is_valid = jnp.arange(SORTED) < num_valid
    else:
        valid_rows = None
        first_rows = jnp.arange(num_rows, dtype=jnp.int32)
        is_valid = mask

    def at(epoch: Array, positions: Array) -> Array:
        # An epoch takes two words of the client's stream, so it has two counters.
        counters = jnp.uint32(ORDER) + 2 * epoch.astype(jnp.uint32) + jnp.arange(2, dtype=jnp.uint32)
        # Hashed once. XLA:CPU would otherwise hash the counters again for each pair of rows.
        words = jax.lax.optimization_barrier(counter_bits(key, counters))
        # Each row is ranked by its hash. Rows that are not valid get the highest bit, and so come last. The row's
        # number in the low bits decides between equal hashes.
        row_number = jnp.arange(first_rows.shape[0], dtype=jnp.uint32)
        bits = jnp.where(is_valid, hashed(words, first_rows.astype(jnp.uint32)) >> 1, jnp.uint32(1) << 31)
        bits = jax.lax.optimization_barrier((bits & ~jnp.uint32(SORTED - 1)) | row_number)
        rank = jax.lax.optimization_barrier(_ranks(bits))
        # At most one row has the rank of a position, so the sum is that row.
        short_order = jnp.where(rank[None, :] == positions[:, None], first_rows[None, :], 0).sum(
            axis=1, dtype=jnp.int32
        )
        if valid_rows is None:
            return short_order
        # More rows are permuted by a Feistel network on a grid that holds them and is nearly a square. A step evaluates
        # the network at its own positions only.
        size = jnp.maximum(num_valid, 1)
        side = jnp.ceil(jnp.sqrt(size.astype(jnp.float32))).astype(jnp.int32)
        round_words = hashed(words, jnp.uint32(1 << 31) + jnp.arange(2 * FEISTEL_ROUNDS, dtype=jnp.uint32)).reshape(
            FEISTEL_ROUNDS, 2
        )
        network = functools.partial(feistel, round_words, side, -(-size // side))
        beyond = math.isqrt(num_rows) + 1  # cells at most: the grid's last row begins below `size`
        inside = jnp.clip(positions, 0, size - 1).astype(jnp.uint32)
        row = valid_rows[walked(network, inside, size, beyond).astype(jnp.int32)]
        return jnp.where(num_valid <= SORTED, short_order, row)

    return at


def _ranks(x: Array) -> Array:
    """Returns how many numbers of `x` [n] are below each of them, [n] int32.

    All pairs are compared, because XLA:CPU sorts short rows an order of magnitude slower. Sixteen numbers at a time are
    compared with all: of more, XLA:CPU would store the comparisons, and one at a time is a longer program.
    """
    rank = jnp.zeros(x.shape, jnp.int32)
    for start in range(0, x.shape[0], COMPARED):
        rank = rank + (x[start : start + COMPARED, None] < x[None]).sum(0, dtype=jnp.int32)
    return rank
