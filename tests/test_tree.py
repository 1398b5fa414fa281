"""Pytree arithmetic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import tree

pytestmark = pytest.mark.optimised

MIXED = {"a": jnp.array([1.5, -0.0]), "b": (jnp.bfloat16(2), jnp.int32(3)), "c": []}


def test_pinned_keeps_every_bit():
    """Catches a barrier that rounds, loses the sign of zero or touches integers."""
    values = {"f": jnp.array([2e-38, -0.0, jnp.inf, 3.3]), "h": jnp.array([1.5], jnp.bfloat16), "i": jnp.array([7])}
    pinned = jax.jit(tree.pinned)(values, jnp.int32(0))
    for x, y in zip(jax.tree.leaves(values), jax.tree.leaves(pinned), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"])
def test_hidden_zero_is_zero(dtype):
    """Catches a double whose upper half is cut off, a sign, and an empty leaf that is asked for its first number."""
    with jax.enable_x64(True):
        for value in (0.1, -0.1, -3.0, 0.0, -0.0, 1e30, float("nan")):
            if (value == value and abs(value) < 100) or dtype in ("float64", "float32", "bfloat16"):
                x = jnp.array(value, jnp.float64).astype(dtype)
                zero = tree.hidden_zero({"a": jnp.zeros((0, 2)), "b": x})
                assert int(zero) == 0 and zero.dtype == jnp.int32
        assert int(tree.hidden_zero([jnp.zeros(0)])) == int(tree.hidden_zero([])) == 0


def test_settled_keeps_every_bit_and_is_a_wall():
    """Under vmap too. Catches a wall that turns, a dtype that it cannot carry, and one that the compiler takes away."""
    key = jax.random.key(3)
    values = {
        "f": jnp.array([1e-40, -0.0, jnp.nan]), "h": jnp.ones(1, jnp.bfloat16), "u": jnp.array([7], jnp.uint32),
        "b": jnp.array([True, False]), "k": jnp.stack([key]),
    }  # fmt: skip
    zero = tree.hidden_zero(jnp.array([-2.5]))
    assert int(zero) == 0 and zero.dtype == jnp.int32 and int(tree.hidden_zero(jnp.array([True]))) == 0
    out = jax.jit(jax.vmap(tree.settled, (0, None)))(jax.tree.map(lambda x: x[None], values), zero)
    for x, y in zip(jax.tree.leaves(values), jax.tree.leaves(out), strict=True):
        x, y = (jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a for a in (x, y[0]))
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
    if jax.default_backend() == "cpu":
        program = jax.jit(lambda x, zero: tree.settled(x * 2, zero) + 1).lower(jnp.ones(8), jnp.int32(0)).compile()
        assert "while(" in program.as_text()


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


def test_take_and_subtract():
    """Catches a gather along the wrong axis."""
    assert tree.take({"x": jnp.arange(6).reshape(3, 2)}, jnp.array([2, 0]))["x"].tolist() == [[4, 5], [0, 1]]
    assert tree.subtract({"x": jnp.array([3.0])}, {"x": jnp.array([1.0])})["x"].tolist() == [2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_all_finite(bad):
    """Catches a check of the first leaf only."""
    assert bool(tree.all_finite(MIXED)) and bool(tree.all_finite(()))
    assert not bool(tree.all_finite(MIXED | {"z": jnp.array([0.0, bad])}))
