"""Arithmetic of secure sums: integers modulo 2^b, b <= 64, or modulo the prime 2^31 - 1, in 32-bit words.

An element is a tuple of uint32 arrays of one shape: one word, or the words (low, high) for more than 32 bits.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.types import Array

PRIME = 2**31 - 1
LANE = 11  # bits of an addend of `Ring.lanes`
MAX_MESSAGES = 2**32 // 2**LANE  # so many addends of 11 bits cannot overflow a word
Element = tuple[Array, ...]


class Ring(NamedTuple):
    """The ring of the integers modulo 2^bits, or the field modulo 2^31 - 1 if `prime` is True.

    Guarantees: all operations equal those of Python's integers
    (tests/aggregation/secure/test_ring.py::test_arithmetic).

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
        """The number of 32-bit words of an element."""
        return 1 if self.bits <= 32 else 2

    @property
    def num_lanes(self) -> int:
        """The number of words for each coordinate in `lanes`."""
        # One word that wraps around modulo 2^32 needs no lanes; other words are cut into three parts of 11 bits.
        return 1 if self.words == 1 and not self.prime else 3 * self.words

    def of(self, x: Array) -> Element:
        """Converts int32 numbers to elements."""
        low = jax.lax.bitcast_convert_type(x, jnp.uint32)
        if self.prime:
            # The bits of a negative x are x + 2^32, and 2^32 is 2 modulo the prime.
            return (jnp.where(x < 0, _folded(low - jnp.uint32(2)), _folded(low)),)
        sign_word = jax.lax.bitcast_convert_type(x >> 31, jnp.uint32)  # all ones for a negative number
        return self._masked((low, sign_word)[: self.words])

    def draw(self, key: Array, shape: tuple[int, ...]) -> Element:
        """Draws uniform elements.

        In the prime field 0 and 1 are half as likely again as other elements, 2^-31 in total variation.
        """
        random_words = jax.random.bits(key, (self.words, *shape), jnp.uint32)
        return (_folded(random_words[0]),) if self.prime else self._masked(tuple(random_words))

    def add(self, a: Element, b: Element) -> Element:
        """Returns a + b."""
        low = a[0] + b[0]
        if self.prime:
            return (_folded(low),)
        if self.words == 1:
            return self._masked((low,))
        carry = (low < a[0]).astype(jnp.uint32)  # the low words wrapped around
        return self._masked((low, a[1] + b[1] + carry))

    def negative(self, a: Element) -> Element:
        """Returns -a."""
        if self.prime:
            return (_folded(jnp.uint32(PRIME) - a[0]),)
        flipped = tuple(~x for x in a)  # two's complement: -a is the complement of a, plus 1
        one = tuple(jnp.full_like(x, i == 0) for i, x in enumerate(a))
        return self.add(self._masked(flipped), one)

    def lanes(self, a: Element) -> Element:
        """Cuts elements into parts of 11 bits, whose sums over elements fit a word.

        The lanes of at most `MAX_MESSAGES` elements may be summed word by word; `gathered` converts the sums back.
        """
        if self.num_lanes == 1:
            return a  # uint32 wraps around as the ring does
        digit_mask = jnp.uint32(2**LANE - 1)
        return tuple(x >> jnp.uint32(LANE * j) & digit_mask for x in a for j in range(3))

    def gathered(self, lanes: Element) -> Element:
        """Converts sums of lanes to the element that they represent."""
        if self.num_lanes == 1:
            return self._masked(lanes)
        if self.prime:
            return reduce(self.add, [(_rotated(_folded(x), LANE * j),) for j, x in enumerate(lanes)])
        addends = []
        for j, x in enumerate(lanes):
            # Lane j counts multiples of 2^(11 (j mod 3)) of the low word, or for j >= 3 of the high word. What is
            # shifted out of the low word goes to the high word, and what is shifted out of the high word is dropped.
            shift = jnp.uint32(LANE * (j % 3))
            high = x >> (jnp.uint32(32) - shift) if j % 3 else jnp.zeros_like(x)
            addends.append((x << shift, high) if j < 3 else (jnp.zeros_like(x), x << shift))
        return reduce(self.add, addends)

    def total(self, a: Element) -> Element:
        """Sums elements over the first axis, whose length is at most `MAX_MESSAGES`."""
        return self.gathered(tuple(x.sum(0, dtype=jnp.uint32) for x in self.lanes(a)))

    def lifted(self, a: Element) -> Array:
        """Converts elements to the float32 numbers in [-q/2, q/2) that they represent, where q is the modulus.

        Numbers of at most 24 bits, of either sign, are exact; others are within two units in the last place.

        Args:
          a: elements, words of any shape.
        """
        if self.num_lanes == 1:
            # Shifted to the top of a word and back as a signed integer, so that the highest bit is the sign.
            num_spare_bits = 32 - self.bits
            shifted = jax.lax.bitcast_convert_type(a[0] << num_spare_bits, jnp.int32)
            return (shifted >> num_spare_bits).astype(jnp.float32)
        half = (self.modulus + 1) // 2
        is_negative = a[-1] >= jnp.uint32(half if self.prime else half >> 32)
        magnitude = tuple(jnp.where(is_negative, y, x) for x, y in zip(a, self.negative(a), strict=True))
        number = magnitude[0].astype(jnp.float32)
        if self.words == 2:
            number = magnitude[1].astype(jnp.float32) * jnp.float32(2.0**32) + number
        return jnp.where(is_negative, -number, number)

    def _masked(self, a: Element) -> Element:
        """Clears the bits past the modulus."""
        num_top_bits = self.bits - 32 * (len(a) - 1)
        return a if num_top_bits == 32 else (*a[:-1], a[-1] & jnp.uint32(2**num_top_bits - 1))


