"""Stores the per-client memory of the whole population: on the device, split over devices, or in a file on disk.

A round takes the rows of its cohort and puts them back; the other rows are not moved. On one device the memory is a
pytree of arrays [N, ...]. With D devices each device holds N / D rows (`Sharded`). `Disk` keeps the rows in a
`MemoryFile`. The kind changes no bit of a result.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

from fedjax_sim import tree, validate
from fedjax_sim.engine.client_memory.disk import MemoryFile, MemoryFileError
from fedjax_sim.engine.client_memory.kinds import Disk, Sharded, scatter
from fedjax_sim.engine.fold import is_unplaced
from fedjax_sim.engine.platform import device_memory
from fedjax_sim.types import Array, PyTree

STORES = ("auto", "device", "disk")
LARGE = 1 << 30  # from this many bytes of client memory on a device on, there is a warning
_setting: contextvars.ContextVar = contextvars.ContextVar("client_memory", default=("auto", None))


@contextlib.contextmanager
def client_memory(kind: str = "auto", directory: str | os.PathLike | None = None) -> Iterator[None]:
    """Sets where an `Algorithm.init` that is called inside the block keeps client memory; `run` opens such a block.

    Args:
      kind: "device"; "disk", a sparse file `clients.mem` in `directory`; or "auto": on disk if it would take more
        than a quarter of a device's memory and there is a directory.
      directory: the run's folder; None without one.

    Raises: ValueError for another kind, and for "disk" without a directory.

    Guarantees: the kind changes no bit (tests/engine/client_memory/test_store.py::test_every_kind_gives_the_same_bits).
    """
    validate.one_of("client_memory", kind, STORES)
    if kind == "disk" and directory is None:
        validate.fail("client_memory", "a run directory for the file of kind 'disk'", None)
    token = _setting.set((kind, None if directory is None else Path(directory)))
    try:
        yield
    finally:
        _setting.reset(token)


def memory_limit(mesh: Mesh | None = None) -> int:
    """Returns the bytes that client memory may take on each device.

    It is half of the device's memory; or half of the device's share of this machine's, where JAX does not know.
    """
    if (known := device_memory()) is not None:
        return known // 2
    shares = 1 if mesh is None else mesh.size if isinstance(mesh, AbstractMesh) else len(mesh.local_devices)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (2 * shares)


def store(client_state: PyTree, num_clients: int, *, mesh: Mesh | None = None, name: str = "clients") -> PyTree:
    """Makes the memory of `num_clients` clients who all start from `client_state`.

    `client_memory` sets its kind.

    Args:
      client_state: a pytree of arrays, the same for every client.
      num_clients: N.
      mesh: devices that share the rows, the same as those of the rounds; None: one device has them all.
      name: the name of the file, without its ending.

    Returns: the memory, for `take` and `put`; the state itself if it has no leaves.

    Raises: MemoryError with the byte count where it would not fit; TypeError for keys among the leaves.

    Guarantees:
      A device of D holds at most ceil(N / D) rows
      (tests/engine/client_memory/test_store.py::test_sharded_rows_are_split).
      A disk holds the rows once they are written
      (tests/engine/client_memory/test_disk.py::test_rows_come_back_and_holes_take_no_disk).

    >>> import jax.numpy as jnp
    >>> store({"c": jnp.zeros(3)}, 5)["c"].shape
    (5, 3)
    """
    if not jax.tree.leaves(client_state):
        return client_state
    for leaf in jax.tree.leaves(client_state):
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            hint = "Keep jax.random.key_data(key), and read it with wrap_key_data."
            validate.fail("client_state", "arrays of numbers", str(leaf.dtype), hint, TypeError)
    # For shapes alone, such as for a program's digest, the kind of memory must not matter.
    if is_unplaced():
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_clients, *jnp.shape(x))), client_state)
    kind, directory = _setting.get()
    shares = 1 if mesh is None else mesh.size
    rows = -(-num_clients // shares)
    row_bytes = tree.num_bytes(tree.spec(client_state))
    limit = memory_limit(mesh)
    # The limit is half of a device's memory: "auto" allows a quarter of it.
    if kind == "disk" or (kind == "auto" and directory is not None and rows * row_bytes > limit // 2):
        if jax.process_count() > 1:
            hint = "The file of one process is not the other's: use client_memory='device', which splits the rows."
            validate.fail("client_memory", "one process for memory on disk", jax.process_count(), hint)
        return Disk(jnp.zeros((), jnp.int32), _file(directory / f"{name}.mem", client_state, num_clients), mesh)
    validate.fits_in_memory(
        "client memory",
        rows * row_bytes,
        limit,
        hint=f"That is one state of {row_bytes:,} bytes for each of {num_clients:,} clients, over {shares} devices; "
        "use client_memory='disk' with a run directory, more devices, a stateless client or a smaller population.",
    )
    if rows * row_bytes > LARGE:
        words = f"client memory takes {rows * row_bytes:,} bytes on each device"
        warnings.warn(f"{words}: run(client_memory='disk') keeps it in a file.", stacklevel=2)
    if mesh is None:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_clients, *jnp.shape(x))), client_state)

    def fill(state):
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (rows * shares, *jnp.shape(x))), state)

    if isinstance(mesh, AbstractMesh):  # of `assumed_devices`: shapes alone are asked for
        # Without weak types, as the NumPy arrays below have none.
        strong = jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.result_type(x)), client_state)
        return Sharded(fill(strong), mesh, num_clients)
    # NumPy arrays are equal on every process, and may enter a program over all processes.
    client_state = jax.tree.map(lambda x: x if isinstance(x, Tracer) else np.asarray(x), client_state)
    split = NamedSharding(mesh, P(mesh.axis_names[0]))
    return Sharded(jax.jit(fill, out_shardings=split)(client_state), mesh, num_clients)


def _file(path: Path, client_state: PyTree, num_clients: int) -> MemoryFile:
    """Returns the file of the memory; under a trace, a file that has the right shapes and fails at its first use."""
    if not any(isinstance(x, Tracer) for x in jax.tree.leaves(client_state)):
        return MemoryFile(path, client_state, num_clients)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tree.spec(client_state))
    # The shapes are right, the values are not: reading or writing must fail.
    file = MemoryFile(path, zeros, num_clients)
    file.fail(MemoryFileError(f"{path}: the algorithm's init was traced. Call it outside jit for memory on disk."))
    return file


def owned(state: PyTree, borrowed: PyTree) -> PyTree:
    """Returns the state in buffers that nobody else reads, so that a program may write over them.

    A leaf is copied if it shares a buffer with `borrowed` (a user's model, a population), or with an earlier leaf.
    Everything else stays where it is, client memory above all.

    Args:
      state: of the algorithm.
      borrowed: arrays whose buffers must stay as they are.

    Guarantees: leaves that share no buffer are not copied
    (tests/engine/client_memory/test_store.py::test_only_shared_buffers_are_copied).
    """
    taken_addresses = {address for leaf in jax.tree.leaves(borrowed) for address in _buffer_addresses(leaf)}

    def leaf(x):
        x = jnp.asarray(x)
        addresses = _buffer_addresses(x)
        if not addresses or taken_addresses & {*addresses}:
            return jnp.array(x)
        taken_addresses.update(addresses)
        return x

    return jax.tree.map(leaf, state)


def _buffer_addresses(x: Array) -> list[int]:
    """Returns the addresses of an array's buffers in this process; [] where nobody can tell."""
    try:
        return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]
    except (AttributeError, NotImplementedError, ValueError, jax.errors.JaxRuntimeError):
        return []


