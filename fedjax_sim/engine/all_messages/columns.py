"""Arranges the messages of a cohort side by side, and computes on them a coordinate or a message at a time.

Messages are taken in the order of their clients' ids. Over devices they are split by coordinate: `messages_of`
exchanges them once, and each device then holds d / D coordinates of every message. `engine.all_messages.messages` has
the arithmetic on them, and these names too.
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
from fedjax_sim.engine.largest import largest_magnitude
from fedjax_sim.types import Array, PyTree

TILE = 4096  # coordinates that are worked on at once
MESSAGES_AT_ONCE = 4  # messages whose peaks are computed at once


@partial(
    jax.tree_util.register_dataclass,
    meta_fields=["shapes", "structure", "mesh"],
    data_fields=["columns", "order"],
)
@dataclasses.dataclass(frozen=True)
class Messages:
    """A `Messages` holds m messages of d numbers, in the order of their clients' ids."""

    columns: tuple[Array, ...]  # one for each leaf of the messages, [places, d_leaf], padded with columns of zeros
    order: Array  # [m] int32: the place of each message
    shapes: tuple[tuple[int, ...], ...]  # of a message's leaves
    structure: jax.tree_util.PyTreeDef  # pyright: ignore[reportInvalidTypeForm]  # jaxlib states no types
    mesh: Mesh | None  # devices that the columns are split over

    @property
    def number(self) -> int:
        """m, with messages that did not arrive."""
        return self.order.shape[0]


def tile_width(size: int) -> int:
    """Returns the columns of a tile of a leaf with this many coordinates: a power of two in [64, 4096]."""
    return min(TILE, max(64, 1 << (size - 1).bit_length()))


def messages_of(rows: Rows, slots: Array) -> Messages:
    """Returns the messages of these slots [m], in this order, split by coordinate over the rows' devices."""
    leaves, structure = jax.tree.flatten(rows.values)
    shapes = tuple(x.shape[1:] for x in leaves)
    flat = [x.reshape(x.shape[0], math.prod(shape)) for x, shape in zip(leaves, shapes, strict=True)]
    order = rows.place[slots]
    mesh = rows.mesh
    if mesh is not None:
        by_row = PartitionSpec(AXIS)
        by_column = PartitionSpec(None, AXIS)
        exchange = lambda leaves: [_exchanged(x, mesh.size) for x in leaves]  # noqa: E731
        flat = jax.shard_map(exchange, mesh=mesh, in_specs=by_row, out_specs=by_column, check_vma=False)(flat)
        order = on_every_device(order, mesh)
    return Messages(tuple(flat), order, shapes, structure, mesh)


