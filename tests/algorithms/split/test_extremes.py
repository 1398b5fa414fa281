"""Split, SplitFed, graph and vertical learning with nobody there, in half precision, and with weighted losses."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, client, models, network, population, sampling, server, transform
from fedjax_sim.algorithms.split.loss import split_transcript
from fedjax_sim.algorithms.split.vertical import party_functions_of
from fedjax_sim.models import squared_error
from fedjax_sim.round.round import observe
from tests.laws.cases import rows

KEY, RATE = jax.random.key(0), 0.1
MLP = models.mlp(input_shape=(4,), num_outputs=1, hidden=(5, 3))
PARTIES = models.vertical_mlp(columns=(2, 2), num_outputs=1, hidden=(3,), embedding=8)
GCN = models.gcn(3, 2, hidden=(4,), dropout=0.0)
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(6, 4)).astype(np.float32), RNG.normal(size=6).astype(np.float32)
ROWS = [{"x": X[:4], "y": Y[:4]}, {"x": X[2:], "y": Y[2:]}, {"x": X, "y": Y}]
PEOPLE = population.from_clients(ROWS)
GRAPH = population.stochastic_blocks(num_clients=3, num_nodes=30, num_classes=2, num_features=3).train
GROUPS = population.grouped(GRAPH, [0, 1, 2])
WORK = {"num_steps": 2, "batch_size": 2}


def weighted(outputs, targets):
    """Some examples count twice, others half, and one sign not at all: padding's target 0 would."""
    values = squared_error(outputs, targets)
    weight = jnp.where(targets > 0.5, 2.0, jnp.where(targets < -0.5, 0.0, 0.5))
    return {**values, "weight": weight}


def split_star(sampler, loss=squared_error, link=None):
    split = algorithms.split_loss(MLP, loss, "hidden_0", link=link)
    work = algorithms.split_client(split, optax.sgd(RATE), client.work(**WORK))
    return algorithms.federated(sampler, work, aggregation.mean(), server.optimizer(optax.sgd(1.0)), mesh=None)


def through_a_cut(make, sampler, loss=squared_error, link=None, **options):
    return make(MLP, loss, sampler, optax.sgd(RATE), cut="hidden_0", mesh=None, link=link, **WORK, **options)


def by_party(sampler, loss=squared_error, link=None):
    links = None if link is None else {"party_1": link}
    return algorithms.vertical(PARTIES, loss, sampler, optax.sgd(RATE), mesh=None, links=links, **WORK)


def graph(sampler, link=None):
    return algorithms.split_gnn(GCN, sampler, optax.sgd(RATE), link=link)


def graphs(sampler, link=None):
    return algorithms.hierarchical_split_gnn(GCN, sampler, optax.sgd(RATE), group_size=1, mesh=None, link=link)


PROGRAMS = {
    "split_client": (split_star, MLP, PEOPLE),
    "splitfed": (partial(through_a_cut, algorithms.splitfed), MLP, PEOPLE),
    "splitfed V2": (partial(through_a_cut, algorithms.splitfed, server_copies=1), MLP, PEOPLE),
    "relay": (partial(through_a_cut, algorithms.split_learning), MLP, PEOPLE),
    "relay of peers": (partial(through_a_cut, algorithms.split_learning, handover="peer"), MLP, PEOPLE),
    "vertical": (by_party, PARTIES, PEOPLE),
    "one consortium": (by_party, PARTIES, population.from_clients(ROWS[2:])),
    "split_gnn": (graph, GCN, GRAPH),
    "hierarchical_split_gnn": (graphs, GCN, GROUPS),
}


def after(made, params, people, rounds=1):
    """(model, info) after some rounds."""
    state, step = made.init(KEY, params, people), jax.jit(made.step)
    for i in range(rounds):
        state, info = step(jax.random.fold_in(KEY, i), state, people)
    return made.params(state), info


