"""FedProx's local solver."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, client
from fedjax_sim.types import ClientData
from tests.laws import laws, problems as p
from tests.refusals import refused

WORK = {"num_steps": p.STEPS, "batch_size": p.BATCH}


@pytest.mark.full
@pytest.mark.optimised
def test_zero_is_local_sgd():
    """Li et al. 2020, section 3.2: coefficient 0 is FedAvg; here bit for bit. Catches another order of keys."""

    def prox(sampler, **options):
        return algorithms.fedprox(p.linear_loss, sampler, optax.sgd(p.RATE), coefficient=0.0, **WORK, **options)

    def average(sampler, **options):
        return algorithms.fedavg(p.linear_loss, sampler, optax.sgd(p.RATE), **WORK, **options)

    one, other = (p.Federation(make=make).run(p.COHORT) for make in (prox, average))
    laws.check_equal_bits(p.outcome(*one), p.outcome(*other), "coefficient 0")


@pytest.mark.parametrize(
    "coefficient, expected", [(0, (0.6, -0.8)), (1, (0.454545, -0.318182)), (10, (0.438710, 0.296774))]
)
def test_reaches_the_closed_form(coefficient, expected):
    """f = w'Hw/2 - g'w from (0.5, 0.5): the minimiser is (H + c I)^-1 (g + c w_t). Catches a term without its 1/2."""
    hessian, linear = jnp.array([[3.0, 1.0], [1.0, 2.0]]), jnp.array([1.0, -1.0])

    def loss(w, x, key):
        return x * (w @ hessian @ w / 2 - linear @ w)

    one = client.proximal(loss, optax.sgd(0.08), coefficient, client.work(num_steps=400))
    data = ClientData(jnp.ones(1), jnp.ones(1, bool))
    report, _ = jax.jit(one.apply)(jax.random.key(0), jnp.full(2, 0.5), (), data)
    np.testing.assert_allclose(0.5 + np.asarray(report.update), expected, atol=2e-6)


@pytest.mark.parametrize("coefficient", [-0.1, float("nan"), float("inf")])
def test_wrong_coefficient(coefficient):
    """Catches a term that pushes away."""
    with refused("coefficient", rule=">= 0"):
        client.proximal(p.linear_loss, optax.sgd(0.1), coefficient, client.work(num_steps=1))
