"""All messages of a cohort side by side, m x d numbers, for rules that are no sums: medians, distances, combinations.

Messages stand in the order of their clients' ids. Over devices they are split by coordinate: `messages_of` exchanges
them once, and each device then holds d / D coordinates of everyone. Coordinates are worked on in tiles of a fixed
width, and what is summed over tiles is summed exactly (`engine.exact`), so no bit depends on the number of devices, on
who sat on which, or on padding (tests/engine/test_messages.py). Nothing here copies the messages on one device; every
function reads them once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from fedjax_sim import validate
from fedjax_sim.engine import exact
from fedjax_sim.engine.barrier import hidden_zero, rounded_here
from fedjax_sim.engine.digits import power_of_two
from fedjax_sim.engine.rounding import pairwise_sum
from fedjax_sim.engine.rows import AXIS, Rows, everywhere
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
    "weighted_rows",
    "weighted_sum",
    "with_message",
]

TILE = 4096  # coordinates that are worked on at once
BLOCK = 48  # messages of a tile whose squares are summed at once: a core's cache holds them
GROUP = 16  # messages that are added at once


@partial(
    jax.tree_util.register_dataclass,
    meta_fields=["shapes", "structure", "mesh"],
    data_fields=["columns", "order"],
)
@dataclasses.dataclass(frozen=True)
class Messages:
    """m messages of d numbers, in the order of their clients' ids."""

    columns: tuple[Array, ...]  # a leaf of the messages each, [places, d_leaf], padded with columns of zeros
    order: Array  # [m] int32: where each message stands
    shapes: tuple[tuple[int, ...], ...]  # of a message's leaves
    structure: jax.tree_util.PyTreeDef
    mesh: Mesh | None  # devices that the columns are split over

    @property
    def number(self) -> int:
        """m, those that did not arrive included."""
        return self.order.shape[0]


def _width(size: int) -> int:
    return min(TILE, max(64, 1 << (size - 1).bit_length()))


def messages_of(rows: Rows, slots: Array) -> Messages:
    """The messages of these slots [m], in this order, split by coordinate over the rows' devices."""
    leaves, structure = jax.tree.flatten(rows.values)
    shapes = tuple(x.shape[1:] for x in leaves)
    flat = [x.reshape(x.shape[0], math.prod(shape)) for x, shape in zip(leaves, shapes, strict=True)]
    order = rows.place[slots]
    if rows.mesh is not None:
        split, to = PartitionSpec(AXIS), PartitionSpec(None, AXIS)
        work = lambda leaves: [_exchanged(x, rows.mesh.size) for x in leaves]  # noqa: E731
        flat = jax.shard_map(work, mesh=rows.mesh, in_specs=split, out_specs=to, check_vma=False)(flat)
        order = everywhere(order, rows.mesh)
    return Messages(tuple(flat), order, shapes, structure, rows.mesh)


def _exchanged(x: Array, devices: int) -> Array:
    """[places / D, d] of one device -> [places, d / D], whole tiles. XLA:CPU's all-to-all takes twice as long."""
    width = _width(x.shape[1])
    mine = width * -(-x.shape[1] // (width * devices))  # columns of a device
    x = jnp.pad(x, ((0, 0), (0, devices * mine - x.shape[1])))
    own = jax.lax.axis_index(AXIS)
    whole = jnp.zeros((devices, x.shape[0], mine), x.dtype)
    for step in range(devices):
        part = jax.lax.dynamic_slice_in_dim(x, (own + step) % devices * mine, mine, axis=1)
        if step:
            part = jax.lax.ppermute(part, AXIS, [(i, (i + step) % devices) for i in range(devices)])
        whole = jax.lax.dynamic_update_index_in_dim(whole, part, (own - step) % devices, 0)
    return whole.reshape(devices * x.shape[0], mine)


def _on_devices(messages: Messages, work: Callable, *args: PyTree, columns: tuple = (), split: bool = False) -> PyTree:
    """`work(leaves, columns, *args)` on each device's columns; `split`: so are its results' last axes, else equal."""
    if messages.mesh is None:
        return work(messages.columns, columns, *args)
    here, last = PartitionSpec(), PartitionSpec(None, AXIS)
    specs = {"in_specs": (last, last, *[here] * len(args)), "out_specs": last if split else here, "check_vma": False}
    args = jax.tree.map(lambda x: everywhere(x, messages.mesh), args)
    return jax.shard_map(work, mesh=messages.mesh, **specs)(messages.columns, columns, *args)


def _repeated(number: int, body: Callable, carry: PyTree) -> PyTree:
    """A loop whose counter has 32 bits, also where integers have 64."""
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(number), body, carry)