def _exchanged(x: Array, devices: int) -> Array:
    """Exchanges [places / D, d] of one device for [places, d / D], in whole tiles.

    docs/design/all_messages.md says why this is no all-to-all: that took about twice as long.

    Args:
      x: the rows of this device, [places / D, d]: all coordinates of its own messages.
      devices: D, the size of the mesh axis.

    Returns: the columns of this device, [places, w] for a width w of whole tiles with D w >= d: its own coordinates of
      all messages. Columns past d are zeros.
    """
    width = tile_width(x.shape[1])
    own_width = width * -(-x.shape[1] // (width * devices))  # columns of a device
    x = jnp.pad(x, ((0, 0), (0, devices * own_width - x.shape[1])))
    own_index = jax.lax.axis_index(AXIS)
    whole = jnp.zeros((devices, x.shape[0], own_width), x.dtype)
    # In step s each device sends to the device s places further on, so that no device waits for two.
    for step in range(devices):
        part = jax.lax.dynamic_slice_in_dim(x, (own_index + step) % devices * own_width, own_width, axis=1)
        if step:
            part = jax.lax.ppermute(part, AXIS, [(i, (i + step) % devices) for i in range(devices)])
        whole = jax.lax.dynamic_update_index_in_dim(whole, part, (own_index - step) % devices, 0)
    return whole.reshape(devices * x.shape[0], own_width)


def on_devices(messages: Messages, work: Callable, *args: PyTree, columns: tuple = (), split: PyTree = False) -> PyTree:
    """Calls `work(leaves, columns, *args)` on each device's columns.

    Args:
      messages: whose columns are the leaves.
      work: the function.
      args: arrays that every device gets whole.
      columns: more arrays that are split by column, as the messages are.
      split: whether the results are split along their last axes; else they are equal on all devices. A truth value for
        all results, or a pytree of truth values, one for each part.
    """
    mesh = messages.mesh
    if mesh is None:
        return work(messages.columns, columns, *args)
    replicated = PartitionSpec()
    by_column = PartitionSpec(None, AXIS)
    specs = {
        "in_specs": (by_column, by_column, *[replicated] * len(args)),
        "out_specs": jax.tree.map(lambda is_split: by_column if is_split else replicated, split),
        "check_vma": False,
    }
    args = jax.tree.map(lambda x: on_every_device(x, mesh), args)
    return jax.shard_map(work, mesh=mesh, **specs)(messages.columns, columns, *args)


def as_columns(messages: Messages, point: PyTree) -> tuple[Array, ...]:
    """Returns a message as columns [1, d], padded as the messages are.

    Raises: ValueError for a message whose leaves have other shapes.
    """
    leaves = messages.structure.flatten_up_to(point)
    if (shapes := tuple(map(jnp.shape, leaves))) != messages.shapes:
        validate.fail("message", f"leaves of shapes {messages.shapes}", shapes)
    flat = [x.reshape(1, -1) for x in leaves]
    padding = [y.shape[1] - x.shape[1] for x, y in zip(flat, messages.columns, strict=True)]
    return tuple(jnp.pad(x, ((0, 0), (0, width))) for x, width in zip(flat, padding, strict=True))


def as_message(messages: Messages, columns: list[Array]) -> PyTree:
    """Returns a message from columns [1, d']; columns of padding are left out."""
    if messages.mesh is not None:
        columns = [on_every_device(x, messages.mesh) for x in columns]
    shaped = (x[0, : math.prod(s)].reshape(s) for x, s in zip(columns, messages.shapes, strict=True))
    return messages.structure.unflatten(shaped)


def columnwise(messages: Messages, rule: Callable, *by_message: Array) -> PyTree:
    """Applies a rule to each coordinate by itself.

    Args:
      messages: the messages.
      rule: (values [places, d], *by_place [places]) -> [d]. Each result depends on its own column alone, and not on the
        order of the rows. A place without a message holds zeros.
      by_message: arrays [m] for the rule, which gets them by place, with zeros where no message stands.

    Returns: an update; leaves as the rule's.
    """
    places = messages.columns[0].shape[0]
    by_place = [jnp.zeros(places, x.dtype).at[messages.order].set(x) for x in by_message]
    work = lambda leaves, _, by_place: [rule(x, *by_place)[None] for x in leaves]  # noqa: E731
    return as_message(messages, on_devices(messages, work, by_place, split=True))


def one_message(messages: Messages, rank: Array) -> PyTree:
    """Returns the message of a rank [] in the order of ids, as it was sent."""
    work = lambda leaves, _, place: [jax.lax.dynamic_slice_in_dim(x, place, 1) for x in leaves]  # noqa: E731
    return as_message(messages, on_devices(messages, work, messages.order[rank], split=True))


def one_row(messages: Messages, point: PyTree) -> Messages:
    """Returns a point, shaped like a message, as the only message, split over devices as these messages are."""
    columns = as_columns(messages, point)
    return dataclasses.replace(messages, columns=columns, order=jnp.zeros(1, jnp.int32))


def peaks(messages: Messages) -> Array:
    """Returns the largest magnitude in each message, [m] float32; infinity where the message holds NaN."""

    def work(leaves, _, order):
        no_peaks = jnp.zeros(leaves[0].shape[0], jnp.float32)
        largest_by_place = reduce(jnp.maximum, [_peaks(x) for x in leaves if x.shape[1]], no_peaks)
        largest_by_place = jnp.where(jnp.isnan(largest_by_place), jnp.inf, largest_by_place)
        return (largest_by_place if messages.mesh is None else jax.lax.pmax(largest_by_place, AXIS))[order]

    return on_devices(messages, work, messages.order)


def _peaks(x: Array) -> Array:
    """Returns the largest magnitude in each row, [places] float32; NaN where the row holds one.

    Only a few rows are read at once, so that they stay in a core's cache.

    Args:
      x: a leaf of the messages, [places, d] with d >= 1.
    """
    num_rows = min(MESSAGES_AT_ONCE, x.shape[0])

    def block(i, peaks):
        # The last block begins earlier, and looks again at some rows: a slice does not go past the end.
        rows = jax.lax.dynamic_slice(x, (i * num_rows, jnp.int32(0)), (num_rows, x.shape[1]))
        of_rows = jax.vmap(largest_magnitude)(rows).astype(jnp.float32)
        return jax.lax.dynamic_update_slice(peaks, of_rows, (i * num_rows,))

    no_peaks = jnp.zeros(x.shape[0], jnp.float32)
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(-(-x.shape[0] // num_rows)), block, no_peaks)


def with_message(messages: Messages, mask: Array, message: PyTree) -> Messages:
    """Returns the messages with one message in the place of those that a mask [m] chooses.

    Args:
      messages: the messages.
      mask: [m] bool, the messages that are replaced.
      message: shaped like a message; cast to the messages' dtypes.

    Guarantees: messages outside of the mask stay as they are
    (tests/adversary/test_byzantine.py::test_attackers_are_replaced).
    """

    def work(leaves, new, order, mask):
        is_replaced = jnp.zeros(leaves[0].shape[0], bool).at[order].set(mask)[:, None]
        return [jnp.where(is_replaced, y.astype(x.dtype), x) for x, y in zip(leaves, new, strict=True)]

    columns = on_devices(messages, work, messages.order, mask, columns=as_columns(messages, message), split=True)
    return dataclasses.replace(messages, columns=tuple(columns))
