"""Per-client memory of the whole population, leaves [N, ...]."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.types import Array, PyTree

__all__ = ["memory_limit", "put", "store"]


def memory_limit() -> int:
    """Bytes that client memory may take: half of what the device, or this machine, has."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] // 2
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def store(client_state: PyTree, num_clients: int) -> PyTree:
    """The memory of `num_clients` clients who all start from `client_state`.

    Raises: MemoryError with the byte count where it would not fit.

    >>> import jax.numpy as jnp
    >>> store({"c": jnp.zeros(3)}, 5)["c"].shape
    (5, 3)
    """
    validate.fits_in_memory(
        "client memory",
        num_clients * tree.num_bytes(tree.spec(client_state)),
        memory_limit(),
        hint=f"That is one state for each of {num_clients:,} clients; use a stateless client or a smaller population.",
    )
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_clients, *jnp.shape(x))).copy(), client_state)


def put(memory: PyTree, ids: Array, rows: PyTree, where: Array) -> PyTree:
    """The memory with `rows` [m, ...] written at `ids` where `where`; other rows as they were.

    Guarantees: padding and lost clients never write, even with another client's id
    (tests/engine/test_store.py::test_put_leaves_absent_clients_alone).
    """

    def leaf(memory, rows):
        target = jnp.where(where, ids, memory.shape[0])  # out of range: dropped
        return memory.at[target].set(rows, mode="drop")

    return jax.tree.map(leaf, memory, rows)
