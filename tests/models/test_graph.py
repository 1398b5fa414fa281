"""Graph networks against loops and dense matrices in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import models
from fedjax_sim.population import graph_data
from fedjax_sim.population.graph.partition import stacked_graphs

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
EDGES = np.array([[0, 1], [1, 2], [2, 3], [3, 0], [1, 4], [4, 5], [2, 5], [5, 0]])
TYPES = np.array([0, 1, 2, 0, 1, 1, 0, 2])
GRAPH = graph_data(RNG.normal(size=(7, 5)), EDGES, directed=True, edge_types=TYPES)  # node 6 is alone
BATCH = jax.tree.map(jnp.asarray, stacked_graphs([GRAPH]))
MAKE = {
    "gcn": lambda **o: models.gcn(5, 3, hidden=(4,), **o),
    "graph_sage": lambda **o: models.graph_sage(5, 3, hidden=(4,), **o),
    "gat": lambda **o: models.gat(5, 3, hidden=(4,), num_heads=2, **o),
    "rgcn": lambda **o: models.rgcn(5, 3, num_types=3, hidden=(4,), **o),
}


def start(name, **options):
    model = MAKE[name](**options)

    @jax.jit
    def moved(key):  # biases too
        return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(key, x.shape), model.init(key)[0])

    return model, moved(KEY)


def numpy_layer(name, p, h, last, heads=2):
    """One layer in float64, node by node."""
    senders, receivers, types = GRAPH.senders, GRAPH.receivers, GRAPH.types
    near = [senders[receivers == i] for i in range(len(h))]
    if name == "gcn":
        a = np.eye(len(h))
        np.add.at(a, (receivers, senders), 1)
        d = a.sum(1)
        return (a / np.sqrt(d[:, None] * d[None])) @ h @ p["kernel"] + p["bias"]
    if name == "graph_sage":
        means = np.stack([h[j].mean(0) if len(j) else 0 * h[0] for j in near])
        return h @ p["kernel"] + means @ p["neighbours"] + p["bias"]
    if name == "rgcn":
        out = h @ p["kernel"] + p["bias"]
        for i, j in enumerate(near):
            for r in range(3):
                of_type = j[types[receivers == i] == r]
                out[i] += h[of_type].mean(0) @ p["neighbours"][r] if len(of_type) else 0
        return out
    heads = 1 if last else heads
    z = (h @ p["kernel"]).reshape(len(h), heads, -1)
    out = np.zeros_like(z)
    for i, j in enumerate(near):
        j = np.append(j, i)
        for k in range(heads):
            e = z[j, k] @ p["sender"][k] + z[i, k] @ p["receiver"][k]
            e = np.where(e > 0, e, 0.2 * e)
            w = np.exp(e - e.max())
            out[i, k] = (w / w.sum()) @ z[j, k]
    return out.reshape(len(h), -1) + p["bias"]


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", MAKE)
def test_numpy(name):
    """Catches a degree of the wrong end, a missing self-loop, a softmax over the wrong edges, types exchanged."""
    model, params = start(name)
    out = jax.jit(lambda params: model.apply(params, (), BATCH, None, False)[0][0])(params)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    h = numpy_layer(name, p["graph_0"], GRAPH.nodes.astype(np.float64), False)
    h = np.where(h > 0, h, np.expm1(h)) if name == "gat" else np.maximum(h, 0)
    np.testing.assert_allclose(out, numpy_layer(name, p["output"], h, True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gcn"])
def test_gradients_are_those_of_dense_matrices(name):
    """Catches a segment sum whose transpose is another one."""
    model, params = start(name, dropout=0.0)
    a = np.eye(7, dtype=np.float32)
    np.add.at(a, (GRAPH.receivers, GRAPH.senders), 1)
    a = a / np.sqrt(a.sum(1)[:, None] * a.sum(1)[None])
    wanted = RNG.normal(size=(7, 3)).astype(np.float32)

    def dense(params):
        h = jax.nn.relu(a @ GRAPH.nodes @ params["graph_0"]["kernel"] + params["graph_0"]["bias"][None])
        return ((a @ h @ params["output"]["kernel"] + params["output"]["bias"][None]) * wanted).sum()

    def sparse(params):
        return (model.apply(params, (), BATCH, KEY, True)[0][0] * wanted).sum()

    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
        jax.jit(jax.grad(sparse))(params),
        jax.jit(jax.grad(dense))(params),
    )


@pytest.mark.full
@pytest.mark.parametrize("name", MAKE)
def test_padding(name):
    """Catches padding (NaN features, edges out of range, from padding, or to padding) that reaches a value or gradient.

    So too edges from nodes of other parties, which are not there.
    """
    model, params = start(name)
    wide = jax.tree.map(lambda x: x[0], BATCH)
    wide = wide._replace(
        nodes=jnp.concatenate([wide.nodes, jnp.full((2, 5), jnp.nan)]),
        ids=jnp.concatenate([wide.ids, jnp.array([-1, -1])]),
        senders=jnp.concatenate([wide.senders, jnp.array([-1, 8, 0, 9, 99])]),
        receivers=jnp.concatenate([wide.receivers, jnp.array([-1, 0, 8, 1, 2])]),
        types=jnp.concatenate([wide.types, jnp.array([-1, 7, 0, 1, 2])]),
    )
    wide = jax.tree.map(lambda x: x[None], wide)

    def total(params, batch):
        out = model.apply(params, (), batch, KEY, True)[0][:, :7]
        return (out**2).sum(), out

    (_, out), gradients = jax.value_and_grad(total, has_aux=True)(params, BATCH)
    (_, padded), others = jax.value_and_grad(total, has_aux=True)(params, wide)
    np.testing.assert_allclose(out, padded, rtol=1e-6, atol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), gradients, others)


@pytest.mark.full
def test_nodes_may_be_renumbered():
    """Catches an edge list whose order or numbers matter; dropout goes by a node's id."""
    model, params = start("gcn")
    order = RNG.permutation(7)
    place = np.argsort(order)
    turned = GRAPH._replace(
        nodes=GRAPH.nodes[order], ids=GRAPH.ids[order], senders=place[GRAPH.senders], receivers=place[GRAPH.receivers]
    )
    turned = jax.tree.map(jnp.asarray, stacked_graphs([turned]))
    out, other = (model.apply(params, (), batch, KEY, True)[0][0] for batch in (BATCH, turned))
    np.testing.assert_allclose(out[order], other, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_dropout_leaves_out_its_share_and_keeps_the_mean():
    """Catches a rate taken for the share that stays, and masks that every column or node shares.

    20,000 entries: the share is within 0.02 of 0.3 but for a chance below 1e-8.
    """
    from fedjax_sim.models.graph import _dropped

    ids, h = jnp.arange(200)[None], jnp.ones((1, 200, 100))
    out = np.asarray(_dropped(KEY, ids, h, 0.3))[0]
    assert abs((out == 0).mean() - 0.3) < 0.02
    np.testing.assert_allclose(out[out > 0], 1 / 0.7, rtol=1e-6)
    assert len(np.unique(out == 0, axis=0)) == 200 and len(np.unique(out == 0, axis=1).T) == 100
    np.testing.assert_array_equal(out[[3]], np.asarray(_dropped(KEY, ids[:, 3:4], h[:, :1], 0.3))[0])


@pytest.mark.full
def test_unknown_edge_types_are_nan():
    """Catches a type that is clamped to another one's weights."""
    model, params = start("rgcn")
    wrong = BATCH._replace(types=BATCH.types.at[0, 0].set(3))
    hit = np.isnan(np.asarray(model.apply(params, (), wrong, None, False)[0][0])).any(1)
    assert hit[GRAPH.receivers[0]] and not hit[6]
    with pytest.raises(ValueError, match=r"x\.types: expected types"):
        model.apply(params, (), BATCH._replace(types=None), None, False)


def test_parameter_counts():
    """Catches a bias left out: 16 -> 32 -> 7 and 16 -> 32 -> 24 -> 7 with a dense output."""

    def counts(model):
        params, _ = jax.eval_shape(model.init, KEY)
        return [sum(leaf.size for leaf in jax.tree.leaves(params[layer.name])) for layer in model.layers]

    assert counts(models.gcn(16, 7, hidden=(32,), output="dense")) == [544, 231]
    assert counts(models.gcn(16, 7, hidden=(32, 24), output="dense")) == [544, 792, 175]


@pytest.mark.full
def test_readouts():
    """Catches a mean over padding."""
    for readout, reduce in (("mean", np.mean), ("sum", np.sum)):
        model, params = start("gcn", readout=readout)
        each, _ = start("gcn")
        small = graph_data(GRAPH.nodes[:3], [[0, 1]])
        batch = jax.tree.map(jnp.asarray, stacked_graphs([GRAPH._replace(types=None), small]))
        out = model.apply(params, (), batch, None, False)[0]
        nodes = np.asarray(each.apply(params, (), batch, None, False)[0])
        np.testing.assert_allclose(out, [reduce(nodes[0], 0), reduce(nodes[1, :3], 0)], rtol=1e-5, atol=1e-6)


def test_wrong_input_is_refused():
    """Catches errors that name no argument."""
    model, params = start("gcn")
    with pytest.raises(TypeError, match="x: expected GraphData"):
        model.apply(params, (), BATCH.nodes, None, False)
    with pytest.raises(ValueError, match=r"x\.nodes: expected features \[n, V, 5\]"):
        model.apply(params, (), BATCH._replace(nodes=BATCH.nodes[..., :4]), None, False)
    for options in ({"dropout": 1.0}, {"dropout": float("nan")}, {"output": "linear"}, {"readout": "max"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            models.gcn(5, 3, **options)
    with pytest.raises(ValueError, match="distinct names"):
        models.graph_network([*models.gcn(5, 5).layers, *models.gcn(5, 5).layers], 5)
