"""Normalisation and blocks as layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.models import blocks, sequential

X = 3 * jax.random.normal(jax.random.key(0), (4, 5, 3, 6)) + 7


def applied(one, x, params=None):
    params = one.init(jax.random.key(1)) if params is None else {one.name: params}
    return np.asarray(jax.jit(one.apply)(params, x))


def test_norms_equal_linen():
    """Catches another axis, another epsilon, groups of the wrong features, and scales that are shared."""
    own = {"scale": np.arange(6, dtype=np.float32), "bias": np.arange(6, dtype=np.float32) - 2}
    for ours, theirs in (
        (blocks.group_norm("norm", 6, groups=3), nn.GroupNorm(3)),
        (blocks.layer_norm("norm", 6), nn.LayerNorm()),
    ):
        expected = jax.jit(theirs.apply)({"params": own}, X)
        np.testing.assert_allclose(applied(ours, X, own), expected, rtol=2e-5, atol=2e-5)


def test_norms_look_at_one_example():
    """Catches statistics of a batch: what else is in it, NaN too, would change a client's model."""
    for one in (blocks.group_norm("norm", 6, groups=2), blocks.layer_norm("norm", 6)):
        assert (applied(one, X)[:1] == applied(one, X[:1])).all()
        assert np.isfinite(applied(one, X.at[1].set(jnp.nan))[0]).all()


def test_blocks_by_hand():
    """Catches a residual without its shortcut and branches in another order."""
    x = jnp.array([[1.0, -2.0]])
    double = blocks.layer("double", None, lambda x: 2 * x)
    for one, expected in (
        (blocks.residual("r", [double]), [[3.0, -6.0]]),
        (blocks.two_branch("t", [double], []), [[2.0, -4.0, 1.0, -2.0]]),
        (blocks.two_branch("t", [double], [], join="add"), [[3.0, -6.0]]),
    ):
        assert sequential([one]).apply({}, (), x, None, False)[0].tolist() == expected
    image = sequential([blocks.convolutional("c", 6, 4, stride=2), blocks.flatten()])
    out = jax.eval_shape(lambda: image.apply(image.init(jax.random.key(0))[0], (), X, None, False)[0])
    assert out.shape == (4, 3 * 2 * 4)
    with pytest.raises(ValueError, match="divisor"):
        blocks.group_norm("norm", 6, groups=4)
