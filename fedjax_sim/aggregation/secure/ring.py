"""Integers modulo 2^b, b <= 64, or modulo the prime 2^31 - 1, in 32-bit words: what secure sums are made of.

An element is a tuple of uint32 arrays of one shape: one word, or (low, high) words past 32 bits.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.types import Array

__all__ = ["MAX_MESSAGES", "PRIME", "Element", "Ring", "multiplied", "power"]

PRIME = 2**31 - 1
LANE = 11  # bits of a summand of `lanes`
MAX_MESSAGES = 2**32 // 2**LANE  # whose lanes fit a word
Element = tuple[Array, ...]


class Ring(NamedTuple):
    """The integers modulo 2^bits, or modulo 2^31 - 1 where `prime`.

    Guarantees: Python's integers, for all operations (tests/aggregation/secure/test_ring.py::test_arithmetic).

    >>> ring = Ring(40)
    >>> numbers = ring.of(jnp.array([-1, 2**31 - 1, 7]))
    >>> float(ring.lifted(ring.total(numbers))), ring.modulus == 2**40, Ring(31, prime=True).modulus == PRIME
    (2147483648.0, True, True)
    """

    bits: int = 32
    prime: bool = False

    @property
    def modulus(self) -> int:
        """The number of elements."""
        return PRIME if self.prime else 1 << self.bits

    @property
    def words(self) -> int:
        """32-bit words of an element."""
        return 1 if self.bits <= 32 else 2

    @property
    def num_lanes(self) -> int:
        """Words a coordinate in `lanes`."""
        return 1 if self.words == 1 and not self.prime else 3 * self.words

    def of(self, x: Array) -> Element:
        """The elements of int32 numbers."""
        low = jax.lax.bitcast_convert_type(x, jnp.uint32)
        if self.prime:
            return (jnp.where(x < 0, _folded(low - jnp.uint32(2)), _folded(low)),)  # 2^32 is 2 modulo the prime
        return self._masked((low, jax.lax.bitcast_convert_type(x >> 31, jnp.uint32))[: self.words])

    def draw(self, key: Array, shape: tuple[int, ...]) -> Element:
        """Uniform elements; in the prime field 0 and 1 are half as likely again as others, 2^-31 in total variation."""
        drawn = jax.random.bits(key, (self.words, *shape), jnp.uint32)
        return (_folded(drawn[0]),) if self.prime else self._masked(tuple(drawn))

    def add(self, a: Element, b: Element) -> Element:
        """a + b."""
        low = a[0] + b[0]
        if self.prime:
            return (_folded(low),)
        return self._masked((low,) if self.words == 1 else (low, a[1] + b[1] + (low < a[0]).astype(jnp.uint32)))

    def negative(self, a: Element) -> Element:
        """-a."""
        if self.prime:
            return (_folded(jnp.uint32(PRIME) - a[0]),)
        flipped = tuple(~x for x in a)
        one = tuple(jnp.full_like(x, i == 0) for i, x in enumerate(a))
        return self.add(self._masked(flipped), one)

    def lanes(self, a: Element) -> Element:
        """Parts that may be summed word by word, over at most `MAX_MESSAGES` elements: see `gathered`."""
        if self.num_lanes == 1:
            return a  # uint32 wraps as the ring does
        digit = jnp.uint32(2**LANE - 1)
        return tuple(x >> jnp.uint32(LANE * j) & digit for x in a for j in range(3))

    def gathered(self, lanes: Element) -> Element:
        """The element that sums of lanes stand for."""
        if self.num_lanes == 1:
            return self._masked(lanes)
        if self.prime:
            return reduce(self.add, [(_turned(_folded(x), LANE * j),) for j, x in enumerate(lanes)])
        found = []
        for j, x in enumerate(lanes):
            shift = jnp.uint32(LANE * (j % 3))
            high = x >> (jnp.uint32(32) - shift) if j % 3 else jnp.zeros_like(x)
            found.append((x << shift, high) if j < 3 else (jnp.zeros_like(x), x << shift))
        return reduce(self.add, found)

    def total(self, a: Element) -> Element:
        """The sum over the first axis, of at most `MAX_MESSAGES` elements."""
        return self.gathered(tuple(x.sum(0, dtype=jnp.uint32) for x in self.lanes(a)))

    def lifted(self, a: Element) -> Array:
        """float32 numbers in [-q/2, q/2) whose elements these are, q the modulus; within two units in the last place.

        Exact where they fit 24 bits, of either sign.
        """
        if self.num_lanes == 1:
            spare = 32 - self.bits
            return (jax.lax.bitcast_convert_type(a[0] << spare, jnp.int32) >> spare).astype(jnp.float32)
        half = (self.modulus + 1) // 2
        below = a[-1] >= jnp.uint32(half if self.prime else half >> 32)
        size = tuple(jnp.where(below, y, x) for x, y in zip(a, self.negative(a), strict=True))
        number = size[0].astype(jnp.float32)
        if self.words == 2:
            number = size[1].astype(jnp.float32) * jnp.float32(2.0**32) + number
        return jnp.where(below, -number, number)

    def _masked(self, a: Element) -> Element:
        """Without the bits past the modulus."""
        top = self.bits - 32 * (len(a) - 1)
        return a if top == 32 else (*a[:-1], a[-1] & jnp.uint32(2**top - 1))


def _folded(x: Array) -> Array:
    """A word modulo 2^31 - 1."""
    once = (x & jnp.uint32(PRIME)) + (x >> jnp.uint32(31))
    return jnp.where(once >= jnp.uint32(PRIME), once - jnp.uint32(PRIME), once)


def _turned(x: Array, bits: int) -> Array:
    """x 2^bits modulo 2^31 - 1, for x below it: its 31 bits, turned."""
    return (x << jnp.uint32(bits) & jnp.uint32(PRIME)) | x >> jnp.uint32(31 - bits) if bits else x


def multiplied(a: Array, b: Array) -> Array:
    """a b modulo 2^31 - 1, for uint32 a and b below it.

    Guarantees: Python's integers (tests/aggregation/secure/test_ring.py::test_products_and_powers).

    >>> int(multiplied(jnp.uint32(2**30), jnp.uint32(6))) == 2**30 * 6 % PRIME
    True
    """
    low, sixteen = jnp.uint32(0xFFFF), jnp.uint32(16)
    a0, a1, b0, b1 = a & low, a >> sixteen, b & low, b >> sixteen
    middle = a1 * b0 + a0 * b1  # times 2^16
    turned = (middle >> jnp.uint32(15)) + ((middle & jnp.uint32(0x7FFF)) << sixteen)
    return _folded(_folded(_folded(a0 * b0) + _folded(turned)) + _folded(jnp.uint32(2) * a1 * b1))


def power(base: Array, exponent: Array | int) -> Array:
    """base^exponent modulo 2^31 - 1, for uint32 numbers below it; base^(2^31 - 3) is 1 / base.

    Guarantees: Python's `pow` (tests/aggregation/secure/test_ring.py::test_products_and_powers).

    >>> int(power(jnp.uint32(3), 2**31 - 3)) == pow(3, -1, PRIME)
    True
    """
    exponent = jnp.asarray(exponent, jnp.uint32)
    shape = jnp.broadcast_shapes(jnp.shape(base), exponent.shape)

    def step(i, carry):
        result, square = carry
        result = jnp.where(exponent >> i.astype(jnp.uint32) & jnp.uint32(1), multiplied(result, square), result)
        return result, multiplied(square, square)

    start = jnp.ones(shape, jnp.uint32), jnp.broadcast_to(base, shape)
    return jax.lax.fori_loop(0, math.ceil(math.log2(PRIME)), step, start)[0]
