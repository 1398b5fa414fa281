"""Defines the kinds of client memory that are no plain arrays: rows over devices (`Sharded`) or in a file (`Disk`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedjax_sim import tree
from fedjax_sim.engine.client_memory.disk import MemoryFile
from fedjax_sim.engine.client_memory.host_calls import on_host
from fedjax_sim.types import Array, PyTree

__all__ = ["Disk", "Sharded", "scatter"]

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
        """See `engine.take`: each device sends the rows that it holds, and receives those of its slots."""
        axis = self.mesh.axis_names[0]

        def on_device(memory, ids):
            def leaf(x):
                place = ids - jax.lax.axis_index(axis) * x.shape[0]
                is_here = (place >= 0) & (place < x.shape[0])
                rows = x[jnp.clip(place, 0, x.shape[0] - 1)]
                # Exactly one device holds a row, so the sum over devices of bits, or zeros, is the row.
                bits = tree.where(is_here, _bits(rows), jnp.zeros((), _bits(rows).dtype))
                return _from_bits(jax.lax.psum_scatter(bits, axis, tiled=True), x.dtype)

            return jax.tree.map(leaf, memory)

        rows = self._mapped(on_device, (P(axis), P()), P(axis))(self.rows, _padded(ids, self.mesh.size, -1))
        return jax.tree.map(lambda x: x[: ids.shape[0]], rows), self

    def put(self, ids: Array, rows: PyTree, where: Array) -> Sharded:
        """See `engine.put`: each device writes the rows of the clients that it holds."""
        axis = self.mesh.axis_names[0]

        def on_device(memory, ids, rows, where):
            size = jax.tree.leaves(memory)[0].shape[0]
            # The places of other devices' clients are outside of this device's rows.
            place = ids - jax.lax.axis_index(axis) * size
            return scatter(memory, place, rows, where & (place >= 0) & (place < size))

        put_rows = self._mapped(on_device, (P(axis), P(), P(), P()), P(axis))
        return dataclasses.replace(self, rows=put_rows(self.rows, ids, rows, where))

    def _mapped(self, on_device: Callable, inputs, outputs) -> Callable:
        """Returns a function of global arrays that calls `on_device` on every device."""
        return jax.shard_map(on_device, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def _bits(x: Array) -> Array:
    """Returns integers of the same bits; a sum with zeros keeps these, while -0.0 + 0.0 would lose its sign."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x


def _from_bits(x: Array, dtype) -> Array:
    """Returns the array whose `_bits` these are."""
    return jax.lax.bitcast_convert_type(x, dtype) if jnp.issubdtype(dtype, jnp.floating) else x.astype(dtype)


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
