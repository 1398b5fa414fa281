"""The buffer of a cohort's messages."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import engine


def test_rows_stand_by_slot_and_padding_is_dropped():
    """Catches rows in order of arrival, and the engine's padding (slot m) overwriting the last row."""
    rows = engine.buffer({"w": jax.ShapeDtypeStruct((2,), jnp.float32)}, 3)
    assert rows.values["w"].shape == (3, 2)
    filled = engine.fill(rows, jnp.array([2, 3, 0]), {"w": jnp.array([[1.0, 1.0], [9.0, 9.0], [2.0, 2.0]])})
    assert filled.values["w"].tolist() == [[2, 2], [0, 0], [1, 1]]
