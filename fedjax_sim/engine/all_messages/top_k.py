"""Finds the largest entries of a vector: a threshold by radix select, then the indices of entries that reach it.

For x of d entries, of which k are wanted, entry i has the key

    key_i = complement of |x_i|, as an unsigned integer

so that the largest magnitudes have the lowest ranks. Let cut be the key of rank k - 1, counted from 0. The chosen
entries are those with key_i < cut, and of those with key_i = cut the ones of lowest index, until there are k.

References: Alabi, Blanchard, Gordon and Steinbach 2012 (radix select for the k-th largest).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.engine.all_messages.radix import UNSIGNED, radix_select
from fedjax_sim.engine.platform import target
from fedjax_sim.types import Array

FOLDED_COLUMNS = 512  # columns that a vector is folded into


def _magnitudes(x: Array) -> Array:
    """Returns unsigned integers of the width of x's dtype that order as |x| does, in the shape of x."""
    unsigned = UNSIGNED[x.dtype.itemsize]
    if jnp.issubdtype(x.dtype, jnp.floating):
        # Without its sign bit a float's bits order as its magnitude.
        return jax.lax.bitcast_convert_type(x, unsigned) & unsigned((1 << (8 * x.dtype.itemsize - 1)) - 1)
    bits = jax.lax.bitcast_convert_type(x, unsigned)
    # The two's complement, which holds the magnitude of the smallest integer too.
    return jnp.where(x < 0, ~bits + unsigned(1), bits)


def _rank_in_vector(keys: Array, rank: Array) -> tuple[Array, Array]:
    """Returns (the key of this rank in a vector, the number of equal keys that rank before it).

    Args:
      keys: [d] unsigned integers; equal ones rank by index.
      rank: [] int32 in [0, d - 1]; 0 is the smallest key.

    Returns: ([] of the keys' dtype, [] int32: the rank less the number of smaller keys).
    """
    largest_key = ~keys.dtype.type(0)
    # Padding has the largest key and stands last, so it changes the rank of no key.
    padding = jnp.full(-keys.size % FOLDED_COLUMNS, largest_key, keys.dtype)
    columns = jnp.concatenate([keys, padding]).reshape(-1, FOLDED_COLUMNS)

    def over_columns(counts):
        """Adds up counts [groups, FOLDED_COLUMNS] over groups and columns, because the columns are one vector: [1]."""
        return counts.sum(keepdims=True)[0]

    key, num_before = radix_select(columns, rank.reshape(1, 1), over_columns)
    return key[0, 0], num_before[0, 0]


def _vector(x: Array, k: int) -> tuple[Array, int]:
    """Returns x as an array and k as an int, after checking that x is [d] and real, and k in [1, d]."""
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
    # The entry of rank k - 1 is the last chosen one. Of the entries at the cut, it and those before it are chosen.
    cut, num_equal_before = _rank_in_vector(keys, jnp.int32(k - 1))
    is_equal = keys == cut
    index = jnp.arange(x.size, dtype=jnp.uint32)

    def last_chosen_index():
        """Selects among the indices of the entries at the cut; all others rank behind them."""
        indices_at_cut = jnp.where(is_equal, index, ~jnp.uint32(0))
        return _rank_in_vector(indices_at_cut, num_equal_before)[0]

    # If all entries at the cut are chosen, there is no second selection, and the largest integer is above all indices.
    takes_all_equal = is_equal.sum(dtype=jnp.int32) == num_equal_before + 1
    last = jax.lax.cond(takes_all_equal, lambda: ~jnp.uint32(0), last_chosen_index)
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
    is_short_float = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize <= 4
    if target() != "cpu":
        chosen = jnp.sort(jax.lax.top_k(_magnitudes(x), k)[1])
    elif is_short_float and k <= max(x.size // 200, 4000):
        chosen = jnp.sort(jax.lax.top_k(jnp.abs(x.astype(jnp.float32)), k)[1])
    else:
        chosen = _indices_of_true(top_k_mask(x, k), k)
    return x[chosen], chosen


def _indices_of_true(mask: Array, k: int) -> Array:
    """Returns the indices of the True entries of a mask, in rising order.

    Flags are packed into words of 32: bit b of word w is the flag 32 w + b. With n_w for the number of flags in word w,
    and f_w = n_0 + ... + n_(w-1), the outputs f_w, ..., f_w + n_w - 1 come from word w. So output j looks up its word
    w, the last one with n_w > 0 and f_w <= j. It then finds the bit of rank r = j - f_w among the set bits of the word.

    The bit is found by bisection: if the lower half of the remaining bits has more than r set bits, the wanted bit is
    there. Otherwise it is in the upper half, and r falls by the number of set bits in the lower half.

    Args:
      mask: [d] bool with exactly k True.
      k: static, in [1, d].

    Returns: [k] int32.
    """
    flags = jnp.concatenate([mask, jnp.zeros(-mask.size % 32, bool)]).reshape(-1, 32)
    words = (flags.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)[None]).sum(1, dtype=jnp.uint32)
    n = jax.lax.population_count(words).astype(jnp.int32)
    f = jnp.cumsum(n) - n
    # Each word with a flag writes its number w at its first output f_w; words without flags write outside, at k. The
    # running maximum carries a word's number on to its other outputs.
    w_at_first_output = (
        jnp.zeros(k, jnp.int32).at[jnp.where(n > 0, f, k)].max(jnp.arange(words.size, dtype=jnp.int32), mode="drop")
    )
    w = jax.lax.cummax(w_at_first_output)  # [k] the word of each output
    word = words[w]
    r = jnp.arange(k, dtype=jnp.int32) - f[w]
    index = w * 32
    for half_width in (16, 8, 4, 2, 1):
        lower_half = word & jnp.uint32((1 << half_width) - 1)
        num_in_lower_half = jax.lax.population_count(lower_half).astype(jnp.int32)
        is_in_upper_half = r >= num_in_lower_half
        r = jnp.where(is_in_upper_half, r - num_in_lower_half, r)
        word = jnp.where(is_in_upper_half, word >> half_width, word)
        index = jnp.where(is_in_upper_half, index + half_width, index)
    return index
