"""Averages of models, ensembles and distillation, against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save

from fedjax_sim import models
from fedjax_sim.models.ensemble import mixture
from tests.refusals import refused

KEY, RNG = jax.random.key(0), np.random.default_rng(1)
X = RNG.normal(size=(6, 4)).astype(np.float32)
MODEL = models.mlp(input_shape=(4,), num_outputs=3, hidden=(5,))


def members(number, model=MODEL):
    return [jax.device_get(model.init(jax.random.fold_in(KEY, i))[0]) for i in range(number)]


def stacked(trees):
    return jax.tree.map(lambda *xs: np.stack(xs), *trees)


def outputs_of(model, params):
    return np.asarray(jax.jit(lambda params: model.apply(params, (), X, None, False)[0])(params))


def test_interpolated():
    """Faults: shares of the other model; 0 and 1 that round, or that spread the other model's NaN."""
    a, b = members(2)
    half = models.interpolated(a, b, 0.25)
    jax.tree.map(lambda x, y, z: np.testing.assert_allclose(z, 0.25 * x + 0.75 * y, rtol=1e-6), a, b, half)
    broken = jax.tree.map(lambda x: x * jnp.nan, b)
    assert models.interpolated(a, broken, 1) is a and models.interpolated(broken, b, 0.0) is b
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="share: expected"):
            models.interpolated(a, b, share)
    with pytest.raises(ValueError, match="b: expected parameters like a"):
        models.interpolated(a, {"w": jnp.ones(2)}, 0.5)


@pytest.mark.parametrize("number", [1, 7])
def test_ensemble(number):
    """Seven equal members: a sum of seven, divided, is not the member's output. Faults: a mean of probabilities; a
    member that is left out."""
    model, own = models.ensemble(MODEL, number), members(number)
    outputs = [outputs_of(MODEL, one) for one in own]
    found = outputs_of(model, stacked(own))
    np.testing.assert_allclose(found, np.mean(outputs, 0), rtol=1e-5, atol=1e-6)
    same = outputs_of(model, stacked([own[0]] * number))
    single = outputs_of(models.ensemble(MODEL, 1), stacked(own[:1]))
    assert np.array_equal(same, single)
    drawn = jax.tree.leaves(model.init(KEY)[0])[-1]
    assert drawn.shape[0] == number and (number == 1 or (drawn[0] != drawn[1]).any())


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("task", ["binary", "classification", "regression"])
def test_mixture(task):
    """Catches a mean of logits where predictions are to be averaged, and weights of other components."""
    number, weights = 3, np.array([0.5, 0.0, 0.5])
    model = models.mlp(input_shape=(4,), num_outputs=1 if task == "binary" else 3, hidden=(5,))
    own = members(number, model)
    outputs = np.stack([np.float64(outputs_of(model, one)) for one in own])
    predict = {
        "binary": lambda z: 1 / (1 + np.exp(-z)),
        "classification": lambda z: np.exp(z) / np.exp(z).sum(-1, keepdims=True),
        "regression": lambda z: z,
    }[task]
    expected = np.tensordot(weights, predict(outputs), 1)
    mixed = mixture(model, number, task)
    params = {"components": stacked(own), "weights": np.float32(weights)}
    found = np.float64(outputs_of(mixed, params))
    np.testing.assert_allclose(predict(found), expected, rtol=1e-5)
    single = {"components": stacked(own[:1]), "weights": np.ones(1, np.float32)}
    alone = outputs_of(mixture(model, 1, task), single)
    np.testing.assert_allclose(predict(np.float64(alone)), predict(outputs[0]), rtol=1e-5)
    np.testing.assert_allclose(mixed.init(KEY)[0]["weights"], np.full(3, 1 / 3), rtol=1e-6)


def test_equal_components_are_refused(tmp_path):
    """A linear model starts at 0 with every key, and an MLP does not. Members that are read from a file are not drawn
    before."""
    linear = models.linear(input_shape=(4,), num_outputs=3)
    for make in (models.ensemble, lambda model, number: mixture(model, number, "classification")):
        with refused("model", value="one that always starts alike", rule="start apart"):
            make(linear, 2).init(KEY)
        make(linear, 1).init(KEY)
    trained = {"kernel": np.float32(RNG.normal(size=(2, 4, 3))), "bias": np.zeros((2, 3), np.float32)}
    (tmp_path / "members.safetensors").write_bytes(save(trained))
    started = models.started_from(models.ensemble(linear, 2), path=str(tmp_path / "members.safetensors"))
    jax.tree.map(np.testing.assert_array_equal, started.init(KEY)[0], trained)


@pytest.mark.full
def test_distillation():
    """Faults: the divergence the other way round, a temperature that does not scale its gradient, a teacher that
    learns."""
    student, other = members(2)
    z, t = (np.float64(MODEL.apply(one, (), X, None, False)[0]) for one in (student, other))

    def soft(logits):
        e = np.exp(logits / 2.0)
        return e / e.sum(1, keepdims=True)

    loss = models.distillation(MODEL, 2.0)
    found = loss(student, {"x": X, "teacher": jnp.float32(t)})["loss"]
    np.testing.assert_allclose(found, 4 * (soft(t) * np.log(soft(t) / soft(z))).sum(1), rtol=1e-5, atol=1e-6)
    alone = models.distillation(MODEL, 2.0, squared_temperature=False)(student, {"x": X, "teacher": jnp.float32(t)})
    np.testing.assert_allclose(4 * alone["loss"], found, rtol=1e-6)
    slope, taught = jax.grad(lambda p, t: loss(p, {"x": X, "teacher": t})["loss"].sum(), (0, 1))(
        student, MODEL.apply(student, (), X, None, False)[0]
    )
    assert all(np.abs(x).max() < 1e-6 for x in jax.tree.leaves((slope, taught)))


def test_what_is_refused():
    """Fault: a model whose running statistics would be averaged or ignored."""
    kept = models.Model(lambda key: (jnp.ones(1), jnp.zeros(1)), lambda params, state, x, key, train: (x, state))
    with pytest.raises(ValueError, match="model: expected a model without state"):
        models.ensemble(kept, 2)
    with pytest.raises(ValueError, match="model: expected a model without state"):
        models.distillation(kept)
    with pytest.raises(TypeError, match="model: expected a Model"):
        models.ensemble(lambda x: x, 2)
    for wrong in (0.0, float("inf")):
        with pytest.raises(ValueError, match="temperature: expected"):
            models.distillation(MODEL, wrong)
