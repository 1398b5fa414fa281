"""FedNova's normalisation of one client's update."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import client
from fedjax_sim.client.normalized import effective_steps
from tests.laws import problems as p
from tests.refusals import refused


def test_divides_by_the_steps_taken():
    """Catches the steps of the largest client for all: client 3 has one example, client 2 six."""
    work = client.local_sgd(p.linear_loss, optax.sgd(p.RATE), client.work(num_epochs=2, batch_size=p.BATCH))
    wrapped = client.normalized(work)
    data = p.ragged()
    both = jax.jit(
        lambda key, id: (
            work.apply(key, p.START, (), data.client(id))[0],
            wrapped.apply(key, p.START, (), data.client(id))[0],
        )
    )
    for id in (2, 3):
        plain, scaled = both(jax.random.key(0), id)
        steps = 2 * -(-int(p.SIZES[id]) // p.BATCH)
        assert float(scaled.update["steps"]) == steps
        np.testing.assert_allclose(scaled.update["direction"] * steps, plain.update, rtol=1e-6)
        assert float(scaled.weight) == float(plain.weight)


@pytest.mark.parametrize(
    "facts, message",
    [
        ({"momentum": 1.0}, "momentum"),
        ({"shrinkage": -0.1}, "shrinkage"),
        ({"momentum": 0.5, "shrinkage": 0.5}, "momentum, shrinkage: expected at most one"),
    ],
)
def test_wrong_facts(facts, message):
    """Catches norms that diverge."""
    with pytest.raises(ValueError, match=message):
        client.normalized(client.local_sgd(p.linear_loss, optax.sgd(0.1), client.work(num_steps=1)), **facts)


def test_momentum_weighs_early_gradients_more():
    """Hand computed: two steps at rho = 1/2 are 1 + 1.5 gradients."""
    from fedjax_sim.client.normalized import effective_steps

    assert float(effective_steps(jnp.float32(2), momentum=0.5)) == 2.5
    assert abs(float(effective_steps(jnp.float32(3), shrinkage=0.5)) - 1.75) < 1e-6


@pytest.mark.parametrize(("momentum", "steps"), [(0.5, 3), (0.9, 10), (0.99, 2), (0.999, 2), (0.999, 10)])
def test_effective_steps_under_momentum_do_not_cancel(momentum, steps):
    """Fault: the closed form in float32, 1 % off at momentum 0.999."""
    velocity = total = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1
        total += velocity
    assert float(effective_steps(jnp.float32(steps), momentum=momentum)) == pytest.approx(total, rel=1e-6)


def test_clients_that_count_no_steps_are_refused():
    """Catches a KeyError about a metric that the caller did not write."""
    private = client.private_sgd(p.linear_loss, 1.0, 0.0, 0.1, num_steps=1, batch_size=1, num_examples=p.ROWS)
    with refused("client", rule="local_steps"):
        jax.eval_shape(
            lambda: client.normalized(private).apply(
                jax.random.key(0), jnp.array(p.START), (), p.ragged().client(jnp.int32(0))
            )
        )
