"""A keyed random permutation of range(N), evaluated at m positions in O(m) time and memory; ids that are not taken."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.prng import ROUNDS, feistel, random_bits, walked
from fedjax_sim.types import Array
from fedjax_sim.validate import PositiveInt

__all__ = ["others", "permute"]

_EXACT_LIMIT = 1024  # a power of two; up to here clients are sorted, and permutations exactly uniform


@validate.named_arguments
def permute(key: Array, positions: Array, population_size: PositiveInt) -> Array:
    """Values at `positions` of a random permutation of range(N) that depends on the key alone.

    N <= 1024: the order of 64 random bits a client, so every permutation is equally likely. Above: a Feistel network
    (`prng.feistel`) on a grid of a x b >= N cells, a and b near sqrt(N), with cycle walking (`prng.walked`) past N.

    Args:
      key: random key.
      positions: integers in [0, N) of any shape; others are clamped into it.
      population_size: N, static, at most 2^31 - 1.

    Returns: int32 values in [0, N), shaped like `positions`; distinct where the positions are.

    Raises: ValueError, TypeError for a population size out of range.

    Guarantees: a bijection for every key and N (tests/sampling/test_permutation.py::test_permutation_is_a_bijection);
    single and pair inclusion as of a uniform permutation (test_single_inclusion_is_uniform,
    test_pairs_are_uniform, test_structured_sets_are_hypergeometric).

    References: Luby and Rackoff 1988; Black and Rogaway 2002, section 4 (cycle walking); Appleby 2011 (MurmurHash3).

    >>> import jax, jax.numpy as jnp
    >>> sorted(permute(jax.random.key(0), jnp.arange(5), 5).tolist())
    [0, 1, 2, 3, 4]
    """
    size = int(population_size)
    positions = jnp.clip(positions, 0, size - 1)
    if size <= _EXACT_LIMIT:
        return _sorted_order(key, size)[positions]
    rows, columns = _grid(size)
    network = functools.partial(feistel, jax.random.bits(key, (ROUNDS, 2), jnp.uint32), rows, columns)
    values = positions.astype(jnp.uint32)
    values = walked(network, values, size) if rows * columns > size else network(values)
    return values.astype(jnp.int32)


def others(ids: Array, ranks: Array, size: int) -> Array:
    """The r-th of the ids in [0, N), from 0, that are not among `ids`, for each r of `ranks`.

    From one bit for each of the N where these are few beside C: for C = 10^5 of 10^6 an eighth of the time of a sort.

    Args:
      ids: [C] int32, all different.
      ranks: [c] int32 in [0, N - C).

    Guarantees: those of a set's complement, by either way
    (tests/sampling/test_permutation.py::test_others_are_the_complement).

    >>> others(jnp.array([3, 0]), jnp.array([0, 1, 2]), 5).tolist()
    [1, 2, 4]
    """
    if size > 32 * ids.size:  # r, and one more for each id that comes before it
        before = jnp.sort(ids) - jnp.arange(ids.size, dtype=jnp.int32)
        return ranks + jnp.searchsorted(before, ranks, side="right").astype(jnp.int32)
    one = jnp.uint32(1)
    words = ~jnp.zeros(-(-size // 32), jnp.uint32).at[ids >> 5].add(one << (ids & 31).astype(jnp.uint32))
    counts = jax.lax.population_count(words).astype(jnp.int32)
    until = jnp.cumsum(counts)
    word = jnp.searchsorted(until, ranks, side="right").astype(jnp.int32)
    found, left, bits = word * 32, ranks - (until - counts)[word], words[word]
    for half in (16, 8, 4, 2, 1):  # whether it is among the upper bits
        lower = jax.lax.population_count(bits & ((one << half) - one)).astype(jnp.int32)
        upper = left >= lower
        found, left = found + jnp.where(upper, half, 0), left - jnp.where(upper, lower, 0)
        bits = jnp.where(upper, bits >> half, bits)
    return found


def _sorted_order(key: Array, size: int) -> Array:
    """[N] the order of 64 random bits a client; the first 22 of them suffice where they differ.

    XLA:CPU sorts one array four times as fast as three, so a client's number is packed into the low bits.
    """
    number = jnp.arange(size, dtype=jnp.uint32)
    low = jnp.uint32(_EXACT_LIMIT - 1)
    packed = jax.lax.sort((random_bits(key, size) & ~low) | number)
    differ = (packed[1:] & ~low != packed[:-1] & ~low).all()

    def whole():
        first, second = jax.random.bits(key, (2, size), jnp.uint32)  # the same first ones
        return jax.lax.sort((first, second, number.astype(jnp.int32)), num_keys=2)[2]

    return jax.lax.cond(differ, lambda: (packed & low).astype(jnp.int32), whole)


def _grid(size: int) -> tuple[int, int]:
    """The near-square grid with the fewest cells past `size`; both sides are below 2^16."""
    root = math.isqrt(size - 1) + 1
    rows = min(range(root, root + min(root // 16, 512) + 1), key=lambda side: -size % side)
    return rows, -(-size // rows)
