"""B7: a client's round, unrolled. The update is rebuilt from the gradients of its steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import client, models
from fedjax_sim.types import ClientData, ClientUpdate
from tests.refusals import refused

MODEL = models.mlp(input_shape=(5,), num_outputs=3, hidden=(7,))
LOSS = models.supervised(MODEL, models.softmax_cross_entropy)


def problem(rows=12, held=9):
    rng = np.random.default_rng(0)
    examples = {"x": jnp.asarray(rng.normal(size=(rows, 5)), jnp.float32), "y": jnp.asarray(rng.integers(0, 3, rows))}
    return MODEL.init(jax.random.key(0))[0], ClientData(examples, jnp.arange(rows) < held)


def test_update_is_rebuilt_from_the_unrolled_steps():
    """-sum rate_k g_k(w_k) is the update to 1e-6, with gradients computed anew. Catches models that are a step late."""
    params, data = problem()
    rates = optax.exponential_decay(0.2, 1, 0.8)
    work = client.local_sgd(LOSS, optax.sgd(rates), client.work(num_steps=6))
    reports = client.unroll(work, jax.random.key(1), params, data)
    held = jax.tree.map(lambda x: x[data.mask], data.examples)

    @jax.jit
    def gradient(params):
        return jax.grad(lambda params: LOSS(params, held, None)["loss"].mean())(params)

    rebuilt = jax.tree.map(jnp.zeros_like, params)
    for step in range(6):
        # The model before the step: the broadcast plus the update of the steps before.
        local = params if step == 0 else jax.tree.map(lambda w, u, k=step - 1: w + u[k], params, reports.update)
        rebuilt = jax.tree.map(lambda u, g, k=step: u - rates(k) * g, rebuilt, gradient(local))
        for found, expected in zip(jax.tree.leaves(reports.update), jax.tree.leaves(rebuilt), strict=True):
            np.testing.assert_allclose(found[step], expected, atol=1e-6)


@pytest.mark.default_rows("plain")
@pytest.mark.parametrize("kind", ["plain", "proximal", "normalized"])
def test_last_row_is_the_report(kind):
    """Two epochs of 9 examples in batches of 4: six steps. Catches other minibatches, and steps on padding."""
    params, data = problem()
    work = client.work(num_epochs=2, batch_size=4)
    made = {
        "plain": client.local_sgd(LOSS, optax.sgd(0.1), work),
        "proximal": client.proximal(LOSS, optax.sgd(0.1), 0.1, work),
        "normalized": client.normalized(client.local_sgd(LOSS, optax.sgd(0.1), work)),
    }[kind]
    reports = client.unroll(made, jax.random.key(1), params, data)
    report, _ = made.apply(jax.random.key(1), params, (), data)
    assert reports.weight.shape == (6,)
    for found, expected in zip(jax.tree.leaves(reports), jax.tree.leaves(report), strict=True):
        np.testing.assert_allclose(found[-1], expected, rtol=1e-5, atol=1e-7)


def test_clients_without_steps_are_refused():
    params, data = problem()
    with refused("client", rule="states its steps"):
        client.unroll(ClientUpdate(lambda params: (), lambda *parts: None), jax.random.key(0), params, data)
    with pytest.raises(TypeError, match="client: expected"):
        client.unroll(LOSS, jax.random.key(0), params, data)
