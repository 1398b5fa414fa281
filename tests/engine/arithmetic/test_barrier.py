"""Barriers change no bit, and compilers leave them standing."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import engine
from fedjax_sim.engine.arithmetic import barrier

pytestmark = pytest.mark.optimised


def test_rounded_here_keeps_every_bit():
    """Catches a barrier that rounds, loses the sign of zero or touches integers."""
    values = {"f": jnp.array([2e-38, -0.0, jnp.inf, 3.3]), "h": jnp.array([1.5], jnp.bfloat16), "i": jnp.array([7])}
    rounded = jax.jit(engine.rounded_here)(values, barrier.HiddenZero(jnp.int32(0)))
    for x, y in zip(jax.tree.leaves(values), jax.tree.leaves(rounded), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.default_rows(2)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"])
def test_hidden_zero_is_zero(dtype):
    """Catches a double whose upper half is cut off, a sign, and an empty leaf that is asked for its first number."""
    with jax.enable_x64(True):
        for value in (0.1, -0.1, -3.0, 0.0, -0.0, 1e30, float("nan")):
            if (value == value and abs(value) < 100) or dtype in ("float64", "float32", "bfloat16"):
                x = jnp.array(value, jnp.float64).astype(dtype)
                zero = barrier.hidden_zero({"a": jnp.zeros((0, 2)), "b": x}).value
                assert int(zero) == 0 and zero.dtype == jnp.int32
        assert int(barrier.hidden_zero([jnp.zeros(0)]).value) == int(barrier.hidden_zero([]).value) == 0


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("impl", ["threefry2x32", "threefry4x32", "rbg"])
def test_a_source_may_be_a_key(impl):
    """Catches words of a key that are read otherwise than `key_data` gives them, and a zero taken for a source."""
    key = jax.random.key(7, impl=impl)
    by_key = jax.make_jaxpr(lambda key: barrier.hidden_zero({"k": key, "x": jnp.float32(3)}).value)(key)
    by_words = jax.make_jaxpr(
        lambda key: barrier.hidden_zero({"k": jax.random.key_data(key), "x": jnp.float32(3)}).value
    )(key)
    assert str(by_key) == str(by_words) and int(barrier.hidden_zero(key).value) == 0
    zero = barrier.hidden_zero(key)
    assert barrier.hidden_zero(zero) is zero


def test_computed_once_keeps_every_bit_and_its_loop():
    """Under vmap too. Catches a loop that turns, a dtype that it cannot carry, and one that the compiler takes away."""
    key = jax.random.key(3)
    values = {
        "f": jnp.array([1e-40, -0.0, jnp.nan]), "h": jnp.ones(1, jnp.bfloat16), "u": jnp.array([7], jnp.uint32),
        "b": jnp.array([True, False]), "k": jnp.stack([key]),
    }  # fmt: skip
    zero = barrier.hidden_zero(jnp.array([-2.5]))
    assert int(zero.value) == 0 and int(barrier.hidden_zero(jnp.array([True])).value) == 0
    out = jax.jit(jax.vmap(barrier.computed_once, (0, None)))(jax.tree.map(lambda x: x[None], values), zero)
    for x, y in zip(jax.tree.leaves(values), jax.tree.leaves(out), strict=True):
        x, y = (jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a for a in (x, y[0]))
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="accelerators have no loop")
def test_a_barrier_costs_nothing():
    """Catches a loop that the compiler takes away, a test or a body that it must compile, and a value that is computed
    although nothing reads it. Under a zero for each client, too, the loop stays."""

    def first(x, y, source):
        return barrier.computed_once((x * 2, jnp.cos(y)), source)[0] + 1

    x, y, sources = jnp.ones(8), jnp.ones(9), jnp.ones((3, 1))
    text = jax.jit(first).lower(x, y, sources[0]).compile().as_text()
    assert " while(" in text and "cosine" not in text
    loop = [re.findall(rf"{part}=%?([\w.-]+)", text) for part in ("condition", "body")]
    for (name,) in loop:
        region = re.search(rf"^%?{re.escape(name)} .*?^}}", text, re.DOTALL | re.MULTILINE)[0]
        assert set(re.findall(r" = .*? ([a-z-]+)\(", region)) <= {"parameter", "get-tuple-element", "tuple"}, region
    each = jax.jit(jax.vmap(first, (None, None, 0)))
    assert " while(" in each.lower(x, y, sources).compile().as_text()
    np.testing.assert_array_equal(each(x, y, sources), np.full((3, 8), 3.0))
