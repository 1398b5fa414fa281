"""HeteroFL against NumPy on sub-matrices, its limit, and what is sent."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, models, population, sampling
from tests.algorithms.personal import problem as p
from tests.refusals import refused

HIDDEN, WIDTHS = (4, 3), (1.0, 0.5, 0.25)
MODEL = models.mlp(input_shape=(2,), num_outputs=2, hidden=HIDDEN)
FULL, SGD = sampling.full(p.NUM_CLIENTS), optax.sgd(p.RATE)


def rows():
    return [{"x": x["x"], "y": np.stack([x["y"], -x["y"]], 1)} for x in p.rows()]


def squares(outputs, y):
    return {"loss": jnp.square(outputs - y).sum(1) / 2}


def hetero(sampler=FULL, model=MODEL, widths=WIDTHS, **options):
    loss_fn = models.supervised(model, squares)
    return algorithms.heterofl(model, loss_fn, sampler, SGD, widths=widths, **p.OPTIONS | options)


def trained(algorithm, rounds=p.ROUNDS):
    people, params = population.from_clients(rows()), MODEL.init(jax.random.key(1))[0]
    state, step, info = algorithm.init(jax.random.key(0), params, people), jax.jit(algorithm.step), None
    for round in range(rounds):
        state, info = step(jax.random.key(round), state, people)
    return state, info, params


def layers(params):
    names = [*(f"hidden_{i}" for i in range(len(HIDDEN))), "output"]
    return [[np.asarray(params[name][part], np.float64) for part in ("kernel", "bias")] for name in names]


def places(width):
    """Which units of inputs, hidden layers and outputs a client holds."""
    return [2, *(math.ceil(width * units) for units in HIDDEN), 2]


def gradients(model, client):
    """Of an MLP with ReLU under squares, written out."""
    inputs, grads = [client["x"].astype(np.float64)], []
    for i, (kernel, bias) in enumerate(model):
        out = inputs[-1] @ kernel + bias
        inputs.append(np.maximum(out, 0) if i < len(model) - 1 else out)
    error = (inputs[-1] - client["y"]) / len(client["y"])
    for (kernel, _), x in zip(model[::-1], inputs[-2::-1], strict=True):
        grads.append((x.T @ error, error.sum(0)))
        error = (error @ kernel.T) * (x > 0)
    return grads[::-1]


def oracle(params):
    """Clients hold small matrices of their own shapes; the server adds and counts their entries."""
    whole = layers(params)
    for _ in range(p.ROUNDS):
        sums = [[np.zeros_like(x) for x in layer] for layer in whole]
        weights = [[np.zeros_like(x) for x in layer] for layer in whole]
        for i, client in enumerate(rows()):
            units = places(WIDTHS[i % len(WIDTHS)])
            cut = [(np.s_[:a, :b], np.s_[:b]) for a, b in itertools.pairwise(units)]
            own = [[x[at] for x, at in zip(layer, where, strict=True)] for layer, where in zip(whole, cut, strict=True)]
            start = [[x.copy() for x in layer] for layer in own]
            for _ in range(p.STEPS):
                steps = gradients(own, client)
                own = [[x - p.RATE * g for x, g in zip(*both, strict=True)] for both in zip(own, steps, strict=True)]
            for i, where in enumerate(cut):
                for j, at in enumerate(where):
                    sums[i][j][at] += len(client["y"]) * (own[i][j] - start[i][j])
                    weights[i][j][at] += len(client["y"])
        for layer, above, below in zip(whole, sums, weights, strict=True):
            for j in range(2):
                layer[j] = layer[j] + above[j] / np.maximum(below[j], 1)
    return whole


def test_matches_numpy():
    """Catches a unit too many or too few, a mean over clients without the parameter, and a model that sees units of
    others."""
    algorithm = hetero()
    state, info, params = trained(algorithm)
    expected = oracle(params)
    for found, wanted in zip(layers(algorithm.params(state)), expected, strict=True):
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    assert info["uplink_bytes"].total() == info["downlink_bytes"].total() == sum(sizes())
    own = jax.jit(algorithm.evaluated.personal)(state, jnp.arange(p.NUM_CLIENTS))
    units = places(WIDTHS[4 % 3])
    kernel = np.asarray(own["hidden_1"]["kernel"][4])
    np.testing.assert_array_equal(kernel[: units[1], : units[2]], expected_part(algorithm, state, units))
    assert not kernel[units[1] :].any() and not kernel[:, units[2] :].any()


def sizes():
    """Bytes of each client's own sub-model."""
    units = [places(WIDTHS[i % 3]) for i in range(p.NUM_CLIENTS)]
    return [sum(4 * (a * b + b) for a, b in itertools.pairwise(x)) for x in units]


