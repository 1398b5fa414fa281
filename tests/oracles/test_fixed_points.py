"""Fixed points of FedAvg and FedProx on quadratics: closed forms, biased by local work."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, client, sampling
from fedjax_sim.types import ClientData
from tests.oracles import scalars

EVERYBODY = sampling.full(2)


@pytest.mark.default_rows("5")
@pytest.mark.parametrize("num_steps", [1, 2, 5, 20])
def test_fedavg_reaches_its_biased_fixed_point(num_steps):
    """w = sum p_i q_i a_i / sum p_i q_i, q_i = 1 - (1 - rate h_i)^K, to 1e-6. Catches a number of local steps off by
    one (each K moves the point by more than 1e-3)."""
    rate, h, a = 0.05, np.array(scalars.CURVATURES), np.array(scalars.CENTERS)
    algorithm = algorithms.fedavg(scalars.loss, EVERYBODY, optax.sgd(rate), num_steps=num_steps, **scalars.OPTIONS)
    reached, _ = scalars.converged(algorithm, scalars.clients(), num_rounds=200)

    def closed_form(steps):
        progress = 1 - (1 - rate * h) ** steps
        return (progress * a).sum() / progress.sum()

    assert abs(reached - closed_form(num_steps)) < 1e-6
    assert abs(reached - closed_form(num_steps + 1)) > 1e-3
    assert (num_steps == 1) == (abs(reached - 10 / 11) < 1e-6)


def test_fedprox_fixed_points():
    """Exact local solves by 400 local steps, every coefficient in one program. Catches a factor of two in the term."""
    coefficients = np.array([0.0, 0.1, 1.0, 10.0, 100.0])
    expected = [0.5, 0.521327, 0.645161, 0.846154, 0.901786]
    contraction = np.array([0.0, 0.0504, 0.2955, 0.7045, 0.9496])
    data = scalars.clients()

    def rest(coefficient):
        algorithm = algorithms.fedprox(
            scalars.loss,
            EVERYBODY,
            optax.sgd(1 / (10 + coefficient)),
            coefficient=coefficient,
            num_steps=400,
            **scalars.OPTIONS,
        )
        state = algorithm.init(jax.random.key(0), jnp.float32(0.3), data)

        def body(state, key):
            state, _ = algorithm.step(key, state, data)
            return state, algorithm.params(state)

        return jax.lax.scan(body, state, jax.random.split(jax.random.key(1), 300))[1]

    paths = np.asarray(jax.jit(jax.vmap(rest))(jnp.array(coefficients, jnp.float32)))
    np.testing.assert_allclose(paths[:, -1], expected, atol=2e-6)
    first, second = paths[:, 0] - expected, paths[:, 1] - expected
    np.testing.assert_allclose(second, contraction * first, atol=1e-4 * np.abs(first).max())


@pytest.mark.full
def test_equal_weights_are_another_objective():
    """n = (1, 9) converges to 0.9 by examples and to 0.5 by clients. Catches weights that are ignored."""
    data = scalars.clients((1.0, 1.0), (0.0, 1.0), (1, 9))
    for weighting, expected in (("examples", 0.9), ("uniform", 0.5)):
        algorithm = algorithms.fedavg(
            scalars.loss, EVERYBODY, optax.sgd(0.5), num_steps=1, weighting=weighting, **scalars.OPTIONS
        )
        reached, _ = scalars.converged(algorithm, data, num_rounds=60)
        assert abs(reached - expected) < 1e-6


@pytest.mark.optimised
def test_a_schedule_that_stops_is_fedsgd():
    """Bit for bit: step sizes (0.1, 0, 0, 0) give one step. Catches schedules that count rounds."""
    work = {"schedule": (lambda step: jnp.where(step == 0, 0.1, 0.0), 4), "one step": (0.1, 1)}
    updates = {}
    data = ClientData({"h": jnp.array([1.0, 3.0]), "a": jnp.array([0.5, 2.0])}, jnp.ones(2, bool))
    for name, (rate, num_steps) in work.items():
        one = client.local_sgd(scalars.loss, optax.sgd(rate), client.work(num_steps=num_steps))
        updates[name] = jax.jit(one.apply)(jax.random.key(0), jnp.float32(0.3), (), data)[0].update
    assert updates["schedule"].tobytes() == updates["one step"].tobytes() and updates["one step"] != 0