def take(memory: PyTree, ids: Array) -> tuple[PyTree, PyTree]:
    """Returns (rows `ids` [m, ...], the memory to `put` them back into); ids must be in range.

    Only the cohort's rows are moved. The second result must be used: on disk it makes the write wait for this read.
    """
    return memory.take(ids) if isinstance(memory, (Sharded, Disk)) else (tree.take_rows(memory, ids), memory)


def put(memory: PyTree, ids: Array, rows: PyTree, where: Array) -> PyTree:
    """Returns the memory with `rows` [m, ...] written at `ids` where `where`; other rows as they were.

    Of several slots with the same id the last one is written.

    Args:
      memory: as `take` returns it.
      ids: [m] integers, the clients of the slots.
      rows: their new states, leaves [m, ...].
      where: [m] bool, the slots that write.

    Guarantees:
      Padding and lost clients never write, even with another client's id
      (tests/engine/client_memory/test_store.py::test_put_leaves_absent_clients_alone).
      An id twice in a cohort has one outcome
      (tests/engine/client_memory/test_store.py::test_the_last_of_equal_ids_writes).
    """
    if not jax.tree.leaves(rows):
        return memory
    if isinstance(memory, Sharded):
        ids, where = memory.whole((ids, where))
    # Scattered writes to equal indices have no defined order, so a single slot of each id may write.
    where = _where_last(ids, where)
    if isinstance(memory, (Sharded, Disk)):
        return memory.put(ids, rows, where)
    return scatter(memory, ids, rows, where)


