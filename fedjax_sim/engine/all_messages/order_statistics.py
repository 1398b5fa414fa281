"""Computes exact order statistics over clients, coordinate by coordinate, by radix select.

`engine.all_messages.radix` has the selection.

Columns go in blocks that stay in the L2 cache. Sums are sums of integers, and sums with weights are exact
(`engine.exact_sums`), so the order of the messages cannot change a bit of the result.

Valid messages have to be finite. If they are not, infinities order at the ends, and NaNs beyond them, by their sign.
Messages that are not valid may hold anything.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.engine.all_messages.radix import floats_of, ordered, radix_select
from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.engine.arithmetic.barrier import hidden_zero, rounded_here
from fedjax_sim.engine.arithmetic.exact_sum import power_of_two
from fedjax_sim.engine.arithmetic.rewriter import divide
from fedjax_sim.engine.platform import target
from fedjax_sim.types import Array

# Bytes of messages x columns of a block, about an L2 cache; the best of 2^16 ... 2^22 measured.
_BLOCK_BYTES = 1 << 21


def _select(keys: Array, rank: Array, weights: Array | None = None) -> Array:
    """Returns the keys [r, B] of ranks [r, B] among keys [m, B], column by column."""
    return radix_select(keys, rank, lambda counts: counts.sum(0), weights)[0]


def _mass(keys: Array, weights: Array | None) -> Array:
    """Returns how many messages a mask [m, B] holds, [1, B]; with weights, each counts as often as its weight."""
    if weights is None:
        return keys.sum(0, dtype=jnp.int32, keepdims=True)
    return jnp.where(keys, weights[:, None], 0).sum(0, dtype=jnp.int32, keepdims=True)


def _over_blocks(fn: Callable, values: Array, columns: tuple[Array, ...], num_rows: int, dtype) -> Array:
    """Computes a function of columns over blocks of columns that fit a core's cache.

    Args:
      fn: (values [m, B], *columns [r, B]) -> [num_rows, B]. What it computes in a column depends on that column alone.
      values: [m, d].
      columns: arrays [r, d], each with its own r.
      num_rows: the rows of the result.
      dtype: of the result.

    Returns: [num_rows, d].
    """
    m, d = values.shape
    if d == 0:
        return jnp.zeros((num_rows, 0), dtype)
    # Whole cache lines of columns; other hardware than a CPU takes all columns at once.
    block = max(64, _BLOCK_BYTES // m // 64 * 64) if target() == "cpu" else d
    if block >= d:
        return fn(values, *columns)

    def body(i, out):
        # The last block begins earlier, and computes some columns of the block before again.
        start = jnp.minimum(i * block, d - block)
        parts = [jax.lax.dynamic_slice_in_dim(x, start, block, axis=1) for x in (values, *columns)]
        return jax.lax.dynamic_update_slice_in_dim(out, fn(*parts), start, axis=1)

    return jax.lax.fori_loop(0, -(-d // block), body, jnp.zeros((num_rows, d), dtype))


def _checked(values: Array, valid: Array | None) -> tuple[Array, Array]:
    """Returns values as [m, d], and the mask of valid messages, after checking both."""
    values = jnp.asarray(values)
    if values.ndim < 1 or values.shape[0] < 1 or not jnp.issubdtype(values.dtype, jnp.floating):
        validate.fail(
            "values", "floats with a leading axis of at least one message", values, "Cast integers to float32."
        )
    valid = jnp.ones(values.shape[0], bool) if valid is None else jnp.asarray(valid)
    if valid.shape != values.shape[:1] or valid.dtype != bool:
        validate.fail("valid", f"[{values.shape[0]}] booleans, one a message", valid)
    return values.reshape(values.shape[0], -1), valid


def _rows(x: Array | int, shape: tuple[int, ...], name: str) -> Array:
    """Returns integers [], or shaped like a message, as [1, d] int32, after checking them."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer) or x.shape not in ((), shape):
        validate.fail(name, f"integers of shape () or {shape}", x)
    return jnp.broadcast_to(x.astype(jnp.int32).reshape(1, -1), (1, math.prod(shape)))


