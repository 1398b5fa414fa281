"""Other topologies than one server, from public names alone: FedBuff, D-PSGD and a hierarchy, each against NumPy.

They show that a round is divided into steps where other algorithms need it: none copies the code of a step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, client, engine, population, sampling, server, transform, tree
from fedjax_sim.algorithms import federated
from fedjax_sim.prng import stream
from fedjax_sim.round.round import FederatedState, aggregate, close, collect, initial_state, invite
from fedjax_sim.types import (
    Algorithm,
    Array,
    ClientData,
    ClientUpdate,
    Cohort,
    Evaluated,
    Execution,
    PyTree,
    Report,
    ServerUpdate,
    Star,
)

KEY, RATE, ROUNDS = jax.random.key(7), 0.3, 6
CENTERS = np.array([0.0, 1.0, 4.0, -2.0, 3.0, 0.5])
CURVATURES = np.array([1.0, 0.5, 2.0, 1.5, 0.8, 1.2])
N = len(CENTERS)
START = {"w": jnp.zeros(1)}


def clients():
    """f_i(w) = (h_i / 2) (w - c_i)^2, one example each."""
    return population.quadratic_population(CURVATURES, CENTERS)


def gradient(w, ids):
    return CURVATURES[ids] * (w - CENTERS[ids])


def run(algorithm, data, rounds=ROUNDS):
    state, step = algorithm.init(KEY, START, data), jax.jit(algorithm.step)
    for t in range(rounds):
        state, info = step(jax.random.fold_in(KEY, t), state, data)
    return np.asarray(algorithm.params(state)["w"], np.float64), info, state


# ---- FedBuff: clients train from the model that they were sent, which others have moved meanwhile


class Buffered(NamedTuple):
    """The state of a federation, and which clients are training on which version of the model."""

    star: FederatedState
    ids: Array  # [C] clients in flight
    versions: Array  # [C] the round that each was sent the model of


def fedbuff(loss_fn, optimizer, work, *, population_size, concurrency, buffer_size, versions) -> Algorithm:
    """Nguyen et al. 2022, algorithm 1: the server steps once `buffer_size` of the clients in flight have arrived."""
    local = client.local_sgd(loss_fn, optimizer, work)

    def apply(key, broadcast, version, data):
        age = broadcast["round"] - version
        report, _ = local.apply(key, jax.tree.map(lambda x: x[age], broadcast["models"]), (), data)
        return report._replace(update=jax.tree.map(lambda x: x / jnp.sqrt(1.0 + age), report.update)), version

    def moved(key, aggregate, state):
        models = jax.tree.map(lambda u, x: jnp.concatenate([(x[0] + u)[None], x[:-1]]), aggregate, state["models"])
        return {"models": models, "round": state["round"] + 1}

    step = ServerUpdate(
        init=lambda params: {
            "models": jax.tree.map(lambda x: jnp.stack([x] * versions), params),
            "round": jnp.int32(0),
        },
        broadcast=lambda state: state,
        apply=moved,
        params=lambda state: jax.tree.map(lambda x: x[0], state["models"]),
    )
    one = ClientUpdate(lambda broadcast: jnp.int32(0), apply)
    sampler = sampling.uniform(population_size, buffer_size)
    star = Star(
        sampler=sampler,
        client=one,
        aggregator=aggregation.fixed_mean(buffer_size),
        server=step,
        transform=transform.identity(),
        execution=Execution(mesh=None),
    )

    def init(key, params, population):
        flying = jnp.arange(concurrency, dtype=jnp.int32)
        return Buffered(initial_state(star, params, population), flying, jnp.zeros_like(flying))

    def arrive(key, state, population):
        slots = jnp.argsort(jax.random.bits(stream(key, "arrival"), (concurrency,)))[:buffer_size]
        everyone = jnp.ones(buffer_size, bool)
        cohort = Cohort(state.ids[slots], everyone, everyone)
        inner = state.star._replace(clients=engine.put(state.star.clients, cohort.ids, state.versions[slots], everyone))
        inner, info = close(star, key, cohort, collect(star, key, cohort, inner, population), inner)
        return Buffered(inner, state.ids, state.versions.at[slots].set(inner.round)), info

    return Algorithm(init, arrive, lambda state: step.params(state.star.server), star)


@pytest.mark.full
def test_fedbuff():
    """Catches a client that trains from another version than it was sent, or weighs by another age."""
    size, buffer, kept = 5, 2, 8
    options = {"population_size": N, "concurrency": size, "buffer_size": buffer, "versions": kept}
    made = fedbuff(population.quadratic_loss, optax.sgd(RATE), client.work(num_steps=2), **options)
    found, info, state = run(made, clients())
    models, versions, ages = [0.0], np.zeros(size, int), set()
    for t in range(ROUNDS):
        bits = jax.random.bits(stream(jax.random.fold_in(KEY, t), "arrival"), (size,))
        slots, total = np.argsort(np.asarray(bits))[:buffer], 0.0
        for slot in slots:
            w = start = models[versions[slot]]
            for _ in range(2):
                w -= RATE * gradient(w, slot)
            total += (w - start) / np.sqrt(1 + t - versions[slot])
            ages.add(t - versions[slot])
        models.append(models[-1] + total / buffer)
        versions[slots] = t + 1
    np.testing.assert_allclose(found, models[-1], rtol=1e-5)
    assert np.asarray(state.versions).tolist() == versions.tolist() and int(info["clients_reported"]) == buffer
    assert len(ages) > 2  # fresh ones and late ones


# ---- D-PSGD: every node has a model of its own, and mixes it with its neighbours'


def dpsgd(loss_fn, rate, mixing) -> Algorithm:
    """Lian et al. 2017, algorithm 1: x_i <- sum_j W_ij x_j - rate grad f_i(x_i); models are the clients' memory."""

    slope = client.full_gradient(loss_fn, weighting="uniform")

    def apply(key, broadcast, own, data):
        report, _ = slope.apply(key, own, (), data)
        return report._replace(update=jax.tree.map(lambda g: -rate * g, report.update)), own

    size = len(mixing)
    nodes = ClientUpdate(lambda params: params, apply)

    def by_node(key, updates, weights, ids):  # rows without a message are zero: added anywhere they change nothing
        return jax.tree.map(lambda x: jnp.zeros_like(x).at[ids].add(x), updates)

    keep = aggregation.gather(by_node, weighted=False)
    star = Star(
        sampler=sampling.full(size),
        client=nodes,
        aggregator=keep,
        server=server.replacement(),
        transform=transform.identity(),
        execution=Execution(mesh=None),
    )

    def init(key, params, population):
        return initial_state(star, params, population)

    def step(key, state, population):
        cohort, _ = invite(star, key, state)
        gathered = collect(star, key, cohort, state, population)
        updates = aggregate(star, key, cohort, gathered, state).update
        models, memory = engine.take(state.clients, cohort.ids)
        mixed = jax.tree.map(lambda x: jnp.tensordot(mixing, x, 1), models)
        moved = jax.tree.map(jnp.add, mixed, updates)
        state = state._replace(
            round=state.round + 1, clients=engine.put(memory, cohort.ids, moved, jnp.ones(size, bool))
        )
        center = jax.tree.map(lambda x: x.mean(0, keepdims=True), moved)
        return state, {"consensus_distance": optax.tree.norm(jax.tree.map(jnp.subtract, moved, center))}

    def mean_model(state):
        models, _ = engine.take(state.clients, jnp.arange(size, dtype=jnp.int32))
        return jax.tree.map(lambda x: x.mean(0), models)

    def personal(state, ids):
        return engine.take(state.clients, ids)[0]

    return Algorithm(init, step, mean_model, star, evaluated=Evaluated(personal))


