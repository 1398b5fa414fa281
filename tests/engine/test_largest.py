"""The largest magnitude of an array, and whether all numbers are finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import engine

all_finite = jax.jit(engine.all_finite)


@pytest.fixture(params=["cpu", "cuda"])
def target(request):
    with engine.compiling_for(request.param):
        yield


@pytest.mark.default_rows(4)
@pytest.mark.parametrize("size", [1, 63, 64, 65, 127, 513, 4_097, 100_003])
def test_largest_of_an_array(size, target):
    """At every place of it, alone and under vmap. Catches a part that is left out, a NaN that a comparison drops."""
    largest = jax.jit(engine.largest_magnitude)
    x = np.random.default_rng(0).normal(size=size).astype(np.float32)
    for place in {0, size // 3, size - 1}:
        for top in (9.0, -9.0, np.inf, -np.inf):
            assert float(largest(np.where(np.arange(size) == place, np.float32(top), x))) == abs(top)
        for bad in (np.float32(np.nan), -np.float32(np.nan)):
            assert np.isnan(largest(np.where(np.arange(size) == place, bad, x)))
        assert int(largest(np.where(np.arange(size) == place, -2, 1).astype(np.int32))) == 2
    rows = np.stack([x, 2 * x])
    np.testing.assert_array_equal(jax.jit(jax.vmap(engine.largest_magnitude))(rows), np.abs(rows).max(1))


@pytest.mark.default_rows(2)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32, jnp.uint32])
def test_largest_of_every_dtype(dtype):
    """Catches bits that are read with another width, an empty array, and a zero whose sign stays."""
    largest = engine.largest_magnitude(jnp.array([[1, 2.5], [3, 0.5]], dtype))
    assert (float(largest), largest.dtype) == (3, dtype)
    assert float(engine.largest_magnitude(jnp.zeros((0, 3), dtype))) == 0
    zero = engine.largest_magnitude(-jnp.zeros(2, dtype))
    assert (float(zero), zero.dtype, bool(jnp.signbit(zero))) == (0, dtype, False)


@pytest.mark.default_rows(2)
@pytest.mark.parametrize(("rows", "size"), [(4_000, 2), (64, 64), (512, 513), (3, 5_000)])
def test_no_nan_of_many_arrays_is_lost(rows, size, target):
    """Catches the maximum of XLA:CPU over the last axis of many rows, which drops NaN: broken clients would be kept."""
    x = np.random.default_rng(0).normal(size=(rows, size)).astype(np.float32)
    x[np.arange(rows), np.arange(rows) % size] = np.nan
    assert np.isnan(jax.jit(jax.vmap(engine.largest_magnitude))(x)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_all_finite(bad):
    """Catches a check of the first leaf only, and one that fails for integers, keys or empty arrays."""
    good = {"a": jnp.ones((2, 3)), "b": jnp.arange(3), "c": jnp.zeros(0), "d": jax.random.key(0), "e": 1.0}
    assert bool(all_finite(good)) and bool(engine.all_finite(()))
    assert not bool(all_finite(good | {"z": np.array([0.0, bad], np.float32)}))
    assert not bool(all_finite(good | {"z": np.array([0.0, bad], jnp.bfloat16)}))
    for number in (complex(bad, 0), complex(0, bad)):
        assert not bool(all_finite(good | {"z": np.array([0.0, number], np.complex64)}))
    assert bool(all_finite(good | {"z": np.array([0.0, 3 + 4j], np.complex64)}))
