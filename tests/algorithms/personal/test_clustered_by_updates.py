"""CFL against NumPy, by trial of all bipartitions, and who is separated."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, population, sampling
from fedjax_sim.algorithms.personal.clustered_by_updates import second_part
from tests.algorithms.personal import problem as p
from tests.refusals import refused

SGD, FULL = optax.sgd(p.RATE), sampling.full(p.NUM_CLIENTS)


def cfl(sampler=FULL, loss_fn=p.loss_fn, **options):
    return algorithms.clustered_by_updates(loss_fn, sampler, SGD, **p.OPTIONS | options)


def separation(similarities, part):
    """The largest similarity between a client of the part and one of the others."""
    return similarities[np.ix_(part, ~part)].max()


def best_parts(similarities):
    """[m] bool, of all bipartitions the one of smallest separation, without client 0."""
    m = len(similarities)
    parts = [np.array((False, *bits)) for bits in itertools.product([False, True], repeat=m - 1) if any(bits)]
    return min(parts, key=lambda part: separation(similarities, part))


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("seed", range(4))
def test_parts_are_the_best(seed):
    """Seven rows, of which five are members: the optimum of all bipartitions, ties included. Catches a cut at another
    link, and rows of others that join."""
    rng = np.random.default_rng(seed)
    directions = rng.normal(size=(7, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    similarities = np.float32(directions @ directions.T)
    if seed % 2:
        similarities = np.round(similarities)  # equal links
    members = np.array([0, 1, 3, 4, 6])
    is_member = np.isin(np.arange(7), members)
    part = np.asarray(second_part(jnp.array(similarities), jnp.array(is_member)))
    own = similarities[np.ix_(members, members)]
    assert not part[~is_member].any() and 0 < part.sum() < 5
    assert separation(own, part[members]) == separation(own, best_parts(own))


@pytest.mark.parametrize("number", [0, 1])
def test_too_few_to_split(number):
    assert not second_part(jnp.eye(3), jnp.arange(3) < number).any()


def oracle(mean_norm, client_norm):
    """(models of clients, clusters of clients): lists of clients in place of arrays of fixed shape."""
    clients, clusters, models = p.rows(), [list(range(p.NUM_CLIENTS))], [p.START]
    for _ in range(p.ROUNDS):
        updates = {}
        for members, model in zip(clusters, models, strict=True):
            for i in members:
                local = model
                for _ in range(p.STEPS):
                    local = local - p.RATE * p.gradient(local, clients[i])
                updates[i] = local - model
        for c, members in enumerate(clusters[:]):
            own = np.array([updates[i] for i in members])
            norms, sizes = np.linalg.norm(own, axis=1), [p.SIZES[i] for i in members]
            if np.linalg.norm(p.mean(own, sizes)) < mean_norm and norms.max() > client_norm and len(members) > 1:
                second = best_parts(own @ own.T / norms / norms[:, None])
                clusters[c] = [i for i, is_second in zip(members, second, strict=True) if not is_second]
                clusters.append([i for i, is_second in zip(members, second, strict=True) if is_second])
                models.append(models[c])
        models = [
            model + p.mean([updates[i] for i in members], [p.SIZES[i] for i in members])
            for members, model in zip(clusters, models, strict=True)
        ]
    own = {i: model for members, model in zip(clusters, models, strict=True) for i in members}
    return [own[i] for i in range(p.NUM_CLIENTS)], clusters


def test_matches_numpy():
    """Catches a test of the wrong norm, a part that keeps the other's mean, and a client that trains another model."""
    norms = {"mean_norm": 0.35, "client_norm": 0.4}
    algorithm = cfl(**norms)
    state, info = p.trained(algorithm)
    models, clusters = oracle(**norms)
    np.testing.assert_allclose(p.own_models(algorithm, state), models, rtol=2e-5, atol=2e-6)
    members = np.asarray(state.aggregator.members)
    assert 1 < len(clusters) == info["clusters"] < p.NUM_CLIENTS
    assert info["uplink_bytes"].total() == info["downlink_bytes"].total() == p.NUM_CLIENTS * 12  # of one model
    assert {tuple(np.flatnonzero(members == c)) for c in set(members)} == {tuple(sorted(x)) for x in clusters}


def quadratic(centers, **options):
    """Clusters after 12 rounds of clients with f_i(w) = |w - c_i|^2 / 2."""
    centers = np.array(centers, np.float32)
    people = population.quadratic_population(np.tile(np.eye(2), (len(centers), 1, 1)), centers)
    algorithm = algorithms.clustered_by_updates(
        population.quadratic_loss, sampling.full(len(centers)), optax.sgd(0.3), num_steps=2, **options
    )
    state, step = algorithm.init(jax.random.key(0), {"w": jnp.zeros(2)}, people), jax.jit(algorithm.step)
    for round in range(12):
        state, info = step(jax.random.key(round), state, people)
    own = algorithm.evaluated.personal(state, jnp.arange(len(centers)))["w"]
    return np.asarray(state.aggregator.members), np.asarray(own), int(info["clusters"])


@pytest.mark.full
def test_opposite_groups_are_separated():
    """Two groups of noisy clients: separated at their common stationary point, and each at its own mean then."""
    rng = np.random.default_rng(0)
    group = np.array([0, 1, 1, 0, 1, 0, 0, 1])
    centers = np.where(group[:, None], [1.0, 0.0], [-1.0, 0.0]) + 0.05 * rng.normal(size=(8, 2))
    members, own, count = quadratic(centers, mean_norm=0.1, client_norm=0.2, max_clusters=4)
    assert count == 2 and len({*zip(members, group, strict=True)}) == 2
    for which in range(2):
        expected = np.tile(centers[group == which].mean(0), (4, 1))
        np.testing.assert_allclose(own[group == which], expected, atol=0.01)


@pytest.mark.full
def test_equal_clients_stay_together():
    """Whatever the norms: |mean| is the norm of each."""
    for norm in (0.1, 1.0):  # passed while they approach, and from the start
        _, _, count = quadratic([[3.0, 1.0]] * 5, mean_norm=norm, client_norm=norm)
        assert count == 1


@pytest.mark.full
def test_one_cluster_is_fedavg():
    algorithm = cfl(max_clusters=1, mean_norm=1e3, client_norm=1e3, batch_size=2)
    plain = algorithms.fedavg(p.loss_fn, FULL, SGD, **p.OPTIONS | {"batch_size": 2})
    found, expected = (p.vector(made.params(p.trained(made)[0])) for made in (algorithm, plain))
    np.testing.assert_allclose(found, expected, rtol=2e-6)


@pytest.mark.full
def test_bytes_are_of_one_model():
    _, info = p.trained(cfl(), rounds=1)
    assert info["uplink_bytes"].total() == info["downlink_bytes"].total() == p.NUM_CLIENTS * 12


def test_what_is_refused():
    with refused("sampler", value="4 of 5"):
        cfl(sampling.uniform(5, 4))
    with refused("client_norm", value=0.4, rule="mean_norm, 0.5"):
        cfl(mean_norm=0.5, client_norm=0.4)
