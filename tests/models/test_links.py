"""Link prediction against counted pairs, and that it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import InvalidType, adversary, algorithms, models, population, sampling
from fedjax_sim.config.build import build
from fedjax_sim.config.document import load
from fedjax_sim.metrics.evaluation import pooled
from tests.refusals import refused

KEY = jax.random.key(0)


@pytest.mark.full
def test_auc_and_loss():
    """Catches ties that count as wins, padding that scores, and joined pairs exchanged with the others."""
    blocks = population.stochastic_blocks(num_nodes=40, num_classes=2, degree_inside=3.0, degree_between=1.0)
    graph = jax.tree.map(lambda x: x[0], blocks.test["x"])
    data = population.link_data(graph, num_clients=2)
    model = models.gcn(8, 4, hidden=(6,))
    params, _ = model.init(KEY)
    loss_fn = models.link_prediction(model)
    examples = jax.tree.map(jnp.asarray, data.test)
    found = loss_fn(params, examples, None)
    h = np.asarray(model.apply(params, (), examples["x"], None, False)[0][0], np.float64)
    pairs, y = data.test["pairs"][0], data.test["y"][0]
    scores = (h[pairs[:, 0]] * h[pairs[:, 1]]).sum(1)
    np.testing.assert_allclose(found["auc"][0], adversary.auc(scores[y == 1], scores[y == 0]), rtol=1e-5)
    losses = np.logaddexp(0, np.where(y == 1, -scores, scores))[y >= 0]
    np.testing.assert_allclose(found["loss"][0], losses.mean(), rtol=1e-5)
    assert float(found["weight"][0]) == (y >= 0).sum() and "auc" not in loss_fn(params, examples, KEY)
    wide = examples | {
        "pairs": jnp.concatenate([examples["pairs"], jnp.full((1, 3, 2), 7)], 1),
        "y": jnp.concatenate([examples["y"], jnp.full((1, 3), -1)], 1),
    }
    for name, value in loss_fn(params, wide, None).items():
        np.testing.assert_allclose(value, found[name], rtol=1e-6)
    flat = jax.tree.map(jnp.zeros_like, params)
    assert float(loss_fn(flat, examples, None)["auc"][0]) == 0.5
    beyond = examples | {"pairs": examples["pairs"].at[0, 0, 0].set(99)}
    assert np.isnan(loss_fn(params, beyond, None)["loss"][0])
    gone = examples["x"]._replace(ids=examples["x"].ids.at[0, int(examples["pairs"][0, 0, 0])].set(-1))
    assert np.isnan(loss_fn(params, examples | {"x": gone}, None)["loss"][0]), "a pair of padding"


def test_auc_of_graphs_that_have_one():
    """Catches a graph without both kinds of pairs that enters the mean AUC as 0, and one that turns it into NaN.

    Three graphs of three nodes: both kinds, joined pairs alone, no pairs. Nodes 0 and 1 have the same features.
    """
    one = population.graph_data(np.array([[1.0], [1.0], [-1.0]]), [[0, 1]])
    examples = {
        "x": jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * 3), one),
        "pairs": jnp.array([[[0, 1], [0, 2]], [[0, 1], [0, 2]], [[0, 0], [0, 0]]]),
        "y": jnp.array([[1, 0], [1, 1], [-1, -1]]),
    }
    model = models.gcn(1, 1, hidden=(), dropout=0.0)
    params = {"output": {"kernel": jnp.ones((1, 1)), "bias": jnp.zeros(1)}}
    found = pooled(models.link_prediction(model), params, examples)
    assert float(found["auc"]) == 1 and np.isfinite(found["loss"])
    alone = jax.tree.map(lambda leaf: leaf[1:], examples)
    assert np.isnan(pooled(models.link_prediction(model), params, alone)["auc"])


@pytest.mark.full
@pytest.mark.parametrize("typed", [False, pytest.param(True, marks=pytest.mark.full)])
def test_links_are_learned(typed):
    """Fault: a loss whose sign is wrong: the AUC of held-out edges of communities would not exceed chance. Typed, an
    edge says whether it leaves its community.

    About 300 held-out pairs of each kind: by chance the AUC is 0.5 with a deviation of 0.024.
    """
    blocks = population.stochastic_blocks(degree_inside=10.0, degree_between=1.0, signal=1.0)
    graph = jax.tree.map(lambda x: x[0], blocks.test["x"])
    model = models.gcn(8, 8, hidden=(16,), dropout=0.0)
    if typed:
        model = models.rgcn(8, 8, num_types=2, hidden=(16,), dropout=0.0)
        real, y = graph.receivers >= 0, np.array(blocks.test["y"][0])
        for party in range(blocks.train.size):
            held, known = blocks.train.examples["x"].ids[party], blocks.train.examples["y"][party]
            y[held[known >= 0]] = known[known >= 0]
        ends = np.stack([graph.senders[real], graph.receivers[real]], 1)
        kinds = (y[ends[:, 0]] != y[ends[:, 1]]).astype(int)
        graph = population.graph_data(graph.nodes, ends, edge_types=kinds)
    parties = 1 if typed else 4  # communities have hardly an edge of the second type inside
    data = population.link_data(graph, num_clients=parties, embedding_size=8)
    loss_fn = models.link_prediction(model)
    made = algorithms.fedavg(loss_fn, sampling.full(parties), optax.adam(0.02), num_steps=10, mesh=None)
    state, step = made.init(KEY, model.init(KEY)[0], data.train), jax.jit(made.step)
    for i in range(8):
        state, _ = step(jax.random.fold_in(KEY, i), state, data.train)
    assert float(loss_fn(made.params(state), jax.tree.map(jnp.asarray, data.test), None)["auc"][0]) > 0.7


@pytest.mark.full
def test_a_config_predicts_links():
    """Faults: a task that the config cannot build, weights that are not the numbers of pairs, accuracy for AUC."""
    settings = ["data.name=karate_club", "data.with_links={test_share=0.2, embedding_size=4}", "model.name=gcn"]
    made = build(load(None, [*settings, "sampler.name=full", "run.devices=1"]))
    assert made.data.task == "link_prediction" and made.data.train.size == 2
    state = jax.jit(made.algorithm.init)(made.key, made.params, made.data.train)
    state, info = jax.jit(made.algorithm.step)(made.key, state, made.data.train)
    assert np.isfinite(float(info["local_loss"]))
    found = made.evaluation(made.algorithm.params(state))
    assert 0 <= found["test_auc"] <= 1 and "test_accuracy" not in found


def test_models_without_graph_layers_are_refused():
    """Catches a model whose outputs are no nodes' embeddings."""
    with refused("model", rule="graph layers", kind=InvalidType):
        models.link_prediction(models.linear(input_shape=(3,), num_outputs=2))
