"""Edges and labels from embeddings: of what SplitGNN's server receives, and of nothing."""

import jax
import numpy as np
import optax
import pytest

from fedjax_sim import adversary, algorithms, models, population, sampling
from fedjax_sim.round.round import observe

KEY = jax.random.key(0)


def received(data, model, parties, seed=0, **options):
    """([V, d] embeddings by node, edges [L, 2], as many other pairs) of a server in the first round."""
    made = algorithms.split_gnn(model, sampling.full(parties), optax.sgd(0.1), **options)
    state = made.init(KEY, model.init(jax.random.key(seed))[0], data.train)
    seen = jax.device_get(jax.jit(lambda state, people: observe(made, KEY, state, people))(state, data.train))
    graph = jax.tree.map(lambda x: np.asarray(x)[0], data.test["x"])
    ids = np.asarray(data.train.examples["x"].ids)[np.asarray(seen.ids)]
    rows = np.zeros((len(graph.ids), seen.messages["embeddings"].shape[-1]), np.float32)
    rows[ids[ids >= 0]] = np.asarray(seen.messages["embeddings"])[ids >= 0]
    once = graph.senders < graph.receivers
    edges = np.stack([graph.senders[once], graph.receivers[once]], 1)
    taken = set(map(tuple, edges.tolist()))
    others = np.random.default_rng(seed).integers(0, len(rows), (4 * len(edges), 2))
    others = np.array([pair for pair in others.tolist() if pair[0] < pair[1] and tuple(pair) not in taken])
    return rows, edges, others


@pytest.mark.full
def test_edges():
    """J11: a layer that sums over neighbours gives edges away. Cut edges that were dropped it does not; nor do features
    that know nothing of the graph, where a server sums by itself.

    At least 650 edges and 1,200 other pairs: by chance an AUC has a deviation of 0.014, of pairs with common nodes up
    to twice that. Catches a score of the wrong sign, and one that reads edges.
    """
    blind = {"num_nodes": 300, "num_classes": 2, "degree_inside": 3.5, "degree_between": 3.5, "signal": 0.0}
    data = population.stochastic_blocks(num_clients=3, partition="random", **blind)
    graph = models.gcn(8, 2, hidden=(8,), output="dense", dropout=0.0)
    holder = np.empty(300, int)
    for party, ids in enumerate(np.asarray(data.train.examples["x"].ids)):
        holder[ids[ids >= 0]] = party

    def leak(across=False, **options):
        rows, *pairs = received(data, graph, 3, **options)
        pairs = [some[(holder[some[:, 0]] != holder[some[:, 1]]) | (not across)] for some in pairs]
        return adversary.auc(*(adversary.edge_scores(rows, some) for some in pairs))

    assert leak() > 0.58 and leak(across=True) > 0.58
    assert abs(leak(across=True, cut_edges="drop") - 0.5) < 0.06
    assert abs(leak(graph_at="server") - 0.5) < 0.06


def test_labels():
    """Labels from few known ones, above the share of the most frequent; not from embeddings of noise.

    300 nodes of two classes: a share by chance is within 0.12 of a half but for 1 in 10^4.
    """
    data = population.stochastic_blocks(num_clients=3, num_nodes=300, num_classes=2, degree_between=1.0, signal=1.0)
    rows, *_ = received(data, models.gcn(8, 2, hidden=(8,), output="dense", dropout=0.0), 3)
    labels = np.arange(300) * 2 // 300
    known = np.random.default_rng(0).permutation(300)[:40]
    assert (adversary.guessed_labels(rows, known, labels[known]) == labels).mean() > 0.8
    noise = np.random.default_rng(1).normal(size=rows.shape)
    rest = np.setdiff1d(np.arange(300), known)
    assert abs((adversary.guessed_labels(noise, known, labels[known]) == labels)[rest].mean() - 0.5) < 0.12


@pytest.mark.full
def test_the_view_holds_what_it_holds():
    """Catches an attack that reads more than was sent: parties who hold all layers send boundary rows and gradients."""
    data = population.stochastic_blocks(num_clients=3, num_nodes=60, num_classes=2)
    model = models.gcn(8, 2, hidden=(4,), dropout=0.0)
    made = algorithms.split_gnn(model, sampling.full(3), optax.sgd(0.1), client_layers=2)
    seen = observe(made, KEY, made.init(KEY, model.init(KEY)[0], data.train), data.train)
    assert "embeddings" not in seen.messages
    halo = np.asarray(data.train.examples["halo"])
    assert (np.abs(np.asarray(seen.messages["boundary_graph_0"])).sum(-1) > 0).sum() <= (halo >= 0).sum()
    dropped = algorithms.split_gnn(model, sampling.full(3), optax.sgd(0.1), client_layers=2, cut_edges="drop")
    seen = observe(dropped, KEY, dropped.init(KEY, model.init(KEY)[0], data.train), data.train)
    assert set(seen.messages) == {"gradients"}


def test_wrong_arguments_are_refused():
    """Catches a pair that JAX would clamp to another node."""
    with pytest.raises(ValueError, match="pairs"):
        adversary.edge_scores(np.ones((3, 2)), np.array([[0, 3]]))
    with pytest.raises(ValueError, match="embeddings"):
        adversary.edge_scores(np.ones(3), np.array([[0, 1]]))
    with pytest.raises(ValueError, match="known"):
        adversary.guessed_labels(np.ones((3, 2)), np.array([3]), np.array([0]))
