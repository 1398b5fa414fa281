"""Client learning rates that fall over rounds."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, client, population, sampling
from fedjax_sim.algorithms import as_client_update
from fedjax_sim.client import over_rounds
from fedjax_sim.config.build import build
from fedjax_sim.config.document import load
from fedjax_sim.types import ClientData, Devices, Spent
from tests.refusals import refused

KEY, START = jax.random.key(0), {"w": jnp.full(1, 8.0)}
CENTRES = np.array([0.0, 1.0, 5.0])
RATES = [0.5, 0.375, 0.25, 0.125, 0.0, 0.0]
FALLING = over_rounds(optax.sgd, optax.linear_schedule(0.5, 0.0, 4))
WORK = {"num_steps": 2, "mesh": None}


def clients(number=3):
    return population.quadratic_population(np.ones(number), CENTRES[:number])


def fedavg(optimizer, **options):
    return algorithms.fedavg(population.quadratic_loss, sampling.full(3), optimizer, **WORK | options)


def path(algorithm, rounds=6, people=None):
    """[rounds + 1] the model before the first round and after each, without a program for each round."""
    people = clients() if people is None else people
    state, step = algorithm.init(KEY, START, people), jax.jit(algorithm.step)
    models = [float(algorithm.params(state)["w"][0])]
    for t in range(rounds):
        state, _ = step(jax.random.fold_in(KEY, t), state, people)
        models.append(float(algorithm.params(state)["w"][0]))
    assert step._cache_size() <= 2  # of states that were just made, and of those that rounds return
    return np.array(models)


def by_hand(rates, steps=2):
    """The mean of the clients' models contracts to the mean of their optima, at the rate of each round."""
    models, centre = [8.0], CENTRES.mean()
    for rate in rates:
        models.append(centre + (1 - rate) ** steps * (models[-1] - centre))
    return models


@pytest.mark.full
def test_a_round_is_that_of_its_rate():
    """In closed form; at rate 0 the model keeps its bits; Adam's third round is that of the constant rate.

    Catches a schedule that counts local steps, one that is off by a round, and a program for each round.
    """
    models = path(fedavg(FALLING))
    np.testing.assert_allclose(models, by_hand(RATES), rtol=1e-6)
    assert models[-1] == models[-3]
    falling = path(fedavg(over_rounds(optax.adam, lambda t: jnp.where(t == 2, 0.25, 0.0))), 3)
    constant = path(fedavg(optax.adam(0.25)), 1)
    assert falling.tolist() == [8.0, 8.0, 8.0, constant[-1]]


@pytest.mark.full
@pytest.mark.parametrize(
    "make", [algorithms.fedprox, partial(algorithms.feddyn, weighting="uniform"), algorithms.fedadam]
)
def test_other_recipes(make):
    """Rates (1/2, 0) are those of two rates 1/2 until the second round. Catches a solver that is not told the round."""
    first = over_rounds(optax.sgd, lambda t: jnp.where(t == 0, 0.5, 0.0))
    falling, constant = (
        path(make(population.quadratic_loss, sampling.full(3), x, **WORK), 2) for x in (first, optax.sgd(0.5))
    )
    assert falling[1] == constant[1] != falling[0] and falling[2] != constant[2]


@pytest.mark.full
def test_asynchronous_clients_train_at_the_rate_of_their_version():
    """One client after the other: client i arrives in step i with the model of version 0, at that version's rate.

    Catches the rate of the step in which a message arrives, which no device could know.
    """
    late = Devices(3, lambda key, ids, load: Spent(*[jnp.zeros_like(ids)] * 2, 1 + 5 * ids, jnp.zeros(ids.shape)))
    made = algorithms.fedbuff(
        population.quadratic_loss, late, over_rounds(optax.sgd, lambda t: jnp.where(t == 0, 0.5, 0.0)),
        population_size=3, concurrency=3, buffer_size=1, refill="same", mesh=None, num_steps=1,
        staleness=lambda gaps: jnp.ones(gaps.shape),
    )  # fmt: skip
    moves = np.diff(path(made, 16))
    moves = moves[moves != 0]  # each client's first message, later ones at a rate of 0
    np.testing.assert_allclose(moves, -0.5 * (8.0 - CENTRES), rtol=1e-6)


def test_edges_that_keep_nothing_refuse_it():
    """Catches a schedule that begins anew in each round of the cloud."""
    edge = fedavg(FALLING).parts
    with refused("optimizer", rule="over steps"):
        as_client_update(edge)
    assert as_client_update(edge, keep=True).federation.client.facts.reads_round


def test_without_a_round():
    """Catches a rate that is silently that of round 0."""
    alone = client.local_sgd(population.quadratic_loss, FALLING, client.work(num_steps=1))
    data = clients().client(jnp.int32(0))
    with refused("optimizer", rule="does not fall"):
        alone.apply(KEY, START, (), ClientData(data.examples, data.mask))


def test_from_a_config():
    """Catches an option that a config cannot name, and one that says nothing."""
    small = "data.num_clients=20 model.name=linear sampler.cohort_size=5 run.rounds=2".split()
    falling = "client_optimizer.schedule=cosine client_optimizer.decay_steps=10 client_optimizer.schedule_over=rounds"
    assert build(load(None, [*small, *falling.split()])).algorithm.parts.client.facts.reads_round
    with pytest.raises(ValueError, match="schedule_over: expected 'steps'"):
        build(load(None, [*small, "client_optimizer.schedule_over=rounds"]))
