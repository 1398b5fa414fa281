"""Integers modulo 2^b and modulo a prime, against Python's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.aggregation.secure.ring import PRIME, Ring, multiplied, power

RNG = np.random.default_rng(0)
RINGS = [Ring(2), Ring(9), Ring(31), Ring(32), Ring(33), Ring(40), Ring(63), Ring(64), Ring(31, prime=True)]


def numbers(element) -> list[int]:
    """Python's integers of an element's words."""
    words = [np.asarray(x).astype(object) for x in element]
    return list(sum(x << 32 * i for i, x in enumerate(words)))


@pytest.mark.default_rows(3)
@pytest.mark.parametrize("ring", RINGS)
def test_arithmetic(ring):
    """Catches a carry that is lost, a sign that is not extended, bits past the modulus, and a prime that is not 0."""
    q, least = ring.modulus, -(2**31)
    x = np.concatenate([RNG.integers(least, -least, 200), [least, least + 1, -1, 0, 1, -least - 1]]).astype(np.int32)
    y = RNG.permutation(x)
    a, b = ring.of(jnp.asarray(x)), ring.of(jnp.asarray(y))
    assert numbers(a) == [int(i) % q for i in x]
    assert numbers(ring.add(a, b)) == [(int(i) + int(j)) % q for i, j in zip(x, y, strict=True)]
    assert numbers(ring.negative(a)) == [-int(i) % q for i in x]
    random = ring.draw(jax.random.key(1), (3000,))
    assert max(numbers(random)) < q and len(random) == ring.words
    assert numbers([w[None] for w in ring.total(random)]) == [sum(numbers(random)) % q]
    products = ring.add(random, ring.add(random, random))
    assert numbers(products) == [3 * i % q for i in numbers(random)]


@pytest.mark.default_rows(3)
@pytest.mark.parametrize("ring", RINGS)
def test_elements_are_uniform(ring):
    """Chi-square over 16 cells of the range, one false alarm in 10^5. Catches bits that are never set."""
    cells = np.array([i * 16 // ring.modulus for i in numbers(ring.draw(jax.random.key(2), (20_000,)))])
    counts = np.bincount(cells.astype(int), minlength=16)
    size = min(16, ring.modulus)
    counts = counts[counts > 0]
    assert counts.size == size and ((counts - 20_000 / size) ** 2 / (20_000 / size)).sum() < 55


@pytest.mark.default_rows(3)
@pytest.mark.parametrize("ring", RINGS)
def test_lifted(ring):
    """Both ends of the range, and numbers near 0 on either side: exact where 24 bits hold them. Catches -1 as 2^b."""
    half = (ring.modulus + 1) // 2
    values = [v for v in (0, 1, -1, 2**23, -(2**23) - 1, half - 1, -half + ring.prime, 10**6) if -half <= v < half]
    words = [[(v % ring.modulus) >> 32 * i & 0xFFFFFFFF for v in values] for i in range(ring.words)]
    found = ring.lifted(tuple(jnp.asarray(np.array(w, np.uint32)) for w in words))
    for v, x in zip(values, found.tolist(), strict=True):
        assert abs(x - v) <= (0 if abs(v) < 2**24 else abs(v) * 2.0**-22)


def test_sums_of_very_many():
    """The largest lanes that `MAX_MESSAGES` elements can have. Catches words that overflow before they are gathered."""
    from fedjax_sim.aggregation.secure.ring import LANE, MAX_MESSAGES

    most = MAX_MESSAGES * (2**LANE - 1)
    assert most < 2**32
    for ring in (Ring(64), Ring(31, prime=True)):
        lanes = [jnp.array([most], jnp.uint32)] * (3 * ring.words)
        true = sum(most << (LANE * (j % 3) + 32 * (j // 3)) for j in range(len(lanes)))
        assert numbers(ring.gathered(tuple(lanes))) == [true % ring.modulus]


def test_products_and_powers():
    """Catches a product that overflows a word."""
    x = np.concatenate([RNG.integers(0, PRIME, 500), [0, 1, PRIME - 1, PRIME - 1, 2**16, 2**15 - 1]])
    y = np.concatenate([RNG.integers(0, PRIME, 500), [5, 1, PRIME - 1, 2, 2**16 - 1, 2**30]])
    a, b = jnp.asarray(x.astype(np.uint32)), jnp.asarray(y.astype(np.uint32))
    assert multiplied(a, b).tolist() == [int(i) * int(j) % PRIME for i, j in zip(x, y, strict=True)]
    assert power(a, b).tolist() == [pow(int(i), int(j), PRIME) for i, j in zip(x, y, strict=True)]
    assert power(a[:3], PRIME - 2).tolist() == [pow(int(i), -1, PRIME) for i in x[:3]]
