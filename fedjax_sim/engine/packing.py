"""Packs clients of unequal size: clients of like size share a chunk, and every device gets about the same work.

A client that works by epochs loops over its own number of steps. Under `vmap` the longest client of the lanes decides
how long all of them take.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_sim.types import Array

# Clients of classes with more rows are not vmapped, and follow one another: the longest would hold up the others.
ALONE = 256


class Packing(NamedTuple):
    """A `Packing` states the places of m slots on D devices, with k chunks of c places on each device."""

    source: Array  # [D, k, c] int32: the slot at each place, or m at an empty place
    kind: Array  # [D, k] int32: the size class of each chunk
    place: Array  # [m] int32: the flat index of each slot's place in `source`


def pack(sizes: Array, capacities: tuple[int, ...], chunk: int, num_devices: int) -> Packing:
    """Packs slots into chunks of one size class each.

    The slots are sorted by falling size and dealt to and fro over the devices.

    Args:
      sizes: [m] int32, rows of each slot's client; 0 for slots without work.
      capacities: the largest number of rows in each class, rising.
      chunk: the number of places c in a chunk.
      num_devices: D.

    Guarantees:
      Each slot has one place, in a chunk of its own class (tests/engine/test_packing.py).
      A vmapped chunk wastes little, because chunks are filled from the largest client down
      (tests/engine/test_packing.py::test_little_is_wasted).

    >>> import jax
    >>> packing = jax.jit(lambda work: pack(work, (10, 100), chunk=2, num_devices=1))(jnp.array([3, 50, 4, 60]))
    >>> packing.source.tolist(), packing.kind.tolist()  # slots 3 and 1 have the most rows; the last chunk is empty
    ([[[3, 1], [2, 0], [4, 4]]], [[1, 0, 0]])
    """
    num_slots = sizes.shape[0]
    num_classes = len(capacities)
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    # A class follows from the client's own size and from nothing else, and so do the bits of its work.
    kind = (sizes[:, None] > jnp.array(capacities[:-1], jnp.int32)[None, :]).sum(1, dtype=jnp.int32)
    order = jnp.argsort(-sizes, stable=True).astype(jnp.int32)
    kind = kind[order]
    # From here on slots are in the order of falling size. Devices are dealt 0 1 2 2 1 0 0 1 2 ..., so that each gets
    # about the same work. A device gets one slot in a turn, so the turn is also the slot's rank on its device.
    turn, seat = np.divmod(np.arange(num_slots, dtype=np.int32), np.int32(num_devices))
    device = np.where(turn % 2, num_devices - 1 - seat, seat)
    is_in = (kind[:, None, None] == jnp.arange(num_classes)[None, None, :]) & (
        jnp.asarray(device)[:, None, None] == jnp.arange(num_devices)[None, :, None]
    )
    counts = is_in.sum(0, dtype=jnp.int32)[:, ::-1]  # [D, classes], largest clients first
    # Each class begins a new chunk on each device, so only the last chunk of a class has empty places.
    chunks = -(-counts // chunk)
    ends = jnp.cumsum(chunks, axis=1)
    starts = (ends - chunks) * chunk
    num_larger = jnp.cumsum(counts, axis=1) - counts  # slots of larger classes on the same device
    column = num_classes - 1 - kind
    place_on_device = starts[device, column] + (turn - num_larger[device, column])
    # The number of chunks must be static. Beyond the chunks that one class would fill, each other class may leave one
    # chunk that is not full.
    num_chunks = -(-num_slots // (num_devices * chunk)) + num_classes - 1
    place = jnp.zeros(num_slots, jnp.int32).at[order].set(device * (num_chunks * chunk) + place_on_device)
    source = jnp.full(num_devices * num_chunks * chunk, num_slots, jnp.int32).at[place].set(slots)
    # Classes follow each other from the largest down. So a chunk's class is the largest, less the number of classes
    # that have ended before the chunk. Chunks behind all slots are empty, and count as the smallest class.
    index = jnp.arange(num_chunks, dtype=jnp.int32)
    num_ended = (index[None, :, None] >= ends[:, None, :]).sum(2, dtype=jnp.int32)
    kinds = jnp.maximum(num_classes - 1 - num_ended, 0)
    return Packing(source.reshape(num_devices, num_chunks, chunk), kinds, place)
