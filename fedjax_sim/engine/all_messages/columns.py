"""The messages of a cohort side by side, and what looks at them a coordinate or a message at a time.

Messages are taken in the order of their clients' ids. Over devices they are split by coordinate: `messages_of`
exchanges them once, and each device then holds d / D coordinates of everyone. `engine.all_messages.messages` has the
arithmetic on them, and these names too.
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
from fedjax_sim.engine.all_messages.rows import AXIS, Rows, on_every_device
from fedjax_sim.engine.arithmetic.maximum import largest
from fedjax_sim.types import Array, PyTree

__all__ = [
    "Messages",
    "as_columns",
    "as_message",
    "columnwise",
    "messages_of",
    "on_devices",
    "one_message",
    "one_row",
    "peaks",
    "tile_width",
    "with_message",
]

TILE = 4096  # coordinates that are worked on at once
ROWS = 4  # messages whose peaks are looked for at once


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


def tile_width(size: int) -> int:
    """Columns of a tile of a leaf with this many coordinates: a power of two in [64, 4096]."""
    return min(TILE, max(64, 1 << (size - 1).bit_length()))


def messages_of(rows: Rows, slots: Array) -> Messages:
    """The messages of these slots [m], in this order, split by coordinate over the rows' devices."""
    leaves, structure = jax.tree.flatten(rows.values)
    shapes = tuple(x.shape[1:] for x in leaves)
    flat = [x.reshape(x.shape[0], math.prod(shape)) for x, shape in zip(leaves, shapes, strict=True)]
    order = rows.place[slots]
    if rows.mesh is not None:
        split = PartitionSpec(AXIS)
        to = PartitionSpec(None, AXIS)
        work = lambda leaves: [_exchanged(x, rows.mesh.size) for x in leaves]  # noqa: E731
        flat = jax.shard_map(work, mesh=rows.mesh, in_specs=split, out_specs=to, check_vma=False)(flat)
        order = on_every_device(order, rows.mesh)
    return Messages(tuple(flat), order, shapes, structure, rows.mesh)


def _exchanged(x: Array, devices: int) -> Array:
    """[places / D, d] of one device -> [places, d / D], whole tiles; DESIGN.md says why there is no all-to-all."""
    width = tile_width(x.shape[1])
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


def on_devices(messages: Messages, work: Callable, *args: PyTree, columns: tuple = (), split: PyTree = False) -> PyTree:
    """`work(leaves, columns, *args)` on each device's columns; `split`: so are its results' last axes, else equal; for
    all results or for each part."""
    if messages.mesh is None:
        return work(messages.columns, columns, *args)
    here = PartitionSpec()
    last = PartitionSpec(None, AXIS)
    specs = {
        "in_specs": (last, last, *[here] * len(args)),
        "out_specs": jax.tree.map(lambda x: last if x else here, split),
        "check_vma": False,
    }
    args = jax.tree.map(lambda x: on_every_device(x, messages.mesh), args)
    return jax.shard_map(work, mesh=messages.mesh, **specs)(messages.columns, columns, *args)


def as_columns(messages: Messages, point: PyTree) -> tuple[Array, ...]:
    """A message as columns [1, d], padded as the messages are."""
    leaves = messages.structure.flatten_up_to(point)
    if (shapes := tuple(map(jnp.shape, leaves))) != messages.shapes:
        validate.fail("message", f"leaves of shapes {messages.shapes}", shapes)
    flat = [x.reshape(1, -1) for x in leaves]
    return tuple(
        jnp.pad(x, ((0, 0), (0, y.shape[1] - x.shape[1]))) for x, y in zip(flat, messages.columns, strict=True)
    )


def as_message(messages: Messages, columns: list[Array]) -> PyTree:
    """A message from columns [1, d']."""
    if messages.mesh is not None:
        columns = [on_every_device(x, messages.mesh) for x in columns]
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
    return as_message(messages, on_devices(messages, work, by_place, split=True))


def one_message(messages: Messages, rank: Array) -> PyTree:
    """The message of a rank [] in the order of ids, as it was sent."""
    work = lambda leaves, _, place: [jax.lax.dynamic_slice_in_dim(x, place, 1) for x in leaves]  # noqa: E731
    return as_message(messages, on_devices(messages, work, messages.order[rank], split=True))


def one_row(messages: Messages, point: PyTree) -> Messages:
    """A point, shaped like a message, as the only message, split over devices as these are."""
    columns = as_columns(messages, point)
    return dataclasses.replace(messages, columns=columns, order=jnp.zeros(1, jnp.int32))


def peaks(messages: Messages) -> Array:
    """[m] float32: the largest magnitude in each message; infinity where it holds NaN."""

    def work(leaves, _, order):
        found = reduce(
            jnp.maximum, [_peaks(x) for x in leaves if x.shape[1]], jnp.zeros(leaves[0].shape[0], jnp.float32)
        )
        found = jnp.where(jnp.isnan(found), jnp.inf, found)
        return (found if messages.mesh is None else jax.lax.pmax(found, AXIS))[order]

    return on_devices(messages, work, messages.order)


def _peaks(x: Array) -> Array:
    """[places] float32: the largest magnitude in each row, NaN where there is one; few rows at once, in a core's
    cache."""
    some = min(ROWS, x.shape[0])

    def block(i, found):
        rows = jax.lax.dynamic_slice(x, (i * some, jnp.int32(0)), (some, x.shape[1]))  # the last ones, at the end
        return jax.lax.dynamic_update_slice(found, jax.vmap(largest)(jnp.abs(rows).astype(jnp.float32)), (i * some,))

    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(-(-x.shape[0] // some)), block, jnp.zeros(x.shape[0], jnp.float32))


def with_message(messages: Messages, mask: Array, message: PyTree) -> Messages:
    """With one message in the place of those that a mask [m] chooses.

    Guarantees: tests/adversary/test_byzantine.py::test_attackers_are_replaced.
    """

    def work(leaves, new, order, mask):
        at = jnp.zeros(leaves[0].shape[0], bool).at[order].set(mask)[:, None]
        return [jnp.where(at, y.astype(x.dtype), x) for x, y in zip(leaves, new, strict=True)]

    made = on_devices(messages, work, messages.order, mask, columns=as_columns(messages, message), split=True)
    return dataclasses.replace(messages, columns=tuple(made))
