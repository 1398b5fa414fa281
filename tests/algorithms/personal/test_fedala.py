"""FedALA against NumPy, its limit, and what its steps cost."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, sampling
from fedjax_sim.round.costs import work_of
from tests.algorithms.personal import problem as p
from tests.laws import laws
from tests.refusals import refused

SGD, COHORT, ROUNDS = optax.sgd(p.RATE), 3, 5
RATE, STEPS = 2.0, 2


def ala(**options):
    given = {"own": ["body"], "weight_learning_rate": RATE, "weight_steps": STEPS}
    return algorithms.fedala(p.loss_fn, sampling.cyclic(p.NUM_CLIENTS, COHORT), SGD, **p.OPTIONS | given | options)


def oracle():
    """(the shared model, the own ones, the weights of each client) after all rounds."""
    shared = p.START
    own, weights = {}, [np.ones(2)] * p.NUM_CLIENTS
    for round in range(ROUNDS):
        cohort = [(COHORT * round + k) % p.NUM_CLIENTS for k in range(COHORT)]
        for i in cohort:
            client, start = p.rows()[i], shared.copy()
            if i in own:
                for _ in range(STEPS):
                    start[p.BODY] = own[i][p.BODY] + (shared - own[i])[p.BODY] * weights[i]
                    slope = p.gradient(start, client)[p.BODY] * (shared - own[i])[p.BODY]
                    weights[i] = np.clip(weights[i] - RATE * slope, 0, 1)
                start[p.BODY] = own[i][p.BODY] + (shared - own[i])[p.BODY] * weights[i]
            for _ in range(p.STEPS):
                start = start - p.RATE * p.gradient(start, client)
            own[i] = start
        shared = np.average([own[i] for i in cohort], axis=0, weights=[p.SIZES[i] for i in cohort])
    return shared, [own[i] for i in range(p.NUM_CLIENTS)], weights


def test_matches_numpy():
    """Three of five clients a round, each three times. Catches weights of the whole model, weights that begin anew, a
    mixture the other way round, and the start for a client's last model."""
    algorithm = ala()
    state, info = p.trained(algorithm, ROUNDS)
    shared, own, weights = oracle()
    np.testing.assert_allclose(p.vector(algorithm.params(state)), shared, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(p.own_models(algorithm, state), own, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.clients.own.weights["body"]["w"], weights, rtol=1e-4, atol=1e-5)
    assert np.min(weights) < 0.99 and info["uplink_bytes"].total() == info["downlink_bytes"].total() == COHORT * 12


@pytest.mark.full
@pytest.mark.optimised
def test_without_a_rate_it_is_fedavg():
    """Bit for bit, on minibatches. Catches a mixture that rounds, and other keys."""
    options = p.OPTIONS | {"batch_size": 2}
    average = algorithms.fedavg(p.loss_fn, sampling.cyclic(p.NUM_CLIENTS, COHORT), SGD, **options)
    adapted = ala(weight_learning_rate=0.0, batch_size=2)
    one, other = (made.params(p.trained(made)[0]) for made in (adapted, average))
    laws.check_equal_bits(one, other, "rate 0")


@pytest.mark.full
def test_weight_steps_are_counted():
    """Catches steps that no clock sees."""
    costs = [work_of(ala(weight_steps=n, batch_size=2).parts, p.start(), p.population()).flops for n in (1, 2, 5)]
    assert costs[1] > costs[0] and costs[2] - costs[1] == pytest.approx(3 * (costs[1] - costs[0]))


def test_newcomers_have_the_shared_model():
    algorithm = ala()
    state, _ = p.trained(algorithm, 1)
    own, shared = p.own_models(algorithm, state), p.vector(algorithm.params(state))
    assert np.array_equal(own[COHORT:], np.stack([shared] * 2)) and not (own[:COHORT] == shared).all(1).any()
    assert np.asarray(algorithm.evaluated.has_trained(state, jnp.arange(5))).tolist() == [True] * 3 + [False] * 2


def test_what_is_refused():
    with pytest.raises(ValueError, match="head"):
        p.trained(ala(own=["head"]), 1)
    with refused("weight_learning_rate", rule=">= 0"):
        ala(weight_learning_rate=-1.0)
    with refused("weight_steps", rule="integer"):
        ala(weight_steps=0)
