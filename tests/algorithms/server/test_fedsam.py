"""FedSAM's rounds."""

from __future__ import annotations

import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, sampling
from fedjax_sim.round.costs import work_of
from tests.algorithms.personal import problem as q
from tests.client.test_sharpness_aware import RADIUS, nearby_gradient
from tests.laws import laws, problems as p

WORK = {"num_steps": p.STEPS, "batch_size": p.BATCH}
FULL = sampling.full(q.NUM_CLIENTS)


@pytest.mark.optimised
def test_zero_is_fedavg():
    """Qu et al. 2022: rho = 0 is FedAvg; here bit for bit, with partial batches. Catches another order of keys."""

    def sharp(sampler, **options):
        return algorithms.fedsam(p.linear_loss, sampler, optax.sgd(p.RATE), radius=0.0, **WORK, **options)

    def average(sampler, **options):
        return algorithms.fedavg(p.linear_loss, sampler, optax.sgd(p.RATE), **WORK, **options)

    one, other = (p.Federation(make=make).run(p.COHORT) for make in (sharp, average))
    laws.check_equal_bits(p.outcome(*one), p.outcome(*other), "radius 0")


@pytest.mark.full
def test_rounds_match_numpy():
    """Three rounds of unequal clients. Catches a mean that ignores rows, and a point nearby that becomes the model."""
    model = q.START
    for _ in range(q.ROUNDS):
        updates = []
        for rows in q.rows():
            local = model
            for _ in range(q.STEPS):
                local = local - q.RATE * nearby_gradient(local, rows)
            updates.append(local - model)
        model = model + q.mean(updates)
    made = algorithms.fedsam(q.loss_fn, FULL, optax.sgd(q.RATE), radius=RADIUS, **q.OPTIONS)
    np.testing.assert_allclose(q.vector(made.params(q.trained(made)[0])), model, rtol=2e-4)


@pytest.mark.full
def test_a_step_costs_two_gradients():
    """Catches operations of the point nearby that no clock sees."""
    options = q.OPTIONS | {"batch_size": 2}
    average = work_of(algorithms.fedavg(q.loss_fn, FULL, optax.sgd(q.RATE), **options).parts, q.start(), q.population())
    sharp = work_of(algorithms.fedsam(q.loss_fn, FULL, optax.sgd(q.RATE), **options).parts, q.start(), q.population())
    assert 1.8 < sharp.step_flops / average.step_flops < 3
    assert (sharp.bytes_up, sharp.bytes_down) == (average.bytes_up, average.bytes_down)
