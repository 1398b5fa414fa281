"""FedEM against NumPy, its limit, and how its mixtures are judged."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, metrics, models, sampling
from tests.algorithms.personal import problem as p
from tests.refusals import refused

M = 3
MODEL = models.from_fn(lambda key: p.start(), lambda w, x: x @ w["body"]["w"] + w["output"]["b"])


def squares(outputs, y):
    return {"loss": (outputs - y) ** 2 / 2}


def em(sampler=None, **options):
    sampler = sampling.full(p.NUM_CLIENTS) if sampler is None else sampler
    options = p.OPTIONS | {"num_components": M, "spread": 2.0} | options
    return algorithms.fedem(MODEL, squares, sampler, optax.sgd(p.RATE), task="regression", **options)


def oracle(starts):
    """(components [M, 3], weights [clients, M])."""
    components, weights = np.array(starts, np.float64), np.full((p.NUM_CLIENTS, M), 1 / M)
    for _ in range(p.ROUNDS):
        updates = []
        for i, client in enumerate(p.rows()):
            x, y = np.c_[client["x"], np.ones(len(client["y"]))].astype(np.float64), client["y"].astype(np.float64)
            joint = weights[i][:, None] * np.exp(-((components @ x.T - y) ** 2) / 2)
            q = joint / joint.sum(0)
            weights[i] = q.mean(1)
            local = components.copy()
            for _ in range(p.STEPS):
                local -= p.RATE * (q * (local @ x.T - y)) @ x / len(y)
            updates.append(local - components)
        components = components + p.mean(updates)
    return components, weights


def test_matches_numpy():
    """Catches responsibilities without the client's weights, or at components after training; a mean that is not by
    rows; and weights that are sent or shared."""
    algorithm = em()
    state, _ = p.trained(algorithm, rounds=0)
    starts = p.vector(algorithm.parts.server.broadcast(state.server))
    components, weights = oracle(starts)
    state, info = p.trained(algorithm)
    assert info["uplink_bytes"].total() == info["downlink_bytes"].total() == p.NUM_CLIENTS * M * 12
    own = algorithm.evaluated.personal(state, jnp.arange(p.NUM_CLIENTS))
    np.testing.assert_allclose(own["weights"], weights, rtol=1e-4, atol=1e-6)
    for i in range(p.NUM_CLIENTS):
        found = jax.tree.map(lambda x, i=i: x[i], own["components"])
        np.testing.assert_allclose(p.vector(found), components, rtol=1e-4, atol=1e-5)
    assert np.ptp(weights, axis=0).max() > 0.1
    params = algorithm.params(state)
    np.testing.assert_allclose(p.vector(params["components"]), components, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(params["weights"], np.full(M, 1 / M), rtol=1e-6)


@pytest.mark.full
def test_one_component_is_fedavg():
    """Catches responsibilities other than 1, and components that draw other minibatches."""
    some, batches = sampling.uniform(p.NUM_CLIENTS, 3), p.OPTIONS | {"batch_size": 2}
    algorithm = em(some, num_components=1, **batches)
    plain = algorithms.fedavg(p.loss_fn, some, optax.sgd(p.RATE), **batches)
    found = p.vector(algorithm.params(p.trained(algorithm)[0])["components"])[0]
    np.testing.assert_allclose(found, p.vector(plain.params(p.trained(plain)[0])), rtol=2e-6)


@pytest.mark.full
def test_bytes_are_of_components():
    _, info = p.trained(em(), rounds=1)
    assert info["uplink_bytes"].total() == info["downlink_bytes"].total() == p.NUM_CLIENTS * M * 12


@pytest.mark.full
def test_a_clients_mixture_is_judged():
    """Catches a judgement by one component, or by equal weights."""
    algorithm = em()
    state, _ = p.trained(algorithm)
    evaluated = algorithm.evaluated
    evaluate = metrics.evaluation(
        models.supervised(evaluated.model, squares), local_test=p.population(1), personal=evaluated.personal,
        has_trained=evaluated.has_trained,
    )  # fmt: skip
    record = evaluate(algorithm.params(state), state)
    components, weights = oracle(p.vector(algorithm.parts.server.broadcast(p.trained(algorithm, 0)[0].server)))

    def loss(weights, client):
        predicted = weights @ (components @ np.c_[client["x"], np.ones(len(client["y"]))].T)
        return ((predicted - client["y"]) ** 2 / 2).sum()

    clients, total = p.rows(1), sum(p.SIZES)
    own = sum(loss(weights[i], client) for i, client in enumerate(clients)) / total
    equal = sum(loss(np.full(M, 1 / M), client) for client in clients) / total
    np.testing.assert_allclose(record["personal_loss"], own, rtol=1e-4)
    np.testing.assert_allclose(record["local_test_loss"], equal, rtol=1e-4)
    assert abs(own - equal) > 1e-3


def test_a_mixture_is_not_fine_tuned():
    """Catches gradient steps that leave the simplex of the weights."""
    with refused("algorithm", rule="judged"):
        algorithms.fine_tuned(em(), p.loss_fn, optax.sgd(0.1))