def order_statistic(values: Array, rank: Array | int, valid: Array | None = None) -> Array:
    """Returns the value of rank `rank` (0 the smallest) among the valid messages, coordinate by coordinate.

    Args:
      values: [m, ...] float16, bfloat16, float32 or float64, finite where valid.
      rank: [] or [...] integers, traced or not; outside [0, number of valid messages) gives NaN.
      valid: [m] bool, the messages that arrived; all by default.

    Returns: [...] values that occur in `values`, bit for bit (-0.0 ranks below +0.0).

    Raises: ValueError for values that are no floats, and ranks or masks of another shape.

    Guarantees:
      It equals a stable sort for every rank, with ties, zeros of both signs, subnormal numbers and infinities
      (tests/engine/all_messages/test_order_statistics.py::test_order_statistics_equal_numpy).
      No bit depends on the order of the messages, on absent ones or on the number of columns
      (tests/engine/all_messages/test_order_statistics.py::test_order_padding_and_blocks_change_no_bit).

    >>> import jax, jax.numpy as jnp
    >>> jax.jit(order_statistic)(jnp.array([[3.0, 1.0], [2.0, 5.0], [9.0, 4.0]]), 1).tolist()
    [3.0, 4.0]
    """
    flat, valid = _checked(values, valid)
    shape = jnp.shape(values)[1:]

    def of_block(block, rank):
        keys = ordered(block)
        # An absent message has the largest key, which is a NaN's: it ranks behind all that are valid.
        keys = jnp.where(valid[:, None], keys, ~keys.dtype.type(0))
        return floats_of(_select(keys, rank), block.dtype)

    return _over_blocks(of_block, flat, (_rows(rank, shape, "rank"),), 1, flat.dtype).reshape(shape)


def _exponent(x: Array) -> Array:
    """Returns int32 e with |x| < 2^(e+1), but at least -90 (float64: -900): smaller values lose digits."""
    if x.dtype == jnp.float64:
        bits = jax.lax.bitcast_convert_type(x, jnp.int64)
        return jnp.maximum(((bits >> 52) & 2047).astype(jnp.int32) - 1023, -900)
    return jnp.maximum(((jax.lax.bitcast_convert_type(x, jnp.int32) >> 23) & 255) - 127, -90)


def _units(x: Array, scale: Array) -> Array:
    """Returns numbers in units of 1 / scale, rounded to integers."""
    return jnp.round(x * scale).astype(jnp.int64 if x.dtype == jnp.float64 else jnp.int32)


