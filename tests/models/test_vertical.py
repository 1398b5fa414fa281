"""Vertical models: columns, parameters, and the Taylor loss."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.models import (
    by_party,
    linear,
    sigmoid_cross_entropy,
    taylor_cross_entropy,
    vertical_linear,
    vertical_mlp,
)

X = np.random.default_rng(0).normal(size=(7, 6)).astype(np.float32)
COLUMNS = (3, 1, 2)


@functools.cache
def network():
    """A network of three parties, and its parameters."""
    model = vertical_mlp(columns=COLUMNS, num_outputs=2, hidden=(5,), embedding=3)
    return model, jax.device_get(model.init(jax.random.key(0))[0])


def test_the_two_forms_of_features():
    """Catches columns that overlap, or are left out."""
    model, params = network()
    outputs = jax.jit(lambda params, x: model.apply(params, (), x, None, False)[0])
    whole, parts = outputs(params, X), outputs(params, (X[:, :3], X[:, 3:4], X[:, 4:]))
    np.testing.assert_array_equal(whole, parts)
    assert whole.shape == (7, 2)
    for wrong in (X[:, :5], (X[:, :3], X[:, 3:])):
        with pytest.raises(ValueError, match=r"\[3, 1, 2\] columns"):
            model.apply(params, (), wrong, None, False)


def test_the_scores_are_those_of_one_table():
    """Kernels of all parties under each other are the centralised one."""
    model, rng = vertical_linear(columns=COLUMNS, num_outputs=2), np.random.default_rng(1)
    kernels = [rng.normal(size=(width, 2)).astype(np.float32) for width in COLUMNS]
    parties = {f"party_{p}": {"score": {"kernel": kernel}} for p, kernel in enumerate(kernels)}
    bias = np.array([0.5, -1.0], np.float32)
    found, _ = model.apply({"parties": parties, "bias": bias}, (), X, None, False)
    central = linear(input_shape=(6,), num_outputs=2)
    expected, _ = central.apply({"kernel": np.concatenate(kernels), "bias": bias}, (), X, None, False)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_parameters_of_the_network():
    """(3 + 1) 5 + (5 + 1) 3 of one party with 3 columns, and so on; (9 + 1) 16 + (16 + 1) 2 of the top."""
    _, params = network()
    count = sum((width + 1) * 5 + 6 * 3 for width in COLUMNS) + 10 * 16 + 17 * 2
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count
    one, other = (np.asarray(params["parties"][f"party_{p}"]["hidden_0"]["kernel"]) for p in (0, 2))
    assert (one[:2] != other).all()  # parties draw their own


def test_taylor():
    """log 2 - s z / 2 + z^2 / 8, within z^4 / 192 of the exact loss. Catches labels 0 and 1 for -1 and 1."""
    z = np.linspace(-3, 3, 41, dtype=np.float32)
    losses = [jax.jit(loss) for loss in (taylor_cross_entropy, sigmoid_cross_entropy)]
    slope_of = jax.jit(jax.grad(lambda z, y: taylor_cross_entropy(z, y)["loss"].sum()))
    for label in (0, 1):
        y = np.full(41, label)
        taylor, exact = (loss(z, y) for loss in losses)
        gap = np.abs(np.asarray(taylor["loss"]) - np.asarray(exact["loss"]))
        assert (gap <= np.asarray(z) ** 4 / 192 + 1e-6).all() and gap.max() > 0.1
        np.testing.assert_array_equal(taylor["accuracy"], exact["accuracy"])
        np.testing.assert_allclose(slope_of(z, y), z / 4 - (2 * label - 1) / 2, atol=1e-6)
    assert np.isnan(taylor_cross_entropy(jnp.zeros(1), jnp.array([2]))["loss"]).all()


@pytest.mark.parametrize(
    "wrong",
    [{"columns": (3,)}, {"columns": (3, 0)}, {"columns": None}, {"num_outputs": 0}, {"embedding": 0}, {"top": (0,)}],
)
def test_wrong_options_are_refused(wrong):
    (name,) = wrong
    with pytest.raises((ValueError, TypeError), match=name):
        vertical_mlp(**{"columns": COLUMNS, "num_outputs": 1} | wrong)
    with pytest.raises(ValueError, match="bottoms"):
        by_party((1, 1), [[]], sum)
