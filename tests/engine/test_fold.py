"""The fold over slots: shapes, padding, memory, gradients under a mesh."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import engine
from fedjax_sim.engine import Plan
from fedjax_sim.engine.arithmetic import exact_sums


def each(shared, slot):
    return shared * slot, slot + 1


def accumulate(shared, carry, messages, slots, valid):
    return exact_sums.add(carry, jnp.where(valid, messages, 0.0))


def folded(num_slots, plan, mesh=None):
    carry = exact_sums.zeros(jax.ShapeDtypeStruct((), jnp.float32))
    slots = jnp.arange(1.0, num_slots + 1)
    carry, rows = jax.jit(lambda s: engine.fold(each, accumulate, jnp.float32(2), carry, s, plan=plan, mesh=mesh))(
        slots
    )
    return float(exact_sums.total(carry)), np.asarray(rows)


@pytest.mark.default_rows(2)
@pytest.mark.parametrize("num_slots, plan", [(1, (4, 8)), (7, (2, 4)), (7, (1, 1)), (8, (4, 4)), (5, (1, 16))])
@pytest.mark.parametrize("devices", [1, 2])
def test_every_slot_once_and_rows_in_order(num_slots, plan, devices):
    """Catches slots lost or doubled where the chunk does not divide the cohort, and rows out of order."""
    mesh = engine.device_mesh(devices)
    result, rows = folded(num_slots, Plan(*plan), mesh)
    assert result == num_slots * (num_slots + 1)
    assert rows.tolist() == np.arange(2.0, num_slots + 2).tolist()


def test_chunks_without_anybody_are_skipped():
    """Two of the five chunks of two have somebody. Faults: a chunk that is computed for nobody, or skipped with
    somebody in it, a carry that it changes, another size class than its own."""
    seen = []

    def watched(shared, slot, rows=0):
        jax.debug.callback(lambda x: seen.append(float(x)), slot)
        return shared * slot, slot + 1

    slots, there = jnp.arange(1.0, 11), jnp.array([0, 0, 0, 1, 0, 0, 0, 0, 1, 1], bool)
    for packed in ({}, {"sizes": jnp.where(there, 5, 0), "capacities": (2, 9)}):

        def run(slots, there, packed=packed):
            carry = exact_sums.zeros(jax.ShapeDtypeStruct((), jnp.float32))
            how = {"plan": Plan(2, 2), "there": there} | packed
            return engine.fold(watched, accumulate, jnp.float32(2), carry, jnp.where(there, slots, 0), **how)

        seen.clear()
        carry, rows = jax.jit(run)(slots, there)
        jax.effects_barrier()
        assert float(exact_sums.total(carry)) == 2 * (4 + 9 + 10) and rows[there].tolist() == [5, 10, 11]
        assert sorted(seen) == [0, 4, 9, 10]


@pytest.mark.default_rows(2)
@pytest.mark.parametrize("plan", [Plan(1, 1), Plan(2, 2), Plan(2, 4), Plan(3, 3), None])
def test_a_chunk_sees_what_the_chunks_before_left(plan):
    """A message is the slot's number plus one more than the carry before its chunk; without a plan all are one chunk.
    Catches a carry of another chunk, and a plan that is made of what is not there before a chunk's turn."""

    def add(shared, carry, messages, slots, valid):
        return carry + jnp.where(valid, messages, 0).sum()

    def run(slots, **how):
        renewed = lambda shared, carry: 1 + carry  # noqa: E731
        each = lambda shared, slot: (shared + slot, shared)  # noqa: E731
        return engine.fold(each, add, None, jnp.float32(0), slots, plan=plan, renewed=renewed, **how)

    slots, carry, seen = np.arange(1.0, 8), 0.0, []
    chunk = 7 if plan is None else plan.chunk
    for at in range(0, 7, chunk):
        here = slots[at : at + chunk]
        seen += [1 + carry] * len(here)
        carry += (1 + carry + here).sum()
    found, rows = jax.jit(run)(jnp.float32(slots))
    assert float(found) == carry and rows.tolist() == seen
    for how in ({"mesh": engine.device_mesh(2)}, {"sizes": jnp.ones(7, jnp.int32), "capacities": (1, 2)}):
        with pytest.raises(ValueError, match="renewed"):
            run(jnp.float32(slots), **how)


def test_gradients_stay_local_under_a_mesh():
    """JAX sums gradients of replicated values over the devices. Catches a fold that lets it."""

    def gradient(w, x):
        return jax.grad(lambda w: (w * x) ** 2 / 2)(w), ()

    def run(mesh):
        carry = exact_sums.zeros(jax.ShapeDtypeStruct((), jnp.float32))
        x = jnp.arange(1.0, 5.0)
        out = jax.jit(lambda w: engine.fold(gradient, accumulate, w, carry, x, plan=Plan(1, 2), mesh=mesh)[0])(2.0)
        return float(exact_sums.total(out))

    assert run(None) == run(engine.device_mesh(2)) == 60.0


def test_memory_is_flat_in_the_cohort():
    """Catches messages that are stacked over the cohort: 16 times the slots, under 5 % more temporary memory.

    Messages of 64 KiB; stacked they would take 64 MiB at 1,024 slots.
    """
    spec = jax.ShapeDtypeStruct((16384,), jnp.float32)

    def message(shared, slot):
        return jnp.sin(shared * slot), ()

    def temporary(num_slots):
        def run(shared, slots):
            return engine.fold(message, accumulate_rows, shared, exact_sums.zeros(spec), slots, plan=Plan(2, 4))[0]

        lowered = jax.jit(run).lower(spec, jax.ShapeDtypeStruct((num_slots,), jnp.float32))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    def accumulate_rows(shared, carry, messages, slots, valid):
        return exact_sums.add(carry, jnp.where(valid[:, None], messages, 0.0))

    small, large = temporary(64), temporary(1024)
    assert large < 1.05 * small + 64 * 1024  # the slots themselves
    assert large < 4 << 20


def test_idle_accelerators_are_told():
    """Faults: a node of which one device trains and the others compute for nobody, in silence; a warning where no lanes
    could help, on a CPU, or within a quarter."""
    mesh = engine.device_mesh(2)

    def warnings_of(platform, num_slots, lanes):
        with warnings.catch_warnings(record=True) as caught, engine.compiling_for(platform):
            warnings.simplefilter("always")
            carry = exact_sums.zeros(jax.ShapeDtypeStruct((), jnp.float32))
            args = jnp.float32(2), carry, jnp.arange(float(num_slots))
            jax.eval_shape(
                lambda *args: engine.fold(each, accumulate, *args, plan=Plan(lanes, lanes), mesh=mesh), *args
            )
        return [str(warning.message) for warning in caught]

    (words,) = warnings_of("cuda", 9, 9)
    assert words.startswith(
        "9 clients in groups of 9 leave 9 of 18 places on 2 devices empty. State lanes = 5: run.lanes"
    )
    assert not warnings_of("cuda", 9, 5)
    assert not warnings_of("cuda", 1, 1)
    assert not warnings_of("cpu", 9, 9)


def test_device_mesh_counts():
    """Catches a request for more devices than there are that silently gets fewer."""
    assert engine.device_mesh(1) is None
    assert engine.device_mesh().size == len(jax.devices())
    for wrong, error in ((0, ValueError), (len(jax.devices()) + 1, ValueError), (True, TypeError), (1.0, TypeError)):
        with pytest.raises(error, match="num_devices: expected"):
            engine.device_mesh(wrong)
