"""Finds the largest entries of a vector: a threshold by radix select, then the indices of entries that reach it.

References: Alabi, Blanchard, Gordon and Steinbach 2012 (radix select for the k-th largest).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.engine.all_messages.radix import UNSIGNED, radix_select
from fedjax_sim.engine.platform import target
from fedjax_sim.types import Array

LANES = 512  # columns that a vector is folded into


def _magnitudes(x: Array) -> Array:
    """Returns unsigned integers that order as |x| does."""
    unsigned = UNSIGNED[x.dtype.itemsize]
    if jnp.issubdtype(x.dtype, jnp.floating):
        # Without its sign bit a float's bits order as its magnitude.
        return jax.lax.bitcast_convert_type(x, unsigned) & unsigned((1 << (8 * x.dtype.itemsize - 1)) - 1)
    bits = jax.lax.bitcast_convert_type(x, unsigned)
    # The two's complement, which holds the magnitude of the smallest integer too.
    return jnp.where(x < 0, ~bits + unsigned(1), bits)


def _rank_in_vector(keys: Array, rank: Array) -> tuple[Array, Array]:
    """Returns (the key of this rank in a vector, the number of equal keys that rank before it)."""
    padding = ~keys.dtype.type(0)
    keys = jnp.concatenate([keys, jnp.full(-keys.size % LANES, padding, keys.dtype)]).reshape(-1, LANES)
    # The vector is folded into columns, whose counts are added up.
    pool = lambda counts: counts.sum(keepdims=True)[0]  # noqa: E731
    key, num_before = radix_select(keys, rank.reshape(1, 1), pool)
    return key[0, 0], num_before[0, 0]


def _vector(x: Array, k: int) -> tuple[Array, int]:
    """Returns x and k, after checking them."""
    x = jnp.asarray(x)
    is_real = jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)
    if x.ndim != 1 or not is_real:
        validate.fail("x", "a vector of floats or integers", x)
    validate.integer("k", k, 1, x.size)
    return x, int(k)


def top_k_mask(x: Array, k: int) -> Array:
    """Returns a mask of the k entries of largest magnitude; among equal ones those of lowest index.

    Args:
      x: [d] floats or integers, finite.
      k: static, in [1, d].

    Returns: [d] bool with exactly k True.

    Raises: ValueError, TypeError for an x that is no vector, and for a k out of range.

    Guarantees: a stable argsort of -|x| chooses the same entries, in every dtype
    (tests/engine/all_messages/test_order_statistics.py::test_top_k_equals_a_stable_sort).

    >>> import jax, jax.numpy as jnp
    >>> jax.jit(top_k_mask, static_argnums=1)(jnp.array([1.0, -5.0, 2.0, 2.0]), 2).tolist()
    [False, True, True, False]
    """
    x, k = _vector(x, k)
    # Complements, so that the largest magnitudes have the lowest ranks.
    keys = ~_magnitudes(x)
    cut, num_before = _rank_in_vector(keys, jnp.int32(k - 1))
    is_equal = keys == cut
    index = jnp.arange(x.size, dtype=jnp.uint32)

    def last_index_among_equal():
        return _rank_in_vector(jnp.where(is_equal, index, ~jnp.uint32(0)), num_before)[0]

    # If all entries at the cut are chosen, there is no second selection.
    takes_all_equal = is_equal.sum(dtype=jnp.int32) == num_before + 1
    last = jax.lax.cond(takes_all_equal, lambda: ~jnp.uint32(0), last_index_among_equal)
    return (keys < cut) | (is_equal & (index <= last))


def top_k(x: Array, k: int) -> tuple[Array, Array]:
    """Returns (values, indices) of the k entries of largest magnitude, in order of index.

    Among entries of equal magnitude those of lowest index are chosen. The entries are found by `top_k_mask`, or by
    `lax.top_k` where it is faster: on accelerators, and on a CPU for few floats of at most 32 bits (k <= 4,000 or
    d / 200).

    Args:
      x: [d] floats or integers, finite.
      k: static, in [1, d].

    Returns: [k] values with their signs, and [k] int32 indices, increasing.

    Raises: ValueError, TypeError for an x that is no vector, and for a k out of range.

    Guarantees: a stable argsort of -|x| chooses the same entries, in every dtype and by either way
    (tests/engine/all_messages/test_order_statistics.py::test_top_k_equals_a_stable_sort).

    >>> import jax.numpy as jnp
    >>> [part.tolist() for part in top_k(jnp.array([1.0, -5.0, 2.0, 2.0]), 2)]
    [[-5.0, 2.0], [1, 2]]
    """
    x, k = _vector(x, k)
    floats = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize <= 4
    if target() != "cpu":
        chosen = jnp.sort(jax.lax.top_k(_magnitudes(x), k)[1])
    elif floats and k <= max(x.size // 200, 4000):
        chosen = jnp.sort(jax.lax.top_k(jnp.abs(x.astype(jnp.float32)), k)[1])
    else:
        chosen = _places(top_k_mask(x, k), k)
    return x[chosen], chosen


def _places(mask: Array, k: int) -> Array:
    """Returns the indices of the k True entries.

    Flags are packed into words of 32. Each output looks up its word, and then bisects the word by population counts.
    """
    flags = jnp.concatenate([mask, jnp.zeros(-mask.size % 32, bool)]).reshape(-1, 32)
    words = (flags.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)[None]).sum(1, dtype=jnp.uint32)
    sizes = jax.lax.population_count(words).astype(jnp.int32)
    first = jnp.cumsum(sizes) - sizes  # output that a word's first flag fills
    at = (
        jnp.zeros(k, jnp.int32)
        .at[jnp.where(sizes > 0, first, k)]
        .max(jnp.arange(words.size, dtype=jnp.int32), mode="drop")
    )
    at = jax.lax.cummax(at)
    word = words[at]
    rank = jnp.arange(k, dtype=jnp.int32) - first[at]
    place = at * 32
    for width in (16, 8, 4, 2, 1):
        lower = jax.lax.population_count(word & jnp.uint32((1 << width) - 1)).astype(jnp.int32)
        upper = rank >= lower
        rank = jnp.where(upper, rank - lower, rank)
        word = jnp.where(upper, word >> width, word)
        place = jnp.where(upper, place + width, place)
    return place
