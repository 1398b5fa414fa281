"""A buffer of fixed size for every message of a cohort, filled by slot: for aggregators that must see all of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.engine.barrier import unsigned_zeros
from fedjax_sim.types import Array, PyTree

__all__ = ["buffer", "fill"]


def buffer(spec: PyTree, num_slots: int) -> PyTree:
    """An empty buffer, leaves [m, ...] of zeros."""
    return jax.tree.map(lambda x: jnp.zeros((num_slots, *x.shape), x.dtype), spec)


def fill(buffer: PyTree, slots: Array, rows: PyTree) -> PyTree:
    """The buffer with `rows` [c, ...] at `slots`; slots at or past m (the engine's padding) are dropped.

    Zeros are stored without a sign: a sum over devices would turn -0.0 into 0.0, and one device would not.

    Guarantees: buffers filled from disjoint slots add to the buffer of their union
    (tests/laws/test_aggregators.py::test_carries_of_disjoint_slots_combine).
    """

    return jax.tree.map(lambda b, r: b.at[slots].set(r, mode="drop"), buffer, unsigned_zeros(rows))
