"""A random permutation of range(N), evaluated at m positions in O(m) time and memory, and complements of id sets."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.engine.feistel import FEISTEL_ROUNDS, feistel, walked
from fedjax_sim.prng import random_bits
from fedjax_sim.types import Array
from fedjax_sim.validate import PositiveInt

_EXACT_LIMIT = 1024  # a power of two; up to this size clients are sorted, and permutations are exactly uniform


@validate.named_arguments
def permute(key: Array, positions: Array, population_size: PositiveInt) -> Array:
    """Returns the values at `positions` of a random permutation of range(N) that depends on the key alone.

    For N <= 1024 the permutation is the order of 64 random bits for each client, so every permutation is equally
    likely. For larger N it is a Feistel network (`engine.feistel`) on a grid of a x b >= N cells, with a and b near
    sqrt(N). Values of N or more are permuted again until they are below N (cycle walking, `engine.feistel.walked`).

    Args:
      key: random key.
      positions: integers in [0, N) of any shape; others are clamped to this range.
      population_size: N, static, at most 2^31 - 1.

    Returns: int32 values in [0, N) in the shape of `positions`; different positions have different values.

    Raises: ValueError or TypeError for a population size out of range.

    Guarantees:
      - the map is a bijection for every key and N (tests/sampling/test_permutation.py::test_permutation_is_a_bijection)
      - single and pair inclusion as for a uniform permutation (test_single_inclusion_is_uniform,
        test_pairs_are_uniform, test_structured_sets_are_hypergeometric)

    References: Luby and Rackoff 1988; Black and Rogaway 2002, section 4 (cycle walking); Appleby 2011 (MurmurHash3).

    >>> import jax, jax.numpy as jnp
    >>> sorted(jax.jit(permute, static_argnums=2)(jax.random.key(0), jnp.arange(5), 5).tolist())
    [0, 1, 2, 3, 4]
    """
    size = int(population_size)
    positions = jnp.clip(positions, 0, size - 1)
    if size <= _EXACT_LIMIT:
        return _sorted_order(key, size)[positions]
    rows, columns = _grid(size)
    network = functools.partial(feistel, random_bits(key, 2 * FEISTEL_ROUNDS).reshape(FEISTEL_ROUNDS, 2), rows, columns)
    return walked(network, positions.astype(jnp.uint32), size, rows * columns - size).astype(jnp.int32)


def others(ids: Array, ranks: Array, size: int) -> Array:
    """Returns the ids in [0, N) that are not among `ids`, by their ranks in ascending order.

    Two algorithms give the same result. If N is at most 32 C, a bit for each of the N ids is used: for C = 10^5 of 10^6
    this takes an eighth of the time of a sort. Otherwise `ids` are sorted.

    Args:
      ids: [C] int32, all different.
      ranks: [c] int32 in [0, N - C); rank 0 is the least id that is not among `ids`.
      size: N.

    Returns: [c] int32.

    Guarantees: the result is the complement of the set, by both algorithms
    (tests/sampling/test_permutation.py::test_others_are_the_complement).

    >>> jax.jit(others, static_argnums=2)(jnp.array([3, 0]), jnp.array([0, 1, 2]), 5).tolist()
    [1, 2, 4]
    """
    if size > 32 * ids.size:
        # The result is the rank, plus one for each id below the result. ids[k] - k is the number of free ids below
        # ids[k], so ids[k] is below the result if ids[k] - k <= rank.
        num_free_below = jnp.sort(ids) - jnp.arange(ids.size, dtype=jnp.int32)
        return ranks + jnp.searchsorted(num_free_below, ranks, side="right").astype(jnp.int32)
    one = jnp.uint32(1)
    # A bit is set for each free id.
    words = ~jnp.zeros(-(-size // 32), jnp.uint32).at[ids >> 5].add(one << (ids & 31).astype(jnp.uint32))
    counts = jax.lax.population_count(words).astype(jnp.int32)
    cumulative_counts = jnp.cumsum(counts)
    word = jnp.searchsorted(cumulative_counts, ranks, side="right").astype(jnp.int32)
    # Within its word, the set bit of a given rank is found by bisection: is it in the upper half of the bits?
    result = word * 32
    rank = ranks - (cumulative_counts - counts)[word]
    bits = words[word]
    for half in (16, 8, 4, 2, 1):
        num_in_lower = jax.lax.population_count(bits & ((one << half) - one)).astype(jnp.int32)
        is_in_upper = rank >= num_in_lower
        result = result + jnp.where(is_in_upper, half, 0)
        rank = rank - jnp.where(is_in_upper, num_in_lower, 0)
        bits = jnp.where(is_in_upper, bits >> half, bits)
    return result


def _sorted_order(key: Array, size: int) -> Array:
    """Returns the clients in the order of 64 random bits each, [N] int32.

    The first 22 bits suffice if they differ for all clients. XLA:CPU sorts one array four times as fast as three, so a
    client's number is packed into the 10 low bits of the word that is sorted.

    Args:
      key: of the order.
      size: N in [1, 1,024].
    """
    numbers = jnp.arange(size, dtype=jnp.uint32)
    low_mask = jnp.uint32(_EXACT_LIMIT - 1)
    packed = jax.lax.sort((random_bits(key, size) & ~low_mask) | numbers)
    all_differ = (packed[1:] & ~low_mask != packed[:-1] & ~low_mask).all()

    def order_by_all_bits():
        # The first words are those of `random_bits` above, so both branches give the same order if their first 22 bits
        # differ for all clients.
        first, second = jax.random.bits(key, (2, size), jnp.uint32)
        return jax.lax.sort((first, second, numbers.astype(jnp.int32)), num_keys=2)[2]

    return jax.lax.cond(all_differ, lambda: (packed & low_mask).astype(jnp.int32), order_by_all_bits)


def _grid(size: int) -> tuple[int, int]:
    """Finds the near-square grid (rows, columns) of at least `size` cells with the fewest excess cells.

    Both numbers are below 2^16.
    """
    root = math.isqrt(size - 1) + 1
    rows = min(range(root, root + min(root // 16, 512) + 1), key=lambda side: -size % side)
    return rows, -(-size // rows)
