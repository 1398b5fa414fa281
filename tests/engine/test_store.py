"""Per-client memory: who is written, who is not, and what does not fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import engine


def test_put_leaves_absent_clients_alone():
    """Catches padding that writes, also when it carries a present client's id; catches ids past N wrapping round."""
    memory = {"a": jnp.arange(5.0), "b": jnp.zeros((5, 2))}
    ids = jnp.array([1, 3, 1, 0])
    rows = {"a": jnp.array([10.0, 30.0, -1.0, -1.0]), "b": jnp.ones((4, 2))}
    new = engine.put(memory, ids, rows, jnp.array([True, True, False, False]))
    assert new["a"].tolist() == [0, 10, 2, 30, 4]
    assert new["b"].sum(1).tolist() == [0, 2, 0, 2, 0]
    same = engine.put(memory, ids, rows, jnp.zeros(4, bool))
    assert all((x == y).all() for x, y in zip(jax.tree.leaves(same), jax.tree.leaves(memory), strict=True))


def test_store_starts_everyone_alike():
    """Catches a shared buffer between clients, and stateless clients that take memory."""
    memory = engine.store({"c": jnp.array([1.0, 2.0]), "n": jnp.int32(3)}, 4)
    assert np.asarray(memory["c"]).tolist() == [[1, 2]] * 4 and memory["n"].tolist() == [3] * 4
    assert engine.store((), 10**9) == ()


def test_store_refuses_what_does_not_fit():
    """Catches an allocation that would kill the process: the error holds the byte count."""
    with pytest.raises(MemoryError, match=r"client memory: expected at most .* got '4,000,000,000,000,000 bytes'"):
        engine.store(jnp.zeros(1000), 10**12)
