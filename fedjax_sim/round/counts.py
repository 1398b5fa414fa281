"""Computes with counts of 64 bits inside of compiled programs.

JAX has no 64-bit integers without its x64 mode. So an integer in [0, 2^64) is a pair of words, [2] uint32, the high
word first. A sum over clients is taken byte by byte: a sum of up to 2^24 bytes fits a uint32, in any order and on any
number of devices.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from fedjax_sim.types import Array, Count

BYTE_SHIFTS = (0, 8, 16, 24)  # the first bit of each byte in a word


def from_int(number: int) -> Array:
    """Returns a Python integer in [0, 2^64) as [2] uint32, the high and the low word.

    >>> from_int(2**32 + 7).tolist()
    [1, 7]
    """
    return jnp.array(divmod(number, 1 << 32), jnp.uint32)


def word_pair(number: Array) -> Array:
    """Returns non-negative int32 or uint32 numbers [...] as [2, ...] uint32, the high and the low words.

    >>> word_pair(jnp.array([5, 6])).tolist()
    [[0, 0], [5, 6]]
    """
    return jnp.stack([jnp.zeros_like(number), number]).astype(jnp.uint32)


def word_pair_sum(a: Array, b: Array) -> Array:
    """Returns the sum a + b modulo 2^64; both and the result are [2] uint32, the high and the low word.

    Guarantees:
      Sums are exact past 2^32 (tests/algorithms/split/test_vertical.py::test_counts_past_32_bits).

    >>> word_pair_sum(from_int(2**32 - 1), from_int(2)).tolist()
    [1, 1]
    """
    low = a[1] + b[1]
    carry = (low < a[1]).astype(jnp.uint32)  # an addition that wrapped gives less than its addend
    return jnp.stack([a[0] + b[0] + carry, low])


def word_pair_product(number: Array, words: Array) -> Array:
    """Returns the product number * words modulo 2^64.

    Args:
      number: [] int32 or uint32.
      words: [2] uint32, the high and the low word of an integer.

    Returns: [2] uint32 words.

    Guarantees:
      The products are Python's (tests/round/test_counts.py::test_counts_past_32_bits).

    >>> word_pair_product(jnp.int32(1_000_000), from_int(5_000)).tolist()
    [1, 705032704]
    """
    number = number.astype(jnp.uint32)
    high, low = words
    # The low words are multiplied by halves of 16 bits, number = a 2^16 + b and low = c 2^16 + d. Every product of two
    # halves fits in 32 bits.
    a = number >> 16
    b = number & 0xFFFF
    c = low >> 16
    d = low & 0xFFFF
    middle = (b * d >> 16) + (a * d & 0xFFFF) + (b * c & 0xFFFF)
    carry = a * c + (a * d >> 16) + (b * c >> 16) + (middle >> 16)
    return jnp.stack([number * high + carry, number * low])


def words_of(count: Count) -> Array:
    """Returns a count, its number times its unit, modulo 2^64, as [2] uint32: the high word and the low word."""
    return word_pair_product(count.number, count.unit)


def bytes_of(counts: Array) -> Array:
    """Returns the bytes of counts, the lowest first, to be summed over clients.

    Args:
      counts: [] a non-negative int32 or uint32, or [..., 2] uint32, pairs of words.

    Returns: [4] uint32 for a number, [..., 8] for pairs of words.

    >>> bytes_of(jnp.int32(256 + 7)).tolist()
    [7, 1, 0, 0]
    """
    words = counts[..., None] if counts.ndim == 0 else counts[..., ::-1]  # the low word first
    first_bits = np.array(BYTE_SHIFTS, np.uint32).reshape((1,) * words.ndim + (4,))
    return (words.astype(jnp.uint32)[..., None] >> first_bits & 255).reshape(*words.shape[:-1], -1)


def from_byte_sums(sums: Array) -> Array:
    """Returns 64-bit sums of counts, from the sums of their bytes.

    Args:
      sums: [..., 4] or [..., 8] uint32, the sums over counts of each of their bytes, the lowest byte first. These sums
        are exact for up to 2^24 counts.

    Returns: [..., 2] uint32, high words and low words, as `Count.unit`.

    Guarantees:
      Sums are exact past 2^32 (tests/round/test_collect.py::test_counts_are_exact).

    >>> from_byte_sums(jnp.array([0, 0, 0, 3 << 8], jnp.uint32)).tolist()  # 3 * 2^32
    [3, 0]
    """
    high = low = jnp.zeros(sums.shape[:-1], jnp.uint32)
    for i in range(4):
        low_part = sums[..., i] << 8 * i
        carry = (low + low_part < low).astype(jnp.uint32)  # an addition that wrapped gives less than its addend
        high_part = sums[..., i] >> 32 - 8 * i if i else jnp.uint32(0)  # the sum of the lowest bytes is in the low word
        high += high_part + carry
        low += low_part
    # Bytes 4 to 7 belong to the high word alone.
    for i in range(4, sums.shape[-1]):
        high += sums[..., i] << 8 * (i - 4)
    return jnp.stack([high, low], axis=-1)


def words_by_name(byte_sums: dict[str, Array]) -> dict[str, Array]:
    """Returns `from_byte_sums` of each entry. All are computed at once, so that the program is short.

    >>> words_by_name({"steps": jnp.array([7, 1, 0, 0], jnp.uint32)})["steps"].tolist()
    [0, 263]
    """
    if not byte_sums:
        return {}
    # Zeros stand for the higher bytes that a shorter entry does not have.
    words = from_byte_sums(jnp.stack([jnp.pad(x, (0, 8 - x.size)) for x in byte_sums.values()]))
    return dict(zip(byte_sums, words, strict=True))
