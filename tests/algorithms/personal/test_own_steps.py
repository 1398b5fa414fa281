"""Own numbers of steps of Ditto's own models and FedRep's own parts: what they cost, and partial work beside them."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, client, network, run, sampling
from fedjax_sim.round.costs import work_of
from tests.algorithms.personal import problem as p

SGD, FULL = optax.sgd(p.RATE), sampling.full(p.NUM_CLIENTS)
MAKE = {"ditto": algorithms.ditto, "fedrep": algorithms.fedrep}


def cost(name, **options):
    made = MAKE[name](p.loss_fn, FULL, SGD, **p.OPTIONS | {"batch_size": 2} | options)
    return work_of(made.parts, p.start(), p.population())


def flops(work, steps):
    return work.flops + (steps - 1) * work.step_flops


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", MAKE)
def test_own_steps_are_counted(name):
    """K + P steps cost what K steps and P steps cost. Catches own steps that are free, or are counted K times."""
    shared, alike = cost(name, own_steps=1), cost(name)
    own_step = flops(cost(name, own_steps=2), p.STEPS) - flops(shared, p.STEPS)
    assert own_step > 0 and flops(cost(name, own_steps=9), p.STEPS) == flops(shared, p.STEPS) + 8 * own_step
    np.testing.assert_allclose(flops(cost(name, own_steps=p.STEPS), p.STEPS), flops(alike, p.STEPS), rtol=0.02)
    np.testing.assert_allclose(shared.step_flops + own_step, alike.step_flops, rtol=0.02)
    epochs = cost(name, num_steps=None, num_epochs=2, own_steps=1)
    assert (epochs.flops, epochs.step_flops) == (shared.flops, shared.step_flops)


@pytest.mark.full
@pytest.mark.parametrize("name", MAKE)
def test_partial_work_leaves_own_steps(name):
    """Two of three shared steps, and all own steps. Catches partial work that shortens both, or none."""
    partial = sampling.with_local_steps(FULL, [2] * p.NUM_CLIENTS)
    found, expected = (
        MAKE[name](p.loss_fn, sampler, SGD, **p.OPTIONS | {"own_steps": 4, "num_steps": steps})
        for sampler, steps in ((partial, 3), (FULL, 2))
    )
    states = [p.trained(made)[0] for made in (found, expected)]
    np.testing.assert_allclose(*(p.own_models(found, state) for state in states), rtol=1e-6)


@pytest.mark.full
def test_simulated_time_has_own_steps():
    """A round's time grows by the own steps alone, at a thousand operations a second."""
    seconds = []
    for own_steps in (1, 11):
        devices = network.heterogeneous(p.NUM_CLIENTS, speed=1e3, bandwidth_down=1e6, bandwidth_up=1e6)
        sampler = sampling.with_clock(FULL, devices)
        made = algorithms.ditto(p.loss_fn, sampler, SGD, own_steps=own_steps, **p.OPTIONS | {"batch_size": 2})
        _, history = run(jax.random.key(0), made, p.start(), p.population(), 1)
        seconds.append(history.records[0]["round_seconds"])
    one = flops(cost("ditto", own_steps=2), p.STEPS) - flops(cost("ditto", own_steps=1), p.STEPS)
    np.testing.assert_allclose(seconds[1] - seconds[0], 10 * one / 1e3, atol=2e-3)


@pytest.mark.full
def test_an_own_rate_may_fall_over_rounds():
    """Catches clients who are not told the round where only the own models' rate falls."""
    falling = client.over_rounds(optax.sgd, optax.linear_schedule(0.2, 0.0, 2))
    made = algorithms.ditto(p.loss_fn, FULL, SGD, own_optimizer=falling, **p.OPTIONS)
    before, after = (p.own_models(made, p.trained(made, rounds)[0]) for rounds in (2, 3))
    np.testing.assert_array_equal(before, after)  # the rate of the third round is 0
    assert made.parts.client.facts.reads_round
    shared = [p.vector(made.params(p.trained(made, rounds)[0])) for rounds in (2, 3)]
    assert (shared[0] != shared[1]).any()


@pytest.mark.parametrize("name", MAKE)
def test_no_own_steps_are_refused(name):
    with pytest.raises(ValueError, match="own_steps: expected"):
        MAKE[name](p.loss_fn, FULL, SGD, own_steps=0, **p.OPTIONS)
