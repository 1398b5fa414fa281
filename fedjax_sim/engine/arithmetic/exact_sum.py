"""Sums floats exactly in integer words, so that the bits do not depend on order, chunk and padding.

A float sum depends on the order of its addends, and a sum of integers does not. So each float is cut into integer
digits on an absolute grid, and the digits are added.

Grid: bin t covers the magnitudes [2^(23t-148), 2^(23t-125)), and its unit is u_t = 2^(23t-147). The digit q_t(x) of a
value x in bin t is x, less its digits in higher bins, rounded to a multiple of the unit and counted in that unit:

    q_t(x) = round((x - sum of q_s(x) u_s over bins s > t) / u_t),    |q_t(x)| <= 2^22

So the digits of some hundred messages fit an int32.

Kept bins: each coordinate keeps only the top bins below the largest magnitude that it has met. When a larger value
arrives, the lowest bins are dropped. A digit depends on its value alone, so the kept sums are those that would have
resulted if the largest magnitude had been known beforehand.

Words: with B kept bins (2 for float32, 4 for float64), a coordinate holds two int32 words for each of the bins t = top,
top - 1, ..., top - B + 1, and its sum over messages x is

    S = sum over t of (high_t 2^20 + low_t) u_t,    high_t 2^20 + low_t = sum over x of q_t(x)

In normal form, low_t is in [0, 2^20). The same messages then have the same words, in whatever order they came.

Cost: a value in units of the grid is rounded to an integer by adding 1.5 * 2^23. The integer then stands in the low
bits of the float. A message costs seven operations a coordinate and touches three words. The high words, and the
carries into them, are touched once in a few hundred messages.

Error: each value is represented to half a unit of the last kept digit. That is at most 2^-23 of the largest magnitude
met at that coordinate for float32 (2 bins) and 2^-69 for float64 (4 bins). The sum of the digits is exact, and
`sums_as_floats` rounds it to the nearest float within 2 units in the last place. Values below 2^-126 count as zero.

References: Demmel and Nguyen 2015 reproduce float sums in the same way. Here digits are integers, and the sum of a bin
is two int32 words.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial, reduce
from itertools import compress

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.engine.arithmetic.barrier import HiddenZero, rounded_here
from fedjax_sim.engine.largest import largest_integer, magnitude_bits
from fedjax_sim.engine.platform import target
from fedjax_sim.types import Array, PyTree

BITS = 23  # of a digit
LOW_BITS = 20  # of the low word of a sum in normal form
LOW_MASK = (1 << LOW_BITS) - 1
MIN_BIN, MAX_BIN = 1, 11  # every exponent of a float32
POISONED = MAX_BIN + 1  # the bin of values that are not finite, or 2^128 and above: the total is then NaN
MAX_CHUNK = 1 << 16  # messages added at once
# Messages whose digits a low word can take: 480 digits of 2^22 stay below 2^31. A low word in normal form, which is
# below 2^20, counts as a message.
PENDING = 480
# Up to BLOCK messages are added one by one. Compilers vectorise that over coordinates, but XLA:CPU vectorises no
# reduction over rows. On a CPU, UNROLLED messages are added in a turn of a loop, so that the program is short. With 8
# messages in a turn, XLA reads the turn's number anew for each coordinate, and LLVM vectorises nothing: seven times the
# time. On accelerators all of them stand in straight-line code, because each turn would write the words to memory.
BLOCK = 64
UNROLLED = 32
MAX_JOINED = 1 << 16  # the most coordinates of a sum that is joined with others
# The most coordinates of a sum whose words move with each chunk on a CPU. For longer ones, loops that seldom turn cost
# less than the words.
SHORT = 1 << 10


@partial(jax.tree_util.register_dataclass, meta_fields=["shape"], data_fields=["top", "low", "high", "pending"])
@dataclasses.dataclass(frozen=True)
class ExactSum:
    """A sum over clients at each of d coordinates. A kept bin holds high * 2^20 + low, in units of its grid.

    The bins of a coordinate are `top`, `top` - 1, ...; tuples of words have the highest bin first, so word i belongs to
    the bin t = `top` - i. Words are flat arrays [d], because XLA:CPU vectorises the last axis of an array that it
    writes, and a leaf's may be short.
    """

    top: Array  # [d] int32: every magnitude met at this coordinate is below 2^(23 top - 125)
    low: tuple[Array, ...]  # for each kept bin, [d] int32
    high: tuple[Array, ...]  # for each kept bin, [d] int32
    pending: Array  # [] int32: 0 before the first message; messages since carries last moved, and one for what is older
    shape: tuple[int, ...]  # of the array that is summed


def _type(acc: ExactSum):
    """Returns the dtype of the summed floats, which the number of kept bins tells."""
    return jnp.float64 if len(acc.low) == 4 else jnp.float32


@jax.custom_jvp
def without_derivative(x: Array) -> Array:
    """Returns `x` unchanged, and makes a derivative through it an error.

    It stands before code that works on the bits of floats. There JAX would take the derivative to be 0, which is wrong.

    Raises:
      TypeError: for a derivative.
    """
    return x


@without_derivative.defjvp
def _(primals, tangents):
    hint = "Trace what you differentiate inside `with engine.fast_arithmetic():`; or use instruments.hypergradient."
    validate.fail("derivative", "none through a part of a round or an exact sum", "one", hint, TypeError)


def empty(shape: tuple[int, ...], dtype) -> ExactSum:
    """Returns a sum of no messages, for arrays of this shape; float64 keeps four bins, other dtypes two."""
    bins = 4 if dtype == jnp.float64 else 2
    size = math.prod(shape)
    words = tuple(jnp.zeros(size, jnp.int32) for _ in range(bins))
    lowest = jnp.full(size, MIN_BIN, jnp.int32)
    return ExactSum(lowest, words, words, jnp.zeros((), jnp.int32), shape)


def power_of_two(exponent: Array, dtype) -> Array:
    """Returns 2^exponent exactly, for int32 exponents whose result is a normal float32 (or float64) number.

    >>> power_of_two(jnp.int32(-3), jnp.float32).item()
    0.125
    """
    # The exponent, plus the bias of the format, is written into its place in the bits of the float.
    if dtype == jnp.float64:
        return jax.lax.bitcast_convert_type((exponent.astype(jnp.int64) + 1023) << 52, jnp.float64)
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _moved(words: tuple[Array, ...], shift: Array) -> tuple[Array, ...]:
    """Returns the kept bins' words after the bins have moved up: new word i is old word i - shift, or 0 above the top.

    The lowest words are dropped.

    Args:
      words: for each kept bin, [d] int32.
      shift: [d] int32 >= 0, in bins. A shift of as many bins as are kept, or of more, leaves zeros.
    """
    # The shift differs by coordinate, so each word is chosen among all words that can take its place.
    is_moved_by = [shift == distance for distance in range(len(words))]
    moved_words = []
    for new_index in range(len(words)):
        word = jnp.zeros_like(words[0])
        for old_index in range(new_index + 1):
            word = jnp.where(is_moved_by[new_index - old_index], words[old_index], word)
        moved_words.append(word)
    return tuple(moved_words)


@partial(jax.jit, inline=True)
def normal_form(acc: ExactSum) -> ExactSum:
    """Returns the same sum with carries moved out of the low words, which are then in [0, 2^20)."""
    # The shift of a negative word rounds towards minus infinity, and the mask gives the remainder, which is
    # non-negative: high * 2^20 + low keeps its value.
    high = tuple(h + (low >> LOW_BITS) for h, low in zip(acc.high, acc.low, strict=True))
    low = tuple(low & LOW_MASK for low in acc.low)
    return ExactSum(acc.top, low, high, jnp.ones_like(acc.pending), acc.shape)


def concatenated(sums: list[ExactSum]) -> tuple[list[ExactSum], Callable]:
    """Joins sums, so that a program which reads their totals has fewer operations, and compiles sooner.

    Args:
      sums: sums, of any shapes.

    Returns: (the sums in normal form, where those of at most MAX_JOINED coordinates and of as many bins are one flat
      sum, a function that splits such sums, or arrays of their shapes, into one for each of `sums`).
    """
    # (number of kept bins, None) -> indices of short sums; (number of kept bins, index) -> the one long sum.
    groups: dict[tuple[int, int | None], list[int]] = {}
    for index, acc in enumerate(sums):
        # A long sum is a group of its own: its words are not copied.
        own_index = None if acc.top.size <= MAX_JOINED else index
        groups.setdefault((len(acc.low), own_index), []).append(index)

    def one_sum(indices: list[int]) -> ExactSum:
        """Lays the coordinates of the sums with these indices one behind the other."""
        words = [(sums[i].top, sums[i].low, sums[i].high) for i in indices]
        top, low, high = words[0] if len(words) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *words)
        return normal_form(ExactSum(top, low, high, jnp.zeros((), jnp.int32), top.shape))

    def split(joined_sums: list) -> list:
        """Splits one sum or array a group into one for each of `sums`, in their order."""
        parts: list = [None] * len(sums)
        for x, indices in zip(joined_sums, groups.values(), strict=True):
            start = 0  # the first coordinate of the next sum in x
            for index in indices:
                parts[index] = _part(x, start, sums[index].shape)
                start += sums[index].top.size
        return parts

    return [one_sum(indices) for indices in groups.values()], split


def _part(x: ExactSum | Array, start: int, shape: tuple[int, ...]) -> ExactSum | Array:
    """Returns the coordinates from `start` on of a flat sum or array [d], as many as `shape` has, in this shape."""
    coordinates = slice(start, start + math.prod(shape))
    if not isinstance(x, ExactSum):
        return x[coordinates].reshape(shape)
    low, high = (tuple(word[coordinates] for word in words) for words in (x.low, x.high))
    return ExactSum(x.top[coordinates], low, high, x.pending, shape)


def _raised(acc: ExactSum, top: Array) -> ExactSum:
    """Returns a sum in normal form whose kept bins start at `top`, [d] int32, which is `acc.top` or above."""
    shift = top - acc.top
    return ExactSum(top, _moved(acc.low, shift), _moved(acc.high, shift), acc.pending, acc.shape)


def _bin(magnitude: Array) -> Array:
    """Returns the bin t of magnitudes, which are given by their bits; POISONED past the largest bin.

    A float32 with the biased exponent e has a magnitude in [2^(e-127), 2^(e-126)), and bin t begins at 2^(23t-148). So
    t = floor((e + 21) / 23).

    Args:
      magnitude: the bits of |x|, int32 for float32 and int64 for float64.

    Returns: int32 of the same shape, 0 to POISONED.
    """
    if magnitude.dtype == jnp.int64:
        # The biased exponent of a float64 is turned into that of a float32: 1023 - 127 = 896.
        exponent = jnp.clip((magnitude >> 52) - 896, 1, 255).astype(jnp.int32)
    else:
        exponent = magnitude >> 23
    # 357 / 2^13 is nearly 1 / 23, so this is the quotient without a division. Zero gets bin 0, which is below MIN_BIN,
    # and so changes no `top`.
    return ((exponent + 21) * 357) >> 13


def _bits(x: Array) -> Array:
    """Returns the bits of floats as signed integers of the same width."""
    return jax.lax.bitcast_convert_type(x, jnp.int64 if x.dtype == jnp.float64 else jnp.int32)


def _highest_bin(values: Array) -> Array:
    """Returns the bin of the largest magnitude at each coordinate, [d] int32, of messages [c, d]."""
    if len(values) <= BLOCK:
        # Bits are taken message by message, or XLA:CPU would write those of all messages before it compares them.
        largest = jnp.zeros_like(_bits(values[0]))
        return _bin(over_messages(lambda largest, x: jnp.maximum(largest, magnitude_bits(x)), largest, values))
    # A GPU is slow if one thread compares thousands of numbers of a coordinate. So blocks are compared beside each
    # other. The bins in between keep the compiler from joining both maxima again.
    return _bin(_blocks(magnitude_bits(values)).max(1)).max(0)


def _blocks(messages: Array) -> Array:
    """Returns messages [c, d] as blocks [ceil(c / PENDING), PENDING, d]; zeros fill up the last one."""
    count, num_coordinates = messages.shape
    padded = jnp.pad(messages, ((0, -count % PENDING), (0, 0)))
    return padded.reshape(-(-count // PENDING), PENDING, num_coordinates)


def over_messages(function: Callable, carry: PyTree, messages: Array) -> PyTree:
    """Returns the carry after `carry = function(carry, message)` for each message [d] of [c, d].

    The function is traced once. XLA compiles straight-line code, or on a CPU a loop with UNROLLED messages in a turn.
    """
    is_straight = len(messages) < 2 * UNROLLED or target() != "cpu"
    step = lambda carry, message: (function(carry, message), None)  # noqa: E731
    return jax.lax.scan(step, carry, messages, unroll=True if is_straight else UNROLLED)[0]


def _digits(value: Array, scale: Array, magic: Array, bins: int) -> list[Array]:
    """Returns the digits of messages in the kept bins, highest first, each plus the bits of `magic`.

    With r = x / u_top at first, each bin takes q = round(r) and leaves (r - q) 2^23 for the next one, whose unit is
    2^23 times smaller. The rounding is the sum r + magic, whose last bit stands for 1:

        bits(r + magic) = bits(magic) + round(r)

    Sums of these integers wrap, and are right as soon as the bits of `magic` are taken off, once for each message.

    Args:
      value: [..., d] floats x, below the top of their kept bins.
      scale: [d] floats, 1 / u_top.
      magic: [1], 1.5 * 2^23 (float64: 1.5 * 2^52). At this magnitude floats are spaced by 1.
      bins: B, the number of kept bins: 2 or 4.

    Returns: B arrays [..., d] int32, bits(magic) + q_t(x); for float64 their lower 32 bits.
    """
    new_axes = (None,) * (value.ndim - 1)
    magic = magic[new_axes]
    remainder = value * scale[new_axes]
    # This addition rounds the remainder to an integer. The factor 1.5 keeps the sum in one binade for negative integers
    # too, so that the difference of the bits is the integer itself.
    rounded = remainder + magic
    digits = [_bits(rounded).astype(jnp.int32)]
    for _ in range(bins - 1):
        digit = rounded - magic  # q, as a float
        # What the rounding left is at most half a unit, and a float again. The next bin's unit is 2^23 times smaller.
        remainder = (remainder - digit) * 2.0**BITS
        rounded = remainder + magic
        digits.append(_bits(rounded).astype(jnp.int32))
    return digits


@partial(jax.jit, inline=True)
def add_messages(sums: list[ExactSum], messages: list[Array]) -> list[ExactSum]:
    """Adds messages to sums.

    Args:
      sums: the sums.
      messages: for each sum, c messages of its shape, [c, ...]; c is the same for all, and at most MAX_CHUNK.

    Raises:
      ValueError: for more than MAX_CHUNK messages.
      TypeError: for a derivative with respect to messages.
    """
    count = messages[0].shape[0]
    messages = [without_derivative(x) for x in messages]
    validate.integer("messages added at once", count, 1, MAX_CHUNK)
    on_cpu = target() == "cpu"
    if on_cpu and count > BLOCK:
        # A long chunk is added in blocks, before each of which carries move if they must. Zeros fill up the last block.
        blocks = [jnp.pad(x, [(0, -count % BLOCK)] + [(0, 0)] * (x.ndim - 1)) for x in messages]
        blocks = [x.reshape(len(x) // BLOCK, BLOCK, *x.shape[1:]) for x in blocks]
        return jax.lax.scan(lambda sums, block: (add_messages(sums, block), None), sums, blocks)[0]
    messages = [x.reshape(count, -1).astype(_type(acc)) for acc, x in zip(sums, messages, strict=True)]  # [c, d] each

    bins = [_highest_bin(x) for x in messages]  # [d] each
    if on_cpu:
        # Bins are computed once, or XLA:CPU would store the bits of all messages, which so many operations would read.
        # Loops read bins and no messages, which would be stored for them.
        bins = jax.lax.optimization_barrier(bins)
    # On accelerators a loop may wait for the host, so all words move with each chunk.
    is_long = [on_cpu and acc.top.size > SHORT for acc in sums]
    # Long sums share a loop. They are put back between the short ones, in their order.
    long_sums = list(compress(sums, is_long))
    long_bins = list(compress(bins, is_long))
    long_sums_with_room = iter(_with_room_where_due(long_sums, long_bins, count))
    with_room = [
        next(long_sums_with_room) if long else _with_room(acc, bin)
        for acc, bin, long in zip(sums, bins, is_long, strict=True)
    ]
    return [_added(acc, x) for acc, x in zip(with_room, messages, strict=True)]


def _with_room(acc: ExactSum, bin: Array) -> ExactSum:
    """Returns a sum in normal form, whose bins hold magnitudes in the bin `bin`, [d] int32, of each coordinate."""
    return _raised(normal_form(acc), jnp.maximum(acc.top, bin))


def _with_room_where_due(sums: list[ExactSum], bins: list[Array], count: int) -> list[ExactSum]:
    """Returns sums whose bins hold the next messages, and whose words were moved only if one of them had to move.

    Args:
      sums: the sums. All have met the same messages, so `pending` of the first is that of all.
      bins: for each sum, the bin of the largest magnitude at each coordinate of the messages, [d].
      count: of the messages, in [1, BLOCK].
    """
    if not sums:
        return []

    def raised(tops):
        """Returns the tops [d] of all sums, raised to the bins of the messages."""
        return [jnp.maximum(top, bin) for top, bin in zip(tops, bins, strict=True)]

    # The first messages find no words that could move, so only the bins rise. To move all words would take a round
    # with few messages longer than to add them. Unlike a condition, a loop of at most one turn leaves the words in
    # their memory where it does not turn.
    tops = _at_most_once(sums[0].pending == 0, raised, [acc.top for acc in sums])
    sums = [dataclasses.replace(acc, top=top) for acc, top in zip(sums, tops, strict=True)]
    # Few later chunks have a message above the bins.
    has_larger = [largest_integer(bin - top) > 0 for bin, top in zip(bins, tops, strict=True)]
    is_due = reduce(jnp.logical_or, has_larger, sums[0].pending + count > PENDING)
    return _at_most_once(is_due, lambda sums: list(map(_with_room, sums, bins)), sums)


def _at_most_once(is_due: Array, function: Callable, carry: PyTree) -> PyTree:
    """Returns `function(carry)` if `is_due`, and otherwise the carry, which then stays in its memory."""
    _, carry = jax.lax.while_loop(
        lambda state: state[0], lambda state: (jnp.zeros_like(state[0]), function(state[1])), (is_due, carry)
    )
    return carry


def _added(acc: ExactSum, values: Array) -> ExactSum:
    """Returns a sum to which the digits of messages are added.

    In terms of words, low_t grows by the sum over messages x of q_t(x). Of a long chunk, each block's sum of digits s_t
    is cut at once: high_t grows by s_t >> 20, and low_t by s_t & (2^20 - 1).

    Args:
      acc: its bins hold the magnitudes of all messages (`_with_room`), and its low words have room for c digits more.
      values: [c, d] floats of the sum's dtype, c messages.

    Returns: the sum; in normal form after a long chunk, with c more messages pending after a short one.
    """
    top = acc.top
    low = acc.low
    high = acc.high
    count = len(values)
    bins = len(low)
    unknown = top[:1]
    magic = jnp.full_like(unknown, 1.5 * 2.0 ** jnp.finfo(values.dtype).nmant, values.dtype)
    # A compiler that knew this number would simplify (x + magic) - magic to x. `top` is 1 or more, which the compiler
    # does not know, so the minimum is a hidden zero.
    magic = rounded_here(magic, HiddenZero(jnp.minimum(unknown, 0)))
    scale = power_of_two(147 - BITS * top, values.dtype)  # 1 / u_top
    magic_bits = _bits(magic).astype(jnp.int32)
    if count > BLOCK:
        # Digits are summed in blocks whose sums fit an int32. The carry of each block goes into the high word.
        biased_digits = _digits(_blocks(values), scale, magic, bins)
        block_sums = [(x - magic_bits[None, None]).sum(1, dtype=jnp.int32) for x in biased_digits]  # [blocks, d] each
        high = tuple(
            word + (block_sum >> LOW_BITS).sum(0, dtype=jnp.int32)
            for word, block_sum in zip(high, block_sums, strict=True)
        )
        low = tuple(
            word + (block_sum & LOW_MASK).sum(0, dtype=jnp.int32)
            for word, block_sum in zip(low, block_sums, strict=True)
        )
        return normal_form(dataclasses.replace(acc, low=low, high=high))

    def with_digits(low, value):
        """Adds the digits of one message [d], each with the bits of `magic`, to the low words."""
        biased_digits = _digits(value, scale, magic, bins)
        return tuple(word + digit for word, digit in zip(low, biased_digits, strict=True))

    # The bits of `magic` are taken off beforehand, once for all messages.
    low = tuple(word - count * magic_bits for word in low)
    low = over_messages(with_digits, low, values)
    return dataclasses.replace(acc, low=low, pending=acc.pending + count)


@partial(jax.jit, inline=True)
def merge_two(x: ExactSum, y: ExactSum) -> ExactSum:
    """Returns the sum of the messages of `x` and of `y`, in normal form."""
    x, y = normal_form(x), normal_form(y)
    # Words can be added only if they belong to the same bins.
    top = jnp.maximum(x.top, y.top)
    words = jax.tree.map(jnp.add, _raised(x, top), _raised(y, top))
    return normal_form(dataclasses.replace(words, top=top))


def packed_words(acc: ExactSum) -> tuple[Array, ...]:
    """Returns the words of a sum in normal form, with `top` in the spare high bits of the first word."""
    return (acc.low[0] | (acc.top << LOW_BITS), *acc.low[1:], *acc.high)


def sum_over_devices(words: tuple[Array, ...], number: int, shape: tuple[int, ...]) -> ExactSum:
    """Returns the sum of the sums of several devices.

    Args:
      words: the `packed_words` of D devices, each [D, d]: the low words of all bins, then the high words.
      number: D.
      shape: of the array that is summed.
    """

    def sum_of_device(device: int) -> ExactSum:
        first_word, *other_words = (x[device] for x in words)
        top = first_word >> LOW_BITS
        bins = len(words) // 2
        low = (first_word & LOW_MASK, *other_words[: bins - 1])
        # Words that were sent may hold messages: 0 pending would mean that there are none.
        return ExactSum(top, low, tuple(other_words[bins - 1 :]), jnp.ones((), jnp.int32), shape)

    return reduce(merge_two, map(sum_of_device, range(number)))


def spread_out(acc: ExactSum) -> tuple[Array, Array, Array]:
    """Returns a sum in normal form as arrays that can be added over devices.

    Two devices may keep different bins of a coordinate. So the arrays have a row for every bin there is, and each word
    stands in the row of its bin.

    Args:
      acc: a sum of d coordinates in normal form.

    Returns: (1 at the top bin of each coordinate and else 0, low words, high words), each [bins, d] int32, with rows
      for the bins from POISONED down.
    """
    bins = len(acc.low)
    tops = jnp.stack([acc.top == top for top in range(POISONED, 0, -1)]).astype(jnp.int32)

    def in_rows(words):
        # A top of MIN_BIN is kept with the bins below it, so the rows go further down than the tops.
        rows = range(POISONED, MIN_BIN - bins, -1)
        # Word i of a coordinate belongs to the bin `top` - i.
        return jnp.stack([sum(jnp.where(acc.top - i == bin, w, 0) for i, w in enumerate(words)) for bin in rows])

    return tops, in_rows(acc.low), in_rows(acc.high)


def kept_bins(spread: tuple[Array, Array, Array], like: ExactSum) -> ExactSum:
    """Returns the sum that keeps the top bins of `spread`, a sum over devices of `spread_out`.

    Args:
      spread: three arrays, as `spread_out` returns them.
      like: a sum with the same shape and number of bins.
    """
    tops, low, high = spread
    first_row = jnp.argmax(tops > 0, axis=0)
    top = (POISONED - first_row).astype(jnp.int32)

    def kept(words):
        return tuple(jnp.take_along_axis(words, (first_row + i)[None], axis=0)[0] for i in range(len(like.low)))

    return normal_form(ExactSum(top, kept(low), kept(high), like.pending, like.shape))


@partial(jax.jit, inline=True)
def sums_as_floats(sums: list[ExactSum]) -> list[Array]:
    """Returns each sum as floats of its shape: float64 for a sum of four bins, else float32.

    A coordinate is NaN if a value was added to it that is not finite.
    """
    joined_sums, split = concatenated(sums)
    return split([_as_float(x) for x in joined_sums])


def _as_float(acc: ExactSum) -> Array:
    """Returns a sum in normal form as floats.

    The sum is written in base 2^23, in units of the lowest kept bin v = top - B + 1:

        S = u_v sum over k = 0, ..., B of e_k 2^(23 k)

    The bin t = v + k adds the low 23 bits of high_t 2^20 + low_t to e_k, and the other bits to e_(k+1). After carries,
    e_0 to e_(B-1) are in [0, 2^23), and e_B has the sign. Horner's rule adds the digits from the highest down.

    Args:
      acc: [d] coordinates, in normal form.

    Returns: floats of the shape of `acc`: float64 for B = 4, and float32 for B = 2. NaN where `top` is POISONED.
    """
    bins = len(acc.low)  # B
    dtype = _type(acc)
    e = [jnp.zeros_like(acc.low[0]) for _ in range(bins + 1)]
    for i in range(bins):
        k = bins - 1 - i  # words have the highest bin first
        # 20 bits of the low word and 3 bits of the high word are 23 bits.
        e[k] += ((acc.high[i] & 7) << LOW_BITS) | acc.low[i]
        e[k + 1] += acc.high[i] >> 3
    # Carries move up.
    for k in range(bins):
        e[k + 1] += e[k] >> BITS
        e[k] &= (1 << BITS) - 1
    # A multiplication by a power of two is exact, so a compiler that fuses it into the addition changes no bit.
    value = e[bins].astype(dtype)
    for k in reversed(range(bins)):
        value = value * 2.0**BITS + e[k].astype(dtype)
    # The unit u_v = 2^exponent may be below the normal numbers. In two steps each factor is normal.
    exponent = BITS * (jnp.minimum(acc.top, MAX_BIN) - bins + 1) - 147
    value = value * power_of_two(exponent >> 1, dtype) * power_of_two(exponent - (exponent >> 1), dtype)
    value = rounded_here(jnp.where(acc.top == POISONED, jnp.nan, value), HiddenZero(jnp.minimum(acc.top, 0)))
    return value.reshape(acc.shape)