def median(values: Array, valid: Array | None = None, weights: Array | None = None) -> Array:
    """Returns the coordinate-wise median of the valid messages; of an even number, the mean of the two middle ones.

    Args:
      values: [m, ...] floats, finite where valid.
      valid: [m] bool, the messages that arrived; all by default.
      weights: [m] int32, how often each message counts, at least once where valid; together less than 2^31. None:
        once each.

    Returns: [...]; NaN without a valid message.

    Guarantees:
      It is `numpy.median` of the valid messages, and finite where the sum of the two middle ones is not
      (tests/engine/all_messages/test_order_statistics.py::test_median_equals_numpy).
      No bit depends on the order of the messages
      (tests/engine/all_messages/test_order_statistics.py::test_order_padding_and_blocks_change_no_bit).

    >>> import jax, jax.numpy as jnp
    >>> jax.jit(median)(jnp.array([[3.0], [2.0], [9.0], [0.0]])).tolist()
    [2.5]
    """
    flat, valid = _checked(values, valid)
    weights = None if weights is None else jnp.where(valid, weights, 0)
    count = (valid if weights is None else weights).sum(dtype=jnp.int32)

    def of_block(block):
        keys = ordered(block)
        keys = jnp.where(valid[:, None], keys, ~keys.dtype.type(0))
        # Of an even number, `low` is the lower middle value.
        low = _select(keys, jnp.broadcast_to((count - 1) // 2, (1, block.shape[1])), weights)
        # The upper middle value is the same number again, or else the next larger one: no second selection is needed.
        num_up_to_low = _mass(keys <= low, weights)
        following = jnp.where(keys > low, keys, ~keys.dtype.type(0)).min(0, keepdims=True)
        high = jnp.where(num_up_to_low > count // 2, low, following)
        half = jnp.asarray(0.5, block.dtype)
        low_value = floats_of(low, block.dtype)
        high_value = floats_of(high, block.dtype)
        # Each is halved before they are added: a compiler would add first, which overflows.
        halves = rounded_here((low_value * half, high_value * half), block)
        mean = jnp.where(low == high, low_value, halves[0] + halves[1])
        return jnp.where(count > 0, mean, jnp.asarray(jnp.nan, block.dtype))

    return _over_blocks(of_block, flat, (), 1, flat.dtype).reshape(jnp.shape(values)[1:])


def trimmed_mean(values: Array, trim: Array | int, valid: Array | None = None, weights: Array | None = None) -> Array:
    """Returns the coordinate-wise mean of the valid messages without the `trim` smallest and the `trim` largest.

    Values strictly between the two selected order statistics are summed as integers, in units of 2^-28 (float64: 2^-60)
    of the larger one's power of two. Of values equal to one of the two, as many copies count as lie inside the cut.

    Args:
      values: [m, ...] floats, finite where kept, m <= 131,071.
      trim: [] or [...] integers >= 0, how many messages are taken off at each end; with weights, how much weight.
      valid: [m] bool, the messages that arrived; all by default.
      weights: [m] int32, how often each message counts, at least once where valid; together less than 2^31. The weight
        of a message at a cut is divided. Products with weights are added exactly (`engine.exact_sums`). None: once
        each.

    Returns: [...] in the dtype of `values`; NaN where no message, or an infinite one, remains.

    Guarantees:
      The error is at most two units in the last place and 2^-28 of the largest kept value, against the mean of sorted
      values, ties at the cut included
      (tests/engine/all_messages/test_order_statistics.py::test_trimmed_mean_equals_numpy).
      No bit depends on the order of the messages
      (tests/engine/all_messages/test_order_statistics.py::test_order_padding_and_blocks_change_no_bit).

    References: Yin, Chen, Ramchandran and Bartlett 2018, definition 2.

    >>> import jax, jax.numpy as jnp
    >>> jax.jit(trimmed_mean)(jnp.array([[1.0], [2.0], [4.0], [900.0]]), 1).tolist()
    [3.0]
    """
    flat, valid = _checked(values, valid)
    shape = jnp.shape(values)[1:]
    validate.integer("messages", flat.shape[0], 1, (1 << 17) - 1)
    weights = None if weights is None else jnp.where(valid, weights, 0)
    count = (valid if weights is None else weights).sum(dtype=jnp.int32)
    double = flat.dtype == jnp.float64
    wide, digits = (jnp.float64, 60) if double else (jnp.float32, 28)
    half = digits // 2  # bits of a half-word: sums of half-words of 2^17 - 1 messages fit

    def of_block(block, trim):
        keys = ordered(block)
        keys = jnp.where(valid[:, None], keys, ~keys.dtype.type(0))
        cuts = _select(keys, jnp.concatenate([trim, count - 1 - trim]), weights)
        # The smallest and the largest value that remain: their ranks are trim and count - 1 - trim.
        low = cuts[:1]
        high = cuts[1:]
        inside = (keys > low) & (keys < high)
        # Copies of the two selected values that lie inside the cut.
        copies_low = _mass(keys <= low, weights) - trim
        copies_high = count - trim - _mass(keys < high, weights)
        ends = floats_of(low, block.dtype).astype(wide), floats_of(high, block.dtype).astype(wide)
        mean = plain if weights is None else weighted
        # Where both selected values are equal, they are the mean; the upper one's copies then count for nothing.
        has_one_end = low == high
        copies = copies_low, jnp.where(low == high, 0, copies_high)
        trimmed = jnp.where(has_one_end, ends[0], mean(block, inside, ends, copies, trim))
        finite = jnp.isfinite(ends[0]) & jnp.isfinite(ends[1]) | (low == high)
        return jnp.where((count > 2 * trim) & (trim >= 0) & finite, trimmed, jnp.nan).astype(block.dtype)

    def weighted(block, inside, ends, copies, trim):
        """Returns the mean with weights: products rounded one by one, and added exactly."""
        assert weights is not None, "without weights the mean is plain"
        zero = hidden_zero(block)
        products = jnp.where(inside, block.astype(wide), 0) * weights[:, None].astype(wide)
        inner = exact_sums.summed(rounded_here(products, zero))
        outer = rounded_here((ends[0] * copies[0].astype(wide), ends[1] * copies[1].astype(wide)), zero)
        total = inner[None] + (outer[0] + outer[1])
        return divide(total, (count - 2 * trim).astype(wide))

    def plain(block, inside, ends, copies, trim):
        """Returns the mean without weights: a sum of integers, in two half-words, so that nothing overflows."""
        exponent = jnp.maximum(*(_exponent(end) for end in ends))
        # Units of the larger end's power of two: every kept value is below 2^digits units.
        units = functools.partial(_units, scale=power_of_two(digits - 1 - exponent, wide))
        messages = units(jnp.where(inside, block, jnp.zeros((), block.dtype)).astype(wide))
        low_units = units(ends[0])
        high_units = units(ends[1])

        def word(part):
            """Returns the sum of a half-word of all kept values."""
            return (
                part(messages).sum(0, dtype=messages.dtype, keepdims=True)
                + part(low_units) * copies[0].astype(messages.dtype)
                + part(high_units) * copies[1].astype(messages.dtype)
            )

        upper = word(lambda x: x >> half)
        lower = word(lambda x: x & ((1 << half) - 1))
        zero = hidden_zero(block)
        num_kept = count - 2 * trim
        total = rounded_here(upper.astype(wide) * 2.0**half + lower.astype(wide), zero)
        # A reciprocal that is rounded here: a compiler would choose how to divide.
        share = rounded_here(1 / num_kept.astype(wide), zero)
        return total * share * power_of_two(exponent + 1 - digits, wide)

    return _over_blocks(of_block, flat, (_rows(trim, shape, "trim"),), 1, flat.dtype).reshape(shape)
