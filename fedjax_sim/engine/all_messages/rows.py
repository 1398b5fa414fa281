"""Keeps every message of a cohort in a row, for aggregators that must see all of them.

Rows stay on the device whose clients sent them, so m messages take the memory of m messages, and not of m on every
device. There are two ways to read them: `all_rows` brings them together on each device, and `messages.messages_of`
gives each device some coordinates of all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_sim.engine.arithmetic.barrier import unsigned_zeros
from fedjax_sim.types import Array, PyTree

AXIS = "clients"  # the axis of a mesh of devices


@partial(jax.tree_util.register_dataclass, meta_fields=["mesh"], data_fields=["values", "place"])
@dataclasses.dataclass(frozen=True)
class Rows:
    """Messages by slot. Each slot's row stands at a place; there may be more places than slots."""

    values: PyTree  # leaves [places, ...]; split over the devices where there is a mesh
    # [m] int32, the place of each slot. Inside `engine.fold` it counts from this device's first place on, so it may be
    # outside.
    place: Array
    mesh: Mesh | None = None

    def only(self, *names: str) -> Rows:
        """Returns some of the entries of rows that are dicts, as a tuple."""
        return dataclasses.replace(self, values=tuple(self.values[name] for name in names))


def buffer(spec: PyTree, num_slots: int) -> Rows:
    """Returns room for m messages: zeros."""
    values = jax.tree.map(lambda x: jnp.zeros((num_slots, *x.shape), x.dtype), spec)
    return Rows(values, jnp.arange(num_slots, dtype=jnp.int32))


def fill(rows: Rows, slots: Array, messages: PyTree) -> Rows:
    """Returns the rows with `messages` [c, ...] at `slots` [c]; slots at or past m (the engine's padding) are dropped.

    Zeros are stored without a sign, as are all arrays that are kept over rounds or devices.

    Guarantees: rows filled from disjoint slots add to the rows of their union
    (tests/laws/test_aggregators.py::test_carries_of_disjoint_slots_combine).
    """
    number = jax.tree.leaves(rows.values)[0].shape[0]
    place = rows.place.at[slots].get(mode="fill", fill_value=number)
    # A place of another device is before the first place here, or behind the last: "drop" leaves it out.
    place = jnp.where(place < 0, number, place)
    values = jax.tree.map(lambda b, r: b.at[place].set(r, mode="drop"), rows.values, unsigned_zeros(messages))
    return dataclasses.replace(rows, values=values)


def merged_rows(a: Rows, b: Rows) -> Rows:
    """Returns the rows of the union of two disjoint sets of slots; places without a message hold zeros."""
    return dataclasses.replace(a, values=jax.tree.map(jnp.add, a.values, b.values))


def spread_rows(rows: Rows, place: Array, number: int, first: Array | int) -> Rows:
    """Returns empty rows for the `number` places of one device, of which `first` is the first.

    Args:
      rows: as `buffer` makes them.
      place: [m] int32, the place of each slot among all devices' places.
      number: the places of the device.
      first: the device's first place.
    """
    values = jax.tree.map(lambda x: jnp.zeros((number, *x.shape[1:]), x.dtype), rows.values)
    return dataclasses.replace(rows, values=values, place=place - first)


def on_every_device(x: Array, mesh: Mesh) -> Array:
    """Returns the whole array on every device of a mesh."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))


def all_rows(rows: Rows, slots: Array) -> PyTree:
    """Returns the rows of these slots, leaves [len(slots), ...], on every device."""
    if rows.mesh is None:
        return jax.tree.map(lambda x: x[rows.place[slots]], rows.values)
    return _gathered(rows, lambda x, at: x[at], on_every_device(rows.place[slots], rows.mesh))


def rows_in_place(rows: Rows) -> tuple[PyTree, Array]:
    """Returns (all rows at their places, leaves [places, ...], and the place of each slot [m]) on every device.

    A function that looks at rows one after the other needs no copy of all rows in their order.
    """
    if rows.mesh is None:
        return rows.values, rows.place
    return _gathered(rows, lambda x: x), on_every_device(rows.place, rows.mesh)


def _gathered(rows: Rows, of: Callable, *args: Array) -> PyTree:
    """Returns `of(leaf [places, ...], *args)` of all devices' rows, on every device."""

    def together(values, *args):
        return jax.tree.map(lambda x: of(jax.lax.all_gather(x, AXIS, tiled=True), *args), values)

    replicated = PartitionSpec()
    split = PartitionSpec(AXIS)
    specs = {"in_specs": (split, *[replicated] * len(args)), "out_specs": replicated, "check_vma": False}
    return jax.shard_map(together, mesh=rows.mesh, **specs)(rows.values, *args)
