"""Computes on all messages of a cohort side by side, m x d numbers: distances, products, sums, combinations.

Over devices messages are split by coordinate (`engine.all_messages.columns`, whose names this file has too). Two things
keep results independent of the number of devices, of the devices of clients, and of padding
(tests/engine/all_messages/test_messages.py): coordinates are worked on in tiles of a fixed width, and sums over tiles
are exact (`engine.exact_sums`).

On one device the messages are read where they lie, and every function reads them once (`gaps` twice: for their peaks
and for their products). Functions that change messages return new ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import reduce

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.engine.all_messages.columns import (
    Messages as Messages,
    columnwise as columnwise,
    messages_of as messages_of,
    on_devices,
    one_message as one_message,
    one_row as one_row,
    peaks as peaks,
    with_message as with_message,
)
from fedjax_sim.engine.all_messages.rows import AXIS
from fedjax_sim.engine.all_messages.sums import (
    inner_products as inner_products,
    mean_and_distances as mean_and_distances,
    over_tiles,
    repeated,
    squared_distances as squared_distances,
    weighted_mean_of_messages as weighted_mean_of_messages,
    weighted_sum as weighted_sum,
)
from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.engine.arithmetic.barrier import hidden_zero, rounded_here
from fedjax_sim.engine.arithmetic.exact_sum import power_of_two
from fedjax_sim.types import Array

# Products of messages are computed in this many blocks of messages; fewer messages than LEAST are one block.
BLOCKS, LEAST = 4, 256


def _tile(
    x: Array, order: Array, start: Array | int, width: int, size: int, *, scale: Array | None = None, dtype=None
) -> Array:
    """Returns a tile's columns of the messages in order, [m, size].

    Args:
      x: a leaf, [places, d].
      order: [m], the place of each message.
      start, width: the tile's first column, and its columns; further columns up to `size` are zeros.
      size: the columns of the result.
      scale: [m] powers of two, by which the messages are multiplied; None for 1.
      dtype: of the result; by default float32, or the leaf's if that is wider.
    """
    empty = jnp.zeros((order.shape[0], size), tree.at_least_float32(x.dtype) if dtype is None else dtype)

    def put(i, tile):
        row = jax.lax.dynamic_slice(x, (order[i], start), (1, width)).astype(tile.dtype)
        return jax.lax.dynamic_update_slice(tile, row if scale is None else row * scale[i], (i, jnp.int32(0)))

    return repeated(order.shape[0], put, empty)


def gram_matrix(messages: Messages, scale: Array | None = None) -> Array:
    """Returns the inner products of s_i u_i and s_j u_j, [m, m] float32.

    A matrix product is computed for each tile of coordinates, and the products of all tiles are added exactly.

    Messages are taken in four blocks (in one, if they are few). The product of two blocks is computed once and copied
    to the other side of the diagonal. So the result is symmetric to the bit.

    Args:
      messages: u_1, ..., u_m.
      scale: [m] powers of two s_i, 1 by default.
    """
    m = messages.number
    scale = jnp.ones(messages.number) if scale is None else scale
    size = -(-m // BLOCKS) if m >= LEAST else m
    blocks = [(first, min(first + size, m)) for first in range(0, m, size)]
    # A pair of blocks is a part of the matrix: rows top to bottom, and columns left to right.
    pairs = [(rows, columns) for i, rows in enumerate(blocks) for columns in blocks[i:]]

    def work(leaves, _, order, scale):
        total = exact_sums.zeros(
            [jax.ShapeDtypeStruct((bottom - top, right - left), jnp.float32) for (top, bottom), (left, right) in pairs]
        )
        for x in leaves:

            def tile(total, start, width, size, x=x):
                values = _tile(x, order, start, width, size, scale=scale, dtype=jnp.float32)
                # A leading axis of length 1: each product is one summand of its exact sum.
                products = [
                    jnp.matmul(values[top:bottom], values[left:right].T, precision=jax.lax.Precision.HIGHEST)[None]
                    for (top, bottom), (left, right) in pairs
                ]
                return exact_sums.add(total, products)

            total = over_tiles(x, tile, total)
        products = exact_sums.total(total if messages.mesh is None else exact_sums.combine(total, AXIS))
        gram = jnp.zeros((m, m), jnp.float32)
        for ((top, bottom), (left, right)), product in zip(pairs, products, strict=True):
            gram = gram.at[left:right, top:bottom].set(product.T).at[top:bottom, left:right].set(product)
        # The product of a block with itself may differ in last bits across its diagonal: one half is mirrored.
        return jnp.triu(gram) + jnp.triu(gram, 1).T

    return on_devices(messages, work, messages.order, scale)


def gaps(messages: Messages) -> Array:
    """Returns the squared distances |u_i - u_j|^2, [m, m] float32, from inner products of scaled messages.

    Each message is scaled by a power of two so that its largest magnitude is in [1, 2).

    Args:
      messages: u_1, ..., u_m.

    Returns: symmetric, 0 on the diagonal, infinity past float32's range. The error is about 2^-20 of
    |u_i|^2 + |u_j|^2. So the distance of two messages that are much closer than they are long has few correct digits.

    Guarantees: it agrees with NumPy's distances, and messages up to 2^99 neither overflow nor become NaN
    (tests/engine/all_messages/test_messages.py::test_gaps).
    """
    top = peaks(messages)
    # The exponent of a float32, read off its bits. The bounds keep all scaled squares within float32's range.
    exponent = jnp.clip((jax.lax.bitcast_convert_type(top, jnp.int32) >> 23) - 127, -60, 110)
    products = gram_matrix(messages, power_of_two(-exponent, jnp.float32))
    squares = jnp.diagonal(products)
    # Both messages of a pair are brought to the unit of the larger one.
    larger = jnp.maximum(exponent[:, None], exponent[None])
    s_i, s_j = (power_of_two(jnp.maximum(x - larger, -60), jnp.float32) for x in (exponent[:, None], exponent[None]))
    # |u_i|^2, |u_j|^2 and 2 u_i . u_j in this unit.
    terms = s_i * s_i * squares[:, None], s_j * s_j * squares[None], 2 * s_i * s_j * products
    # Each term is rounded before they are added, or a compiler would fuse a product with the addition.
    rounded_terms = rounded_here(terms, hidden_zero(products))
    distances = jnp.maximum(rounded_terms[0] + rounded_terms[1] - rounded_terms[2], 0)
    unit = power_of_two(larger, jnp.float32)
    # Not by the square of the unit, which may be past float32's range.
    distances = distances * unit * unit
    return jnp.where(jnp.eye(messages.number, dtype=bool), 0, distances)


def linear_combinations(messages: Messages, matrix: Array) -> Messages:
    """Returns the messages A u: the combinations of the messages by the rows of a matrix A [k, m]."""

    def rows(tile, matrix):
        return jnp.matmul(matrix.astype(tile.dtype), tile, precision=jax.lax.Precision.HIGHEST)

    return _new_messages(messages, matrix.shape[0], rows, matrix)


def pooled_messages(messages: Messages, members: Array, coefficients: Array) -> Messages:
    """Returns new messages sum_j c_kj u_(members_kj); terms are added one after the other.

    Args:
      messages: u_1, ..., u_m.
      members: [k, s] int32, ranks of messages.
      coefficients: [k, s] floats c.
    """
    zero = hidden_zero(coefficients)

    def rows(tile, members, coefficients):
        terms = [tile[members[:, j]] * coefficients[:, j, None].astype(tile.dtype) for j in range(members.shape[1])]
        return reduce(jnp.add, rounded_here(terms, zero))

    return _new_messages(messages, members.shape[0], rows, members, coefficients)


def weighted_rows(messages: Messages, factors: Array) -> Messages:
    """Returns new messages c_i u_i; factors c [m]."""
    zero = hidden_zero(factors)
    scaled = lambda tile, factors: rounded_here(tile * factors[:, None].astype(tile.dtype), zero)  # noqa: E731
    return _new_messages(messages, messages.number, scaled, factors)


def _new_messages(messages: Messages, number: int, rows: Callable, *args: Array) -> Messages:
    """Returns new messages that are computed tile by tile from the coordinates of all messages.

    Args:
      messages: u_1, ..., u_m.
      number: how many new messages there are, at least 1.
      rows: (tile [m, size] of the messages in order, *args) -> [number, size] of the new ones. It takes the columns one
        by one: what it computes at a coordinate depends on that coordinate of the messages alone.
      args: arrays that `rows` reads; every device has all of each.

    Returns: `Messages` of floats of at least 32 bits, in the order of the rows.
    """
    validate.integer("messages", number, 1)

    def work(leaves, _, order, *args):
        def of_leaf(x):
            def tile(out, start, width, size):
                new_rows = rows(_tile(x, order, start, width, size), *args)
                return jax.lax.dynamic_update_slice(out, new_rows[:, :width], (jnp.int32(0), start))

            return over_tiles(x, tile, jnp.zeros((number, x.shape[1]), tree.at_least_float32(x.dtype)))

        return [of_leaf(x) for x in leaves]

    columns = on_devices(messages, work, messages.order, *args, split=True)
    return dataclasses.replace(messages, columns=tuple(columns), order=jnp.arange(number, dtype=jnp.int32))
