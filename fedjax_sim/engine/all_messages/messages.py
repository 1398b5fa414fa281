"""Arithmetic on all messages of a cohort side by side, m x d numbers: distances, products, sums, combinations.

Over devices messages are split by coordinate (`engine.all_messages.columns`, whose names this file has too).
Coordinates are worked on in tiles of a fixed width, and what is summed over tiles is summed exactly
(`engine.exact_sums`), so no bit depends on the number of devices, on who sat on which, or on padding
(tests/engine/all_messages/test_messages.py). On one device the messages are taken as they lie, and every function reads
them once (`gaps` twice: for their peaks and for their products). What changes messages makes new ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import reduce

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.engine.all_messages.columns import (
    Messages,
    columnwise,
    messages_of,
    on_devices,
    one_message,
    one_row,
    peaks,
    with_message,
)
from fedjax_sim.engine.all_messages.rows import AXIS
from fedjax_sim.engine.all_messages.sums import (
    inner_products,
    mean_and_distances,
    over_tiles,
    repeated,
    squared_distances,
    weighted_mean_of_messages,
    weighted_sum,
)
from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.engine.arithmetic.barrier import hidden_zero, rounded_here
from fedjax_sim.engine.arithmetic.exact_sum import power_of_two
from fedjax_sim.types import Array

__all__ = [
    "Messages",
    "columnwise",
    "gaps",
    "gram_matrix",
    "inner_products",
    "linear_combinations",
    "mean_and_distances",
    "messages_of",
    "one_message",
    "one_row",
    "peaks",
    "pooled_messages",
    "squared_distances",
    "weighted_mean_of_messages",
    "weighted_rows",
    "weighted_sum",
    "with_message",
]

BLOCKS, LEAST = 4, 256  # of messages whose products are worked out at once; fewer messages than that are one block


def _tile(
    x: Array, order: Array, start: Array | int, width: int, size: int, scale: Array | None = None, dtype=None
) -> Array:
    """[m, size] a tile's columns of the messages in order, floats of 32 bits at least, each times a power of two [m] of
    `scale`."""
    empty = jnp.zeros((order.shape[0], size), tree.at_least_float32(x.dtype) if dtype is None else dtype)

    def put(i, tile):
        row = jax.lax.dynamic_slice(x, (order[i], start), (1, width)).astype(tile.dtype)
        return jax.lax.dynamic_update_slice(tile, row if scale is None else row * scale[i], (i, jnp.int32(0)))

    return repeated(order.shape[0], put, empty)


def gram_matrix(messages: Messages, scale: Array | None = None) -> Array:
    """[m, m] float32: the inner products of s_i u_i and s_j u_j, matmuls for each tile, the tiles added exactly.

    The matrix is symmetric to the bit: messages are taken in four blocks (one, where they are few), and products of two
    blocks are worked out once.

    Args:
      scale: [m] powers of two, 1 by default.
    """
    m = messages.number
    scale = jnp.ones(messages.number) if scale is None else scale
    size = -(-m // BLOCKS) if m >= LEAST else m
    ends = [(first, min(first + size, m)) for first in range(0, m, size)]
    pairs = [(one, other) for i, one in enumerate(ends) for other in ends[i:]]

    def work(leaves, _, order, scale):
        total = exact_sums.zeros([jax.ShapeDtypeStruct((b - a, d - c), jnp.float32) for (a, b), (c, d) in pairs])
        for x in leaves:

            def tile(total, start, width, size, x=x):
                rows = _tile(x, order, start, width, size, scale, jnp.float32)
                found = [
                    jnp.matmul(rows[a:b], rows[c:d].T, precision=jax.lax.Precision.HIGHEST)[None]
                    for (a, b), (c, d) in pairs
                ]
                return exact_sums.add(total, found)

            total = over_tiles(x, tile, total)
        found = exact_sums.total(total if messages.mesh is None else exact_sums.combine(total, AXIS))
        whole = jnp.zeros((m, m), jnp.float32)
        for ((a, b), (c, d)), block in zip(pairs, found, strict=True):
            whole = whole.at[c:d, a:b].set(block.T).at[a:b, c:d].set(block)
        return jnp.triu(whole) + jnp.triu(whole, 1).T

    return on_devices(messages, work, messages.order, scale)


def gaps(messages: Messages) -> Array:
    """[m, m] float32 |u_i - u_j|^2, from inner products of messages whose peaks are scaled to [1, 2).

    Returns: symmetric, 0 on the diagonal, infinity past float32's range. The error is some 2^-20 of |u_i|^2 + |u_j|^2:
    messages that are much closer than they are long are told apart no better than that.

    Guarantees: tests/engine/all_messages/test_messages.py::test_gaps.
    """
    top = peaks(messages)
    exponent = jnp.clip((jax.lax.bitcast_convert_type(top, jnp.int32) >> 23) - 127, -60, 110)
    found = gram_matrix(messages, power_of_two(-exponent, jnp.float32))
    squares = jnp.diagonal(found)
    larger = jnp.maximum(exponent[:, None], exponent[None])
    left, right = (power_of_two(jnp.maximum(x - larger, -60), jnp.float32) for x in (exponent[:, None], exponent[None]))
    terms = left * left * squares[:, None], right * right * squares[None], 2 * left * right * found
    parts = rounded_here(terms, hidden_zero(found))
    apart = jnp.maximum(parts[0] + parts[1] - parts[2], 0)
    unit = power_of_two(larger, jnp.float32)
    apart = apart * unit * unit
    return jnp.where(jnp.eye(messages.number, dtype=bool), 0, apart)


def linear_combinations(messages: Messages, matrix: Array) -> Messages:
    """Messages A u: the combinations of the messages by the rows of a matrix [k, m], each a new message."""

    def rows(tile, matrix):
        return jnp.matmul(matrix.astype(tile.dtype), tile, precision=jax.lax.Precision.HIGHEST)

    return _made(messages, matrix.shape[0], rows, matrix)


def pooled_messages(messages: Messages, members: Array, coefficients: Array) -> Messages:
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

            return over_tiles(x, tile, jnp.zeros((number, x.shape[1]), tree.at_least_float32(x.dtype)))

        return [of_leaf(x) for x in leaves]

    columns = on_devices(messages, work, messages.order, *args, split=True)
    return dataclasses.replace(messages, columns=tuple(columns), order=jnp.arange(number, dtype=jnp.int32))
