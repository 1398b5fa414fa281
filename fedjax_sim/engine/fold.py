"""The fold over cohort slots: the only place that knows about lanes, chunks, devices and hosts.

Slots are laid out in chunks of `groups` times `lanes`. The clients of a group are vmapped, the messages of a chunk are
summed at once, and the chunks of a device follow each other in a scan.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fedjax_sim import validate
from fedjax_sim.engine.all_messages.rows import AXIS, Rows, spread_rows
from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.engine.arithmetic.barrier import computed_once
from fedjax_sim.engine.packing import ALONE, pack
from fedjax_sim.engine.plan import Plan, plan_for
from fedjax_sim.types import Array, PyTree

__all__ = ["AXIS", "device_mesh", "fold", "is_unplaced", "one_device", "unplaced"]

_one_device = jax.make_user_context(False)  # JAX traces a function anew where the context is another
_unplaced = jax.make_user_context(False)


@contextlib.contextmanager
def one_device() -> Iterator[None]:
    """Inside the block `device_mesh()` is None: devices share out whole runs, and not the clients of one run."""
    with _one_device(True):
        yield


@contextlib.contextmanager
def unplaced() -> Iterator[None]:
    """For programs that are traced only to be read: inside the block they are for one device, whatever the mesh, and
    client memory is a plain array of any size.

    Guarantees: a round is the same program for any mesh, kind of client memory and number of processes
    (tests/running/test_fingerprint.py::test_devices_leave_no_trace).
    """
    with _unplaced(True), one_device():
        yield


def is_unplaced() -> bool:
    """Whether this is inside `unplaced`."""
    return _unplaced.value


def device_mesh(num_devices: int | None = None) -> Mesh | None:
    """A mesh over the first `num_devices` visible devices (default: all, of all processes); None for a single device.

    Raises: ValueError for more devices than there are, or where a process would be left without one of them.
    """
    if _one_device.value and num_devices is None:
        return None
    visible = jax.devices()
    num_devices = len(visible) if num_devices is None else num_devices
    validate.integer("num_devices", num_devices, 1, len(visible), hint="More are needed? Start JAX with more devices.")
    if jax.process_count() > 1 and num_devices != len(visible):
        hint = f"{jax.process_count()} processes share them, and each must have its part."
        validate.fail("num_devices", f"all {len(visible)} devices", num_devices, hint)
    if num_devices == 1:
        return None
    return jax.make_mesh((num_devices,), (AXIS,), devices=visible[:num_devices], axis_types=(AxisType.Auto,))


class _Layout(NamedTuple):
    """Which slot stands at which place. The chunks of the first device come first, then those of the second, ..."""

    source: Array  # [chunks, groups, lanes] int32: the slot at each place, num_slots or more at an empty one
    kind: Array  # [chunks] int32: the size class of a chunk
    place: Array | slice  # of the flat places, those of the slots in their order
    padding: int  # empty slots behind the slots, which the empty places read
    packed: bool  # whether slots are packed by size, else they stand in their order


def _layout(
    num_slots: int, num_devices: int, groups: int, lanes: int, sizes: Array | None, capacities: tuple[int, ...]
) -> _Layout:
    """Slots over devices: packed by size if sizes are given, with one group to a chunk, else in their order."""
    if sizes is not None:
        source, kind, place = pack(sizes, capacities, lanes, num_devices)
        return _Layout(source.reshape(-1, 1, lanes), kind.reshape(-1), place, 1, True)
    chunks = num_devices * -(-num_slots // (num_devices * groups * lanes))
    source = jnp.arange(chunks * groups * lanes, dtype=jnp.int32).reshape(chunks, groups, lanes)
    return _Layout(source, jnp.zeros(chunks, jnp.int32), slice(num_slots), source.size - num_slots, False)


def _laid_out(x: Array, layout: _Layout) -> Array:
    """Slots [m, ...] at their places, [chunks, groups, lanes, ...]."""
    x = jnp.concatenate([x, jnp.zeros((layout.padding, *x.shape[1:]), x.dtype)]) if layout.padding else x
    return x[layout.source] if layout.packed else x.reshape(*layout.source.shape, *x.shape[1:])


def _flat(leaves: PyTree, axes: int) -> PyTree:
    """The first axes of each leaf as one."""
    return jax.tree.map(lambda x: x.reshape(math.prod(x.shape[:axes]), *x.shape[axes:]), leaves)


def _is_rows(x) -> bool:
    return isinstance(x, Rows)


def _with_rows(carry: PyTree, change: Callable) -> PyTree:
    return jax.tree.map(lambda x: change(x) if _is_rows(x) else x, carry, is_leaf=_is_rows)


def _run_group(each: Callable, alone: bool, shared: PyTree, group: PyTree) -> tuple[PyTree, PyTree]:
    """`each` of the slots of a group [lanes, ...]: together, or one after the other if `alone`."""
    lanes = jax.tree.leaves(group)[0].shape[0]
    if lanes == 1:  # without a batch axis: even one of length one would turn matmuls into slower batched ones
        one = jax.tree.map(lambda x: x[0], group)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], each(shared, one))
    if alone:
        return jax.lax.map(partial(each, shared), group)
    return jax.vmap(each, in_axes=(None, 0))(shared, group)


def _chunk_step(
    branches: list[Callable], accumulate: Callable, num_slots: int, shared: PyTree, renewed: Callable | None
) -> Callable:
    """The scan's step: a chunk's messages are made, computed once, and accumulated.

    Args:
      branches: for each size class, (shared, group [lanes, ...]) -> (messages, per_slot) [lanes, ...].

    Where the chunk says who is there, one without anybody leaves the carry as it is, and has zeros for each slot.
    """

    def step(carry, chunk):
        slots, there, positions, kind = chunk
        if there is None:
            return done(carry, slots, positions, kind)
        like = jax.eval_shape(done, carry, slots, positions, kind)[1]
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        return jax.lax.cond(there.any(), done, lambda carry, *chunk: (carry, nothing), carry, slots, positions, kind)

    def done(carry, slots, positions, kind):
        now = shared if renewed is None else renewed(shared, carry)
        ways = [partial(branch, now) for branch in branches]
        if positions.shape[0] == 1:
            messages, per_slot = jax.lax.switch(kind, ways, jax.tree.map(lambda x: x[0], slots))
        else:
            messages, per_slot = _flat(jax.lax.map(ways[0], slots), 2)
        messages, per_slot = computed_once((messages, per_slot), messages)
        carry = accumulate(shared, carry, messages, _flat(slots, 2), positions.reshape(-1) < num_slots)
        return carry, per_slot

    return step


def fold(
    each: Callable,
    accumulate: Callable,
    shared: PyTree,
    carry: PyTree,
    slots: PyTree,
    *,
    plan: Plan | None = None,
    mesh: Mesh | None = None,
    sizes: Array | None = None,
    capacities: tuple[int, ...] = (),
    there: Array | None = None,
    renewed: Callable | None = None,
) -> tuple[PyTree, PyTree]:
    """Runs `each` for every slot and accumulates the messages into one carry.

    Args:
      each: (shared, slot) -> (message, per_slot), for ONE slot.
      accumulate: (shared, carry, messages [c, ...], slots [c, ...], valid [c] bool) -> carry. Slots that are not
        valid are the engine's padding and must leave the carry as it is.
      shared: what every client sees (broadcast, population, keys); an argument, never a closure.
      carry: the empty carry, all zeros; any values where there is no `mesh`.
      slots: pytree of [m, ...].
      plan: clients vmapped at once and messages summed at once; by default fitted to the cache.
      mesh: devices that share the slots; None for one device.
      sizes: [m] int32, rows of each slot's client, where their work differs: a chunk then holds clients of one size
        class (see `packing.pack`), whatever the order of the slots.
      capacities: with `sizes`, rows of the classes; `each` is then (shared, slot, rows), traced once per class.
      there: [m] bool, slots that may send a message; chunks without one are skipped, and have zeros for each slot.
        Under a vmap they are computed all the same. None: all may.
      renewed: (shared, carry) -> shared: what the clients of a chunk see of what the chunks before it left. Slots then
        follow each other in their order, so there may be neither `mesh` nor `sizes`. None: all see the same.

    Returns: (carry over all slots, per_slot [m, ...]).

    Guarantees: temporary memory does not grow with m, apart from `per_slot`
    (tests/engine/test_fold.py::test_memory_is_flat_in_the_cohort); the carry has the same bits for any number of
    devices, order of slots and padding (tests/laws/test_invariance.py), packed by size too; packing itself changes no
    more than rounding (tests/laws/test_unequal.py).
    """
    num_slots = jax.tree.leaves(slots)[0].shape[0]
    mesh = None if is_unplaced() else mesh
    num_devices = mesh.size if mesh is not None else 1
    validate.integer("cohort slots", num_slots, 1, exact_sums.MAX_CLIENTS, hint="Exact sums hold that many messages.")
    validate.integer("devices", num_devices, 1, exact_sums.MAX_DEVICES, hint="Exact sums combine that many at once.")
    if renewed is not None and (mesh is not None or sizes is not None):
        validate.fail("renewed", "None where devices share the slots, or sizes turn their order", renewed)
    kinds = [partial(each, rows=rows) for rows in capacities] if sizes is not None else [each]
    if plan is None:
        now = shared if renewed is None else jax.eval_shape(renewed, shared, carry)
        plan = plan_for(jax.eval_shape(kinds[-1], now, jax.tree.map(lambda x: x[0], slots))[0])
    # Lanes and groups may not depend on the number of devices: compilers round differently in another loop.
    lanes = min(plan.lanes, num_slots)
    groups = min(max(plan.chunk // lanes, 1), -(-num_slots // lanes))  # of lanes in a chunk
    validate.integer("plan.chunk", lanes * groups, 1, exact_sums.MAX_CHUNK, hint="An exact sum adds that many at once.")
    layout = _layout(num_slots, num_devices, groups, lanes, sizes, capacities)
    slots, there = jax.tree.map(lambda x: _laid_out(x, layout), (slots, there))
    branches = [partial(_run_group, each, len(kinds) > 1 and capacities[i] > ALONE) for i, each in enumerate(kinds)]

    def work(shared, carry, chunks):
        return jax.lax.scan(_chunk_step(branches, accumulate, num_slots, shared, renewed), carry, chunks)

    def on_device(shared, carry, chunks):
        here, every = layout.source.size // num_devices, jnp.arange(layout.source.size, dtype=jnp.int32)
        local = partial(spread_rows, place=every[layout.place], number=here, first=jax.lax.axis_index(AXIS) * here)
        carry, per_slot = work(shared, _with_rows(carry, local), chunks)
        rows = [x.values for x in jax.tree.leaves(carry, is_leaf=_is_rows) if _is_rows(x)]
        return exact_sums.combine(_with_rows(carry, lambda x: None), AXIS), rows, per_slot

    chunks = slots, there, layout.source, layout.kind
    if mesh is None:
        carry, per_slot = work(shared, carry, chunks)
    else:
        here, split = PartitionSpec(), PartitionSpec(AXIS)
        # Checked replication would sum gradients with respect to shared values over devices (a client's gradient is its
        # own), and would refuse every client whose loops start from constants.
        specs = {"in_specs": (here, here, split), "out_specs": (here, split, split), "check_vma": False}
        sharded = jax.shard_map(on_device, mesh=mesh, **specs)
        # Else the partitioner would split what made the slots, the sampling, and gather its parts again.
        chunks = jax.lax.with_sharding_constraint(chunks, NamedSharding(mesh, here))
        sums, rows, per_slot = sharded(shared, carry, chunks)
        rows, place = iter(rows), jnp.arange(layout.source.size, dtype=jnp.int32)[layout.place]
        whole = lambda like, x: Rows(next(rows), place, mesh) if _is_rows(like) else x  # noqa: E731
        carry = jax.tree.map(whole, carry, sums, is_leaf=_is_rows)
    return carry, jax.tree.map(lambda x: x[layout.place], _flat(per_slot, 2))