def _folded(x: Array) -> Array:
    """Returns a word modulo 2^31 - 1: the highest bit counts as 1, since 2^31 is 1 modulo the prime."""
    partly_reduced = (x & jnp.uint32(PRIME)) + (x >> jnp.uint32(31))
    return jnp.where(partly_reduced >= jnp.uint32(PRIME), partly_reduced - jnp.uint32(PRIME), partly_reduced)


def _rotated(x: Array, bits: int) -> Array:
    """Computes x 2^bits modulo 2^31 - 1, for x below the prime: a rotation of the 31 bits of x."""
    return (x << jnp.uint32(bits) & jnp.uint32(PRIME)) | x >> jnp.uint32(31 - bits) if bits else x


def multiplied(a: Array, b: Array) -> Array:
    """Computes a b modulo 2^31 - 1, for uint32 a and b below the prime, in words of 32 bits.

    Args:
      a, b: of shapes that broadcast.

    Guarantees: the product equals that of Python's integers modulo 2^31 - 1
    (tests/aggregation/secure/test_ring.py::test_products_and_powers).

    >>> int(multiplied(jnp.uint32(2**30), jnp.uint32(6))) == 2**30 * 6 % PRIME
    True
    """
    # With a = a1 2^16 + a0 and b = b1 2^16 + b0, each of the products below fits a word.
    low_mask = jnp.uint32(0xFFFF)
    sixteen = jnp.uint32(16)
    a0 = a & low_mask
    a1 = a >> sixteen
    b0 = b & low_mask
    b1 = b >> sixteen
    middle = a1 * b0 + a0 * b1  # counts multiples of 2^16
    # middle 2^16 modulo the prime: what exceeds 2^31 is divided by 2^31, which is 1.
    shifted_middle = (middle >> jnp.uint32(15)) + ((middle & jnp.uint32(0x7FFF)) << sixteen)
    # The highest product counts multiples of 2^32, which is 2 modulo the prime.
    return _folded(_folded(_folded(a0 * b0) + _folded(shifted_middle)) + _folded(jnp.uint32(2) * a1 * b1))


def power(base: Array, exponent: Array | int) -> Array:
    """Computes base^exponent modulo 2^31 - 1, for uint32 numbers below the prime; base^(2^31 - 3) is 1 / base.

    Args:
      base: of any shape.
      exponent: of a shape that broadcasts with it.

    Guarantees: the power equals that of Python's `pow` with the modulus 2^31 - 1
    (tests/aggregation/secure/test_ring.py::test_products_and_powers).

    >>> int(power(jnp.uint32(3), 2**31 - 3)) == pow(3, -1, PRIME)
    True
    """
    exponent = jnp.asarray(exponent, jnp.uint32)
    shape = jnp.broadcast_shapes(jnp.shape(base), exponent.shape)

    def step(i, carry):  # square and multiply, from the lowest bit of the exponent
        result, square = carry
        result = jnp.where(exponent >> i.astype(jnp.uint32) & jnp.uint32(1), multiplied(result, square), result)
        return result, multiplied(square, square)

    start = jnp.ones(shape, jnp.uint32), jnp.broadcast_to(base, shape)
    return jax.lax.fori_loop(0, math.ceil(math.log2(PRIME)), step, start)[0]
