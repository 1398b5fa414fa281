"""Selects the number of a given rank among many by radix select, without a sort and without a comparison of floats.

The bits of a float, taken as an integer after flipping the bits of negative numbers, order as the floats do: -inf, ...,
-0.0, +0.0, ..., inf. The integer of the wanted rank is found from its highest bit down: a bit is set if no more than
`rank` messages lie below the integer that this gives.

Bits are found a byte at a time. Messages that differ in a higher byte are first replaced by 0xFF, and the number of
those that lie below is subtracted from the rank. So each counting pass reads one byte a message and adds bytes (up to
255 messages a group), 64 at a time with AVX-512. Every step is integer arithmetic on counts, so the order of the
messages cannot change a bit of the result.

References: Knuth 1998, The Art of Computer Programming 3, section 5.2.5 (radix exchange); Alabi, Blanchard, Gordon and
Steinbach 2012 (radix select on GPUs).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim.types import Array

UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
_GROUP = 250  # messages of a group: a byte can count them


def ordered(x: Array) -> Array:
    """Returns unsigned integers that order as the floats do."""
    unsigned = UNSIGNED[x.dtype.itemsize]
    top = unsigned(1 << (8 * x.dtype.itemsize - 1))
    bits = jax.lax.bitcast_convert_type(x, unsigned)
    return jnp.where(bits >= top, ~bits, bits | top)


def floats_of(keys: Array, dtype) -> Array:
    """Returns the floats that `ordered` made these integers of."""
    top = keys.dtype.type(1 << (8 * keys.dtype.itemsize - 1))
    return jax.lax.bitcast_convert_type(jnp.where(keys >= top, keys ^ top, ~keys), dtype)


def _grouped(x: Array, fill: int) -> Array:
    """Returns [m, ...] as [groups, at most _GROUP, ...], padded with `fill`."""
    groups = -(-x.shape[0] // _GROUP)
    group_size = -(-x.shape[0] // groups)
    padding = groups * group_size - x.shape[0]
    if padding:
        x = jnp.concatenate([x, jnp.full((padding, *x.shape[1:]), fill, x.dtype)])
    return x.reshape(groups, group_size, *x.shape[1:])


def radix_select(keys: Array, rank: Array, pool: Callable, weights: Array | None = None) -> tuple[Array, Array]:
    """Returns (the key of a rank, the number of equal keys that rank before it).

    Args:
      keys: [m, B] unsigned integers; padding and absent messages are the largest integer.
      rank: [r, B], or [1, 1] with a pool over everything.
      pool: counts [g, B] of one rank -> [B] or [1]; adds the counts of groups, or of everything.
      weights: [m] int32, how often each message counts; once by default.
    """
    bits = 8 * keys.dtype.itemsize
    keys = _grouped(keys, (1 << bits) - 1) if weights is None else keys[None]

    def of_rank(rank):
        """Returns the key of one rank in each column, and how many equal keys rank before it."""

        def below(messages, value):
            """Returns how many messages have a byte below `value`."""
            smaller = messages < value[None, None]
            if weights is not None:
                return pool(jnp.where(smaller, weights[None, :, None], 0).sum(1, dtype=jnp.int32))
            return pool(smaller.sum(1, dtype=jnp.uint8).astype(jnp.int32))

        key = jnp.zeros(rank.shape, keys.dtype)
        # From the highest byte down.
        for shift in range(bits - 8, -1, -8):
            messages = (keys >> shift).astype(jnp.uint8)
            if shift < bits - 8:
                # Messages that differ in a higher byte no longer count: 0xFF is below no byte.
                messages = jnp.where((keys >> (shift + 8)) == key[None, None], messages, jnp.uint8(255))

            # A bit of the byte is set if no more than `rank` messages lie below the byte that this gives.
            def decide(i, byte, messages=messages, rank=rank):
                higher = byte | (jnp.uint8(128) >> i.astype(jnp.uint8))
                return jnp.where(below(messages, higher) <= rank, higher, byte)

            byte: Array = jax.lax.fori_loop(0, 8, decide, jnp.zeros(rank.shape, jnp.uint8))
            # Among the messages that share this byte too, the rank counts from their first.
            rank = rank - below(messages, byte)
            # A key of a single byte is not shifted.
            key = (key << (8 if bits > 8 else 0)) | byte.astype(keys.dtype)
        return key, rank

    # One rank after the other, since each needs the memory of a pass over all keys.
    return jax.lax.map(of_rank, rank) if rank.shape[0] > 1 else jax.tree.map(lambda x: x[None], of_rank(rank[0]))