def _where_last(ids: Array, where: Array) -> Array:
    """Returns `where`, without slots whose id comes again in a later slot that writes."""
    keys = jnp.where(where, ids, -1)
    # A stable sort keeps the order of slots among equal ids: the last of each group is the last slot.
    order = jnp.argsort(keys, stable=True)
    ordered = keys[order]
    ends = jnp.concatenate([ordered[1:] != ordered[:-1], jnp.ones(1, bool)])
    return jnp.zeros_like(where).at[order].set(ends) & where


def memory_files(state: PyTree) -> list[tuple[MemoryFile, Array]]:
    """Returns the files in which a state keeps client memory, each with the version to which the state belongs."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Disk))
    return [(node.file, node.version) for node in nodes if isinstance(node, Disk)]


def gathered(state: PyTree, *, spec: bool = False) -> PyTree:
    """Returns the state as a checkpoint keeps it, the same for any number of devices.

    Client memory that is split over devices becomes plain arrays [N, ...] on the host. Memory on disk becomes (its
    version, a bit for each client that tells whether it was written).

    Args:
      state: the state of an algorithm.
      spec: True for arrays of the same shapes and dtypes that take no memory, to be filled from a checkpoint.
    """

    def node_as_arrays(node):
        """Returns a part of a state without its kind of memory."""
        if isinstance(node, Disk):
            return node.version, node.file.written if spec else node.file.written.copy()
        if not isinstance(node, Sharded):
            return node
        if spec:
            empty = lambda x: np.broadcast_to(np.zeros((), x.dtype), (node.size, *x.shape[1:]))  # noqa: E731
            return jax.tree.map(empty, node.rows)
        # Rows of padding, behind the last client, are left out.
        return jax.tree.map(lambda x: np.asarray(x)[: node.size], node.rows)

    return jax.tree.map(node_as_arrays, state, is_leaf=lambda x: isinstance(x, (Sharded, Disk)))


def scattered(state: PyTree, like: PyTree) -> PyTree:
    """Inverts `gathered`: returns the state with client memory split, or on disk, as in `like`.

    Args:
      state: as `gathered` returns it.
      like: a state with the same shapes, in the kinds of memory that are wanted.
    """

    def node_as_memory(node, plain):
        """Returns a part of a state in the kind of memory of `node`, a part of `like`."""
        if isinstance(node, Disk):
            version, node.file.written = plain
            return dataclasses.replace(node, version=version)
        if not isinstance(node, Sharded):
            return plain
        split = NamedSharding(node.mesh, P(node.mesh.axis_names[0]))

        # On the host, since the whole may be more than a device can hold.
        def leaf(x, rows):
            rows = np.asarray(rows)
            return jax.device_put(np.pad(rows, [(0, len(x) - len(rows))] + [(0, 0)] * (rows.ndim - 1)), split)

        return dataclasses.replace(node, rows=jax.tree.map(leaf, node.rows, plain))

    return jax.tree.map(node_as_memory, like, state, is_leaf=lambda x: isinstance(x, (Sharded, Disk)))
