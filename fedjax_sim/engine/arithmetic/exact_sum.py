"""An exact sum of floats in integer words: the same bits for any order, chunk and padding.

A float is cut into integer digits on an absolute grid. Bin t covers the magnitudes [2^(23t-148), 2^(23t-125)); a
value's digit in a bin is the value, less its digits in higher bins, rounded to a multiple of 2^(23t-147) and counted in
that unit. A digit is at most 2^22, so the digits of some hundred messages fit an int32. Digits are integers, so their
sums are associative. Only the top bins below the largest magnitude met at a coordinate are kept; when a larger value
arrives, the lowest bins are dropped. A kept digit depends on its value alone, so the kept sums are those that knowing
the largest magnitude beforehand would have given (Demmel and Nguyen, 2015, reproduce float sums the same way; here
digits are integers and a sum is two int32 words).

A digit is read off the bits of a float: adding 1.5 * 2^23 to a value in units of the grid rounds it to an integer, and
leaves that integer in the low bits. A message costs seven operations a coordinate and touches three words; the high
words, and the carries into them, are touched once in a few hundred messages.

Error: each value is represented to half a unit of the last kept digit, at most 2^-23 of the largest magnitude met at
that coordinate for float32 (2 bins) and 2^-69 for float64 (4 bins); the sum of the digits is exact, and `sum_as_float`
rounds it to the nearest float within 2 units in the last place. Below 2^-126 values count as zero.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial, reduce

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.engine.arithmetic.barrier import HiddenZero, rounded_here
from fedjax_sim.engine.platform import target
from fedjax_sim.types import Array

__all__ = [
    "MAX_CHUNK",
    "ExactSum",
    "add_messages",
    "empty",
    "kept_bins",
    "merge_two",
    "merged",
    "normal_form",
    "packed_words",
    "power_of_two",
    "spread_out",
    "sum_as_float",
    "without_derivative",
]

BITS = 23  # of a digit
LOW_BITS = 20  # of a normal sum's low word
LOW_MASK = (1 << LOW_BITS) - 1
MIN_BIN, MAX_BIN = 1, 11  # every exponent of a float32
POISONED = MAX_BIN + 1  # a value that is not finite, or 2^128 and above, was added: the total is NaN
MAX_CHUNK = 1 << 16  # messages added at once
PENDING = 480  # messages whose digits a low word can take
UNROLLED = 64  # messages that are added one by one: compilers vectorise that, but no reduction over rows


@partial(jax.tree_util.register_dataclass, meta_fields=["shape"], data_fields=["top", "low", "base", "high", "pending"])
@dataclasses.dataclass(frozen=True)
class ExactSum:
    """A sum over clients at each coordinate. A kept bin, highest first, holds high * 2^20 + low in units of its grid.

    Words are flat: XLA:CPU vectorises the last axis of what it writes, and that of a leaf may be short.
    """

    top: Array  # [d] int32: every magnitude met at this coordinate is below 2^(23 top - 125)
    low: tuple[Array, ...]  # one per kept bin, [d] int32
    base: Array  # [d] int32: `top` when carries last moved; the high words stand there
    high: tuple[Array, ...]  # [d] int32
    pending: Array  # [] int32 messages since carries last moved
    shape: tuple[int, ...]  # of what is summed


def _type(acc: ExactSum):
    return jnp.float64 if len(acc.low) == 4 else jnp.float32


@jax.custom_jvp
def without_derivative(x: Array) -> Array:
    """The same number; a derivative through it is an error, since what follows works on bits, whose derivative is 0."""
    return x


@without_derivative.defjvp
def _(primals, tangents):
    hint = "Trace what you differentiate inside `with engine.fast_arithmetic():`; or use instruments.hypergradient."
    validate.fail("derivative", "none through a part of a round or an exact sum", "one", hint, TypeError)


def empty(shape: tuple[int, ...], dtype) -> ExactSum:
    """The sum of nothing; float64 keeps four bins, others two."""
    bins, size = 4 if dtype == jnp.float64 else 2, math.prod(shape)
    words = tuple(jnp.zeros(size, jnp.int32) for _ in range(bins))
    lowest = jnp.full(size, MIN_BIN, jnp.int32)
    return ExactSum(lowest, words, lowest, words, jnp.zeros((), jnp.int32), shape)


def power_of_two(exponent: Array, dtype) -> Array:
    """2^exponent, exactly, for normal float32 (float64) results."""
    if dtype == jnp.float64:
        return jax.lax.bitcast_convert_type((exponent.astype(jnp.int64) + 1023) << 52, jnp.float64)
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _moved(words: tuple[Array, ...], shift: Array) -> tuple[Array, ...]:
    """The kept bins' words when these start `shift` bins higher: zeros come in at the top, the lowest are dropped."""
    kept = []
    for bin in range(len(words)):
        word = jnp.zeros_like(words[0])
        for source in range(bin + 1):
            word = jnp.where(shift == bin - source, words[source], word)
        kept.append(word)
    return tuple(kept)


