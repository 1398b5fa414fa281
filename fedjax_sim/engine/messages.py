"""Arithmetic on all messages of a cohort side by side, m x d numbers: distances, products, sums, combinations.

Over devices messages are split by coordinate (`engine.columns`, whose names this file has too). Coordinates are worked
on in tiles of a fixed width, and what is summed over tiles is summed exactly (`engine.exact`), so no bit depends on the
number of devices, on who sat on which, or on padding (tests/engine/test_messages.py). On one device the messages are
taken as they lie, and every function reads them once (`gaps` twice: for their peaks and for their products). What
changes messages makes new ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import reduce

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.engine import exact
from fedjax_sim.engine.barrier import hidden_zero, rounded_here
from fedjax_sim.engine.columns import (
    Messages,
    as_columns,
    as_message,
    columnwise,
    messages_of,
    on_devices,
    one_message,
    peaks,
    tile_width,
    with_message,
)
from fedjax_sim.engine.digits import power_of_two
from fedjax_sim.engine.rounding import divide, pairwise_sum
from fedjax_sim.engine.rows import AXIS
from fedjax_sim.types import Array, PyTree

__all__ = [
    "Messages",
    "columnwise",
    "gaps",
    "inner_products",
    "messages_of",
    "mixed",
    "one_message",
    "peaks",
    "pooled",
    "products",
    "squared_distances",
    "weighted_mean",
    "weighted_rows",
    "weighted_sum",
    "with_message",
]

BLOCK = 48  # messages of a tile whose squares are summed at once: a core's cache holds them
GROUP = 16  # messages that are added at once
BLOCKS, LEAST = 4, 256  # of messages whose products are worked out at once; fewer messages than that are one block


def _repeated(number: int, body: Callable, carry: PyTree) -> PyTree:
    """A loop whose counter has 32 bits, also where integers have 64."""
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(number), body, carry)


def _over_tiles(x: Array, step: Callable, carry: PyTree) -> PyTree:
    """`step(carry, start, width, size)` for the tiles of a leaf [places, d]: `width` columns from `start` on, to be
    padded with zeros to `size`."""
    size = tile_width(x.shape[1])
    whole, rest = divmod(x.shape[1], size)
    if whole:
        carry = _repeated(whole, lambda i, carry: step(carry, i * size, size, size), carry)
    return step(carry, jnp.int32(whole * size), rest, size) if rest else carry


def _tile(
    x: Array, order: Array, start: Array | int, width: int, size: int, scale: Array | None = None, dtype=None
) -> Array:
    """[m, size] a tile's columns of the messages in order, floats of 32 bits at least, each times a power of two [m] of
    `scale`."""
    empty = jnp.zeros((order.shape[0], size), jnp.promote_types(x.dtype, jnp.float32) if dtype is None else dtype)

    def put(i, tile):
        row = jax.lax.dynamic_slice(x, (order[i], start), (1, width)).astype(tile.dtype)
        return jax.lax.dynamic_update_slice(tile, row if scale is None else row * scale[i], (i, jnp.int32(0)))

    return _repeated(order.shape[0], put, empty)


def squared_distances(messages: Messages, point: PyTree | None = None) -> Array:
    """[m] float32 |u_i - p|^2 over all leaves.

    Args:
      point: shaped like a message; zero by default.

    Returns: infinity where it is past float32's range (distances from about 1.8e19 on).

    Guarantees: NumPy's sum to 2^-20, the same bits on any devices (tests/engine/test_messages.py::test_distances).
    """

    def squares(rows, p):
        away = rows if p is None else rows - p
        return away * away

    found = _summed(messages, point, squares)
    return jnp.where(jnp.isnan(found), jnp.inf, found)


def inner_products(messages: Messages, point: PyTree) -> Array:
    """[m] float32 <u_i, p> over all leaves; NaN where it is past float32's range.

    Guarantees: tests/engine/test_messages.py::test_inner_products.
    """
    return _summed(messages, point, jnp.multiply)


def _summed(messages: Messages, point: PyTree | None, terms: Callable) -> Array:
    """[m] float32: the sums of `terms(rows, p)` over all coordinates: each tile's by halves, the tiles exactly."""
    point = () if point is None else [x.astype(jnp.float32) for x in as_columns(messages, point)]

    def work(leaves, point, order):
        zero, total = hidden_zero(leaves), exact.zeros(jax.ShapeDtypeStruct((leaves[0].shape[0],), jnp.float32))

        def of_leaf(total, x, p):
            block = min(BLOCK, x.shape[0])

            def tile(total, start, width, size):
                def some(i, found):
                    first = jnp.minimum(i * block, x.shape[0] - block)  # the last block looks again at some rows
                    rows = jax.lax.dynamic_slice(x, (first, start), (block, width)).astype(jnp.float32)
                    here = None if p is None else jax.lax.dynamic_slice(p, (jnp.int32(0), start), (1, width))
                    sums = pairwise_sum(rounded_here(terms(rows, here), zero), (1,))
                    return jax.lax.dynamic_update_slice(found, sums, (first,))

                found = _repeated(-(-x.shape[0] // block), some, jnp.zeros(x.shape[0], jnp.float32))
                return exact.add(total, found[None])

            return _over_tiles(x, tile, total)

        for x, p in zip(leaves, point or [None] * len(leaves), strict=True):
            total = of_leaf(total, x, p)
        return exact.total(total if messages.mesh is None else exact.combine(total, AXIS))[order]

    return on_devices(messages, work, messages.order, columns=point)


def weighted_sum(messages: Messages, coefficients: Array) -> PyTree:
    """sum_i c_i u_i, leaves [...] of float32 at least: groups of 16 products by halves, group after group.

    Args:
      coefficients: [m] floats; 0 adds nothing.
    """
    groups = -(-messages.number // GROUP)
    padding = groups * GROUP - messages.number

    def work(leaves, _, order, coefficients):
        order, coefficients = jnp.pad(order, (0, padding)), jnp.pad(coefficients, (0, padding))
        zero = hidden_zero(coefficients)

        def of_leaf(x):
            dtype = jnp.promote_types(x.dtype, jnp.float32)

            def tile(out, start, width, size):
                def group(i, total):
                    at = jax.lax.dynamic_slice(order, (i * GROUP,), (GROUP,))
                    c = jax.lax.dynamic_slice(coefficients, (i * GROUP,), (GROUP,)).astype(dtype)
                    rows = [jax.lax.dynamic_slice(x, (at[k], start), (1, width)).astype(dtype) for k in range(GROUP)]
                    terms = rounded_here([c[k] * rows[k] for k in range(GROUP)], zero)
                    while len(terms) > 1:
                        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
                    return total + terms[0]

                found = _repeated(groups, group, jnp.zeros((1, width), dtype))
                return jax.lax.dynamic_update_slice(out, found, (jnp.int32(0), start))

            return _over_tiles(x, tile, jnp.zeros((1, x.shape[1]), dtype))

        return [of_leaf(x) for x in leaves]

    return as_message(messages, on_devices(messages, work, messages.order, coefficients, split=True))


def weighted_mean(messages: Messages, weights: Array) -> PyTree:
    """sum_i w_i u_i / sum_i w_i, the sums of `weighted_sum` and by halves; zeros where no weight [m] is positive."""
    total = pairwise_sum(weights, (0,))
    total = jnp.where(total > 0, total, 1)
    return jax.tree.map(lambda x: divide(x, total.astype(x.dtype)), weighted_sum(messages, weights))


def products(messages: Messages, scale: Array | None = None) -> Array:
    """[m, m] float32: the inner products of s_i u_i and s_j u_j, matmuls for each tile, the tiles added exactly.

    The matrix is symmetric to the bit: messages are taken in four blocks (one, where they are few), and products of two
    blocks are worked out once.

    Args:
      scale: [m] powers of two, 1 by default.
    """
    m, scale = messages.number, jnp.ones(messages.number) if scale is None else scale
    size = -(-m // BLOCKS) if m >= LEAST else m
    ends = [(first, min(first + size, m)) for first in range(0, m, size)]
    pairs = [(one, other) for i, one in enumerate(ends) for other in ends[i:]]

    def work(leaves, _, order, scale):
        total = exact.zeros([jax.ShapeDtypeStruct((b - a, d - c), jnp.float32) for (a, b), (c, d) in pairs])
        for x in leaves:

            def tile(total, start, width, size, x=x):
                rows = _tile(x, order, start, width, size, scale, jnp.float32)
                found = [
                    jnp.matmul(rows[a:b], rows[c:d].T, precision=jax.lax.Precision.HIGHEST)[None]
                    for (a, b), (c, d) in pairs
                ]
                return exact.add(total, found)

            total = _over_tiles(x, tile, total)
        found = exact.total(total if messages.mesh is None else exact.combine(total, AXIS))
        whole = jnp.zeros((m, m), jnp.float32)
        for ((a, b), (c, d)), block in zip(pairs, found, strict=True):
            whole = whole.at[c:d, a:b].set(block.T).at[a:b, c:d].set(block)
        return jnp.triu(whole) + jnp.triu(whole, 1).T

    return on_devices(messages, work, messages.order, scale)


def gaps(messages: Messages) -> Array:
    """[m, m] float32 |u_i - u_j|^2, from inner products of messages whose peaks are scaled to [1, 2).

    Returns: symmetric, 0 on the diagonal, infinity past float32's range. The error is some 2^-20 of |u_i|^2 + |u_j|^2:
    messages that are much closer than they are long are told apart no better than that.

    Guarantees: tests/engine/test_messages.py::test_gaps.
    """
    top = peaks(messages)
    exponent = jnp.clip((jax.lax.bitcast_convert_type(top, jnp.int32) >> 23) - 127, -60, 110)
    found = products(messages, power_of_two(-exponent, jnp.float32))
    squares = jnp.diagonal(found)
    larger = jnp.maximum(exponent[:, None], exponent[None])
    left, right = (power_of_two(jnp.maximum(x - larger, -60), jnp.float32) for x in (exponent[:, None], exponent[None]))
    terms = left * left * squares[:, None], right * right * squares[None], 2 * left * right * found
    parts = rounded_here(terms, hidden_zero(found))
    apart = jnp.maximum(parts[0] + parts[1] - parts[2], 0)
    unit = power_of_two(larger, jnp.float32)
    apart = apart * unit * unit
    return jnp.where(jnp.eye(messages.number, dtype=bool), 0, apart)


def mixed(messages: Messages, matrix: Array) -> Messages:
    """Messages A u: the combinations of the messages by the rows of a matrix [k, m], each a new message."""

    def rows(tile, matrix):
        return jnp.matmul(matrix.astype(tile.dtype), tile, precision=jax.lax.Precision.HIGHEST)

    return _made(messages, matrix.shape[0], rows, matrix)


def pooled(messages: Messages, members: Array, coefficients: Array) -> Messages:
    """sum_j c_kj u_(members_kj), each a new message, added one after the other.

    Args:
      members: [k, s] int32, ranks of messages; coefficients [k, s].
    """
    zero = hidden_zero(coefficients)

    def rows(tile, members, coefficients):
        terms = [tile[members[:, j]] * coefficients[:, j, None].astype(tile.dtype) for j in range(members.shape[1])]
        return reduce(jnp.add, rounded_here(terms, zero))

    return _made(messages, members.shape[0], rows, members, coefficients)


def weighted_rows(messages: Messages, factors: Array) -> Messages:
    """c_i u_i, each a new message; factors [m]."""
    zero = hidden_zero(factors)
    scaled = lambda tile, factors: rounded_here(tile * factors[:, None].astype(tile.dtype), zero)  # noqa: E731
    return _made(messages, messages.number, scaled, factors)


def _made(messages: Messages, number: int, rows: Callable, *args: Array) -> Messages:
    """New messages by `rows(tile [m, size], *args) -> [k, size]`."""
    validate.integer("messages", number, 1)

    def work(leaves, _, order, *args):
        def of_leaf(x):
            def tile(out, start, width, size):
                found = rows(_tile(x, order, start, width, size), *args)
                return jax.lax.dynamic_update_slice(out, found[:, :width], (jnp.int32(0), start))

            return _over_tiles(x, tile, jnp.zeros((number, x.shape[1]), jnp.promote_types(x.dtype, jnp.float32)))

        return [of_leaf(x) for x in leaves]

    columns = on_devices(messages, work, messages.order, *args, split=True)
    return dataclasses.replace(messages, columns=tuple(columns), order=jnp.arange(number, dtype=jnp.int32))
