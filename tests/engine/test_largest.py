"""The largest number of an array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import engine


@pytest.fixture(params=["cpu", "cuda"])
def target(request):
    with engine.compiling_for(request.param):
        yield


@pytest.mark.parametrize("size", [1, 63, 64, 65, 127, 513, 4_097, 100_003])
def test_largest_of_an_array(size, target):
    """At every place of it, alone and under vmap. Catches a part that is left out, a NaN that a comparison drops."""
    largest = jax.jit(engine.largest)
    x = np.random.default_rng(0).normal(size=size).astype(np.float32)
    for place in {0, size // 3, size - 1}:
        here = np.where(np.arange(size) == place, 9, x).astype(np.float32)
        assert float(largest(here)) == 9
        here[place] = np.nan
        assert np.isnan(largest(here))
        assert int(largest(np.where(np.arange(size) == place, -1, -2).astype(np.int32))) == -1
    rows = jnp.stack([x, -x])
    np.testing.assert_array_equal(jax.vmap(engine.largest)(rows), np.asarray(rows).max(1))


@pytest.mark.parametrize(("rows", "size"), [(4_000, 2), (64, 64), (512, 513), (3, 5_000)])
def test_no_nan_of_many_arrays_is_lost(rows, size, target):
    """Catches the maximum of XLA:CPU over the last axis of many rows, which drops NaN: broken clients would be kept."""
    x = np.random.default_rng(0).normal(size=(rows, size)).astype(np.float32)
    x[np.arange(rows), np.arange(rows) % size] = np.nan
    assert np.isnan(jax.jit(jax.vmap(engine.largest))(x)).all()
