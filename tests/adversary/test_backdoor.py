"""Model replacement in whole rounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import adversary, aggregation, client, population, sampling, server
from fedjax_sim.algorithms import federated
from tests.refusals import refused

SIZE, DIMENSION, ATTACKER = 10, 4, 3
START = np.array([1.0, -2.0, 0.5, 3.0], np.float32)
OTHER = np.array([-1.5, 0.25, 4.0, 1.0], np.float32)  # whose targets the attacker holds
RNG = np.random.default_rng(0)


def loss(params, examples, key):
    return (examples["x"] @ params - examples["y"]) ** 2 / 2


def people(sizes):
    """Honest clients hold the model's own outputs, so their gradient at it is zero to the bit; integers keep it so."""
    clients = []
    for id, n in enumerate(sizes):
        x = RNG.integers(-2, 3, (n, DIMENSION)).astype(np.float32)
        clients.append({"x": x, "y": x @ (OTHER if id == ATTACKER else START)})
    return population.from_clients(clients)


def local(weighting):
    return client.local_sgd(loss, optax.sgd(0.05), client.work(num_steps=3, weighting=weighting))


def after_a_round(data, weighting, rule, server_rate=1.0):
    star = federated(
        sampling.full(SIZE), local(weighting), rule, server=server.optimizer(optax.sgd(server_rate)), mesh=None
    )
    state = star.init(jax.random.key(0), jnp.asarray(START), data)
    state, info = jax.jit(star.step)(jax.random.key(1), state, data)
    return np.asarray(star.params(state)), info


def own_model(data):
    """What the attacker's own local training makes of the model: three steps of gradient descent in NumPy."""
    x, y = (np.asarray(data.client(ATTACKER).examples[name], np.float64)[: data.sizes[ATTACKER]] for name in "xy")
    model = START.astype(np.float64)
    for _ in range(3):
        model = model - 0.05 * x.T @ (x @ model - y) / len(y)
    return model


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("server_rate", [1.0, 0.5])
def test_the_attackers_model_replaces_the_global(weighting, server_rate):
    """The others send zeros. Catches a boost by m where weights are examples, one that forgets the server's rate or
    multiplies by it, and one that takes W for the others' weight."""
    data = people(range(4, 4 + SIZE))
    total = SIZE if weighting == "uniform" else float(data.sizes.sum())
    attack = adversary.model_replacement(total, server_rate=server_rate)
    rule = adversary.corrupted(aggregation.mean(weighting=weighting), attack, adversary.clients([ATTACKER]))
    found, info = after_a_round(data, weighting, rule, server_rate)
    wanted = own_model(data)
    assert np.abs(wanted - START).max() > 0.1 and int(info["attackers_met"]) == 1
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    halves = adversary.model_replacement(total, server_rate=server_rate, num_attackers=2)
    one, half = (np.asarray(x.send(jax.random.key(0), jnp.asarray(START), 1.0)[0]) for x in (attack, halves))
    np.testing.assert_allclose(half, one / 2, rtol=1e-6)


@pytest.mark.full
def test_a_norm_bound_bounds_the_shift():
    """Catches a bound inside of the attack, which binds honest clients only, and one by the sum in place of C / m."""
    data, bound = people([6] * SIZE), 0.5
    attack = adversary.model_replacement(float(SIZE))
    rule = aggregation.norm_bounding(aggregation.mean(weighting="uniform"), bound)
    rule = adversary.corrupted(rule, attack, adversary.clients([ATTACKER]))
    found, _ = after_a_round(data, "uniform", rule)
    assert np.linalg.norm(own_model(data) - START) > bound / SIZE
    np.testing.assert_allclose(np.linalg.norm(found - START), bound / SIZE, rtol=1e-5)
    with refused("aggregator", rule="without attackers"):
        aggregation.norm_bounding(adversary.corrupted(aggregation.mean(), attack, adversary.clients([3])), bound)


@pytest.mark.parametrize(
    "options, told",
    [
        ((0.0,), "cohort_weight: expected a finite number > 0"),
        ((float("nan"),), "cohort_weight: expected"),
        ((10.0, -1.0), "server_rate: expected"),
        ((10.0, 1.0, 0), "num_attackers: expected an integer"),
        ((3e38, 1e-6), r"cohort_weight / \(server_rate x num_attackers\): expected"),
    ],
)
def test_wrong_input(options, told):
    """Catches a boost that is not finite."""
    with pytest.raises(ValueError, match=told):
        adversary.model_replacement(*options)
