"""Pytree arithmetic."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import tree

pytestmark = pytest.mark.optimised

MIXED = {"a": jnp.array([1.5, -0.0]), "b": (jnp.bfloat16(2), jnp.int32(3)), "c": []}


def test_sizes():
    """Catches bytes counted at four per scalar."""
    assert tree.num_bytes(MIXED) == 8 + 2 + 4
    assert tree.num_bytes(tree.spec(MIXED)) == tree.num_bytes(MIXED)
    assert tree.spec({"x": 1.0})["x"].shape == ()


def test_where_selects_and_never_multiplies():
    """Catches 0 * NaN; the condition's axes are the leaves' leading ones."""
    a = {"m": jnp.full((2, 3), jnp.nan), "v": jnp.array([jnp.inf, 1.0])}
    chosen = tree.where(jnp.array([False, True]), a, tree.zeros_like(a))
    assert chosen["v"].tolist() == [0, 1]
    assert chosen["m"][0].tolist() == [0, 0, 0] and np.isnan(chosen["m"][1]).all()
    assert tree.where(jnp.array(False), a, tree.zeros_like(a))["m"].tolist() == np.zeros((2, 3)).tolist()


def test_scaled():
    """Catches factors of columns in the place of rows', and a dtype that is promoted."""
    rows = {"m": jnp.ones((2, 2)), "v": jnp.array([3, 5], jnp.bfloat16)}
    found = tree.scaled(rows, jnp.array([2.0, -1.0]))
    assert found["m"].tolist() == [[2, 2], [-1, -1]] and found["v"].tolist() == [6, -5]
    assert found["v"].dtype == jnp.bfloat16 and tree.scaled(rows, 0.5)["m"].tolist() == [[0.5, 0.5]] * 2


def test_take_and_subtract():
    """Catches a gather along the wrong axis, and ids out of range that wrap around or give NaN."""
    assert tree.take_rows({"x": jnp.arange(6).reshape(3, 2)}, jnp.array([2, 0]))["x"].tolist() == [[4, 5], [0, 1]]
    outside = tree.take_rows(jnp.arange(6.0).reshape(3, 2), jnp.array([3, 2**31 - 1, -1, -(2**31)]))
    assert outside.tolist() == [[4, 5], [4, 5], [0, 1], [0, 1]]
    assert tree.subtract({"x": jnp.array([3.0])}, {"x": jnp.array([1.0])})["x"].tolist() == [2]


def test_packed_leaves_hold_the_same_numbers():
    """Catches a leaf that is lost or cast, and a large one that is copied."""
    large = jnp.arange(tree.MAX_GROUPED_LEAF + 1.0)
    found = tree.packed({"a": jnp.ones((2, 2)), "b": jnp.int32(3), "c": large, "d": jnp.float32(2)})
    assert [x.tolist() for x in found[:2]] == [[1, 1, 1, 1, 2], 3] and found[2] is large
    assert [x.dtype for x in found] == [jnp.float32, jnp.int32, jnp.float32]
