"""Graph networks: GCN, GraphSAGE, GAT and one with typed edges, for batches of padded graphs.

A batch of n graphs has leaves [n, ...]. Networks for nodes return [n, V, C]; with a readout [n, C]. Dropout is drawn by
the nodes' ids, so that a node loses the same inputs at whichever party it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from fedjax_sim.models import graph_layers as layers
from fedjax_sim.models.graph_layers import GraphLayer
from fedjax_sim.models.model import Model
from fedjax_sim.prng import counter_bits, stream
from fedjax_sim.types import Array, GraphData, PyTree
from fedjax_sim.validate import NumFeatures, NumOutputs, fail, in_range, integer, one_of, sequence

__all__ = [
    "apply_layer",
    "gat",
    "gcn",
    "graph_network",
    "graph_sage",
    "link_prediction",
    "rgcn",
]

READOUTS = ("none", "mean", "sum")


def apply_layer(
    layer: GraphLayer,
    params: PyTree,
    graphs: GraphData,
    h: Array,
    key: Array | None = None,
    exchange: Callable | None = None,
    *,
    stacked: bool = False,
) -> Array:
    """One layer on a batch of graphs.

    Args:
      params: of the layer.
      graphs: leaves [n, ...], with edges as `graph_layers.known_edges` leaves them.
      h: [n, V, d] embeddings.
      key: of the training step; None = evaluation, without dropout.
      exchange: (sent [n, V, width]) -> the same as it is where neighbours are summed, and what arrives there of other
        parties' nodes, [n, H, width]; None = nothing does.
      stacked: whether each graph has parameters of its own, leaves [n, ...].

    Returns: [n, V, d'], after the activation.
    """
    if key is not None and layer.dropout > 0:
        h = _dropped(stream(key, f"dropout_{layer.name}"), graphs.ids, h, layer.dropout)
    own = 0 if stacked else None
    if layer.send is None:
        nothing = jnp.zeros((h.shape[0], 0, 0))
        sent, received = nothing, nothing
    else:
        sent = jax.vmap(layer.send, (own, 0, 0))(params, graphs, h)
        nothing = jnp.zeros((h.shape[0], 0, layer.width))
        sent, received = (sent, nothing) if exchange is None else exchange(sent)
    return layer.activation(jax.vmap(layer.combine, (own, 0, 0, 0, 0))(params, graphs, h, sent, received))


def _dropped(key: Array, ids: Array, h: Array, rate: float) -> Array:
    """h without a share of its entries, each by node and column; the others are scaled so that the mean stays."""
    width = h.shape[-1]
    counters = ids.astype(jnp.uint32)[..., None] * jnp.uint32(width) + jnp.arange(width, dtype=jnp.uint32)[None, None]
    kept = counter_bits(key, counters) >= jnp.uint32(min(int(rate * 2**32), 2**32 - 1))
    return jnp.where(kept, h * (1 / (1 - rate)), 0)


def _checked(x: GraphData, num_features: int) -> None:
    if not isinstance(x, GraphData):
        fail("x", "GraphData", type(x).__name__, "population.graph_data makes one.", TypeError)
    if x.nodes.ndim != 3 or x.nodes.shape[2] != num_features:
        fail("x.nodes", f"features [n, V, {num_features}]", x.nodes.shape, "A single graph is a batch of one: x[None].")


def graph_network(parts: Sequence[GraphLayer], num_features: NumFeatures, *, readout: str = "none") -> Model:
    """A model of layers over graphs, which can be cut between them.

    Args:
      parts: layers in order, with distinct names.
      num_features: F of the nodes.
      readout: "none" (outputs [n, V, C]), or "mean" or "sum" over each graph's nodes ([n, C]).

    Returns: a stateless `Model`; it has the `layers`. Edges from nodes of other parties are left out of it.

    Guarantees: padding, whatever its features, changes nothing (tests/models/test_graph.py::test_padding).
    """
    parts = tuple(parts)
    sequence("parts", parts)
    integer("num_features", num_features)
    one_of("readout", readout, READOUTS)
    names = [layer.name for layer in parts]
    if len(set(names)) < len(names):
        fail("parts", "layers with distinct names", names)

    def init(key: Array) -> tuple[PyTree, PyTree]:
        return {layer.name: layer.init(stream(key, layer.name)) for layer in parts}, ()

    def apply(params, state, x, key, train):
        _checked(x, num_features)
        there = x.ids >= 0
        h = jnp.where(there[..., None], x.nodes, 0).astype(jnp.float32)
        x = jax.vmap(layers.known_edges)(x, jnp.zeros((there.shape[0], 0), bool))
        for layer in parts:
            h = apply_layer(layer, params[layer.name], x, h, key if train else None)
        if readout == "none":
            return h, state
        total = jnp.where(there[..., None], h, 0).sum(1)
        return total / jnp.maximum(there.sum(1), 1).astype(total.dtype)[:, None] if readout == "mean" else total, state

    return Model(jax.jit(init), apply, parts)


def _identity(x: Array) -> Array:
    return x


def _network(
    make: Callable,
    num_features: int,
    num_outputs: int,
    *,
    hidden: Sequence[int],
    output: str,
    dropout: float,
    readout: str,
    last: Callable | None = None,
    activation: Callable = jax.nn.relu,
) -> Model:
    integer("num_features", num_features)
    integer("num_outputs", num_outputs)
    one_of("output", output, ("graph", "dense"))
    in_range("dropout", dropout, 0, 1, open_high=True)
    if not isinstance(hidden, (tuple, list)):
        fail("hidden", "a list of integers", hidden, error=TypeError)
    made, before = [], num_features
    for i, width in enumerate(hidden):
        integer(f"hidden[{i}]", width)
        made.append(make(f"graph_{i}", before, width, dropout=dropout, activation=activation))
        before = made[-1].num_outputs
    final = layers.head if output == "dense" else last or make
    made.append(final("output", before, num_outputs, dropout=dropout, activation=_identity))
    return graph_network(made, num_features, readout=readout)


def gcn(
    num_features: NumFeatures,
    num_outputs: NumOutputs,
    *,
    hidden: Sequence[int] = (16,),
    output: str = "graph",
    dropout: float = 0.5,
    readout: str = "none",
) -> Model:
    """Graph convolutional network: h <- ReLU(Â h W + b), Â the symmetrically normalised adjacency with self-loops.

    Args:
      num_features: F of a node.
      num_outputs: C, classes.
      hidden: widths of the layers before the last.
      output: the last layer: "graph", another convolution, or "dense", on each node by itself.
      dropout: share of each layer's inputs left out in training, in [0, 1).
      readout: "none" for nodes, "mean" or "sum" over nodes for whole graphs.

    Returns: a `Model` on batches of `GraphData`.

    Guarantees: equals dense matrices in NumPy, values and gradients (tests/models/test_graph.py::test_numpy);
    16 -> 32 -> 7 with a dense output has 544 + 231 parameters (::test_parameter_counts).

    References: Kipf and Welling 2017, section 3.1.

    >>> import jax
    >>> params, _ = gcn(16, 7, hidden=(32,), output="dense").init(jax.random.key(0))
    >>> [sum(leaf.size for leaf in jax.tree.leaves(params[name])) for name in ("graph_0", "output")]
    [544, 231]
    """
    options = {"hidden": hidden, "output": output, "dropout": dropout, "readout": readout}
    return _network(layers.graph_convolution, num_features, num_outputs, **options)


def graph_sage(
    num_features: NumFeatures,
    num_outputs: NumOutputs,
    *,
    hidden: Sequence[int] = (16,),
    output: str = "graph",
    dropout: float = 0.5,
    readout: str = "none",
) -> Model:
    """GraphSAGE with the mean of all neighbours: h_i <- ReLU(h_i W + mean_j h_j U + b). Arguments as of `gcn`.

    Guarantees: equals loops in NumPy (tests/models/test_graph.py::test_numpy).

    References: Hamilton, Ying and Leskovec 2017, algorithm 1.
    """
    options = {"hidden": hidden, "output": output, "dropout": dropout, "readout": readout}
    return _network(layers.sample_mean, num_features, num_outputs, **options)


def gat(
    num_features: NumFeatures,
    num_outputs: NumOutputs,
    *,
    hidden: Sequence[int] = (8,),
    num_heads: int = 8,
    output: str = "graph",
    dropout: float = 0.5,
    readout: str = "none",
) -> Model:
    """Graph attention network, with ELU; the last layer has one head. Attention weights are not dropped.

    Args:
      hidden: widths of each head in the layers before the last.
      num_heads: heads of those layers, side by side. Others as of `gcn`.

    Guarantees: equals loops in NumPy (tests/models/test_graph.py::test_numpy).

    References: Velickovic et al. 2018, section 2.
    """
    integer("num_heads", num_heads)
    options = {"hidden": hidden, "output": output, "dropout": dropout, "readout": readout}
    make, last = partial(layers.attention, num_heads=num_heads), partial(layers.attention, average=True)
    return _network(make, num_features, num_outputs, **options, last=last, activation=jax.nn.elu)


def rgcn(
    num_features: NumFeatures,
    num_outputs: NumOutputs,
    *,
    num_types: int,
    hidden: Sequence[int] = (16,),
    output: str = "graph",
    dropout: float = 0.5,
    readout: str = "none",
) -> Model:
    """Relational graph network for typed edges: h_i <- ReLU(h_i W + sum_r mean_{j: type r} h_j U_r + b).

    Args:
      num_types: R; an edge of another type gives NaN. Others as of `gcn`.

    Guarantees: equals loops in NumPy (tests/models/test_graph.py::test_numpy).

    References: Schlichtkrull et al. 2018, equation 2.
    """
    integer("num_types", num_types)
    options = {"hidden": hidden, "output": output, "dropout": dropout, "readout": readout}
    return _network(partial(layers.typed, num_types=num_types), num_features, num_outputs, **options)


def link_prediction(model: Model) -> Callable:
    """A loss for links: nodes a and b are joined with probability sigmoid(h_a . h_b).

    Args:
      model: a graph network for nodes; its outputs are embeddings.

    Returns: `loss_fn(params, examples, key)` with examples `x` (a batch of graphs), `pairs` [n, L, 2] int32 nodes, and
    `y` [n, L]: 1 joined, 0 not, -1 padding. It gives "loss" (mean cross entropy of a graph's pairs), "weight" (their
    number) and in evaluations "auc": the chance that a joined pair scores above another of its graph, ties counted
    half. A graph without both kinds of pairs has no AUC: its "auc_weight" is 0, and a mean over such graphs alone is
    NaN. A pair with a label whose end is no node, or padding, makes the loss NaN.

    Guarantees: AUC is the count of all pairs of pairs, padding changes nothing
    (tests/models/test_links.py::test_auc_and_loss); graphs without an AUC do not lower the mean
    (::test_auc_of_graphs_that_have_one).

    References: Kipf and Welling 2016 (the inner product decoder).
    """
    if not isinstance(model, Model) or not all(isinstance(layer, GraphLayer) for layer in model.layers or [None]):
        fail("model", "a network of graph layers", type(model).__name__, "Take models.gcn, say.", TypeError)

    def loss_fn(params: PyTree, examples: dict[str, PyTree], key: Array | None = None) -> dict[str, Array]:
        h, _ = model.apply(params, (), examples["x"], key, key is not None)
        pairs, y = examples["pairs"], examples["y"]
        size = h.shape[1]
        there = jax.vmap(lambda ids, at: ids.at[at].get(mode="fill", fill_value=-1))(examples["x"].ids, pairs) >= 0
        known = (y >= 0) & (pairs >= 0).all(-1) & there.all(-1)
        ends = [jax.vmap(lambda rows, at: rows[at])(h, jnp.clip(pairs[..., i], 0, size - 1)) for i in (0, 1)]
        scores = jnp.where(known, (ends[0] * ends[1]).sum(-1), 0)
        wrong = (y >= 0) & (~known | (y > 1))
        losses = jax.nn.softplus(jnp.where(y == 1, -scores, scores))
        count = known.sum(1).astype(jnp.float32)
        loss = jnp.where(known, losses, 0).sum(1) / jnp.maximum(count, 1)
        found = {"loss": jnp.where(wrong.any(1), jnp.nan, loss), "weight": count}
        if key is not None:
            return found
        joined, apart = known & (y == 1), known & (y == 0)
        both = joined.any(1) & apart.any(1)
        return found | {"auc": jax.vmap(_auc)(scores, joined, apart), "auc_weight": jnp.where(both, count, 0)}

    return loss_fn


def _auc(scores: Array, positive: Array, negative: Array) -> Array:
    ahead, equal = (compare(scores[:, None], scores[None]).astype(jnp.float32) for compare in (jnp.greater, jnp.equal))
    above = ahead + equal / 2
    pairs = positive[:, None] & negative[None]
    return jnp.where(pairs, above, 0).sum() / jnp.maximum(pairs.sum(), 1).astype(jnp.float32)