def sent(info):
    return {name: value.total() for name, value in info.items() if name.endswith("_bytes")}


@pytest.mark.full
@pytest.mark.parametrize("name", rows(PROGRAMS, ("splitfed V2", "split_gnn", "vertical")))
def test_nobody_is_there(name):
    """An empty Poisson cohort. Faults: a model that moves or becomes NaN, bytes of nobody, a loss of 0."""
    make, model, people = PROGRAMS[name]
    start = model.init(KEY)[0]
    moved, info = after(make(sampling.poisson(people.size, 1e-9)), start, people)
    jax.tree.map(np.testing.assert_array_equal, start, moved)
    assert set(sent(info).values()) == {0} and info["skipped_rounds"] == 1 and np.isnan(info["local_loss"])


@pytest.mark.full
@pytest.mark.parametrize("name", rows(PROGRAMS, ("splitfed V2", "split_gnn", "vertical")))
def test_half_precision(name):
    """bfloat16 models. Faults: another type after a round, another model than float32's, bytes of another type."""
    make, model, people = PROGRAMS[name]
    start = model.init(KEY)[0]
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), start)
    made = make(sampling.full(people.size))
    (wide, told), (narrow, info) = after(made, start, people, 3), after(made, half, people, 3)
    assert {x.dtype for x in jax.tree.leaves(narrow)} == {jnp.dtype(jnp.bfloat16)}
    for was, a, b in zip(*map(jax.tree.leaves, (start, wide, narrow)), strict=True):
        moved = np.abs(a - was).max()
        np.testing.assert_allclose(b.astype(np.float32), a, atol=0.02 * np.abs(a).max() + 0.2 * moved)
    np.testing.assert_allclose(info["local_loss"], told["local_loss"], rtol=0.03)
    assert info["skipped_rounds"] == info["dropped_clients"] == 0
    wide, narrow = sent(told), sent(info)
    for way, size in wide.items():
        labels = 4 * 2 * 2 * people.size if way == "split_up_bytes" else 0  # float32 in both
        kept = "gnn" in name and any(x in way for x in ("boundary", "activation"))  # features are float32
        if "gnn" not in name or kept:
            assert narrow[way] - labels == (size if kept else (size - labels) // 2)


@pytest.mark.full
def test_half_precision_on_the_wire():
    """Fault: embeddings of another type than the one that is counted, where a model is bfloat16."""
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), GCN.init(KEY)[0])
    made = graph(sampling.full(3))
    state = made.init(KEY, half, GRAPH)
    seen, info = observe(made, KEY, state, GRAPH).messages, sent(made.step(KEY, state, GRAPH)[1])
    assert info["activation_bytes"] == 2 * 30 * 4 * seen["embeddings"].dtype.itemsize


@pytest.mark.full
@pytest.mark.parametrize("made", [network.link(), network.link(forward=transform.local_gaussian(1.0, 0.1))])
def test_transcripts_of_half_precision(made):
    """Faults: messages of another type than their model's, whose bytes are those of the model's type."""
    examples = {"x": X, "y": Y}
    split = algorithms.split_loss(MLP, squared_error, "hidden_0", link=made)
    vertical = partial(algorithms.vertical_transcript, PARTIES, squared_error, link=made, key=KEY)
    for model, seen in ((MLP, partial(split_transcript, split)), (PARTIES, vertical)):
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.init(KEY)[0])
        sent = [message for message in seen(half, examples).messages if message.kind != "labels"]
        assert len(sent) == 2 and {message.value.dtype for message in sent} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.full
@pytest.mark.parametrize("name", rows(PROGRAMS, ("splitfed V2", "split_gnn", "vertical")))
def test_half_precision_through_a_link(name):
    """Noise there, 8 bits back. Fault: a transform that gives float32 where bfloat16 was sent, or NaN."""
    make, model, people = PROGRAMS[name]
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.init(KEY)[0])
    link = network.link(forward=transform.local_gaussian(1.0, 0.1), backward=transform.quantize(8), encrypted=True)
    moved, info = after(make(sampling.full(people.size), link=link), half, people)
    assert info["dropped_clients"] == info["skipped_rounds"] == 0
    assert all(x.dtype == jnp.bfloat16 and jnp.isfinite(x).all() for x in jax.tree.leaves(moved))
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (half, moved)), strict=True))


