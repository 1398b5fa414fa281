"""Robust gossip: what clipping does, and what attackers can."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import adversary, algorithms, engine, network, population
from tests.algorithms.gossip import problems as g
from tests.laws.cases import rows

WIDTH, BAD = 3, np.arange(g.N) == 5
CENTERS = np.random.default_rng(8).normal(size=(g.N, WIDTH)).astype(np.float32).astype(np.float64)
START = {"w": jnp.zeros(WIDTH)}
WHEEL = network.metropolis(network.from_edges(g.N, [(i, (i + hop) % g.N) for i in range(g.N) for hop in (1, 2)]))


def clients():
    return population.quadratic_population(np.broadcast_to(np.eye(WIDTH), (g.N, WIDTH, WIDTH)), CENTERS)


def clipped(mixing=WHEEL, rate=0.1, **options):
    options = {"num_steps": 1, "mesh": None} | options
    return algorithms.clipped_gossip(population.quadratic_loss, mixing, optax.sgd(rate), **options)


def own(made, state):
    return np.asarray(made.evaluated.personal(state, g.IDS)["w"], np.float64)


def sends_far():
    """Each attacker sends its own message, far away."""
    return adversary.Alone(lambda key, update, weight: ({"w": update["w"] * 0 + 50.0}, weight))


def reference(rounds, radius=None, num_byzantine=None, attacks=False):
    matrix, x = network.matrix_of(WHEEL).toarray(), np.zeros((g.N, WIDTH))
    np.fill_diagonal(matrix, 0)
    for _ in range(rounds):
        y = x - 0.1 * (x - CENTERS)
        sent = np.where(BAD[:, None], 50.0, y) if attacks else y
        x = y.copy()
        for i in range(g.N):
            heard = np.flatnonzero(matrix[i])
            away = np.linalg.norm(sent[heard] - y[i], axis=1)
            tau = radius
            if radius is None:
                order = np.argsort(-away, kind="stable")
                far, near = heard[order[:num_byzantine]], order[num_byzantine:]
                tau = np.sqrt((matrix[i, heard[near]] * away[near] ** 2).sum() / matrix[i, far].sum())
            for j, d in zip(heard, away, strict=True):
                x[i] += matrix[i, j] * min(1, tau / max(d, 1e-30)) * (sent[j] - y[i])
    return x


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("rule", [{"radius": 0.3}, {"num_byzantine": 1}])
@pytest.mark.parametrize("attacks", [False, True])
def test_numpy(rule, attacks):
    """Catches a distance from another model than the node's own, a clip of the weighted difference, ranks that count
    padding, an attacker whose own model is led away; means that count attackers."""
    how = {"attack": sends_far(), "who": adversary.clients([5])} if attacks else {}
    made = clipped(**rule, **how)
    state, infos = g.run(made, 5, clients(), START)
    expected = reference(5, **rule, attacks=attacks)
    np.testing.assert_allclose(own(made, state), expected, rtol=1e-4, atol=1e-5)
    counted = expected[~BAD] if attacks else expected
    np.testing.assert_allclose(made.params(state)["w"], counted.mean(0), rtol=1e-4, atol=1e-5)
    away = np.sqrt(((counted - counted.mean(0)) ** 2).sum(1).mean())
    np.testing.assert_allclose(infos[-1]["consensus_distance"], away, rtol=1e-4)
    assert infos[-1].get("attackers_met", 0) == attacks


@pytest.mark.full
def test_attackers_do_little():
    """One of eight sends 50s: plain gossip is led tens away, clipped stays within 0.5 of where it is without attack."""
    how = {"attack": sends_far(), "who": adversary.clients([5])}
    ends = []
    for rule in ({"radius": 1e6}, {"num_byzantine": 1}):
        made = clipped(**rule, **how)
        state, _ = g.run(made, 60, clients(), START)
        ends.append(own(made, state)[~BAD])
    assert np.abs(ends[0] - CENTERS.mean(0)).max() > 10
    assert np.abs(ends[1] - CENTERS[~BAD].mean(0)).max() < 1.2 and np.abs(CENTERS).max() > 1.5


@pytest.mark.full
@pytest.mark.parametrize("name", rows(["alie", "sign_flip", "inner_product"], ["alie"]))
def test_every_kind_of_attack(name):
    """Alone, together and with memory. Catches a kind whose messages never reach the neighbours."""
    attack = {
        "alie": adversary.alie,
        "sign_flip": adversary.sign_flip,
        "inner_product": lambda: adversary.inner_product(5.0),
    }[name]()
    plain = clipped(radius=1.0)
    made = clipped(radius=1.0, attack=attack, who=adversary.clients([5]))
    one, _ = g.run(plain, 4, clients(), START)
    two, infos = g.run(made, 4, clients(), START)
    assert infos[0]["attackers_met"] == 1 and infos[0]["attackers_lost"] == 0
    assert np.abs(own(plain, one) - own(made, two))[[4, 6]].max() > 1e-3


@pytest.mark.full
def test_a_large_radius_is_gossip():
    """Catches a clip that rounds, and lost messages of attackers that count as zeros: one sends inf to a neighbour."""
    made = clipped(radius=1e9)
    other = algorithms.dpsgd(
        population.quadratic_loss, WHEEL, optax.sgd(0.1), num_steps=1, form="adapt_then_combine", mesh=None
    )
    one, two = g.run(made, 4, clients(), START)[0], g.run(other, 4, clients(), START)[0]
    np.testing.assert_allclose(own(made, one), own(other, two), rtol=1e-5, atol=1e-6)
    inf = adversary.Alone(lambda key, update, weight: ({"w": update["w"] * jnp.inf}, weight))
    made = clipped(radius=1e9, attack=inf, who=adversary.clients([5]))
    state, infos = g.run(made, 3, clients(), START)
    matrix = network.matrix_of(WHEEL).toarray()
    matrix[:, 5] = 0
    matrix[5, :] = network.matrix_of(WHEEL).toarray()[5]
    np.fill_diagonal(matrix, 0)
    np.fill_diagonal(matrix, 1 - matrix.sum(1))
    x = np.zeros((g.N, WIDTH))
    for _ in range(3):
        x = matrix @ (x - 0.1 * (x - CENTERS))
    np.testing.assert_allclose(own(made, state)[~BAD], x[~BAD], rtol=1e-4, atol=1e-5)
    assert infos[0]["attackers_lost"] == 1


@pytest.mark.full
def test_same_bits_on_two_devices():
    """Catches distances whose sums are split over devices."""
    found = []
    for mesh in (None, engine.device_mesh(2)):
        made = clipped(num_byzantine=1, attack=adversary.alie(), who=adversary.clients([5]), mesh=mesh)
        state, infos = g.run(made, 3, clients(), START)
        found.append((own(made, state), np.asarray(made.params(state)["w"]), infos[-1]["consensus_distance"]))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "options, words",
    [
        ({}, "radius, num_byzantine: expected exactly one"),
        ({"radius": 1.0, "num_byzantine": 1}, "radius, num_byzantine: expected exactly one"),
        ({"radius": 0.0}, "radius: expected a finite number > 0"),
        ({"num_byzantine": 0}, "num_byzantine: expected an integer"),
        ({"radius": 1.0, "who": adversary.clients([1])}, "attack, who: expected both or none"),
        ({"radius": 1.0, "mixing": network.neighbour_mean(network.exponential(8))}, "mixing: expected a symmetric one"),
    ],
)
def test_what_is_refused(options, words):
    """Catches an attack by nobody."""
    with pytest.raises(ValueError, match=words):
        clipped(**options)