def _over_tiles(x: Array, step: Callable, carry: PyTree) -> PyTree:
    """`step(carry, start, width, size)` for the tiles of a leaf [places, d]: `width` columns from `start` on, to be
    padded with zeros to `size`."""
    size = _width(x.shape[1])
    whole, rest = divmod(x.shape[1], size)
    if whole:
        carry = _repeated(whole, lambda i, carry: step(carry, i * size, size, size), carry)
    return step(carry, jnp.int32(whole * size), rest, size) if rest else carry


def _tile(x: Array, order: Array, start: Array | int, width: int, size: int) -> Array:
    """[m, size] a tile's columns of the messages in order, floats of 32 bits at least."""
    empty = jnp.zeros((order.shape[0], size), jnp.promote_types(x.dtype, jnp.float32))

    def put(i, tile):
        row = jax.lax.dynamic_slice(x, (order[i], start), (1, width)).astype(tile.dtype)
        return jax.lax.dynamic_update_slice(tile, row, (i, jnp.int32(0)))

    return _repeated(order.shape[0], put, empty)


def _flat(messages: Messages, point: PyTree) -> tuple[Array, ...]:
    """A message as columns [1, d], padded as the messages are."""
    leaves = messages.structure.flatten_up_to(point)
    if (shapes := tuple(map(jnp.shape, leaves))) != messages.shapes:
        validate.fail("message", f"leaves of shapes {messages.shapes}", shapes)
    flat = [x.reshape(1, -1) for x in leaves]
    return tuple(
        jnp.pad(x, ((0, 0), (0, y.shape[1] - x.shape[1]))) for x, y in zip(flat, messages.columns, strict=True)
    )


def _message(messages: Messages, columns: list[Array]) -> PyTree:
    """A message from columns [1, d']."""
    if messages.mesh is not None:
        columns = [everywhere(x, messages.mesh) for x in columns]
    shaped = (x[0, : math.prod(s)].reshape(s) for x, s in zip(columns, messages.shapes, strict=True))
    return messages.structure.unflatten(shaped)


def columnwise(messages: Messages, rule: Callable, *by_message: Array) -> PyTree:
    """A rule for each coordinate by itself.

    Args:
      rule: (values [places, d], *by_place [places]) -> [d], each result of its own column alone, whatever the order of
        the rows; a place without a message holds zeros.
      by_message: arrays [m], handed over by place; zeros where no message stands.

    Returns: an update; leaves as the rule's.
    """
    places = messages.columns[0].shape[0]
    by_place = [jnp.zeros(places, x.dtype).at[messages.order].set(x) for x in by_message]
    work = lambda leaves, _, by_place: [rule(x, *by_place)[None] for x in leaves]  # noqa: E731
    return _message(messages, _on_devices(messages, work, by_place, split=True))


def one_message(messages: Messages, rank: Array) -> PyTree:
    """The message of a rank [] in the order of ids, as it was sent."""
    work = lambda leaves, _, place: [jax.lax.dynamic_slice_in_dim(x, place, 1) for x in leaves]  # noqa: E731
    return _message(messages, _on_devices(messages, work, messages.order[rank], split=True))