@pytest.mark.full
@pytest.mark.parametrize("name", rows(("split_client", "splitfed", "splitfed V2", "relay", "vertical"), ("relay",)))
def test_inputs_of_half_precision(name):
    """Fault: activations that follow the inputs' type, not the model's, and are counted otherwise."""
    make, model, _ = PROGRAMS[name]
    start, told = model.init(KEY)[0], []
    for x in (X, jnp.asarray(X, jnp.bfloat16)):
        told.append(after(make(sampling.full(3)), start, population.from_clients([{"x": x, "y": Y}] * 3), 3))
    (wide, a), (narrow, b) = told
    assert sent(a) == sent(b)
    for one, other in zip(*map(jax.tree.leaves, (wide, narrow)), strict=True):
        assert other.dtype == np.float32
        np.testing.assert_allclose(other, one, atol=0.02)


@pytest.mark.full
@pytest.mark.parametrize("name", rows(("split_client", "splitfed", "vertical"), ("splitfed", "vertical")))
def test_weighted_losses_are_fedavg(name):
    """Fault: a weight that is lost between the loss's party and the others, or in the clients' mean."""
    make, model, people = PROGRAMS[name]
    start, joint = model.init(KEY)[0], models.supervised(model, weighted)
    made = algorithms.fedavg(joint, sampling.full(3), optax.sgd(RATE), mesh=None, **WORK)
    (wanted, told), (found, info) = after(made, start, people), after(make(sampling.full(3), weighted), start, people)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), wanted, found)
    assert info["total_weight"] == told["total_weight"] == sum(_weights(own["y"]).sum() for own in ROWS)
    plain = after(make(sampling.full(3)), start, people)[0]
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(*map(jax.tree.leaves, (plain, found)), strict=True))


@pytest.mark.full
def test_weighted_relay():
    """Full batches, one client after the other, against descent on each one's weighted mean."""
    joint, start = models.supervised(MLP, weighted), MLP.init(KEY)[0]
    options = {"cut": "hidden_0", "num_steps": 2, "mesh": None}
    made = algorithms.split_learning(MLP, weighted, sampling.full(3), optax.sgd(RATE), **options)

    def mean(params, own):
        values = joint(params, own, KEY)
        return (values["loss"] * values["weight"]).sum() / values["weight"].sum()

    wanted = start
    for own in ROWS:
        for _ in range(2):
            wanted = jax.tree.map(lambda p, g: p - RATE * g, wanted, jax.grad(mean)(wanted, own))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), wanted, after(made, start, PEOPLE)[0])


@pytest.mark.full
def test_weighted_vertical_transcript():
    """Fault: what parties receive in a transcript is of another loss than the one that is trained."""
    start = PARTIES.init(KEY)[0]
    examples = {"x": X, "y": Y}
    made = algorithms.vertical_transcript(PARTIES, weighted, start, examples, key=KEY)
    (back,) = made.seen_by(1)
    bottom = party_functions_of(PARTIES).bottoms[1]
    own = jax.vjp(lambda p: bottom(p, X), start)[1](back.value)[0]["parties"]["party_1"]

    def mean(params):
        values = algorithms.vertical_loss(PARTIES, weighted)(params, examples, KEY)
        return (values["loss"] * values["weight"]).sum() / values["weight"].sum()

    wanted = jax.grad(mean)(start)["parties"]["party_1"]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), wanted, own)


def _weights(y):
    return np.where(y > 0.5, 2.0, np.where(y < -0.5, 0.0, 0.5))