@partial(jax.jit, inline=True)
def normal_form(acc: ExactSum) -> ExactSum:
    """Carries moved out of the low words."""
    high = _moved(acc.high, acc.top - acc.base)
    high = tuple(h + (low >> LOW_BITS) for h, low in zip(high, acc.low, strict=True))
    low = tuple(low & LOW_MASK for low in acc.low)
    return ExactSum(acc.top, low, acc.top, high, jnp.zeros_like(acc.pending), acc.shape)


def _raised(acc: ExactSum, top: Array) -> ExactSum:
    """A normal sum whose kept bins start at a higher one."""
    shift = top - acc.top
    return ExactSum(top, _moved(acc.low, shift), top, _moved(acc.high, shift), acc.pending, acc.shape)


def _bin(magnitude: Array) -> Array:
    """The bin of a magnitude given by its bits; POISONED past the largest."""
    if magnitude.dtype == jnp.int64:
        exponent = jnp.clip((magnitude >> 52) - 896, 1, 255).astype(jnp.int32)
    else:
        exponent = magnitude >> 23
    return ((exponent + 21) * 357) >> 13  # ceil((exponent - 1) / 23); zero is below every bin


def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.int64 if x.dtype == jnp.float64 else jnp.int32)


def _peak(values: Array, here: Array | bool = True) -> Array:
    """Bits of the largest magnitude at each coordinate of messages [c, d]; zero unless `here`."""
    bits = _bits(values)
    no_sign = jnp.iinfo(bits.dtype).max
    bits &= no_sign if here is True else jnp.where(here, no_sign, 0)
    return bits.max(0) if len(values) > UNROLLED else reduce(jnp.maximum, bits)


def _digits(value: Array, scale: Array, magic: Array, bins: int) -> list[Array]:
    """A message's digits in the kept bins."""
    leading = (None,) * (value.ndim - 1)
    scale, magic = scale[leading], magic[leading]
    rest, digits = value * scale, []
    for _ in range(bins):
        rounded = rest + magic
        digits.append((_bits(rounded) - _bits(magic)).astype(jnp.int32))
        rest = (rest - (rounded - magic)) * 2.0**BITS
    return digits


