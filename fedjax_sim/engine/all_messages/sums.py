"""Sums over all messages of a cohort, or over the coordinates of each: weighted sums, distances, products with a point.

The arithmetic of `engine.all_messages.messages`, which has these names too, that goes through the messages once, a tile
of columns after the other.
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
from fedjax_sim.engine.arithmetic.reproducible import divide, pairwise_sum
from fedjax_sim.types import Array, PyTree

__all__ = [
    "inner_products",
    "mean_and_distances",
    "over_tiles",
    "repeated",
    "squared_distances",
    "weighted_mean_of_messages",
    "weighted_sum",
]

BLOCK = 48  # messages of a tile whose squares are summed at once: a core's cache holds them
NARROW = 256  # columns of a tile whose distances are taken: a core's cache holds those of all messages
GROUP = 16  # messages that are added at once


def repeated(number: int, body: Callable, carry: PyTree) -> PyTree:
    """A loop whose counter has 32 bits, also where integers have 64."""
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(number), body, carry)


def over_tiles(x: Array, step: Callable, carry: PyTree, most: int = TILE) -> PyTree:
    """`step(carry, start, width, size)` for the tiles of a leaf [places, d]: `width` columns from `start` on, to be
    padded with zeros to `size`, which is at most `most`."""
    size = min(tile_width(x.shape[1]), most)
    whole, rest = divmod(x.shape[1], size)
    if whole:
        carry = repeated(whole, lambda i, carry: step(carry, i * size, size, size), carry)
    return step(carry, jnp.int32(whole * size), rest, size) if rest else carry


def squared_distances(messages: Messages, point: PyTree | None = None) -> Array:
    """[m] float32 |u_i - p|^2 over all leaves.

    Args:
      point: shaped like a message; zero by default.

    Returns: infinity where it is past float32's range (distances from about 1.8e19 on).

    Guarantees: NumPy's sum to 2^-20, the same bits on any devices
    (tests/engine/all_messages/test_messages.py::test_distances).
    """
    return _finite_or_infinity(_summed(messages, point, _squares))


def _squares(rows: Array, p: Array | None) -> Array:
    away = rows if p is None else rows - p
    return away * away


def _finite_or_infinity(squares: Array) -> Array:
    return jnp.where(jnp.isnan(squares), jnp.inf, squares)


def inner_products(messages: Messages, point: PyTree) -> Array:
    """[m] float32 <u_i, p> over all leaves; NaN where it is past float32's range.

    Guarantees: tests/engine/all_messages/test_messages.py::test_inner_products.
    """
    return _summed(messages, point, lambda rows, p: rows * p)


def _summed(messages: Messages, point: PyTree | None, terms: Callable) -> Array:
    """[m] float32: the sums of `terms(rows, p)` over all coordinates: each tile's by halves, the tiles exactly."""
    point = () if point is None else [x.astype(jnp.float32) for x in as_columns(messages, point)]

    def work(leaves, point, order):
        total = _no_sums(leaves)
        zero = hidden_zero(leaves)
        for x, p in zip(leaves, point or [None] * len(leaves), strict=True):

            def tile(total, start, width, size, x=x, p=p):
                here = None if p is None else jax.lax.dynamic_slice(p, (jnp.int32(0), start), (1, width))
                return exact_sums.add(total, _sums_of_tile(x, start, width, partial(terms, p=here), zero))

            total = over_tiles(x, tile, total, NARROW)
        return _of_all_tiles(messages, total)[order]

    return on_devices(messages, work, messages.order, columns=point)


def _no_sums(leaves: Sequence[Array]) -> PyTree:
    return exact_sums.zeros(jax.ShapeDtypeStruct((leaves[0].shape[0],), jnp.float32))


def _of_all_tiles(messages: Messages, total: PyTree) -> Array:
    return exact_sums.total(total if messages.mesh is None else exact_sums.combine(total, AXIS))


def _sums_of_tile(x: Array, start: Array, width: int, terms: Callable, zero: HiddenZero) -> Array:
    """[1, places] the sums of `terms(rows)` over a tile's columns, by halves."""
    block = min(BLOCK, x.shape[0])

    def some(i, found):
        first = jnp.minimum(i * block, x.shape[0] - block)  # the last block looks again at some rows
        rows = jax.lax.dynamic_slice(x, (first, start), (block, width)).astype(jnp.float32)
        sums = pairwise_sum(rounded_here(terms(rows), zero), (1,))
        return jax.lax.dynamic_update_slice(found, sums, (first,))

    return repeated(-(-x.shape[0] // block), some, jnp.zeros(x.shape[0], jnp.float32))[None]


def weighted_sum(messages: Messages, coefficients: Array) -> PyTree:
    """sum_i c_i u_i, leaves [...] of float32 at least: groups of 16 products by halves, group after group.

    Args:
      coefficients: [m] floats; 0 adds nothing.
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
    return jnp.zeros((1, x.shape[1]), tree.at_least_float32(x.dtype))


class _Terms(NamedTuple):
    """The terms c_i u_i of a sum over messages, in the order of ids, in groups."""

    order: Array  # [groups, GROUP]
    coefficients: Array
    zero: HiddenZero

    @classmethod
    def of(cls, order: Array, coefficients: Array) -> _Terms:
        zero = hidden_zero(coefficients)
        padding = -order.shape[0] % GROUP
        return cls(*(jnp.pad(x, (0, padding)).reshape(-1, GROUP) for x in (order, coefficients)), zero)

    def added(self, x: Array, start: Array, width: int) -> Array:
        """[1, width] the sum of a tile's columns."""
        dtype = tree.at_least_float32(x.dtype)

        def group(i, total):
            at = self.order[i]
            c = self.coefficients[i].astype(dtype)
            rows = [jax.lax.dynamic_slice(x, (at[k], start), (1, width)).astype(dtype) for k in range(GROUP)]
            terms = rounded_here([c[k] * rows[k] for k in range(GROUP)], self.zero)
            while len(terms) > 1:
                terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
            return total + terms[0]

        return repeated(self.order.shape[0], group, jnp.zeros((1, width), dtype))


def weighted_mean_of_messages(messages: Messages, weights: Array) -> PyTree:
    """sum_i w_i u_i / sum_i w_i, the sums of `weighted_sum` and by halves; zeros where no weight [m] is positive."""
    total = _divisor(weights)
    return jax.tree.map(lambda x: divide(x, total.astype(x.dtype)), weighted_sum(messages, weights))


def _divisor(weights: Array) -> Array:
    total = pairwise_sum(weights, (0,))
    return jnp.where(total > 0, total, 1)


def mean_and_distances(messages: Messages, weights: Array) -> tuple[PyTree, Array]:
    """(`weighted_mean_of_messages`, the `squared_distances` from it), in one pass over the messages: those of a few
    columns are looked at twice while a core's cache holds them.

    Guarantees: the bits of one after the other
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
                found = _sums_of_tile(x, start, width, partial(_squares, p=mean.astype(jnp.float32)), zero)
                return jax.lax.dynamic_update_slice(out, mean, (jnp.int32(0), start)), exact_sums.add(squares, found)

            mean, squares = over_tiles(x, tile, (_no_message(x), squares), NARROW)
            means.append(mean)
        return means, _of_all_tiles(messages, squares)[order]

    means, squares = on_devices(messages, work, messages.order, weights, _divisor(weights), split=(True, False))
    return as_message(messages, means), _finite_or_infinity(squares)
