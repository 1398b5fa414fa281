"""Link prediction against counted pairs, and that it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import adversary, algorithms, models, population, sampling

KEY = jax.random.key(0)


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


def test_links_are_learned():
    """Fault: a loss whose sign is wrong: the AUC of held-out edges of communities would not exceed chance.

    About 300 held-out pairs of each kind: by chance the AUC is 0.5 with a deviation of 0.024.
    """
    blocks = population.stochastic_blocks(degree_inside=10.0, degree_between=1.0, signal=1.0)
    graph = jax.tree.map(lambda x: x[0], blocks.test["x"])
    data = population.link_data(graph, num_clients=4, embedding_size=8)
    model = models.gcn(8, 8, hidden=(16,), dropout=0.0)
    loss_fn = models.link_prediction(model)
    made = algorithms.fedavg(loss_fn, sampling.full(4), optax.adam(0.02), num_steps=10, mesh=None)
    state, step = made.init(KEY, model.init(KEY)[0], data.train), jax.jit(made.step)
    for i in range(8):
        state, _ = step(jax.random.fold_in(KEY, i), state, data.train)
    assert float(loss_fn(made.params(state), jax.tree.map(jnp.asarray, data.test), None)["auc"][0]) > 0.7


def test_models_without_graph_layers_are_refused():
    """Catches a model whose outputs are no nodes' embeddings."""
    with pytest.raises(TypeError, match="model: expected a network of graph layers"):
        models.link_prediction(models.linear(input_shape=(3,), num_outputs=2))
