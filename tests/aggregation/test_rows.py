"""Norms and means over rows have the bits of NumPy, whatever program they stand in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import engine
from fedjax_sim.aggregation import rows

pytestmark = pytest.mark.optimised

RNG = np.random.default_rng(0)
UPDATES = {"a": RNG.normal(size=(7, 5, 33)).astype(np.float32), "b": RNG.normal(size=7).astype(np.float32)}
WEIGHTS = RNG.uniform(0.1, 3, 7).astype(np.float32)


def halves(x):
    """The sum over the first axis by halves, each a power of two long."""
    while len(x) > 1:
        half = 1 << (len(x) - 1).bit_length() - 1
        x = np.concatenate([x[: len(x) - half] + x[half:], x[len(x) - half : half]])
    return x[0]


def numpy_norms(updates):
    flat = (x.astype(np.float32).reshape(len(x), -1) for x in updates.values())
    return sum((halves((x * x).T) for x in flat), np.float32(0))


def numpy_mean(updates, weights):
    shaped = {k: weights.reshape(-1, *[1] * (x.ndim - 1)) for k, x in updates.items()}
    return {k: halves(x.astype(np.float32) * shaped[k]) / halves(weights) for k, x in updates.items()}


@pytest.mark.default_rows("float32")
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_bits_are_those_of_numpy(dtype):
    """With what is left of a fused product beside them. Catches a product that is fused, a sum that is vectorised, a
    quotient that became a product, and squares of a narrow leaf."""
    updates = {name: x.astype(dtype) for name, x in UPDATES.items()}
    norms, mean = numpy_norms(updates), numpy_mean(updates, WEIGHTS)

    @jax.jit
    @engine.reproducible
    def beside(updates, weights, norms, mean):
        """What others do with the values: a compiler may then compute them as it likes."""
        found, centre = rows.squared_norms(updates), rows.weighted_mean(updates, weights)
        apart = rows.squared_norms(jax.tree.map(lambda x: x[None], centre))
        return found - norms, jax.tree.map(jnp.subtract, centre, mean), apart * 3 + found.sum()

    left = beside(updates, WEIGHTS, norms, mean)[:2]
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(left))
    assert np.array_equal(jax.jit(engine.reproducible(rows.squared_norms))(updates), norms)
    for name, x in jax.jit(engine.reproducible(rows.weighted_mean))(updates, WEIGHTS).items():
        assert x.dtype == jnp.float32 and np.array_equal(x, mean[name])


def test_rows_without_a_weight():
    """Behind the others they change no bit; alone they give zeros. Catches 0 / 0, and an order of sums by slots."""
    padded = {name: np.concatenate([x, np.zeros((6, *x.shape[1:]), np.float32)]) for name, x in UPDATES.items()}
    weights = np.concatenate([WEIGHTS, np.zeros(6, np.float32)])
    mean = jax.jit(engine.reproducible(rows.weighted_mean))
    for x, y in zip(*(jax.tree.leaves(mean(*given)) for given in ((UPDATES, WEIGHTS), (padded, weights))), strict=True):
        assert np.array_equal(x, y)
    assert all(not np.any(x) for x in jax.tree.leaves(mean(UPDATES, np.zeros(7, np.float32))))


def test_derivatives_pass():
    """Catches a barrier that cuts the derivative of a hypergradient off."""
    both = lambda w: rows.weighted_mean(jnp.array([1.0, 4.0]), w) + rows.squared_norms(w[:, None]).sum()  # noqa: E731
    slope = jax.jit(jax.grad(both))
    np.testing.assert_allclose(slope(jnp.array([1.0, 2.0])), [2 - 2 / 3, 4 + 1 / 3], rtol=1e-6)
