"""Sums over clients that do not depend on order, chunk, padding or device count.

A float is cut into integer digits on an absolute grid: bin b covers the magnitudes [2^(24(b-1)-1), 2^(24b-1)), and a
value's digit in a bin is what rounding to that bin's grid, the multiples of 2^(24(b-1)), leaves. A bin ends at half the
unit of the next bin's grid, so a value has no digit above its own bin. Digits are integers, so their sums are
associative. Only the top bins below the largest magnitude met at a coordinate are kept; when a larger value arrives,
the lowest bins fall out. A kept digit depends on its value alone, so the kept sums are those that knowing the largest
magnitude beforehand would have given (Demmel and Nguyen, 2015, reproduce float sums the same way; here digits are int32
and sums are two int32 words).

Error: each value is represented to half a unit of the last kept digit, at most 2^-24 of the largest magnitude met at
that coordinate for float32 (2 bins) and 2^-72 for float64 (4 bins); the sum of the digits is exact, and `total` rounds
it to the nearest float within 2 units in the last place. Below 2^-121 (float32) values count as zero.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.types import Array, PyTree

__all__ = ["MAX_CHUNK", "MAX_CLIENTS", "MAX_DEVICES", "ExactSum", "add", "combine", "merge", "total", "zeros"]

BITS = 24  # of a digit
LOW_BITS = 20  # of a sum's low word
LOW_MASK = (1 << LOW_BITS) - 1
MIN_BIN, MAX_BIN = -3, 6  # powers of two for every kept bin stay within float32
POISONED = MAX_BIN + 1  # a value that is not finite, or 2^143 and above, was added: the total is NaN
MAX_CLIENTS = 1 << 26  # before a high word could overflow
MAX_DEVICES = 1 << 10  # before a sum of low words could
MAX_CHUNK = 1 << 16  # letters added at once: before a sum of low words could
GROUP = 64  # digits of at most 2^23 that an int32 can add


class ExactSum(NamedTuple):
    """The sum of one leaf over clients: digits of the kept bins, highest first."""

    top: Array  # [...] int32: every magnitude met at this coordinate is below 2^(24 top - 1)
    low: tuple[Array, ...]  # one per kept bin, [...] int32 in [0, 2^20)
    high: tuple[Array, ...]  # the digit sum is high * 2^20 + low


def _is_sum(x) -> bool:
    return isinstance(x, ExactSum)


def zeros(spec: PyTree) -> PyTree:
    """A tree of empty sums for leaves of these shapes; float64 leaves keep four bins, others two."""

    def leaf(x):
        bins = 4 if x.dtype == jnp.float64 else 2
        words = tuple(jnp.zeros(x.shape, jnp.int32) for _ in range(bins))
        return ExactSum(jnp.full(x.shape, MIN_BIN, jnp.int32), words, words)

    return jax.tree.map(leaf, spec)


def _zero(acc: ExactSum) -> Array:
    """Zero for `tree.pinned`: a low word is never negative."""
    return acc.low[0] >> 31


def _power_of_two(exponent: Array, dtype) -> Array:
    """2^exponent, exactly, for normal results."""
    if dtype == jnp.float64:
        return jax.lax.bitcast_convert_type((exponent.astype(jnp.int64) + 1023) << 52, jnp.float64)
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _raise_top(acc: ExactSum, top: Array) -> ExactSum:
    """The same sum seen from a higher bin: the lowest bins fall out."""
    shift = top - acc.top

    def shifted(words):
        kept = []
        for bin in range(len(words)):
            word = jnp.zeros_like(words[0])
            for source in range(bin + 1):
                word = jnp.where(shift == bin - source, words[source], word)
            kept.append(word)
        return tuple(kept)

    return ExactSum(top, shifted(acc.low), shifted(acc.high))


def _normal(acc: ExactSum) -> ExactSum:
    """Carries moved out of the low words."""
    high = tuple(h + (low >> LOW_BITS) for h, low in zip(acc.high, acc.low, strict=True))
    return ExactSum(acc.top, tuple(low & LOW_MASK for low in acc.low), high)


def _bin_of(peak: Array) -> Array:
    """The lowest bin whose grid covers magnitudes up to `peak`."""
    if peak.dtype == jnp.float64:
        exponent = ((jax.lax.bitcast_convert_type(peak, jnp.int64) >> 52) - 1021).astype(jnp.int32)
    else:
        exponent = (jax.lax.bitcast_convert_type(peak, jnp.int32) >> 23) - 125  # peak < 2^(exponent - 1)
    bin = jnp.maximum((exponent + BITS * 100 - 1) // BITS - 99, MIN_BIN)  # ceil; the operand is kept positive
    finite = (peak < jnp.inf) & (bin <= MAX_BIN)
    return jnp.where(finite, bin, POISONED)


def _add_leaf(acc: ExactSum, values: Array) -> ExactSum:
    validate.integer("letters added at once", values.shape[0], 1, MAX_CHUNK)
    dtype = jnp.float64 if len(acc.low) == 4 else jnp.float32
    rest = tree.pinned(values.astype(dtype), _zero(acc)[None])
    acc = _raise_top(acc, jnp.maximum(acc.top, _bin_of(jnp.abs(rest).max(0))))
    pad = -values.shape[0] % GROUP if values.shape[0] > GROUP else 0
    if pad:
        rest = jnp.concatenate([rest, jnp.zeros((pad, *rest.shape[1:]), dtype)])
    low, high = [], []
    for bin in range(len(acc.low)):
        exponent = BITS * (acc.top - 1 - bin)[None]
        digit = jnp.round(rest * _power_of_two(-exponent, dtype))
        rest = rest - digit * _power_of_two(exponent, dtype)
        digit = digit.astype(jnp.int32)
        if digit.shape[0] <= GROUP:
            digit = digit.sum(0, dtype=jnp.int32)
            low.append(acc.low[bin] + (digit & LOW_MASK))
            high.append(acc.high[bin] + (digit >> LOW_BITS))
        else:
            groups = digit.reshape(-1, GROUP, *digit.shape[1:]).sum(1, dtype=jnp.int32)
            low.append(acc.low[bin] + (groups & LOW_MASK).sum(0, dtype=jnp.int32))
            high.append(acc.high[bin] + (groups >> LOW_BITS).sum(0, dtype=jnp.int32))
    return _normal(ExactSum(acc.top, tuple(low), tuple(high)))


def add(acc: PyTree, values: PyTree) -> PyTree:
    """Adds a chunk of letters, leaves [c, ...], c <= MAX_CHUNK.

    Guarantees: any order, chunking or padding with zeros gives the same bits
    (tests/engine/test_exact.py::test_any_order_and_chunking_gives_the_same_bits); a value that is not finite makes
    the total NaN, never a wrong number (::test_non_finite_values_poison).
    """
    return jax.tree.map(_add_leaf, acc, values, is_leaf=_is_sum)


def merge(a: PyTree, b: PyTree) -> PyTree:
    """The sum of the union of two disjoint sets of letters; leaves that are no exact sums are added."""

    def leaf(x, y):
        if not _is_sum(x):
            return x + y
        top = jnp.maximum(x.top, y.top)
        x, y = _raise_top(x, top), _raise_top(y, top)
        words = jax.tree.map(jnp.add, (x.low, x.high), (y.low, y.high))
        return _normal(ExactSum(top, *words))

    return jax.tree.map(leaf, a, b, is_leaf=_is_sum)


def combine(carry: PyTree, axis: str) -> PyTree:
    """`merge` over the devices of a mesh axis (at most 1,024): one maximum of the bins, one sum of everything else."""
    leaves, structure = jax.tree.flatten(carry, is_leaf=_is_sum)
    sums = [i for i, x in enumerate(leaves) if _is_sum(x)]
    if sums:
        tops = jax.lax.pmax([leaves[i].top for i in sums], axis)
        for top, i in zip(tops, sums, strict=True):
            leaves[i] = _raise_top(leaves[i], top)
        words = jax.lax.psum([x[1:] if _is_sum(x) else x for x in leaves], axis)
        leaves = [_normal(ExactSum(leaves[i].top, *w)) if _is_sum(leaves[i]) else w for i, w in enumerate(words)]
    else:
        leaves = jax.lax.psum(leaves, axis)
    return structure.unflatten(leaves)


def total(acc: PyTree) -> PyTree:
    """The sums as floats (float64 for float64 leaves, else float32); NaN where a poisoned value was added."""

    def leaf(x: ExactSum) -> Array:
        bins = len(x.low)
        dtype = jnp.float64 if bins == 4 else jnp.float32
        digits = [jnp.zeros_like(x.low[0]) for _ in range(bins + 1)]  # base 2^24, lowest first
        for bin in range(bins):
            place = bins - 1 - bin
            digits[place] += ((x.high[bin] & 15) << LOW_BITS) | x.low[bin]
            digits[place + 1] += x.high[bin] >> 4
        for place in range(bins):
            digits[place + 1] += digits[place] >> BITS
            digits[place] &= (1 << BITS) - 1
        value = digits[bins].astype(dtype)
        for place in reversed(range(bins)):
            value = value * 2.0**BITS + digits[place].astype(dtype)
        value = value * _power_of_two(BITS * (jnp.minimum(x.top, MAX_BIN) - bins), dtype)
        return tree.pinned(jnp.where(x.top == POISONED, jnp.nan, value), _zero(x))

    return jax.tree.map(leaf, acc, is_leaf=_is_sum)
