"""Sums over all messages of a cohort, or over each message's coordinates: weighted sums, distances, inner products.

These functions of `engine.all_messages.messages`, which has their names too, go through the messages once, a tile of
columns after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import tree
from fedjax_sim.engine.all_messages.columns import TILE, Messages, as_columns, as_message, on_devices, tile_width
from fedjax_sim.engine.all_messages.rows import AXIS
from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.engine.arithmetic.barrier import HiddenZero, hidden_zero, rounded_here
from fedjax_sim.engine.arithmetic.rewriter import divide, pairwise_sum
from fedjax_sim.types import Array, PyTree

BLOCK = 48  # messages of a tile whose squares are summed at once: a core's cache holds them
NARROW = 256  # columns of a tile whose distances are computed: a core's cache holds these columns of all messages
GROUP = 16  # messages that are added at once


def repeated(number: int, body: Callable, carry: PyTree) -> PyTree:
    """Runs a loop whose counter has 32 bits, also where integers have 64."""
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(number), body, carry)


def over_tiles(x: Array, step: Callable, carry: PyTree, most: int = TILE) -> PyTree:
    """Calls `step(carry, start, width, size)` for the tiles of a leaf [places, d], and returns the last carry.

    Args:
      x: the leaf.
      step: gets `width` columns from `start` on, to be padded with zeros to `size`.
      carry: its first carry.
      most: the largest `size`.
    """
    size = min(tile_width(x.shape[1]), most)
    num_whole, num_remaining = divmod(x.shape[1], size)
    if num_whole:
        carry = repeated(num_whole, lambda i, carry: step(carry, i * size, size, size), carry)
    # The last tile is narrower: its width is static, so it is no turn of the loop.
    return step(carry, jnp.int32(num_whole * size), num_remaining, size) if num_remaining else carry


def squared_distances(messages: Messages, point: PyTree | None = None) -> Array:
    """Returns |u_i - p|^2 over all leaves, [m] float32.

    Args:
      messages: u_1, ..., u_m.
      point: p, shaped like a message; zero by default.

    Returns: infinity where the square is past float32's range (distances from about 1.8e19 on).

    Guarantees: it agrees with NumPy's sum to 2^-20, and has the same bits on any devices
    (tests/engine/all_messages/test_messages.py::test_distances).
    """
    return _finite_or_infinity(_summed(messages, point, _squares))


def _squares(rows: Array, p: Array | None) -> Array:
    """Returns the squares of (rows - p); p is zero for None."""
    difference = rows if p is None else rows - p
    return difference * difference


def _finite_or_infinity(squares: Array) -> Array:
    """Returns infinity for NaN: an exact sum with an infinite addend is NaN."""
    return jnp.where(jnp.isnan(squares), jnp.inf, squares)


def inner_products(messages: Messages, point: PyTree) -> Array:
    """Returns <u_i, p> over all leaves, [m] float32; NaN where it is past float32's range.

    Args:
      messages: u_1, ..., u_m.
      point: p, shaped like a message.

    Guarantees: it agrees with NumPy's products (tests/engine/all_messages/test_messages.py::test_inner_products).
    """
    return _summed(messages, point, lambda rows, p: rows * p)


def _summed(messages: Messages, point: PyTree | None, terms: Callable) -> Array:
    """Returns the sums of `terms(rows, p)` over all coordinates, [m] float32.

    Message i has sum_j t(u_ij, p_j), over the coordinates j of all leaves. The terms of a tile are added by halves, and
    the tiles are added exactly.

    Args:
      messages: u_1, ..., u_m.
      point: p, shaped like a message; None where the terms need no point.
      terms: t: (rows [b, w] float32, p [1, w] float32 or None) -> [b, w], the term of each coordinate, for b places and
        w columns at a time.
    """
    columns = () if point is None else tuple(x.astype(jnp.float32) for x in as_columns(messages, point))

    # All devices call this on their columns; the sums of the coordinates are then added over the devices.
    def work(leaves, point, order):
        total = _no_sums(leaves)
        zero = hidden_zero(leaves)
        for x, p in zip(leaves, point or [None] * len(leaves), strict=True):

            def tile(total, start, width, size, *, x=x, p=p):
                p_of_tile = None if p is None else jax.lax.dynamic_slice(p, (jnp.int32(0), start), (1, width))
                return exact_sums.add(total, _sums_of_tile(x, start, width, partial(terms, p=p_of_tile), zero))

            total = over_tiles(x, tile, total, NARROW)
        return _of_all_tiles(messages, total)[order]

    return on_devices(messages, work, messages.order, columns=columns)


def _no_sums(leaves: Sequence[Array]) -> PyTree:
    """Returns exact sums of nothing, one for each place."""
    return exact_sums.zeros(jax.ShapeDtypeStruct((leaves[0].shape[0],), jnp.float32))


def _of_all_tiles(messages: Messages, total: PyTree) -> Array:
    """Returns exact sums as floats, added over the devices that hold the columns."""
    return exact_sums.total(total if messages.mesh is None else exact_sums.combine(total, AXIS))


def _sums_of_tile(x: Array, start: Array, width: int, terms: Callable, zero: HiddenZero) -> Array:
    """Returns the sums of `terms(rows)` over a tile's columns, by halves, [1, places]."""
    block = min(BLOCK, x.shape[0])

    def of_block(i, sums):
        # The last block begins earlier, and computes some rows again.
        first = jnp.minimum(i * block, x.shape[0] - block)
        rows = jax.lax.dynamic_slice(x, (first, start), (block, width)).astype(jnp.float32)
        sums_of_block = pairwise_sum(rounded_here(terms(rows), zero), (1,))
        return jax.lax.dynamic_update_slice(sums, sums_of_block, (first,))

    return repeated(-(-x.shape[0] // block), of_block, jnp.zeros(x.shape[0], jnp.float32))[None]


def weighted_sum(messages: Messages, coefficients: Array) -> PyTree:
    """Returns sum_i c_i u_i, leaves [...] of at least float32: groups of 16 products by halves, group after group.

    Args:
      messages: u_1, ..., u_m.
      coefficients: c, [m] floats; 0 adds nothing.
    """

    def work(leaves, _, order, coefficients):
        terms = _Terms.of(order, coefficients)

        def of_leaf(x):
            def tile(out, start, width, size):
                return jax.lax.dynamic_update_slice(out, terms.added(x, start, width), (jnp.int32(0), start))

            return over_tiles(x, tile, _no_message(x))

        return [of_leaf(x) for x in leaves]

    return as_message(messages, on_devices(messages, work, messages.order, coefficients, split=True))


def _no_message(x: Array) -> Array:
    """Returns room for a sum of a leaf's rows, [1, d]: zeros."""
    return jnp.zeros((1, x.shape[1]), tree.at_least_float32(x.dtype))


class _Terms(NamedTuple):
    """A `_Terms` holds the terms c_i u_i of a sum over messages, in the order of ids, in groups of GROUP."""

    order: Array  # [groups, GROUP] places; padded with place 0
    coefficients: Array  # [groups, GROUP] padded with zeros
    zero: HiddenZero

    @classmethod
    def of(cls, order: Array, coefficients: Array) -> _Terms:
        """Groups the terms of a sum."""
        zero = hidden_zero(coefficients)
        padding = -order.shape[0] % GROUP
        order, coefficients = (jnp.pad(x, (0, padding)).reshape(-1, GROUP) for x in (order, coefficients))
        return cls(order, coefficients, zero)

    def added(self, x: Array, start: Array, width: int) -> Array:
        """Returns the sum over messages of a tile's columns, [1, width].

        Args:
          x: [places, d], a leaf of all messages.
          start: [] int32, the first of the columns.
          width: their number, static.
        """
        dtype = tree.at_least_float32(x.dtype)

        def group(i, total):
            """Adds a group of terms to the total."""
            places = self.order[i]
            c = self.coefficients[i].astype(dtype)
            rows = [jax.lax.dynamic_slice(x, (places[k], start), (1, width)).astype(dtype) for k in range(GROUP)]
            terms = rounded_here([c[k] * rows[k] for k in range(GROUP)], self.zero)
            # By halves, in straight-line code: XLA:CPU does not vectorise a fused reduction over rows.
            while len(terms) > 1:
                terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
            return total + terms[0]

        return repeated(self.order.shape[0], group, jnp.zeros((1, width), dtype))


def weighted_mean_of_messages(messages: Messages, weights: Array) -> PyTree:
    """Returns sum_i w_i u_i / sum_i w_i; zeros if no weight [m] is positive.

    The numerator is a `weighted_sum`, and the denominator is added by halves.
    """
    total = _divisor(weights)
    return jax.tree.map(lambda x: divide(x, total.astype(x.dtype)), weighted_sum(messages, weights))


def _divisor(weights: Array) -> Array:
    """Returns the sum of the weights; 1 if it is not positive."""
    total = pairwise_sum(weights, (0,))
    return jnp.where(total > 0, total, 1)


def mean_and_distances(messages: Messages, weights: Array) -> tuple[PyTree, Array]:
    """Returns (`weighted_mean_of_messages`, the `squared_distances` from it), in one pass over the messages.

    A few columns of all messages are read twice, for the mean and for the distances, while a core's cache holds them.

    Args:
      messages: u_1, ..., u_m.
      weights: [m] >= 0; if none is positive, the mean is zero.

    Guarantees: it has the bits of the two functions
    (tests/engine/all_messages/test_messages.py::test_a_mean_and_the_distances_from_it).
    """

    def work(leaves, _, order, weights, total):
        terms = _Terms.of(order, weights)
        squares = _no_sums(leaves)
        zero = hidden_zero(leaves)
        means = []
        for x in leaves:

            def tile(carry, start, width, size, x=x):
                out, squares = carry
                mean = terms.added(x, start, width)
                mean = divide(mean, total.astype(mean.dtype))
                sums = _sums_of_tile(x, start, width, partial(_squares, p=mean.astype(jnp.float32)), zero)
                return jax.lax.dynamic_update_slice(out, mean, (jnp.int32(0), start)), exact_sums.add(squares, sums)

            mean, squares = over_tiles(x, tile, (_no_message(x), squares), NARROW)
            means.append(mean)
        return means, _of_all_tiles(messages, squares)[order]

    means, squares = on_devices(messages, work, messages.order, weights, _divisor(weights), split=(True, False))
    return as_message(messages, means), _finite_or_infinity(squares)
