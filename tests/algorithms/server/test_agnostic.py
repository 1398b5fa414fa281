"""AFL against NumPy, its limit, and the projection onto the simplex."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.optimize import brentq

from fedjax_sim import algorithms, sampling
from fedjax_sim.algorithms.server.agnostic import on_simplex
from tests.algorithms.personal import problem as p
from tests.refusals import refused

SGD, FULL = optax.sgd(p.RATE), sampling.full(p.NUM_CLIENTS)


def nearest(values):
    """The projection by a root of the sum: bisection and the like, without a sort."""
    total = lambda c: np.maximum(values - c, 0).sum() - 1  # noqa: E731
    return np.maximum(values - brentq(total, values.min() - 1, values.max(), xtol=1e-14), 0)


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 100.0])
def test_nearest_point_of_the_simplex(spread):
    """Catches a threshold that counts an entry too many or too few."""
    values = (spread * np.random.default_rng(5).normal(size=40) + 3).astype(np.float32)
    found = np.asarray(on_simplex(jnp.array(values)))
    np.testing.assert_allclose(found, nearest(values.astype(np.float64)), atol=2e-6 * max(spread, 3))
    assert (found >= 0).all()


@pytest.mark.default_rows("values0", "values2")
@pytest.mark.parametrize("values", [[1e8, 0.0, 3.0], [1e6] * 40, [50.0] * 100_000, [0.23] * 100_000])
def test_weights_add_up_to_one(values):
    """Catches a sum in float32 that loses the 1 beside large losses, or over many clients."""
    assert float(on_simplex(jnp.array(values)).sum()) == pytest.approx(1, abs=1e-5)


def afl(rate, sampler=FULL, **options):
    return algorithms.agnostic(p.loss_fn, sampler, SGD, weight_learning_rate=rate, **p.OPTIONS | options)


def test_matches_numpy():
    """Catches losses after training, weights of this round's losses, and a mean by rows."""
    model, mixture = p.START, np.full(p.NUM_CLIENTS, 1 / p.NUM_CLIENTS)
    for _ in range(p.ROUNDS):
        updates, losses = [], [p.loss(model, client) for client in p.rows()]
        for client in p.rows():
            local = model
            for _ in range(p.STEPS):
                local = local - p.RATE * p.gradient(local, client)
            updates.append(local - model)
        model = model + p.mean(updates, mixture)
        mixture = nearest(mixture + 0.2 * np.array(losses))
    algorithm = afl(0.2)
    state, info = p.trained(algorithm)
    np.testing.assert_allclose(p.vector(algorithm.params(state)), model, rtol=3e-5, atol=3e-6)
    np.testing.assert_allclose(state.aggregator, mixture, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(info["largest_weight"], mixture.max(), rtol=1e-4)
    assert 0 < (mixture == 0).sum() < p.NUM_CLIENTS - 1


@pytest.mark.full
def test_without_a_rate_it_is_fedavg():
    plain = algorithms.fedavg(p.loss_fn, FULL, SGD, weighting="uniform", **p.OPTIONS | {"batch_size": 2})
    made = afl(0.0, batch_size=2)
    found, expected = (p.vector(x.params(p.trained(x)[0])) for x in (made, plain))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.full
def test_the_worst_client_gains():
    """Catches weights that fall with losses."""

    def worst(algorithm):
        model = p.vector(algorithm.params(p.trained(algorithm, rounds=60)[0]))
        return max(p.loss(model, client) for client in p.rows())

    assert worst(afl(0.05)) < 0.9 * worst(afl(0.0))


def test_what_is_refused():
    with refused("sampler", value="4 of 5"):
        afl(0.1, sampling.uniform(5, 4))
