"""Unequal clients: those of like size share a chunk, and every device gets about the same work."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_sim.types import Array

__all__ = ["ALONE", "Packing", "pack"]

ALONE = 256  # clients with more rows are not vmapped but follow one another: the longest would hold up the others


class Packing(NamedTuple):
    """Where slots stand: on D devices with k chunks each, of c places."""

    source: Array  # [D, k, c] int32: the slot at each place, or m in an empty one
    kind: Array  # [D, k] int32: the class of a chunk
    place: Array  # [m] int32: where each slot stands in `source`, flat


def pack(sizes: Array, capacities: tuple[int, ...], chunk: int, num_devices: int) -> Packing:
    """Sorts the slots by falling size and deals them to and fro over the devices, in chunks of one size class each.

    Args:
      sizes: [m] int32, rows of each slot's client; 0 for slots without work.
      capacities: the largest number of rows in each class, rising.
      chunk: c.
      num_devices: D.

    Guarantees: each slot has one place, in a chunk of its own class; with chunks filled from the largest client down,
    a vmapped chunk wastes little (tests/engine/test_packing.py).
    """
    num_slots, classes = sizes.shape[0], len(capacities)
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    kind = (sizes[:, None] > jnp.array(capacities[:-1], jnp.int32)[None, :]).sum(1, dtype=jnp.int32)
    order = jnp.argsort(-sizes, stable=True).astype(jnp.int32)
    kind = kind[order]
    turn, seat = np.divmod(np.arange(num_slots, dtype=np.int32), np.int32(num_devices))
    device = np.where(turn % 2, num_devices - 1 - seat, seat)  # 0 1 2 2 1 0 0 1 2: like work for each
    own = (kind[:, None, None] == jnp.arange(classes)[None, None, :]) & (
        jnp.asarray(device)[:, None, None] == jnp.arange(num_devices)[None, :, None]
    )
    counts = own.sum(0, dtype=jnp.int32)[:, ::-1]  # [D, classes], largest clients first
    chunks = -(-counts // chunk)
    ends = jnp.cumsum(chunks, axis=1)
    starts = (ends - chunks) * chunk
    before = jnp.cumsum(counts, axis=1) - counts  # slots of larger classes on the same device
    column = classes - 1 - kind
    inside = starts[device, column] + (turn - before[device, column])
    most = -(-num_slots // (num_devices * chunk)) + classes - 1
    place = jnp.zeros(num_slots, jnp.int32).at[order].set(device * (most * chunk) + inside)
    source = jnp.full(num_devices * most * chunk, num_slots, jnp.int32).at[place].set(slots)
    row = jnp.arange(most, dtype=jnp.int32)
    later = (row[None, :, None] >= ends[:, None, :]).sum(2, dtype=jnp.int32)
    kinds = jnp.maximum(classes - 1 - later, 0)
    return Packing(source.reshape(num_devices, most, chunk), kinds, place)