@partial(jax.jit, inline=True)
def add_messages(sums: list[ExactSum], messages: list[Array]) -> list[ExactSum]:
    """Adds messages [c, ...] to each sum, c <= MAX_CHUNK."""
    messages, count = [without_derivative(x) for x in messages], messages[0].shape[0]
    validate.integer("messages added at once", count, 1, MAX_CHUNK)
    on_cpu = target() == "cpu"
    if on_cpu and count > UNROLLED:
        blocks = [jnp.pad(x, [(0, -count % UNROLLED)] + [(0, 0)] * (x.ndim - 1)) for x in messages]
        blocks = [x.reshape(len(x) // UNROLLED, UNROLLED, *x.shape[1:]) for x in blocks]
        return jax.lax.scan(lambda sums, block: (add_messages(sums, block), None), sums, blocks)[0]
    messages = [x.reshape(count, -1).astype(_type(acc)) for acc, x in zip(sums, messages, strict=True)]

    def ready(sums, here=True):  # carries moved, and no message above the top bin
        tops = [jnp.maximum(acc.top, _bin(_peak(x, here))) for acc, x in zip(sums, messages, strict=True)]
        return [_raised(normal_form(acc), top) for acc, top in zip(sums, tops, strict=True)]

    if on_cpu:  # a loop of at most one turn, for few chunks: unlike a condition, it leaves the words where they are
        above = [
            tree.largest(_bin(_peak(x)) - acc.top) > 0 for acc, x in zip(sums, messages, strict=True) if acc.top.size
        ]
        due = reduce(jnp.logical_or, above, sums[0].pending + count > PENDING)
        _, sums = jax.lax.while_loop(lambda x: x[0], lambda x: (jnp.zeros_like(x[0]), ready(x[1], x[0])), (due, sums))
    else:  # where a loop may wait for the host
        sums = ready(sums)
    return [_added(acc, x) for acc, x in zip(sums, messages, strict=True)]


def _added(acc: ExactSum, values: Array) -> ExactSum:
    """A sum with the digits of messages [c, d] that fit its bins."""
    top, low, high, count = acc.top, acc.low, acc.high, len(values)
    magic = jnp.full_like(top, 1.5 * 2.0 ** jnp.finfo(values.dtype).nmant, values.dtype)
    magic = rounded_here(magic, HiddenZero(jnp.minimum(top, 0)))  # or a compiler cancels (x + magic) - magic
    scale = power_of_two(147 - BITS * top, values.dtype)
    if count > UNROLLED:
        values = jnp.pad(values, ((0, -count % PENDING), (0, 0))).reshape(-(-count // PENDING), PENDING, top.size)
        digits = [x.sum(1, dtype=jnp.int32) for x in _digits(values, scale, magic, len(low))]
        high = tuple(x + (digit >> LOW_BITS).sum(0, dtype=jnp.int32) for x, digit in zip(high, digits, strict=True))
        low = tuple(x + (digit & LOW_MASK).sum(0, dtype=jnp.int32) for x, digit in zip(low, digits, strict=True))
        return normal_form(dataclasses.replace(acc, low=low, high=high))
    for value in values:
        digits = _digits(value, scale, magic, len(low))
        low = tuple(x + digit for x, digit in zip(low, digits, strict=True))
    return dataclasses.replace(acc, low=low, pending=acc.pending + count)


@partial(jax.jit, inline=True)
def merge_two(x: ExactSum, y: ExactSum) -> ExactSum:
    """The sum of both."""
    x, y = normal_form(x), normal_form(y)
    top = jnp.maximum(x.top, y.top)
    words = jax.tree.map(jnp.add, _raised(x, top), _raised(y, top))
    return normal_form(dataclasses.replace(words, top=top, base=top))


def packed_words(acc: ExactSum) -> tuple[Array, ...]:
    """The words of a normal sum, its top in the spare bits of the first."""
    return (acc.low[0] | (acc.top << LOW_BITS), *acc.low[1:], *acc.high)


def merged(words: tuple[Array, ...], number: int, shape: tuple[int, ...]) -> ExactSum:
    """The sum of the devices' packed words [D, ...]."""

    def part(i: int) -> ExactSum:
        first, *rest = (x[i] for x in words)
        top, bins = first >> LOW_BITS, len(words) // 2
        low = (first & LOW_MASK, *rest[: bins - 1])
        return ExactSum(top, low, top, tuple(rest[bins - 1 :]), jnp.zeros((), jnp.int32), shape)

    return reduce(merge_two, map(part, range(number)))


def spread_out(acc: ExactSum) -> tuple[Array, Array, Array]:
    """A normal sum as arrays that add up over devices, with a place for every bin there is, [bins, ...].

    Returns: (1 at the top bin of each coordinate, low words, high words), bins from POISONED down.
    """
    bins = len(acc.low)
    tops = jnp.stack([acc.top == top for top in range(POISONED, 0, -1)]).astype(jnp.int32)

    def everywhere(words):
        places = range(POISONED, MIN_BIN - bins, -1)
        return jnp.stack([sum(jnp.where(acc.top - i == bin, w, 0) for i, w in enumerate(words)) for bin in places])

    return tops, everywhere(acc.low), everywhere(acc.high)


def kept_bins(spread: tuple[Array, Array, Array], like: ExactSum) -> ExactSum:
    """The sum whose kept bins are the top ones of `spread`, a sum of `spread_out`s."""
    tops, low, high = spread
    first = jnp.argmax(tops > 0, axis=0)
    top = (POISONED - first).astype(jnp.int32)

    def of(words):
        return tuple(jnp.take_along_axis(words, (first + i)[None], axis=0)[0] for i in range(len(like.low)))

    return normal_form(ExactSum(top, of(low), top, of(high), like.pending, like.shape))


@partial(jax.jit, inline=True)
def sum_as_float(acc: ExactSum) -> Array:
    """The sum as floats (float64 with four bins, else float32); NaN where a value was added that is not finite."""
    acc = normal_form(acc)
    bins, dtype = len(acc.low), _type(acc)
    digits = [jnp.zeros_like(acc.low[0]) for _ in range(bins + 1)]  # base 2^23, lowest first
    for bin in range(bins):
        place = bins - 1 - bin
        digits[place] += ((acc.high[bin] & 7) << LOW_BITS) | acc.low[bin]
        digits[place + 1] += acc.high[bin] >> 3
    for place in range(bins):
        digits[place + 1] += digits[place] >> BITS
        digits[place] &= (1 << BITS) - 1
    value = digits[bins].astype(dtype)
    for place in reversed(range(bins)):
        value = value * 2.0**BITS + digits[place].astype(dtype)
    exponent = BITS * (jnp.minimum(acc.top, MAX_BIN) - bins + 1) - 147  # of the last digit; in two steps, each normal
    value = value * power_of_two(exponent >> 1, dtype) * power_of_two(exponent - (exponent >> 1), dtype)
    value = rounded_here(jnp.where(acc.top == POISONED, jnp.nan, value), HiddenZero(jnp.minimum(acc.top, 0)))
    return value.reshape(acc.shape)
