"""Asynchronous gossip: meetings one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, engine, network, population, run, sampling
from fedjax_sim.algorithms.gossip.pairwise import first_places, meetings
from fedjax_sim.prng import stream
from tests.algorithms.gossip import problems as g
from tests.laws import problems as p
from tests.refusals import refused

GRAPH = network.from_edges(
    g.N, [(0, i) for i in range(1, g.N - 1)] + [(1, 2), (3, 4)], connected=False
)  # node 7 is alone


def gossip(cohort=5, rate=g.RATE, sampler=None, **options):
    sampler = sampling.uniform(g.N, cohort) if sampler is None else sampler
    options = {"num_steps": 1, "mesh": None} | options
    return algorithms.pairwise_gossip(population.quadratic_loss, sampler, optax.sgd(rate), GRAPH, **options)


def tables():
    ids, _ = GRAPH.neighbours()
    return {"neighbours": jnp.array(ids), "degrees": jnp.array(GRAPH.in_degrees, jnp.int32)}


@pytest.mark.parametrize("lost", [pytest.param(False, marks=pytest.mark.full), True])
def test_numpy(lost):
    """Nine rounds, meeting by meeting, with updates from the models at the start of each round; with dropout too.

    Catches a mean with a partner's model of before the last meeting, and a node that meets although it dropped out."""
    sampler = sampling.uniform(g.N, 5)
    sampler = sampling.with_dropout(sampler, 0.4) if lost else sampler
    made, data = gossip(sampler=sampler), g.clients()
    state, step, x, met = made.init(g.KEY, g.START, data), jax.jit(made.step), np.zeros(g.N), 0

    @jax.jit
    def drawn(key):
        cohort, _ = sampler.sample(stream(key, "sampling"), sampler.init())
        return cohort, meetings(key, cohort.ids, tables())

    for t in range(9):
        key = jax.random.fold_in(g.KEY, t)
        cohort, (partners, order) = jax.device_get(drawn(key))
        start, ids = x.copy(), np.asarray(cohort.ids)
        for slot in order:
            if cohort.reported[slot]:
                i, j = ids[slot], partners[slot]
                x[i] = x[j] = (x[i] + x[j]) / 2
                x[i] -= g.RATE * g.gradient(start)[i]
                met += i != j
        state, info = step(key, state, data)
        there = np.asarray(cohort.reported)
        assert info["edges"] == (there & (partners != ids)).sum() and info["clients_reported"] == there.sum()
        assert info["uplink_bytes"].total() == 8 * info["edges"]
        np.testing.assert_allclose(g.models(made, state), x, rtol=1e-5, atol=1e-6)
    assert met > 15


@pytest.mark.full
def test_meetings_keep_the_average():
    """200 rounds without training, from models of their own. Catches a model that two nodes overwrite."""
    made, data = gossip(rate=1e-12), g.clients()
    state = made.init(g.KEY, g.START, data)
    start = {"model": {"w": jnp.array(np.random.default_rng(0).normal(10, 1, (g.N, 1)), jnp.float32)}}
    state = state._replace(star=state.star._replace(clients=start))
    before, step = g.models(made, state), jax.jit(made.step)
    for t in range(200):
        state, _ = step(jax.random.fold_in(g.KEY, t), state, data)
    after = g.models(made, state)
    np.testing.assert_allclose(after.sum(), before.sum(), rtol=1e-6)
    np.testing.assert_allclose(after[:7], before[:7].mean(), rtol=1e-5)
    assert after[7] == before[7]


@pytest.mark.full
def test_partners():
    """Each neighbour as likely (6 of the hub, 2 of node 1), by 4,000 draws within 5 standard deviations; and every
    order of two. Catches a neighbour that is never met, the node itself, and an order by slot."""
    ids = jnp.array([0, 1, 7], jnp.int32)
    draw = jax.jit(jax.vmap(lambda key: meetings(key, ids, tables())))
    partners, order = map(np.asarray, draw(jax.random.split(jax.random.key(2), 4000)))
    for place, neighbours in ((0, range(1, 7)), (1, (0, 2))):
        counts = np.array([(partners[:, place] == j).sum() for j in neighbours])
        chance = 1 / len(counts)
        assert counts.sum() == 4000 and np.abs(counts - 4000 * chance).max() < 5 * np.sqrt(4000 * chance * (1 - chance))
    assert (partners[:, 2] == 7).all()
    assert abs((order[:, 0] == 0).mean() - 1 / 3) < 5 * np.sqrt(2 / 9 / 4000)
    turned = meetings(jax.random.key(0), ids[::-1], tables())
    straight = meetings(jax.random.key(0), ids, tables())
    assert (
        turned[0][::-1].tolist() == straight[0].tolist() and ids[::-1][turned[1]].tolist() == ids[straight[1]].tolist()
    )