@pytest.mark.full
def test_dpsgd():
    """Catches mixing of what has already moved, a node that trains from another's model, weights off the graph."""
    ring = np.eye(N) / 2 + (np.roll(np.eye(N), 1, 0) + np.roll(np.eye(N), -1, 0)) / 4
    made = dpsgd(population.quadratic_loss, RATE, jnp.array(ring, jnp.float32))
    _, info, state = run(made, clients())
    x = np.zeros(N)
    for _ in range(ROUNDS):
        x = ring @ x - RATE * gradient(x, np.arange(N))
    own = made.evaluated.personal(state, jnp.arange(N, dtype=jnp.int32))["w"][:, 0]
    np.testing.assert_allclose(own, x, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(float(info["consensus_distance"]), np.linalg.norm(x - x.mean()), rtol=1e-4)
    np.testing.assert_allclose(made.params(state)["w"][0], x.mean(), rtol=1e-4)


# ---- a hierarchy: a whole federation, seen from above, is one client


def as_client_update(star: Star, rounds: int, people) -> ClientUpdate:
    """A federation as a client: `rounds` rounds of its own from what it is sent; `people(examples)` is whom."""

    def apply(key, broadcast, state, data):
        group = people(tree.where(data.mask, data.examples, tree.zeros_like(data.examples)))
        inner = initial_state(star, broadcast, group)
        for t in range(rounds):
            own = jax.random.fold_in(key, t)
            cohort, sampler = invite(star, own, inner)
            gathered = collect(star, own, cohort, inner, group)
            inner, _ = close(star, own, cohort, gathered, inner._replace(sampler=sampler))
        update = tree.subtract(star.server.params(inner.server), broadcast)
        return Report(update, data.mask.sum(dtype=jnp.float32), {}), state

    return ClientUpdate(lambda params: (), apply)


@pytest.mark.full
def test_hierarchy():
    """Two groups of three clients: two rounds inside of each round outside. Catches a group that forgets its clients'
    weights, or starts from its own model."""
    plan = engine.Plan(lanes=2, chunk=2)
    local = client.local_sgd(population.quadratic_loss, optax.sgd(RATE), client.work(num_steps=1))
    step = server.optimizer(optax.sgd(1.0))
    inside = Star(
        sampler=sampling.full(3),
        client=local,
        aggregator=aggregation.mean(),
        server=step,
        transform=transform.identity(),
        execution=Execution(plan, mesh=None),
    )
    whole = clients()
    rows = jax.vmap(whole.client)(jnp.arange(N, dtype=jnp.int32)).examples

    def people(examples):
        return population.generated(3, clients_row, examples)

    groups = population.generated(2, group_row, jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), rows))
    outside = federated(sampling.full(2), as_client_update(inside, 2, people), aggregation.mean(), step, mesh=None)
    found, _, _ = run(outside, groups, rounds=3)
    w = 0.0
    for _ in range(3):
        models = []
        for ids in (np.arange(3), np.arange(3, 6)):
            own = w
            for _ in range(2):
                own -= RATE * gradient(own, ids).mean()
            models.append(own)
        w = np.mean(models)
    np.testing.assert_allclose(found, w, rtol=1e-5)


def clients_row(rows: PyTree, id: Array):
    """Client `id` of a group."""
    return ClientData(jax.tree.map(lambda x: x[id], rows), jnp.ones(1, bool))


def group_row(rows: PyTree, id: Array):
    """Group `id`, whose examples are its clients."""
    return ClientData(jax.tree.map(lambda x: x[id], rows), jnp.ones(3, bool))