def expected_part(algorithm, state, units):
    return np.asarray(algorithm.params(state)["hidden_1"]["kernel"])[: units[1], : units[2]]


@pytest.mark.full
def test_whole_models_are_fedavg():
    some, batches = sampling.uniform(p.NUM_CLIENTS, 3), {"batch_size": 2}
    plain = algorithms.fedavg(models.supervised(MODEL, squares), some, SGD, **p.OPTIONS | batches)
    made = hetero(some, widths=[1.0], **batches)
    found, expected = (jax.tree.leaves(x.params(trained(x)[0])) for x in (made, plain))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


@pytest.mark.full
def test_what_nobody_holds_stays():
    """Catches zeros, or an average with the old model, where no client has a parameter."""
    algorithm = hetero(widths=[0.5])
    state, _, params = trained(algorithm)
    before, after = (np.asarray(x["hidden_0"]["kernel"]) for x in (params, algorithm.params(state)))
    np.testing.assert_array_equal(before[:, 2:], after[:, 2:])
    assert (before[:, :2] != after[:, :2]).any()


@pytest.mark.full
def test_bytes():
    """Each client counts its own sub-model, both ways."""
    _, info, _ = trained(hetero(), rounds=1)
    assert info["uplink_bytes"].total() == info["downlink_bytes"].total() == sum(sizes())


@pytest.mark.full
@pytest.mark.parametrize("width", [0.5, 0.25])
def test_a_cnns_sub_model_is_a_smaller_cnn(width):
    """Channels behind a flattening: the outputs are those of the network that has these channels alone."""
    shape = {"input_shape": (8, 8), "num_outputs": 3}
    whole, small = (models.cnn(channels=(int(4 * r), int(8 * r)), hidden=(int(4 * r),), **shape) for r in (1, width))
    params = whole.init(jax.random.key(0))[0]
    images = np.random.default_rng(0).normal(size=(5, 8, 8)).astype(np.float32)
    people = population.from_clients([{"x": images, "y": np.zeros(5, np.int32)}])
    loss_fn = models.supervised(whole, models.softmax_cross_entropy)
    made = algorithms.heterofl(whole, loss_fn, sampling.full(1), SGD, widths=[width], num_steps=1)
    own = made.evaluated.personal(made.init(jax.random.key(0), params, people), jnp.arange(1))
    own = jax.tree.map(lambda x: np.asarray(x)[0], own)
    spec = jax.eval_shape(lambda: small.init(jax.random.key(0))[0])
    held = jax.tree.map(lambda x, s: x[x != 0].reshape(s.shape) if x.ndim > 1 else x[: s.shape[0]], own, spec)
    outputs = [np.asarray(m.apply(w, (), images, None, False)[0]) for m, w in ((whole, own), (small, held))]
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-6)


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"widths\[1\]: expected .* got 0"):
        hetero(widths=[1.0, 0])
    with refused("widths", value=6, rule="5 clients"):
        hetero(widths=[1.0] * 6)
    for model in (models.from_fn(MODEL.init, lambda w, x: x), models.gru(num_outputs=5)):
        with pytest.raises(ValueError, match="model: expected"):
            hetero(model=model)
