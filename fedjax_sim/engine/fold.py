"""Runs one function for every slot of a cohort, and accumulates the messages of all slots into one carry.

This is the only module that knows about lanes, chunks, devices and hosts. Lanes are the clients under one `vmap`; they
make a group. A chunk is `groups` times `lanes` slots, whose messages are summed at once. The chunks of a device follow
each other in a scan.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from fedjax_sim import validate
from fedjax_sim.engine.all_messages.rows import AXIS as AXIS, Rows, spread_rows
from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.engine.arithmetic.barrier import computed_once
from fedjax_sim.engine.jaxpr import traced_once
from fedjax_sim.engine.packing import ALONE, pack
from fedjax_sim.engine.plan import Plan, plan_for
from fedjax_sim.engine.platform import target, visible_devices
from fedjax_sim.types import Array, PyTree

# The largest share of empty places on several accelerators that nobody is warned of.
MAX_EMPTY = 0.25
# These settings are part of JAX's trace context: a function that was traced under another setting is traced anew.
_one_device = jax.make_user_context(False)
_unplaced = jax.make_user_context(False)
_assumed_devices = jax.make_user_context(None)


@contextlib.contextmanager
def one_device() -> Iterator[None]:
    """Makes `device_mesh()` return None inside the block.

    It is for code that gives whole runs to devices, so that the clients of one run must not be split among them.
    """
    with _one_device(True):
        yield


@contextlib.contextmanager
def unplaced() -> Iterator[None]:
    """Traces programs that are only read, and never run, as if there were a single device.

    Inside the block any mesh is ignored, and client memory is a plain array of any size.

    Guarantees:
      A round is the same program for any mesh, kind of client memory and number of processes
      (tests/running/test_fingerprint.py::test_devices_leave_no_trace).
    """
    with _unplaced(True), one_device():
        yield


def is_unplaced() -> bool:
    """Returns whether the caller is inside `unplaced`."""
    return _unplaced.value


@contextlib.contextmanager
def assumed_devices(num_devices: int) -> Iterator[None]:
    """Traces programs that are only read, and never run, for a number of devices that need not be here.

    Guarantees:
      The program of a round is that of a machine with so many devices
      (tests/running/test_same_program.py::test_the_program_of_other_devices).
    """
    # Of nested blocks the inner one holds: a run on one device reads a checkpoint's program for the devices of that.
    with _one_device(False), _assumed_devices(num_devices):
        yield


def mesh_for(stated: Mesh | Literal["all"] | None) -> Mesh | AbstractMesh | None:
    """Returns the devices that share a cohort, as an algorithm states them: a mesh, "all" or None for one device.

    Inside of `assumed_devices` these are the assumed ones, whatever the algorithm states.
    """
    return device_mesh() if stated == "all" or _assumed_devices.value is not None else stated


def device_mesh(num_devices: int | None = None) -> Mesh | AbstractMesh | None:
    """Returns a mesh over the first visible devices, or None for a single device.

    Args:
      num_devices: how many devices the mesh has; None takes all devices of all processes. Inside `one_device`, None
        returns None. Inside `assumed_devices` the assumed devices are returned.

    Raises:
      ValueError: for more devices than there are, or if a process would be left without any device of the mesh.
    """
    if _one_device.value and num_devices is None:
        return None
    if _assumed_devices.value is not None:
        number = _assumed_devices.value
        return None if number == 1 else AbstractMesh((number,), (AXIS,), axis_types=(AxisType.Auto,))
    visible = visible_devices()
    num_devices = len(visible) if num_devices is None else num_devices
    validate.integer("num_devices", num_devices, 1, len(visible), hint="More are needed? Start JAX with more devices.")
    if jax.process_count() > 1 and num_devices != len(visible):
        hint = f"{jax.process_count()} processes share them, and each must have its part."
        validate.fail("num_devices", f"all {len(visible)} devices", num_devices, hint)
    if num_devices == 1:
        return None
    return jax.make_mesh((num_devices,), (AXIS,), devices=visible[:num_devices], axis_types=(AxisType.Auto,))


def check_mesh(name: str, value: Any) -> None:
    """Raises InvalidType for a value that is neither a mesh nor "all", which stands for all visible devices."""
    if not isinstance(value, Mesh) and not (isinstance(value, str) and value == "all"):
        validate.fail(name, "'all', None or a Mesh", value, "engine.device_mesh(2) is one of two devices.", TypeError)


class _Layout(NamedTuple):
    """The places at which slots stand. The chunks of the first device come first, then the chunks of the second, ..."""

    source: Array  # [chunks, groups, lanes] int32: the slot at each place; num_slots or more at an empty place
    kind: Array  # [chunks] int32: the size class of each chunk
    place: Array | slice  # the flat place of each slot, in the order of slots
    padding: int  # how many empty slots are appended to the slots, for the empty places to read
    packed: bool  # whether slots are packed by size; else they stand in their own order


def num_places(num_slots: int, plan: Plan, mesh: Mesh | None) -> int:
    """Returns at how many places slots stand that are not packed by size: whole chunks on every device.

    >>> num_places(100, Plan(7, 7), None)
    105
    """
    lanes, groups = _groups_of(num_slots, plan)
    num_devices = 1 if mesh is None or is_unplaced() else mesh.size
    return num_devices * groups * lanes * -(-num_slots // (num_devices * groups * lanes))


def _groups_of(num_slots: int, plan: Plan) -> tuple[int, int]:
    """Returns (lanes, groups of lanes in a chunk).

    They may not depend on the number of devices: compilers round differently in another loop.
    """
    lanes = min(plan.lanes, num_slots)
    return lanes, min(max(plan.chunk // lanes, 1), -(-num_slots // lanes))


def _layout(
    num_slots: int, num_devices: int, groups: int, lanes: int, *, sizes: Array | None, capacities: tuple[int, ...]
) -> _Layout:
    """Returns the layout of slots over devices.

    Slots are packed by size if `sizes` are given, and a chunk is then one group. Else slots keep their order.

    Args:
      num_slots: m.
      num_devices: D, which get equally many chunks.
      groups: of lanes in a chunk; 1 is taken where slots are packed.
      lanes: slots under one `vmap`.
      sizes: [m] int32, rows of each slot's client; None = not packed.
      capacities: the number of rows of each size class, rising; () where slots are not packed.
    """
    if sizes is not None:
        source, kind, place = pack(sizes, capacities, lanes, num_devices)
        # Every empty place reads the same slot, num_slots: one empty slot is enough.
        return _Layout(source.reshape(-1, 1, lanes), kind.reshape(-1), place, 1, True)
    # Each device gets the same number of chunks, so the cohort is padded to whole chunks on all devices.
    chunks = num_devices * -(-num_slots // (num_devices * groups * lanes))
    source = jnp.arange(chunks * groups * lanes, dtype=jnp.int32).reshape(chunks, groups, lanes)
    return _Layout(source, jnp.zeros(chunks, jnp.int32), slice(num_slots), source.size - num_slots, False)


def _warn_of_idle_devices(num_slots: int, num_devices: int, lanes: int, layout: _Layout) -> None:
    """Warns where the lanes leave many places of several accelerators empty, with the lanes that would not.

    "Many" is a share above MAX_EMPTY. Nobody is warned on a CPU, or where slots are packed.

    Args:
      num_slots: m.
      num_devices: D.
      lanes: slots under one `vmap`.
      layout: of these slots.

    Guarantees: there is no warning where no lanes could help
      (tests/engine/test_fold.py::test_idle_accelerators_are_told).
    """
    num_places = layout.source.size
    shared_out = -(-num_slots // num_devices)
    if target() == "cpu" or layout.packed or num_places - num_slots <= MAX_EMPTY * num_places or shared_out >= lanes:
        return
    warnings.warn(
        f"{num_slots:,} clients in groups of {lanes:,} leave {num_places - num_slots:,} of {num_places:,} places on "
        f"{num_devices} devices empty. State lanes = {shared_out}: run.lanes in a config, plan=engine.Plan.checked("
        f"{shared_out}) in Python. They are a part of the result, so they do not follow from the devices.",
        stacklevel=2,
    )


def _laid_out(x: Array, layout: _Layout) -> Array:
    """Returns the slots [m, ...] at their places, [chunks, groups, lanes, ...]; or what has a row for each place."""
    if x.shape[0] == layout.source.size and not layout.packed:
        return x.reshape(*layout.source.shape, *x.shape[1:])
    x = jnp.concatenate([x, jnp.zeros((layout.padding, *x.shape[1:]), x.dtype)]) if layout.padding else x
    return x[layout.source] if layout.packed else x.reshape(*layout.source.shape, *x.shape[1:])


def _flat(leaves: PyTree, axes: int) -> PyTree:
    """Returns leaves whose first `axes` axes are merged into one axis."""
    return jax.tree.map(lambda x: x.reshape(math.prod(x.shape[:axes]), *x.shape[axes:]), leaves)


def _is_rows(x) -> bool:
    return isinstance(x, Rows)


def _with_rows(carry: PyTree, change: Callable) -> PyTree:
    """Returns the carry with each `Rows` in it changed."""
    return jax.tree.map(lambda x: change(x) if _is_rows(x) else x, carry, is_leaf=_is_rows)


def _run_group(each: Callable, alone: bool, shared: PyTree, group: PyTree) -> tuple[PyTree, PyTree]:
    """Runs `each` for the slots of a group [lanes, ...].

    The slots run together under a `vmap`, or one after the other if `alone`.
    """
    lanes = jax.tree.leaves(group)[0].shape[0]
    if lanes == 1:
        # A single slot runs without a batch axis. Even a batch axis of length one would turn matrix products into
        # slower batched ones.
        single_slot = jax.tree.map(lambda x: x[0], group)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], each(shared, single_slot))
    if alone:
        return jax.lax.map(partial(each, shared), group)
    return jax.vmap(each, in_axes=(None, 0))(shared, group)


def _chunk_step(
    branches: list[Callable],
    accumulate: Callable,
    num_slots: int,
    shared: PyTree,
    *,
    renewed: Callable | None,
    per_slot_spec: PyTree,
) -> Callable:
    """Returns the step of the scan over chunks.

    A step makes the messages of a chunk, computes them once, and accumulates them. A chunk that states which of its
    slots may send a message is skipped if there is no such slot: the carry stays, and each slot has zeros.

    Args:
      branches: for each size class, (shared, group [lanes, ...]) -> (messages, per_slot) [lanes, ...].
      accumulate, num_slots, shared, renewed: as in `fold`; `num_slots` is m.
      per_slot_spec: the shapes and dtypes of what is kept for one slot.
    """

    def step(carry, chunk):
        slots, is_there, positions, kind = chunk
        chunk = slots, positions, kind
        if is_there is None:
            return run_chunk(carry, chunk)
        zeros_per_slot = jax.tree.map(lambda x: jnp.zeros((positions.size, *x.shape), x.dtype), per_slot_spec)
        skip_chunk = lambda carry, chunk: (carry, zeros_per_slot)  # noqa: E731
        return jax.lax.cond(is_there.any(), run_chunk, skip_chunk, carry, chunk)

    def run_chunk(carry, chunk):
        slots, positions, kind = chunk
        shared_now = shared if renewed is None else renewed(shared, carry)
        group_runs = [partial(branch, shared_now) for branch in branches]
        if positions.shape[0] == 1:
            # Only a chunk of one group can choose among size classes. Packed slots always have such chunks.
            messages, per_slot = jax.lax.switch(kind, group_runs, jax.tree.map(lambda x: x[0], slots))
        else:
            messages, per_slot = _flat(jax.lax.map(group_runs[0], slots), 2)
        # Without this, XLA:CPU would compute a message anew in each operation that reads it, with another rounding.
        messages, per_slot = computed_once((messages, per_slot), messages)
        flat_slots = _flat(slots, 2)
        is_slot = positions.reshape(-1) < num_slots  # an empty place stands for slot num_slots or above
        carry = accumulate(shared, carry, messages, flat_slots, is_slot)
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
    held: PyTree = False,
) -> tuple[PyTree, PyTree]:
    """Runs `each` for every slot of a cohort and accumulates the messages into one carry.

    m is the number of slots of the cohort, c the number of slots in a chunk.

    Args:
      each: (shared, slot) -> (message, per_slot), for ONE slot.
      accumulate: (shared, carry, messages [c, ...], slots [c, ...], valid [c] bool) -> carry. Slots that are not
        valid are the engine's padding and must leave the carry as it is.
      shared: the values that every client sees (broadcast, population, keys). They are an argument, because large
        arrays that a function closes over become constants of the program.
      carry: the empty carry, all zeros. Without a `mesh` it may have any values.
      slots: pytree of [m, ...].
      plan: how many clients are vmapped at once, and how many messages are summed at once; None fits both to the cache.
      mesh: devices that share the slots; None for one device.
      sizes: [m] int32, rows of each slot's client, for clients whose work differs. A chunk then holds clients of one
        size class (see `packing.pack`), whatever the order of the slots. None: slots keep their order.
      capacities: with `sizes`, the number of rows of each class, rising. `each` is then (shared, slot, rows), and it is
        traced once per class.
      there: [m] bool, slots that may send a message; None: all may. A chunk without such a slot is skipped and has
        zeros for each slot. Under a `vmap` of the fold, skipped chunks are computed all the same.
      renewed: (shared, carry) -> shared, for clients that see what the chunks before theirs have left in the carry.
        Slots then follow each other in their order, so there may be neither `mesh` nor `sizes`. None: all clients see
        the same.
      held: a prefix of the pytree `slots`: True for leaves that are split over the devices of the mesh already, such as
        clients' states. A device then gets those of its own slots alone, unless slots are packed. Such leaves may have
        a row for each place (`num_places`), so that none moves to another device; those behind the slots count for
        nothing.

    Returns: (carry over all slots, per_slot [m, ...]).

    Raises:
      ValueError: for more slots, devices or messages of a chunk than exact sums hold, or for `renewed` together with
        `mesh` or `sizes`.

    Guarantees:
      Temporary memory does not grow with m, apart from `per_slot`
      (tests/engine/test_fold.py::test_memory_is_flat_in_the_cohort).
      The carry has the same bits for any number of devices, order of slots and padding, for packed slots too
      (tests/laws/test_invariance.py).
      Packing itself changes no more than rounding (tests/laws/test_unequal.py).

    >>> from fedjax_sim.engine import exact_sums
    >>> def each(scale, x):  # a message, and a value that is kept for the slot
    ...     return scale * x, x + 1
    >>> def accumulate(scale, carry, messages, slots, valid):
    ...     return exact_sums.add(carry, jnp.where(valid, messages, 0.0))
    >>> empty = exact_sums.zeros(jax.ShapeDtypeStruct((), jnp.float32))
    >>> carry, per_slot = fold(each, accumulate, 2.0, empty, jnp.arange(3.0))
    >>> float(exact_sums.total(carry)), per_slot.tolist()
    (6.0, [1.0, 2.0, 3.0])
    """
    num_slots = jax.tree.leaves(slots)[0].shape[0]
    mesh = None if is_unplaced() else mesh
    num_devices = mesh.size if mesh is not None else 1
    validate.integer("cohort slots", num_slots, 1, exact_sums.MAX_CLIENTS, hint="Exact sums hold that many messages.")
    validate.integer("devices", num_devices, 1, exact_sums.MAX_DEVICES, hint="Exact sums combine that many at once.")
    if renewed is not None and (mesh is not None or sizes is not None):
        validate.fail("renewed", "None where devices share the slots, or sizes turn their order", renewed)
    # Each size class has a program of its own, which reads no more rows than the clients of the class may have.
    each_by_class = [partial(each, rows=rows) for rows in capacities] if sizes is not None else [each]
    shared_spec = shared if renewed is None else jax.eval_shape(renewed, shared, carry)
    first_slot = jax.eval_shape(lambda slots: jax.tree.map(lambda x: x[0], slots), slots)
    traces = [traced_once(each, shared_spec, first_slot) for each in each_by_class]
    each_by_class = [each for each, _ in traces]
    message_spec, per_slot_spec = traces[-1][1]
    plan = plan_for(message_spec) if plan is None else plan

    lanes, groups = _groups_of(num_slots, plan)
    validate.integer("plan.chunk", lanes * groups, 1, exact_sums.MAX_CHUNK, hint="An exact sum adds that many at once.")
    layout = _layout(num_slots, num_devices, groups, lanes, sizes=sizes, capacities=capacities)
    _warn_of_idle_devices(num_slots, num_devices, lanes, layout)
    slots, there = jax.tree.map(lambda x: _laid_out(x, layout), (slots, there))
    # Under a vmap the client with most rows decides how long its group takes, so large clients run one by one. A
    # client's class follows from its own size alone, and so does this choice.
    branches = [
        partial(_run_group, each_of_class, len(each_by_class) > 1 and capacities[i] > ALONE)
        for i, each_of_class in enumerate(each_by_class)
    ]

    def run_chunks(shared, carry, chunks):
        step = _chunk_step(branches, accumulate, num_slots, shared, renewed=renewed, per_slot_spec=per_slot_spec)
        return jax.lax.scan(step, carry, chunks)

    def on_device(shared, carry, chunks):
        num_local = layout.source.size // num_devices
        all_places = jnp.arange(layout.source.size, dtype=jnp.int32)
        # A device keeps rows for its own places only.
        local_rows = partial(
            spread_rows,
            place=all_places[layout.place],
            number=num_local,
            first=jax.lax.axis_index(AXIS) * num_local,
        )
        carry, per_slot = run_chunks(shared, _with_rows(carry, local_rows), chunks)
        rows = [x.values for x in jax.tree.leaves(carry, is_leaf=_is_rows) if _is_rows(x)]
        # Sums are combined over devices. Rows stay where they are, and only the result's sharding joins them.
        return exact_sums.combine(_with_rows(carry, lambda x: None), AXIS), rows, per_slot

    chunks = slots, there, layout.source, layout.kind
    if mesh is None:
        carry, per_slot = run_chunks(shared, carry, chunks)
    else:
        replicated = PartitionSpec()
        split = PartitionSpec(AXIS)
        # Checked replication would sum gradients with respect to shared values over devices (a client's gradient is its
        # own), and would refuse every client whose loops start from constants.
        specs = {
            "in_specs": (replicated, replicated, split),
            "out_specs": (replicated, split, split),
            "check_vma": False,
        }
        sharded = jax.shard_map(on_device, mesh=mesh, **specs)
        # Without this constraint the partitioner would also split the sampling, which made the slots, and would gather
        # its parts again.
        whole, parts = NamedSharding(mesh, replicated), NamedSharding(mesh, split)
        of_slots = jax.tree.map(lambda is_held: parts if is_held and not layout.packed else whole, held)
        chunks = jax.lax.with_sharding_constraint(chunks, (of_slots, whole, whole, whole))
        sums, rows, per_slot = sharded(shared, carry, chunks)
        # The combined sums hold None in place of rows. The devices' rows are put back in the order of the leaves.
        rows = iter(rows)
        place = jnp.arange(layout.source.size, dtype=jnp.int32)[layout.place]
        with_rows = lambda like, x: Rows(next(rows), place, mesh) if _is_rows(like) else x  # noqa: E731
        carry = jax.tree.map(with_rows, carry, sums, is_leaf=_is_rows)
    return carry, jax.tree.map(lambda x: x[layout.place], _flat(per_slot, 2))
