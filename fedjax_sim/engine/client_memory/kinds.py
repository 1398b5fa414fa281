"""Defines the kinds of client memory that are no plain arrays: rows over devices (`Sharded`) or in a file (`Disk`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from fedjax_sim import tree
from fedjax_sim.engine.client_memory.disk import MemoryFile
from fedjax_sim.engine.client_memory.host_calls import on_host
from fedjax_sim.types import Array, PyTree

static = {"static": True}


def scatter(memory: PyTree, ids: Array, rows: PyTree, where: Array) -> PyTree:
    """Returns arrays [N, ...] with `rows` [m, ...] written at `ids` where `where`; other rows as they were."""

    def leaf(memory, rows):
        # An index out of range is dropped.
        target = jnp.where(where, ids, memory.shape[0])
        return memory.at[target].set(rows, mode="drop")

    return jax.tree.map(leaf, memory, rows)


def _padded(x: Array, shares: int, value) -> Array:
    """Returns `x` [m, ...] with rows of `value` behind, so that `shares` divides its length."""
    num_padding = -x.shape[0] % shares
    if not num_padding:
        return x
    return jnp.concatenate([x, jnp.full((num_padding, *x.shape[1:]), value, x.dtype)])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Sharded:
    """Rows split over the D devices of a mesh; device k holds clients [k ceil(N / D), (k + 1) ceil(N / D))."""

    rows: PyTree  # leaves [D ceil(N / D), ...]
    mesh: Mesh = dataclasses.field(metadata=static)
    size: int = dataclasses.field(metadata=static)  # N

    def take(self, ids: Array) -> tuple[PyTree, Sharded]:
        """See `engine.take`: the rows of each device's slots go around, and every device fills in those that it holds.

        So a device has the rows of one device's slots at a time, and never those of the whole cohort.

        Args:
          ids: [m] int32, the clients of the slots, in range.
        """
        axis, shares = self.mesh.axis_names[0], self.mesh.size

        def on_device(memory, ids):
            here = jax.lax.axis_index(axis)

            def filled(step, rows):
                # After all steps but one, the rows are with the device whose slots they are.
                place, is_here = self._place(ids[(here + shares - 1 - step) % shares])
                return tree.where(is_here, tree.take_rows(memory, place), rows)

            empty = jax.tree.map(lambda x: jnp.zeros((ids.shape[1], *x.shape[1:]), x.dtype), memory)
            rows = jax.lax.fori_loop(0, shares - 1, lambda step, rows: self._passed_on(filled(step, rows)), empty)
            return filled(shares - 1, rows)

        slots = _padded(ids, shares, -1).reshape(shares, -1)
        rows = self._mapped(on_device, (P(axis), P()), P(axis))(self.rows, slots)
        return jax.tree.map(lambda x: x[: ids.shape[0]], rows), self

    def put(self, ids: Array, rows: PyTree, where: Array) -> Sharded:
        """See `engine.put`: the rows of each device's slots go around, and every device writes those that it holds.

        Args:
          ids: [m] int32, the clients of the slots.
          rows: their new states, leaves [m, ...].
          where: [m] bool, the slots that write.
        """
        axis, shares = self.mesh.axis_names[0], self.mesh.size

        def on_device(memory, ids, rows):
            here = jax.lax.axis_index(axis)

            def written(step, memory, rows):
                place, is_here = self._place(ids[(here - step) % shares])
                return scatter(memory, place, rows, is_here)

            def step(step, state):
                memory, rows = state
                return written(step, memory, rows), self._passed_on(rows)

            memory, rows = jax.lax.fori_loop(0, shares - 1, step, (memory, rows))
            return written(shares - 1, memory, rows)

        # A slot that does not write has the id -1, as has padding.
        slots = _padded(jnp.where(where, ids, -1), shares, -1).reshape(shares, -1)
        rows = jax.tree.map(lambda x: _padded(x, shares, 0), rows)
        put_rows = self._mapped(on_device, (P(axis), P(), P(axis)), P(axis))
        return dataclasses.replace(self, rows=put_rows(self.rows, slots, rows))

    def whole(self, slots: PyTree) -> PyTree:
        """Returns what is small and known of all slots, whole on every device.

        Otherwise the partitioner would split the cohort's draw, because the clients' rows are split, and gather it.
        """
        return jax.lax.with_sharding_constraint(slots, NamedSharding(self.mesh, P()))

    def _place(self, ids: Array) -> tuple[Array, Array]:
        """Returns on a device: the rows at which it holds these clients, and whether it holds them, both [s]."""
        size = jax.tree.leaves(self.rows)[0].shape[0] // self.mesh.size
        place = ids - jax.lax.axis_index(self.mesh.axis_names[0]) * size
        return jnp.clip(place, 0, size - 1), (place >= 0) & (place < size)

    def _passed_on(self, rows: PyTree) -> PyTree:
        """Returns on a device: the rows of the device before it."""
        shares = self.mesh.size
        ring = [(device, (device + 1) % shares) for device in range(shares)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.mesh.axis_names[0], ring), rows)

    def _mapped(self, on_device: Callable, inputs, outputs) -> Callable:
        """Returns a function of global arrays that calls `on_device` on every device."""
        return jax.shard_map(on_device, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Disk:
    """Rows in a file. A state from before the last write can no longer be used, since its rows are overwritten."""

    version: Array  # [] int32 writes so far; each read and write takes it and returns it, which orders them
    file: MemoryFile = dataclasses.field(metadata=static)
    mesh: Mesh | None = dataclasses.field(metadata=static)

    @property
    def size(self) -> int:
        """N, the number of clients."""
        return self.file.num_clients

    @property
    def fingerprint(self) -> str:
        """What the host computes in a read or a write, as text for the digest of a program."""
        return f"{self.size} clients, {self.file.format.specs}"

    def take(self, ids: Array) -> tuple[PyTree, Disk]:
        """See `engine.take`: each device reads the rows of its slots."""
        shares = 1 if self.mesh is None else self.mesh.size

        def on_device(version, ids):
            specs = [jax.ShapeDtypeStruct((*ids.shape, *spec.shape), spec.dtype) for spec in self.file.format.specs]
            *leaves, version = on_host(self._read, [*specs, version], version, ids)
            return self.file.format.structure.unflatten(leaves), version

        rows, version = self._shared(on_device, 1)(self.version, _padded(jnp.asarray(ids), shares, -1))
        return jax.tree.map(lambda x: x[: ids.shape[0]], rows), dataclasses.replace(self, version=version)

    def put(self, ids: Array, rows: PyTree, where: Array) -> Disk:
        """See `engine.put`: each device writes the rows of its slots."""
        shares = 1 if self.mesh is None else self.mesh.size

        def on_device(version, ids, rows):
            (version,) = on_host(self._write, [version], version, ids, *jax.tree.leaves(rows))
            return (), version

        # A slot that does not write has the id -1, as has padding.
        ids = _padded(jnp.where(where & (ids >= 0) & (ids < self.size), ids, -1), shares, -1)
        rows = jax.tree.map(lambda x: _padded(x, shares, 0), rows)
        _, version = self._shared(on_device, 2)(self.version, ids, rows)
        return dataclasses.replace(self, version=version)

    def _shared(self, of_device: Callable, num_split: int) -> Callable:
        """Returns a function that calls `of_device` on every device's slots.

        The version that it returns is the minimum over devices. So it waits for all devices, and is -1 after an error
        on any of them.

        Args:
          of_device: (version, *arrays of a device's slots) -> (rows, version).
          num_split: the number of arrays that are split over devices.
        """
        if self.mesh is None:
            return of_device
        axis = self.mesh.axis_names[0]

        def on_device(version, *split):
            rows, version = of_device(version, *split)
            return rows, jax.lax.pmin(version, axis)

        inputs = (P(), *[P(axis)] * num_split)
        return jax.shard_map(on_device, mesh=self.mesh, in_specs=inputs, out_specs=(P(axis), P()), check_vma=False)

    def _read(self, out: list[np.ndarray], version: np.ndarray, ids: np.ndarray) -> None:
        """Reads the rows of a device's slots into `out`, on the host; after an error they are NaN."""
        *leaves, version_out = out
        # NaN shows in the round's result, where zeros would look like a state.
        if not self._call(self.file.read, int(version), ids, leaves):
            for leaf in leaves:
                leaf[...] = np.nan if np.issubdtype(leaf.dtype, np.floating) else 0
        version_out[...] = -1 if self.file.failed else version

    def _write(self, out: list[np.ndarray], version: np.ndarray, ids: np.ndarray, *leaves: np.ndarray) -> None:
        """Writes the rows of a device's slots, on the host; an id of -1 is no client."""
        present = np.flatnonzero(ids >= 0)
        shares = 1 if self.mesh is None else self.mesh.size
        self._call(self.file.write, int(version), ids[present], [x[present] for x in leaves], shares)
        out[0][...] = -1 if self.file.failed else version + 1

    def _call(self, function: Callable, *arguments) -> bool:
        """Calls the function, and returns False after an error here or before.

        One device of several must not raise its error, because the others would wait for it in a collective. `run`
        raises the error afterwards (`MemoryFile.check`).
        """
        try:
            self.file.check()
            function(*arguments)
        except Exception as error:
            self.file.fail(error)
            if self.mesh is None:
                raise
        return not self.file.failed
