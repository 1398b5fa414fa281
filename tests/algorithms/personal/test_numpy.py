"""Each personal algorithm against a short program in NumPy: full participation, full batches, three rounds."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, engine, sampling
from tests.algorithms.personal import problem as p


def ditto(clients, coefficient=0.5, own_rate=p.RATE, own_steps=p.STEPS):
    shared, own = p.START, [p.START] * p.NUM_CLIENTS
    for _ in range(p.ROUNDS):
        updates = []
        for i, client in enumerate(clients):
            local = shared
            for _ in range(p.STEPS):
                local = local - p.RATE * p.gradient(local, client)
            for _ in range(own_steps):
                own[i] = own[i] - own_rate * (p.gradient(own[i], client) + coefficient * (own[i] - shared))
            updates.append(local - shared)
        shared = shared + p.mean(updates)
    return shared, own


def parts(clients, kind, own_steps=p.STEPS):
    shared, own = p.START, [p.START[p.OUTPUT]] * p.NUM_CLIENTS
    for _ in range(p.ROUNDS):
        updates = []
        for i, client in enumerate(clients):
            local = np.concatenate([shared[p.BODY], own[i]])
            trained = {"fedper": ([p.BODY, p.OUTPUT],), "fedrep": ([p.OUTPUT], [p.BODY]), "fedbabu": ([p.BODY],)}[kind]
            for places in trained:
                for _ in range(own_steps if places == [p.OUTPUT] else p.STEPS):
                    gradient = p.gradient(local, client)
                    local = local.copy()
                    for place in places:
                        local[place] -= p.RATE * gradient[place]
            updates.append(local[p.BODY] - shared[p.BODY])
            own[i] = local[p.OUTPUT]
        shared = np.concatenate([shared[p.BODY] + p.mean(updates), p.START[p.OUTPUT]])
    return shared, [np.concatenate([shared[p.BODY], part]) for part in own]


def apfl(clients, share=0.3, share_rate=0.0, shares=None):
    shared, own = p.START, [p.START] * p.NUM_CLIENTS
    shares = [share] * p.NUM_CLIENTS if shares is None else shares
    for _ in range(p.ROUNDS):
        updates = []
        for i, client in enumerate(clients):
            local = shared
            for step in range(p.STEPS):
                share = shares[i]
                slope = p.gradient(share * own[i] + (1 - share) * local, client)
                if step == 0:
                    shares[i] = np.clip(share - share_rate * slope @ (own[i] - local), 0, 1)
                own[i] = own[i] - p.RATE * share * slope
                local = local - p.RATE * p.gradient(local, client)
            updates.append(local - shared)
        shared = shared + p.mean(updates)
    return shared, [share * v + (1 - share) * shared for share, v in zip(shares, own, strict=True)]


def pfedme(clients, coefficient=2.0, inner=4, inner_rate=0.05, server_share=0.8):
    def solved(start, client):
        theta = start
        for _ in range(inner):
            theta = theta - inner_rate * (p.gradient(theta, client) + coefficient * (theta - start))
        return theta

    shared, own = p.START, [p.START] * p.NUM_CLIENTS
    for _ in range(p.ROUNDS):
        updates = []
        for i, client in enumerate(clients):
            local = shared
            for _ in range(p.STEPS):
                local = local - p.RATE * coefficient * (local - solved(local, client))
            own[i] = solved(local, client)
            updates.append(local - shared)
        shared = shared + server_share * p.mean(updates)
    return shared, own


def per_fedavg(clients, step_size=0.2, order="hessian"):
    even, odd = slice(0, None, 2), slice(1, None, 2)
    shared = p.START
    for _ in range(p.ROUNDS):
        updates = []
        for client in clients:
            local = shared
            for _ in range(p.STEPS):
                stepped = local - step_size * p.gradient(local, client, even)
                gradient = p.gradient(stepped, client, odd)
                if order == "hessian":
                    gradient = gradient - step_size * p.hessian(client, even) @ gradient
                local = local - p.RATE * gradient
            updates.append(local - shared)
        shared = shared + p.mean(updates)
    return shared, None


def ifca(clients, starts):
    models = np.array(starts, np.float64)
    for _ in range(p.ROUNDS):
        updates, weights = np.zeros_like(models), np.zeros(len(models))
        chosen = []
        for client in clients:
            k = int(np.argmin([p.loss(model, client) for model in models]))
            local = models[k]
            for _ in range(p.STEPS):
                local = local - p.RATE * p.gradient(local, client)
            updates[k] += len(client["y"]) * (local - models[k])
            weights[k] += len(client["y"])
            chosen.append(k)
        models = models + updates / np.maximum(weights, 1)[:, None]
    return models, [models[k] for k in chosen]


SGD = optax.sgd(p.RATE)
FULL = sampling.full(p.NUM_CLIENTS)
ROWS = {
    "ditto": (lambda: algorithms.ditto(p.loss_fn, FULL, SGD, coefficient=0.5, **p.OPTIONS), ditto),
    "ditto, own rate and steps": (
        lambda: algorithms.ditto(
            p.loss_fn, FULL, SGD, coefficient=0.5, own_optimizer=optax.sgd(0.2), own_steps=5, **p.OPTIONS
        ),
        lambda c: ditto(c, own_rate=0.2, own_steps=5),
    ),
    "fedper": (lambda: algorithms.fedper(p.loss_fn, FULL, SGD, **p.OPTIONS), lambda c: parts(c, "fedper")),
    "fedrep": (lambda: algorithms.fedrep(p.loss_fn, FULL, SGD, **p.OPTIONS), lambda c: parts(c, "fedrep")),
    "fedrep, own steps": (
        lambda: algorithms.fedrep(p.loss_fn, FULL, SGD, own_steps=5, **p.OPTIONS),
        lambda c: parts(c, "fedrep", own_steps=5),
    ),
    "fedbabu": (lambda: algorithms.fedbabu(p.loss_fn, FULL, SGD, **p.OPTIONS), lambda c: parts(c, "fedbabu")),
    "apfl": (lambda: algorithms.apfl(p.loss_fn, FULL, SGD, share=0.3, **p.OPTIONS), apfl),
    "apfl, learnt shares": (
        lambda: algorithms.apfl(p.loss_fn, FULL, SGD, share=0.3, share_learning_rate=2.0, **p.OPTIONS),
        lambda c: apfl(c, share_rate=2.0),
    ),
    "pfedme": (
        lambda: algorithms.pfedme(
            p.loss_fn, FULL, SGD, coefficient=2.0, inner_steps=4, inner_learning_rate=0.05, server_share=0.8,
            **p.OPTIONS,
        ),
        pfedme,
    ),
    "per_fedavg": (lambda: algorithms.per_fedavg(p.loss_fn, FULL, SGD, step_size=0.2, **p.OPTIONS), per_fedavg),
    "per_fedavg, first order": (
        lambda: algorithms.per_fedavg(p.loss_fn, FULL, SGD, step_size=0.2, order="first", **p.OPTIONS),
        lambda c: per_fedavg(c, order="first"),
    ),
}  # fmt: skip


@pytest.mark.default_rows("ditto")
@pytest.mark.parametrize("name", ROWS)
def test_matches_numpy(name):
    """Catches a model trained from the wrong start, a pull to the wrong model, a part that is shared or kept by
    mistake, and a weight that is no number of rows."""
    make, oracle = ROWS[name]
    algorithm = make()
    state, _ = p.trained(algorithm)
    shared, own = oracle(p.rows())
    np.testing.assert_allclose(p.vector(algorithm.params(state)), shared, rtol=2e-5, atol=2e-6)
    if own is not None:
        np.testing.assert_allclose(p.own_models(algorithm, state), own, rtol=2e-5, atol=2e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", ["apfl", "ditto", "fedrep", "per_fedavg", "pfedme"])
def test_the_plain_mean_of_the_papers(name, monkeypatch):
    """With `weighting="uniform"` clients of 1 to 7 rows count alike. Catches a mean that is by rows all the same."""
    make, oracle = ROWS[name]
    monkeypatch.setitem(p.OPTIONS, "weighting", "uniform")
    by_rows, _ = oracle(p.rows())
    monkeypatch.setattr(p, "mean", lambda updates: np.mean(updates, axis=0))
    shared, _ = oracle(p.rows())
    assert np.abs(shared - by_rows).max() > 1e-3
    algorithm = make()
    np.testing.assert_allclose(p.vector(algorithm.params(p.trained(algorithm)[0])), shared, rtol=2e-5, atol=2e-6)


@pytest.mark.full
def test_learnt_shares_match_numpy():
    """The shares themselves, some of which are cut to 0 or 1, and their mean in the info. Catches a share that moves at
    every step, after the models, or beyond [0, 1]."""
    rate, shares = 12.0, [0.3] * p.NUM_CLIENTS
    algorithm = algorithms.apfl(p.loss_fn, FULL, SGD, share=0.3, share_learning_rate=rate, **p.OPTIONS)
    state, info = p.trained(algorithm)
    apfl(p.rows(), share_rate=rate, shares=shares)
    kept, _ = engine.take(state.clients, jnp.arange(p.NUM_CLIENTS))
    np.testing.assert_allclose(kept.own["share"], shares, rtol=1e-4)
    np.testing.assert_allclose(info["own_share"], np.mean(shares), rtol=1e-4)
    assert {0.0, 1.0} < {float(share) for share in shares}
    assert [metric.pooled for metric in algorithm.metrics if metric.name == "own_share"] == ["last"]


def test_ifca_matches_numpy():
    """Catches a client that trains another model than its best, and a mean over clients of other models."""
    algorithm = algorithms.ifca(p.loss_fn, FULL, SGD, num_clusters=3, spread=2.0, **p.OPTIONS)
    state, _ = p.trained(algorithm, rounds=0)
    starts = p.vector(algorithm.parts.server.broadcast(state.server))
    np.testing.assert_allclose(starts[0], p.START, rtol=1e-6)
    assert np.abs(starts[1:] - p.START).max() > 0.1
    models, own = ifca(p.rows(), starts)
    state, _ = p.trained(algorithm)
    np.testing.assert_allclose(p.vector(algorithm.parts.server.broadcast(state.server)), models, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(p.own_models(algorithm, state), own, rtol=2e-5, atol=2e-6)
    assert len({tuple(model) for model in own}) > 1
