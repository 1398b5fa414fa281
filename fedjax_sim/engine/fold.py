"""The fold over cohort slots: the only place that knows about lanes, chunks, devices and hosts."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fedjax_sim import tree, validate
from fedjax_sim.engine import exact
from fedjax_sim.engine.packing import ALONE, pack
from fedjax_sim.engine.plan import Plan, plan_for
from fedjax_sim.types import Array, PyTree

__all__ = ["AXIS", "device_mesh", "fold", "is_unplaced", "one_device", "unplaced"]

AXIS = "clients"
_alone: contextvars.ContextVar = contextvars.ContextVar("alone", default=False)
_unplaced: contextvars.ContextVar = contextvars.ContextVar("unplaced", default=False)


@contextlib.contextmanager
def one_device() -> Iterator[None]:
    """`device_mesh()` is None inside the block: whole runs, not the clients of one, are shared out over the devices."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


@contextlib.contextmanager
def unplaced() -> Iterator[None]:
    """What is traced inside the block is read and never run: one device, whatever the mesh, and memory without limit.

    Guarantees: a round is the same program for any mesh, kind of client memory and number of processes
    (tests/running/test_fingerprint.py::test_devices_leave_no_trace).
    """
    token = _unplaced.set(True)
    try:
        with one_device():
            yield
    finally:
        _unplaced.reset(token)


def is_unplaced() -> bool:
    """Whether this is inside `unplaced`."""
    return _unplaced.get()


def device_mesh(num_devices: int | None = None) -> Mesh | None:
    """A mesh over the first `num_devices` visible devices (default: all, of all processes); None for a single device.

    Raises: ValueError where a process would be left without a part.
    """
    if _alone.get() and num_devices is None:
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
) -> tuple[PyTree, PyTree]:
    """Runs `each` for every slot and gathers the letters into one carry.

    Args:
      each: (shared, slot) -> (letter, per_slot), for ONE slot.
      accumulate: (shared, carry, letters [c, ...], slots [c, ...], valid [c] bool) -> carry. Slots that are not
        valid are the engine's padding and must leave the carry as it is.
      shared: what every client sees (broadcast, population, keys); an argument, never a closure.
      carry: the empty carry, all zeros.
      slots: pytree of [m, ...].
      plan: clients vmapped at once and letters summed at once; by default fitted to the cache.
      mesh: devices that share the slots; None for one device.
      sizes: [m] int32, for slots of unequal work: like goes with like (see `packing.pack`), whatever their order.
      capacities: with `sizes`, rows of the classes; `each` is then (shared, slot, rows), traced once per class.

    Returns: (carry over all slots, per_slot [m, ...]).

    Guarantees: temporary memory does not grow with m, apart from `per_slot`
    (tests/engine/test_fold.py::test_memory_is_flat_in_the_cohort); the carry has the same bits for any number of
    devices, order of slots and padding (tests/laws/test_invariance.py), packed by size too; packing itself changes no
    more than rounding (tests/laws/test_unequal.py).
    """
    num_slots = jax.tree.leaves(slots)[0].shape[0]
    mesh = None if is_unplaced() else mesh
    num_devices = mesh.size if mesh is not None else 1
    validate.integer("cohort slots", num_slots, 1, exact.MAX_CLIENTS, hint="Exact sums hold that many letters.")
    validate.integer("devices", num_devices, 1, exact.MAX_DEVICES, hint="Exact sums combine that many at once.")
    kinds = [partial(each, rows=rows) for rows in capacities] if sizes is not None else [each]
    if plan is None:
        plan = plan_for(jax.eval_shape(kinds[-1], shared, jax.tree.map(lambda x: x[0], slots))[0])
    # Neither may depend on the number of devices: compilers round differently in another loop.
    lanes = min(plan.lanes, num_slots)
    groups = min(max(plan.chunk // lanes, 1), -(-num_slots // lanes))  # of lanes in a chunk
    chunk = lanes * groups
    validate.integer("plan.chunk", chunk, 1, exact.MAX_CHUNK, hint="An exact sum adds that many letters at once.")
    if sizes is not None:
        groups, chunk = 1, lanes
        source, kind, place = pack(sizes, capacities, lanes, num_devices)
        source, kind = source.reshape(-1, groups, lanes), kind.reshape(-1)
        padding = 1
    else:
        chunks = -(-num_slots // (num_devices * chunk))
        padding = num_devices * chunks * chunk - num_slots
        source = jnp.arange(num_slots + padding, dtype=jnp.int32).reshape(num_devices * chunks, groups, lanes)
        kind = jnp.zeros(num_devices * chunks, jnp.int32)

    def blocks(x: Array) -> Array:
        x = jnp.concatenate([x, jnp.zeros((padding, *x.shape[1:]), x.dtype)]) if padding else x
        return x[source] if sizes is not None else x.reshape(*source.shape, *x.shape[1:])

    def flat(leaves: PyTree, axes: int) -> PyTree:
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[axes:]), leaves)

    slots = jax.tree.map(blocks, slots)

    def work(shared, carry, slots):
        def vmapped(each, group, alone):
            if alone or lanes == 1:  # a batch axis of one would still turn matmuls into slower batched ones
                if lanes > 1:
                    return jax.lax.map(partial(each, shared), group)
                one = jax.tree.map(lambda x: x[0], group)
                return jax.tree.map(lambda x: jnp.asarray(x)[None], each(shared, one))
            return jax.vmap(each, in_axes=(None, 0))(shared, group)

        branches = [
            partial(vmapped, each, alone=bool(capacities) and capacities[i] > ALONE and len(kinds) > 1)
            for i, each in enumerate(kinds)
        ]

        def chunk_step(carry, slots):
            slots, positions, kind = slots
            if groups == 1:
                letters, per_slot = jax.lax.switch(kind, branches, jax.tree.map(lambda x: x[0], slots))
            else:
                letters, per_slot = flat(jax.lax.map(branches[0], slots), 2)
            letters, per_slot = tree.settled((letters, per_slot), tree.hidden_zero(letters))
            carry = accumulate(shared, carry, letters, flat(slots, 2), positions.reshape(-1) < num_slots)
            return carry, per_slot

        return jax.lax.scan(chunk_step, carry, slots)

    def on_device(shared, carry, slots):
        carry, per_slot = work(shared, carry, slots)
        return exact.combine(carry, AXIS), per_slot

    if mesh is None:
        carry, per_slot = work(shared, carry, (slots, source, kind))
    else:
        here, split = PartitionSpec(), PartitionSpec(AXIS)
        # Checked replication would sum gradients with respect to shared values over devices (a client's gradient is its
        # own), and would refuse every client whose loops start from constants.
        specs = {"in_specs": (here, here, split), "out_specs": (here, split), "check_vma": False}
        sharded = jax.shard_map(on_device, mesh=mesh, **specs)
        # Else the partitioner would split what made the slots, the sampling, and gather its parts again.
        slots, source, kind = jax.lax.with_sharding_constraint((slots, source, kind), NamedSharding(mesh, here))
        carry, per_slot = sharded(shared, carry, (slots, source, kind))
    there = slice(num_slots) if sizes is None else place
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[there], per_slot)
