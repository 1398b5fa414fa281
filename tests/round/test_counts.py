"""Counts of 64 bits in two words are Python's integers modulo 2^64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.round.counts import (
    bytes_of,
    from_byte_sums,
    from_int,
    word_pair_product,
    word_pair_sum,
    words_by_name,
    words_of,
)
from fedjax_sim.types import Count

EDGES = [0, 1, 255, 256, 2**16 - 1, 2**16, 2**31 - 1, 2**32 - 1, 2**32, 2**33 + 7, 2**63, 2**64 - 1]


def integers(words) -> list[int]:
    """Python's integers of words [..., 2]."""
    return [(int(high) << 32) + int(low) for high, low in np.asarray(words).reshape(-1, 2)]


def test_counts_past_32_bits():
    """Faults: a carry that is lost between the words, a product that wraps at 32 bits."""
    for number, unit in ((2**31 - 1, 2**32 + 12345), (123_456_789, 987_654_321), (0, 7), (1, 2**63)):
        words = words_of(Count.of(jnp.int32(number), unit))
        total = from_byte_sums(bytes_of(jnp.stack([words, words])).sum(0))
        for found, expected in ((words, number * unit), (total, 2 * number * unit)):
            assert (int(found[0]) << 32) + int(found[1]) == expected % 2**64


def test_sums_and_products_at_the_edges():
    """Every pair of edges. Faults: a carry into the high word that is lost, or made where nothing wraps; half-words of
    a product that are added before they fit."""
    words = jnp.stack([from_int(x) for x in EDGES])
    factors = [x for x in EDGES if x < 2**32]

    @jax.jit
    def every_pair(words, factors):
        sums = jax.vmap(lambda a: jax.vmap(lambda b: word_pair_sum(a, b))(words))(words)
        return sums, jax.vmap(lambda x: jax.vmap(lambda b: word_pair_product(x, b))(words))(factors)

    sums, products = every_pair(words, jnp.array(factors, jnp.uint32))
    assert integers(words) == EDGES
    assert integers(sums) == [(a + b) % 2**64 for a in EDGES for b in EDGES]
    assert integers(products) == [a * b % 2**64 for a in factors for b in EDGES]


def test_entries_of_both_lengths():
    """Sums of bytes of short and of long counts. Faults: an entry under another's name; a short entry whose highest
    sums are cut, as those of 2^24 counts of 2^32 - 1 would be; bytes of a long entry that stand in the low word."""
    num_counts = 2**24
    byte_sums = {
        "short": jnp.full(4, 255 * num_counts, jnp.uint32),
        "long": jnp.arange(1, 9, dtype=jnp.uint32),
        "none": jnp.zeros(4, jnp.uint32),
    }
    found = {name: integers(words)[0] for name, words in words_by_name(byte_sums).items()}
    long = sum(x << 8 * i for i, x in enumerate(range(1, 9)))
    assert found == {"short": num_counts * (2**32 - 1), "long": long, "none": 0} and words_by_name({}) == {}
