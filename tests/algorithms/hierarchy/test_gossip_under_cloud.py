"""Edges that gossip under a cloud, against NumPy and against the hierarchies that they include."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, population, sampling, server
from fedjax_sim.algorithms.hierarchy.hierfavg import as_client_update

KEY, RATE = jax.random.key(3), 0.3
CENTERS, EDGE_OF = np.array([0.0, 1.0, 4.0, -2.0, 3.0, 0.5, 9.0]), np.array([0, 0, 1, 2, 2, 3, 3])
N = np.bincount(EDGE_OF)
PEOPLE = population.grouped(population.quadratic_population(np.ones(7), CENTERS), EDGE_OF)
MEANS = np.array([CENTERS[g == EDGE_OF].mean() for g in range(4)])
RING = np.eye(4) / 2 + (np.roll(np.eye(4), 1, 0) + np.roll(np.eye(4), -1, 0)) / 4
EDGE = algorithms.fedavg(population.quadratic_loss, sampling.full(2), optax.sgd(RATE), num_steps=1, mesh=None).parts


STEP = server.optimizer(optax.sgd(1.0))


def run(matrix, rounds, **options):
    made = algorithms.hierarchical_gossip(EDGE, matrix, mesh=None, **options)
    state, step = made.init(KEY, {"w": jnp.ones(1)}, PEOPLE), jax.jit(made.step)
    infos = []
    for t in range(rounds):
        state, info = step(jax.random.fold_in(KEY, t), state, PEOPLE)
        infos.append(info)
    np.testing.assert_allclose(made.params(state)["w"], np.mean(state.clients["w"]), rtol=1e-6)
    return np.asarray(state.clients["w"])[:, 0], infos


def by_hand(matrix, rounds, kappa=1, cloud_every=0):
    x = np.ones(4)
    for t in range(rounds):
        x = matrix @ (MEANS + (1 - RATE) ** kappa * (x - MEANS))
        if cloud_every and (t + 1) % cloud_every == 0:
            x = np.full(4, np.average(x, weights=N))
    return x


@pytest.mark.full
def test_a_ring_under_a_cloud():
    """Two edge rounds, a cloud in every third round. Faults: a mix of what has not moved, the transposed matrix, an
    average by numbers of edges, bytes of a cloud that does not meet."""
    found, infos = run(RING, 5, edge_rounds=2, cloud_every=3)
    np.testing.assert_allclose(found, by_hand(RING, 5, 2, 3), rtol=1e-5)
    assert [info["uplink_bytes"].total() for info in infos] == [0, 0, 16, 0, 0]
    assert infos[0]["gossip_bytes"].total() == 8 * 4 and infos[0]["edge_uplink_bytes"].total() == 2 * 7 * 4
    np.testing.assert_allclose(float(infos[-1]["consensus_distance"]), found.std(), rtol=1e-4)
    turned = 0.6 * np.eye(4) + 0.3 * np.roll(np.eye(4), 1, 1) + 0.1 * np.roll(np.eye(4), 2, 1)
    np.testing.assert_allclose(run(turned, 4)[0], by_hand(turned, 4), rtol=1e-5)


@pytest.mark.full
def test_special_cases():
    """Fault: a cloud, or a complete graph, that is not the average."""
    for matrix, weighting, options in (
        (np.eye(4), "examples", {"cloud_every": 1}),
        (np.ones((4, 4)) / 4, "uniform", {}),
    ):
        made = algorithms.federated(
            sampling.full(4), as_client_update(EDGE, weighting=weighting), aggregation.mean(), STEP, mesh=None
        )
        state, step = made.init(KEY, {"w": jnp.ones(1)}, PEOPLE), jax.jit(made.step)
        for t in range(3):
            state, _ = step(jax.random.fold_in(KEY, t), state, PEOPLE)
        np.testing.assert_allclose(run(matrix, 3, **options)[0], np.full(4, made.params(state)["w"][0]), rtol=1e-6)


@pytest.mark.parametrize(
    "matrix, options, words",
    [
        (np.ones((4, 4)), {}, "mixing: expected a square matrix"),
        (np.eye(4)[:3], {}, "mixing: expected a square matrix"),
        (np.full((4, 4), np.nan), {}, "mixing: expected a square matrix"),
        ([[2.0, -1.0], [0.0, 1.0]], {}, "mixing: expected a square matrix"),
        (np.ones(4), {}, "mixing rows: expected an integer"),
        (np.eye(4), {"cloud_every": 0}, "cloud_every: expected an integer"),
        ([[0.5, 0.5], [0.0, 1.0]], {}, "mixing: expected columns that sum to 1"),
        (np.eye(4), {}, "mixing: expected a connected graph, got '4 parts, of 1, 1, 1, 1 nodes'"),
    ],
)
def test_wrong_input(matrix, options, words):
    """Fault: models that grow or vanish by mixing, edges that count more than their share (the optimum 1.0 became
    1.283), and edges that never agree."""
    with pytest.raises(ValueError, match=words):
        algorithms.hierarchical_gossip(EDGE, matrix, **options)


@pytest.mark.full
def test_a_round_that_overflows():
    """Rows that sum to 1 + 9e-6, and models at the end of float32. Fault: infinite models that nobody counts."""
    slow = algorithms.fedavg(population.quadratic_loss, sampling.full(2), optax.sgd(1e-9), num_steps=1, mesh=None).parts
    made = algorithms.hierarchical_gossip(slow, np.eye(4) * (1 + 9e-6), cloud_every=2, mesh=None)
    state = made.init(KEY, {"w": jnp.full(1, 3.4028e38)}, PEOPLE)
    after, info = jax.jit(made.step)(KEY, state, PEOPLE)
    assert int(info["skipped_rounds"]) == 1
    np.testing.assert_array_equal(after.clients["w"], state.clients["w"])
