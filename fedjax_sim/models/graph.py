"""This module builds graph networks for batches of padded graphs: GCN, GraphSAGE, GAT, and one for typed edges.

A batch of n graphs has leaves [n, ...]. Networks for nodes return [n, V, C], networks with a readout [n, C]. Dropout is
drawn by the ids of nodes, so a node loses the same inputs at any party.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from fedjax_sim.models import graph_layers as layers
from fedjax_sim.models.graph_layers import GraphLayer
from fedjax_sim.models.model import Model, compiled_init
from fedjax_sim.prng import counter_bits, stream
from fedjax_sim.types import Array, GraphData, PyTree
from fedjax_sim.validate import NumFeatures, NumOutputs, fail, in_range, integer, one_of, sequence

READOUTS = ("none", "mean", "sum")


def apply_layer(
    layer: GraphLayer,
    params: PyTree,
    graphs: GraphData,
    h: Array,
    key: Array | None = None,
    *,
    exchange: Callable | None = None,
    stacked: bool = False,
) -> Array:
    """Applies one layer to a batch of graphs.

    Args:
      layer: the layer.
      params: of the layer.
      graphs: leaves [n, ...], with edges as `graph_layers.known_edges` returns them.
      h: [n, V, d] embeddings.
      key: of the training step. None means evaluation, without dropout.
      exchange: (sent [n, V, width]) -> (sent, received). It returns `sent` in the form in which neighbours sum it, and
        the rows [n, H, width] that arrive from nodes of other parties. None means that no rows arrive.
      stacked: whether each graph has parameters of its own, with leaves [n, ...].

    Returns: [n, V, d'], after the activation.
    """
    if key is not None and layer.dropout > 0:
        h = _dropped(stream(key, f"dropout_{layer.name}"), jnp.asarray(graphs.ids), h, layer.dropout)
    # Layers are written for one graph. `vmap` gives all graphs the same parameters, or each its own.
    params_axis = 0 if stacked else None
    if layer.send is None:
        no_rows = jnp.zeros((h.shape[0], 0, 0))
        sent, received = no_rows, no_rows
    else:
        sent = jax.vmap(layer.send, (params_axis, 0, 0))(params, graphs, h)
        no_rows = jnp.zeros((h.shape[0], 0, layer.width))
        sent, received = (sent, no_rows) if exchange is None else exchange(sent)
    return layer.activation(jax.vmap(layer.combine, (params_axis, 0, 0, 0, 0))(params, graphs, h, sent, received))


def _dropped(key: Array, ids: Array, h: Array, rate: float) -> Array:
    """Sets a share of the entries of h to zero, and scales the others so that the mean stays the same.

    An entry is dropped by its node's id and its column, so the same entries are dropped in any partition of a graph.
    """
    width = h.shape[-1]
    # The counter id * width + column is a different one for each entry of the whole graph (modulo 2^32).
    counters = ids.astype(jnp.uint32)[..., None] * jnp.uint32(width) + jnp.arange(width, dtype=jnp.uint32)[None, None]
    is_kept = counter_bits(key, counters) >= jnp.uint32(min(int(rate * 2**32), 2**32 - 1))
    return jnp.where(is_kept, h * (1 / (1 - rate)), 0)


def _check_graphs(x: GraphData, num_features: int) -> None:
    """Refuses an input that is not a batch of graphs with so many features."""
    if not isinstance(x, GraphData):
        fail("x", "GraphData", type(x).__name__, "population.graph_data makes one.", TypeError)
    if x.nodes.ndim != 3 or x.nodes.shape[2] != num_features:
        fail("x.nodes", f"features [n, V, {num_features}]", x.nodes.shape, "A single graph is a batch of one: x[None].")


def graph_network(parts: Sequence[GraphLayer], num_features: NumFeatures, *, readout: str = "none") -> Model:
    """Builds a model from layers over graphs.

    Args:
      parts: layers in order, with distinct names.
      num_features: F, the number of features of a node.
      readout: "none" returns outputs of nodes, [n, V, C]. "mean" and "sum" reduce them over each graph's nodes, [n, C].

    Returns: a stateless `Model` with `layers`. It ignores edges from nodes of other parties. Algorithms that exchange
    such nodes run the layers themselves, by `apply_layer`.

    Guarantees: padding, whatever its features, changes nothing (tests/models/test_graph.py::test_padding).
    """
    parts = tuple(parts)
    sequence("parts", parts)
    integer("num_features", num_features)
    one_of("readout", readout, READOUTS)
    # Names are the keys of the model's parameters.
    names = [layer.name for layer in parts]
    if len(set(names)) < len(names):
        fail("parts", "layers with distinct names", names)

    def init(key: Array) -> tuple[PyTree, PyTree]:
        return {layer.name: layer.init(stream(key, layer.name)) for layer in parts}, ()

    def apply(params, state, x, key, train):
        _check_graphs(x, num_features)
        is_node = x.ids >= 0
        # Features of padding may hold anything, even NaN, which a product with zero would not remove.
        h = jnp.where(is_node[..., None], x.nodes, 0).astype(jnp.float32)
        x = jax.vmap(layers.known_edges)(x, jnp.zeros((is_node.shape[0], 0), bool))
        for layer in parts:
            h = apply_layer(layer, params[layer.name], x, h, key if train else None)
        if readout == "none":
            return h, state
        # After a bias the rows of padding are not zero, so they are masked again.
        total = jnp.where(is_node[..., None], h, 0).sum(1)
        if readout == "mean":
            return total / jnp.maximum(is_node.sum(1), 1).astype(total.dtype)[:, None], state
        return total, state

    return Model(compiled_init(init), apply, parts)


def _identity(x: Array) -> Array:
    """Returns `x`, as the activation of the last layer."""
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
    """Builds a network of one kind of layer.

    Args:
      make: (name, num_inputs, num_outputs, dropout, activation) -> a hidden layer.
      num_features, num_outputs, hidden, output, dropout, readout: as in `gcn`.
      last: makes the last layer if `output` is "graph". None = `make`.
      activation: of the hidden layers.
    """
    integer("num_features", num_features)
    integer("num_outputs", num_outputs)
    one_of("output", output, ("graph", "dense"))
    in_range("dropout", dropout, 0, 1, open_high=True)
    if not isinstance(hidden, (tuple, list)):
        fail("hidden", "a list of integers", hidden, error=TypeError)
    parts = []
    num_inputs = num_features
    for i, width in enumerate(hidden):
        integer(f"hidden[{i}]", width)
        parts.append(make(f"graph_{i}", num_inputs, width, dropout=dropout, activation=activation))
        num_inputs = parts[-1].num_outputs  # with several attention heads it is not `width`
    make_last = layers.head if output == "dense" else last or make
    parts.append(make_last("output", num_inputs, num_outputs, dropout=dropout, activation=_identity))
    return graph_network(parts, num_features, readout=readout)


def gcn(
    num_features: NumFeatures,
    num_outputs: NumOutputs,
    *,
    hidden: Sequence[int] = (16,),
    output: str = "graph",
    dropout: float = 0.5,
    readout: str = "none",
) -> Model:
    """Builds a graph convolutional network, whose layers compute h <- ReLU(Â h W + b).

    Â is the symmetrically normalised adjacency matrix with self-loops. The last layer has no ReLU.

    Args:
      num_features: F, the number of features of a node.
      num_outputs: C, the number of classes.
      hidden: widths of the layers before the last.
      output: the last layer. "graph" is another convolution, "dense" a dense layer on each node by itself.
      dropout: share of each layer's inputs that is left out in training, in [0, 1).
      readout: "none" for outputs of nodes, "mean" or "sum" over nodes for outputs of whole graphs.

    Returns: a `Model` on batches of `GraphData`.

    Guarantees: equals dense matrices in NumPy, in values and gradients (tests/models/test_graph.py::test_numpy). The
    network 16 -> 32 -> 7 with a dense output has 544 + 231 parameters (::test_parameter_counts).

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
    """Builds a GraphSAGE network with the mean of all neighbours: h_i <- ReLU(h_i W + mean_j h_j U + b).

    Args:
      num_features, num_outputs, hidden, output, dropout, readout: as in `gcn`.

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
    """Builds a graph attention network with ELU. The last layer has one head. Dropout leaves attention weights alone.

    Args:
      hidden: width of each head, for each layer before the last.
      num_heads: number of heads in these layers. Their outputs are concatenated.
      num_features, num_outputs, output, dropout, readout: as in `gcn`.

    Guarantees: equals loops in NumPy (tests/models/test_graph.py::test_numpy).

    References: Velickovic et al. 2018, section 2.
    """
    integer("num_heads", num_heads)
    options = {"hidden": hidden, "output": output, "dropout": dropout, "readout": readout}
    make = partial(layers.attention, num_heads=num_heads)
    last = partial(layers.attention, average=True)
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
    """Builds a relational graph network for typed edges: h_i <- ReLU(h_i W + sum_r mean_{j: type r} h_j U_r + b).

    Args:
      num_types: R, the number of types. An edge of another type gives NaN.
      num_features, num_outputs, hidden, output, dropout, readout: as in `gcn`.

    Guarantees: equals loops in NumPy (tests/models/test_graph.py::test_numpy).

    References: Schlichtkrull et al. 2018, equation 2.
    """
    integer("num_types", num_types)
    options = {"hidden": hidden, "output": output, "dropout": dropout, "readout": readout}
    return _network(partial(layers.typed, num_types=num_types), num_features, num_outputs, **options)


def link_prediction(model: Model) -> Callable:
    """Makes a loss for link prediction, where nodes a and b are joined with probability sigmoid(h_a . h_b).

    Args:
      model: a graph network for nodes, whose outputs are embeddings h.

    Returns: `loss_fn(params, examples, key)` with examples `x` (a batch of graphs), `pairs` [n, L, 2] int32 nodes, and
    `y` [n, L]: 1 for a joined pair, 0 for another pair, -1 for padding. It returns

    - "loss" [n], the mean cross entropy over a graph's pairs. It is NaN if a pair with a label has an end that is
      padding or not a node;
    - "weight" [n], the number of these pairs;
    - in evaluations "auc" [n], the probability that a joined pair has a higher score than another pair of its graph,
      where ties count half;
    - in evaluations "auc_weight" [n], which is 0 for a graph that lacks one kind of pairs and so has no AUC. A mean
      over such graphs alone is NaN.

    Guarantees: the AUC equals a count over all pairs of pairs, and padding changes nothing
    (tests/models/test_links.py::test_auc_and_loss). Graphs without an AUC do not lower the mean
    (::test_auc_of_graphs_that_have_one).

    References: Kipf and Welling 2016 (the inner product decoder).
    """
    if not isinstance(model, Model) or not all(isinstance(layer, GraphLayer) for layer in model.layers or [None]):
        fail("model", "a network of graph layers", type(model).__name__, "Take models.gcn, say.", TypeError)

    def loss_fn(params: PyTree, examples: dict[str, PyTree], key: Array | None = None) -> dict[str, Array]:
        h, _ = model.apply(params, (), examples["x"], key, key is not None)
        pairs = examples["pairs"]
        y = examples["y"]
        size = h.shape[1]
        # JAX clamps or wraps indices out of range, so the ends of pairs are checked before h is read.
        is_node = jax.vmap(lambda ids, at: ids.at[at].get(mode="fill", fill_value=-1))(examples["x"].ids, pairs) >= 0
        is_usable = (y >= 0) & (pairs >= 0).all(-1) & is_node.all(-1)
        ends = [jax.vmap(lambda rows, at: rows[at])(h, jnp.clip(pairs[..., i], 0, size - 1)) for i in (0, 1)]
        scores = jnp.where(is_usable, (ends[0] * ends[1]).sum(-1), 0)
        is_wrong = (y >= 0) & (~is_usable | (y > 1))
        losses = jax.nn.softplus(jnp.where(y == 1, -scores, scores))
        num_pairs = is_usable.sum(1).astype(jnp.float32)
        loss = jnp.where(is_usable, losses, 0).sum(1) / jnp.maximum(num_pairs, 1)
        values = {"loss": jnp.where(is_wrong.any(1), jnp.nan, loss), "weight": num_pairs}
        if key is not None:
            return values
        is_joined = is_usable & (y == 1)
        is_unjoined = is_usable & (y == 0)
        has_auc = is_joined.any(1) & is_unjoined.any(1)
        auc = jax.vmap(_auc)(scores, is_joined, is_unjoined)
        return values | {"auc": auc, "auc_weight": jnp.where(has_auc, num_pairs, 0)}

    return loss_fn


def _auc(scores: Array, positive: Array, negative: Array) -> Array:
    """Computes the share of pairs (positive, negative) in which the positive one has the higher score, ties half.

    Args:
      scores: [L].
      positive, negative: [L] bool, which scores are of which kind; a score may be of neither.

    Returns: [] in [0, 1]; 0 where one kind is missing.
    """
    is_greater, is_equal = (
        compare(scores[:, None], scores[None]).astype(jnp.float32) for compare in (jnp.greater, jnp.equal)
    )
    wins = is_greater + is_equal / 2
    is_counted = positive[:, None] & negative[None]
    return jnp.where(is_counted, wins, 0).sum() / jnp.maximum(is_counted.sum(), 1).astype(jnp.float32)
