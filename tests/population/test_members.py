"""Clients that left: no rows, the same ids, and a run as if they had never had any."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, population, sampling
from tests.algorithms.personal import problem as p
from tests.refusals import refused


@pytest.mark.default_rows("2")
@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_client_that_left_had_no_rows(batch_size):
    """Catches other ids, cohorts or minibatches of those who stay, and a client that still counts."""
    people, left = p.population(), [1, 4]
    empty = [{name: x[:0] if i in left else x for name, x in client.items()} for i, client in enumerate(p.rows())]
    sampler = sampling.uniform(p.NUM_CLIENTS, 3)
    algorithm = algorithms.fedavg(p.loss_fn, sampler, optax.sgd(p.RATE), **p.OPTIONS, batch_size=batch_size)

    @jax.jit
    def rounds(key, people):
        state = algorithm.init(key, p.start(), people)
        state, info = jax.lax.scan(
            lambda state, key: algorithm.step(key, state, people), state, jax.random.split(key, 4)
        )
        return algorithm.params(state), info["local_loss"]

    found, expected = (
        jax.device_get(rounds(jax.random.key(0), people))
        for people in (population.without_clients(people, left), population.from_clients(empty))
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert (p.vector(found[0]) != p.vector(p.start())).all()


def test_counts():
    """Catches sizes of those who left."""
    people = population.without_clients(p.population(), [0])
    assert np.asarray(people.sizes).tolist() == [0, *p.SIZES[1:]]
    assert [int(people.count(i)) for i in range(2)] == [0, p.SIZES[1]]
    assert np.asarray(population.without_clients(p.population(), []).sizes).tolist() == list(p.SIZES)
    assert not people.client(0).mask.any() and people.client(2).mask.sum() == p.SIZES[2]


@pytest.mark.parametrize("ids", [[5], [-1], [1, 1], [0.5], 3])
def test_wrong_ids(ids):
    with refused("ids", rule="each once"):
        population.without_clients(p.population(), ids)
