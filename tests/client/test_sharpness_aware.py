"""FedSAM's local solver."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import client
from fedjax_sim.types import ClientData
from tests.algorithms.personal import problem as q
from tests.laws import problems as p
from tests.refusals import refused

RADIUS = 0.3


def nearby_gradient(model, rows):
    """The gradient of `personal.problem` at model + RADIUS g / |g|, in NumPy."""
    g = q.gradient(model, rows)
    return q.gradient(model + RADIUS * g / (np.linalg.norm(g) or 1), rows)


def test_matches_numpy():
    """Two steps from one client's rows. Catches a norm of each leaf, a step downhill, and a radius that shrinks with
    the gradient."""
    rows = q.rows()[0]
    model = q.START
    for _ in range(2):
        model = model - q.RATE * nearby_gradient(model, rows)
    one = client.sharpness_aware(q.loss_fn, optax.sgd(q.RATE), RADIUS, client.work(num_steps=2))
    data = ClientData(jax.tree.map(jnp.asarray, rows), jnp.ones(len(rows["y"]), bool))
    report, _ = jax.jit(one.apply)(jax.random.key(0), q.start(), (), data)
    np.testing.assert_allclose(q.vector(report.update), model - q.START, rtol=2e-5)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30])
def test_any_scale(size):
    """f = size <a, w>^2 / 2 with |a| = 1 at w = a: the gradient is size a, and size (1 + rho) a nearby; a step of rate
    1 / size moves w by -(1 + rho) a. Catches squares that overflow or vanish, and a division of zero by zero."""
    a = jnp.array([0.6, 0.8])
    optimizer = optax.sgd(1 / size if size else 1.0)
    one = client.sharpness_aware(lambda w, x, key: x * (w @ a) ** 2 / 2, optimizer, RADIUS, client.work(num_steps=1))
    data = ClientData(jnp.full(1, size, jnp.float32), jnp.ones(1, bool))
    report, _ = jax.jit(one.apply)(jax.random.key(0), a, (), data)
    np.testing.assert_allclose(report.update, -(1 + RADIUS) * np.asarray(a) if size else np.zeros(2), rtol=1e-5)


@pytest.mark.parametrize("radius", [-0.1, float("nan"), float("inf")])
def test_wrong_radius(radius):
    with refused("radius", rule=">= 0"):
        client.sharpness_aware(p.linear_loss, optax.sgd(0.1), radius, client.work(num_steps=1))