def peaks(messages: Messages) -> Array:
    """[m] float32: the largest magnitude in each message; infinity where it holds NaN."""

    def work(leaves, _, order):
        sizes = [jnp.abs(x).astype(jnp.float32) for x in leaves]
        found = reduce(jnp.maximum, [x.max(1, initial=0) for x in sizes])
        lost = reduce(jnp.logical_or, [jnp.isnan(x).any(1) for x in sizes])  # XLA:CPU's maximum of rows drops NaN
        found = jnp.where(lost, jnp.inf, found)
        return (found if messages.mesh is None else jax.lax.pmax(found, AXIS))[order]

    return _on_devices(messages, work, messages.order)


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
    point = () if point is None else _flat(messages, point)

    def work(leaves, point, order):
        zero, total = hidden_zero(leaves), exact.zeros(jax.ShapeDtypeStruct((leaves[0].shape[0],), jnp.float32))

        def of_leaf(total, x, p):
            block = min(BLOCK, x.shape[0])

            def tile(total, start, width, size):
                def some(i, found):
                    first = jnp.minimum(i * block, x.shape[0] - block)  # the last block looks again at some rows
                    rows = jax.lax.dynamic_slice(x, (first, start), (block, width)).astype(jnp.float32)
                    here = (
                        None
                        if p is None
                        else jax.lax.dynamic_slice(p, (jnp.int32(0), start), (1, width)).astype(jnp.float32)
                    )
                    sums = pairwise_sum(rounded_here(terms(rows, here), zero), (1,))
                    return jax.lax.dynamic_update_slice(found, sums, (first,))

                found = _repeated(-(-x.shape[0] // block), some, jnp.zeros(x.shape[0], jnp.float32))
                return exact.add(total, found[None])

            return _over_tiles(x, tile, total)

        for x, p in zip(leaves, point or [None] * len(leaves), strict=True):
            total = of_leaf(total, x, p)
        return exact.total(total if messages.mesh is None else exact.combine(total, AXIS))[order]

    return _on_devices(messages, work, messages.order, columns=point)


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

    return _message(messages, _on_devices(messages, work, messages.order, coefficients, split=True))


def products(messages: Messages, scale: Array | None = None) -> Array:
    """[m, m] float32: the inner products of s_i u_i and s_j u_j, a matmul for each tile, the tiles added exactly.

    Args:
      scale: [m] powers of two, 1 by default.
    """
    scale = jnp.ones(messages.number) if scale is None else scale

    def work(leaves, _, order, scale):
        total = exact.zeros(jax.ShapeDtypeStruct((messages.number,) * 2, jnp.float32))
        for x in leaves:

            def tile(total, start, width, size, x=x):
                rows = _tile(x, order, start, width, size).astype(jnp.float32) * scale[:, None]
                return exact.add(total, jnp.matmul(rows, rows.T, precision=jax.lax.Precision.HIGHEST)[None])

            total = _over_tiles(x, tile, total)
        return exact.total(total if messages.mesh is None else exact.combine(total, AXIS))

    return _on_devices(messages, work, messages.order, scale)


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
    zero = hidden_zero(found)
    parts = rounded_here(
        (left * left * squares[:, None], right * right * squares[None], 2 * left * right * found), zero
    )
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


def with_message(messages: Messages, mask: Array, message: PyTree) -> Messages:
    """With one message in the place of those that a mask [m] chooses.

    Guarantees: tests/adversary/test_byzantine.py::test_attackers_are_replaced.
    """

    def work(leaves, new, order, mask):
        at = jnp.zeros(leaves[0].shape[0], bool).at[order].set(mask)[:, None]
        return [jnp.where(at, y.astype(x.dtype), x) for x, y in zip(leaves, new, strict=True)]

    made = _on_devices(messages, work, messages.order, mask, columns=_flat(messages, message), split=True)
    return dataclasses.replace(messages, columns=tuple(made))


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

    columns = _on_devices(messages, work, messages.order, *args, split=True)
    return dataclasses.replace(messages, columns=tuple(columns), order=jnp.arange(number, dtype=jnp.int32))
