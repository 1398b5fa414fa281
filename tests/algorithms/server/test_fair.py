"""q-FedAvg and TERM against NumPy, and their limits."""

from __future__ import annotations

import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, sampling
from tests.algorithms.personal import problem as p

SGD, FULL = optax.sgd(p.RATE), sampling.full(p.NUM_CLIENTS)


def oracle(factor_and_term):
    """The server moves by the ratio of sums over clients of what `factor_and_term(update, loss)` gives."""
    shared = p.START
    for _ in range(p.ROUNDS):
        above, below = np.zeros(3), 0.0
        for client in p.rows():
            local = shared
            for _ in range(p.STEPS):
                local = local - p.RATE * p.gradient(local, client)
            factor, term = factor_and_term(local - shared, p.loss(shared, client))
            above, below = above + factor * (local - shared), below + term
        shared = shared + above / below
    return shared


def qffl(update, loss, q=1.5):
    inverse = 1 / p.RATE
    norm = inverse**2 * (update @ update)
    return inverse * loss**q, q * loss ** (q - 1) * norm + inverse * loss**q


def model(algorithm):
    state, info = p.trained(algorithm)
    return p.vector(algorithm.params(state)), info


def test_matches_numpy():
    """Catches a power of the wrong loss, a norm that is not squared, and a server that divides by clients."""
    found, info = model(algorithms.qfedavg(p.loss_fn, FULL, SGD, exponent=1.5, **p.OPTIONS))
    np.testing.assert_allclose(found, oracle(qffl), rtol=3e-5, atol=3e-6)
    assert info["broadcast_loss"] > 0
    tilted, _ = model(algorithms.term(p.loss_fn, FULL, SGD, tilt=-0.7, **p.OPTIONS))
    weight = lambda update, loss: (np.exp(-0.7 * loss),) * 2  # noqa: E731
    np.testing.assert_allclose(tilted, oracle(weight), rtol=3e-5, atol=3e-6)


@pytest.mark.full
def test_what_has_no_weight_is_dropped_and_counted():
    """Catches a negative loss that counts as a tiny one, and an exponential that overflows unseen."""

    def negative(params, examples, key):
        return {"loss": p.loss_fn(params, examples, key)["loss"] - 1e3}

    _, info = model(algorithms.qfedavg(negative, FULL, SGD, **p.OPTIONS))
    assert info["dropped_clients"] == p.NUM_CLIENTS
    _, info = model(algorithms.term(p.loss_fn, FULL, SGD, tilt=1e4, **p.OPTIONS))
    assert info["dropped_clients"] > 0


@pytest.mark.full
@pytest.mark.parametrize("name", ["exponent", "tilt"])
def test_none_of_it_is_fedavg(name):
    make = {"exponent": algorithms.qfedavg, "tilt": algorithms.term}[name]
    found, _ = model(make(p.loss_fn, FULL, SGD, **{name: 0.0}, **p.OPTIONS))
    plain, _ = model(algorithms.fedavg(p.loss_fn, FULL, SGD, weighting="uniform", **p.OPTIONS))
    np.testing.assert_allclose(found, plain, rtol=1e-5)


@pytest.mark.full
def test_the_worst_client_gains():
    """A large exponent, and a large tilt, lower the largest of the clients' losses further than FedAvg does."""

    def worst(algorithm):
        state, _ = p.trained(algorithm, rounds=60)
        found = p.vector(algorithm.params(state))
        return max(p.loss(found, client) for client in p.rows())

    plain = worst(algorithms.fedavg(p.loss_fn, FULL, SGD, weighting="uniform", **p.OPTIONS))
    assert worst(algorithms.qfedavg(p.loss_fn, FULL, SGD, exponent=3.0, **p.OPTIONS)) < 0.95 * plain
    assert worst(algorithms.term(p.loss_fn, FULL, SGD, tilt=3.0, **p.OPTIONS)) < 0.95 * plain