def test_first_places():
    """Against a search. Catches the last place, and one of another node."""
    rng = np.random.default_rng(1)
    for size in (1, 2, 30):
        nodes = rng.integers(0, 7, size)
        assert jax.jit(first_places)(nodes).tolist() == [int(np.argmax(nodes == node)) for node in nodes]


@pytest.mark.full
def test_a_resumed_run_has_the_same_bits(tmp_path):
    """On one device and on two, on a memory file. Catches a partner that is not written back."""
    made, data = gossip(), g.clients()
    straight, history = run(g.KEY, made, g.START, data, 6)
    options = {"directory": tmp_path, "client_memory": "disk"}
    run(g.KEY, made, g.START, data, 3, **options)
    resumed, records = run(g.KEY, made, g.START, data, 6, resume=True, **options)
    assert (g.models(made, resumed) == g.models(made, straight)).all() and records.records == history.records
    both = gossip(mesh=engine.device_mesh(2))
    other, _ = run(g.KEY, both, g.START, data, 6)
    assert (g.models(both, other) == g.models(made, straight)).all()


def test_what_is_refused():
    """Catches arrows, and a node that wakes up twice in a round."""
    with refused("sampler", rule="without replacement"):
        g.run(gossip(sampler=sampling.with_replacement(g.N, 3)), 1)
    with pytest.raises(ValueError, match="graph: expected an undirected graph"):
        algorithms.pairwise_gossip(
            population.quadratic_loss, sampling.uniform(8, 2), optax.sgd(0.1), network.exponential(8), num_steps=1
        )


@pytest.mark.full
def test_unequal_nodes():
    """Four rounds of nodes with 0 to 7 examples each, meeting by meeting, against NumPy: each takes its step on the
    mean of its own loss, and who has no examples meets all the same. Catches steps by size, rows in the order in which
    clients of unequal size were trained, and samplers by which larger nodes count more."""
    ring = network.ring(p.NUM_CLIENTS)
    sampler = sampling.uniform(p.NUM_CLIENTS, 9)
    options = {"num_steps": 1, "batch_size": None, "mesh": None}
    made = algorithms.pairwise_gossip(p.linear_loss, sampler, optax.sgd(p.RATE), ring, **options)
    data = p.ragged(sizes=np.where(np.arange(p.NUM_CLIENTS) % 5 == 0, 0, p.SIZES))
    clients = [jax.device_get(data.client(jnp.int32(i))) for i in range(p.NUM_CLIENTS)]
    rows = {"neighbours": jnp.array(ring.neighbours()[0]), "degrees": jnp.array(ring.in_degrees, jnp.int32)}

    def slope(i, w):
        there = clients[i].mask
        x, y = (np.float64(clients[i].examples[name][there]) for name in ("x", "y"))
        return x.T @ (x @ w - y) / max(there.sum(), 1)

    state, step = made.init(g.KEY, jnp.array(p.START), data), jax.jit(made.step)
    x = np.tile(np.float64(p.START), (p.NUM_CLIENTS, 1))
    for t in range(4):
        key = jax.random.fold_in(g.KEY, t)
        cohort, _ = sampler.sample(stream(key, "sampling"), sampler.init())
        partners, order = map(np.asarray, meetings(key, cohort.ids, rows))
        start, ids = x.copy(), np.asarray(cohort.ids)
        for slot in order:
            i, j = ids[slot], partners[slot]
            x[i] = x[j] = (x[i] + x[j]) / 2
            x[i] -= p.RATE * slope(i, start[i])
        state, info = step(key, state, data)
        assert info["edges"] == 9 and info["clients_reported"] == sum(clients[i].mask.any() for i in ids)
    found = made.evaluated.personal(state, jnp.arange(p.NUM_CLIENTS, dtype=jnp.int32))
    np.testing.assert_allclose(found, x, rtol=1e-4, atol=1e-5)
    by_size = sampling.weighted_without_replacement(p.SIZES, 6)
    with refused("sampler", rule="equally often"):
        algorithms.pairwise_gossip(p.linear_loss, by_size, optax.sgd(p.RATE), ring, **options)


@pytest.mark.full
def test_a_round_that_diverges_is_skipped():
    """Neighbours 6e38 apart, a difference that is not finite: models stay, and the round is counted. Catches
    models of infinity."""

    def loss(params, examples, key):
        return jnp.zeros(jax.tree.leaves(examples)[0].shape[0]) * params["w"][0]

    made = algorithms.pairwise_gossip(
        loss, sampling.full(g.N), optax.sgd(1.0), network.ring(g.N), num_steps=1, mesh=None
    )
    data, far = g.clients(), 3e38 * (-1.0) ** np.arange(g.N)
    state = made.init(g.KEY, g.START, data)
    state = state._replace(star=state.star._replace(clients={"model": {"w": jnp.float32(far)[:, None]}}))
    state, info = jax.jit(made.step)(g.KEY, state, data)
    assert info["skipped_rounds"] == 1 and info["clients_reported"] == g.N
    assert (g.models(made, state) == np.float32(far)).all()
