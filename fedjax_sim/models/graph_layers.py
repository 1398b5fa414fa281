"""This module has layers over graphs, in two halves each, so that neighbours may belong to another party.

`send` computes the row that a node's neighbours receive. `combine` computes a node's new embedding from the rows that
it receives. Everything that crosses an edge is exchanged between the two halves. Sums over neighbours are segment sums.
In formulas, Â = D^-1/2 (A + I) D^-1/2, where A is the adjacency matrix and D holds the nodes' degrees + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_sim.models.layers import dense, init_dense
from fedjax_sim.types import Array, GraphData
from fedjax_sim.validate import fail


class GraphLayer(NamedTuple):
    """A `GraphLayer` is one layer, written for one graph with V nodes of its own and H nodes of other parties."""

    name: str  # of its parameters
    init: Callable  # (key) -> params
    send: Callable | None  # (params, graph, h [V, d]) -> [V, width]; None = neighbours are not used
    combine: Callable  # (params, graph, h [V, d], sent [V, width], received [H, width]) -> [V, d']
    width: int  # how many numbers a node sends to each neighbour
    num_outputs: int  # d'
    activation: Callable = jax.nn.relu
    dropout: float = 0.0  # share of the layer's inputs that is left out in training
    from_sent: bool = False  # whether `combine` reads `sent` and `received` only, and not h


def known_edges(graph: GraphData, is_received: Array) -> GraphData:
    """Returns the graph, with both ends of every unusable edge moved out of range, where sums drop them.

    An edge is usable if its receiver is a node of the graph, and its sender such a node or one that is received.

    Args:
      graph: V nodes. Senders from V on are nodes of other parties.
      is_received: [H] bool, which embeddings of other parties' nodes are received.
    """
    num_nodes = graph.ids.shape[0]
    is_known = jnp.concatenate([graph.ids >= 0, is_received])
    out_of_range = is_known.shape[0]

    # Clipping keeps the index valid for ends out of range, which the first two conditions refuse.
    def usable(ends, limit):
        return (ends >= 0) & (ends < limit) & is_known[jnp.clip(ends, 0, out_of_range - 1)]

    is_usable = usable(graph.senders, out_of_range) & usable(graph.receivers, num_nodes)
    senders, receivers = (jnp.where(is_usable, ends, out_of_range) for ends in (graph.senders, graph.receivers))
    return graph._replace(senders=senders, receivers=receivers)


def _degrees(graph: GraphData) -> Array:
    """Returns how many edges each node receives, [V] float32. An edge that is listed twice counts twice."""
    return jnp.zeros(graph.ids.shape[0]).at[graph.receivers].add(1.0, mode="drop")


def _rows(table: Array, places: ArrayLike) -> Array:
    """Returns the rows of the table at these places, and zeros for a place out of range."""
    return table.at[places].get(mode="fill", fill_value=0)


def _sums(graph: GraphData, messages: Array) -> Array:
    """Sums the messages [E, ...] of the edges that each node receives, [V, ...]."""
    return jnp.zeros((graph.ids.shape[0], *messages.shape[1:])).at[graph.receivers].add(messages, mode="drop")


def graph_convolution(name: str, num_inputs: int, num_outputs: int, **options) -> GraphLayer:
    """Makes a graph convolution, Â h W + b. A node sends its row of h W, divided by the root of its degree + 1.

    Args:
      name: of the layer's parameters.
      num_inputs, num_outputs: numbers of a node before and after the layer.
      options: fields of `GraphLayer`, such as `dropout`.

    References: Kipf and Welling 2017, equation 2.
    """

    # The sender divides by the root of its own degree + 1, so that degrees need no message of their own.
    def send(params, graph, h):
        return (h @ params["kernel"]) * jax.lax.rsqrt(_degrees(graph) + 1)[:, None]

    def combine(params, graph, h, sent, received):
        # The added `sent` is the node's own row, for the self-loop of A + I.
        total = _sums(graph, _rows(jnp.concatenate([sent, received]), graph.senders)) + sent
        return total * jax.lax.rsqrt(_degrees(graph) + 1)[:, None] + params["bias"][None]

    return GraphLayer(
        name,
        init=lambda key: init_dense(key, num_inputs, num_outputs),
        send=send,
        combine=combine,
        width=num_outputs,
        num_outputs=num_outputs,
        from_sent=True,
        **options,
    )


def sample_mean(name: str, num_inputs: int, num_outputs: int, **options) -> GraphLayer:
    """Makes a GraphSAGE layer, h_i W + (mean of the neighbours' h_j) U + b.

    All neighbours are used, and a node without neighbours has the mean 0.

    Args:
      name, num_inputs, num_outputs, options: as in `graph_convolution`.

    References: Hamilton, Ying and Leskovec 2017, section 3.3 (the mean aggregator, with concatenation).
    """

    def init(key):
        own_key, neighbour_key = jax.random.split(key)
        return init_dense(own_key, num_inputs, num_outputs) | {
            "neighbours": init_dense(neighbour_key, num_inputs, num_outputs)["kernel"]
        }

    def combine(params, graph, h, sent, received):
        total = _sums(graph, _rows(jnp.concatenate([sent, received]), graph.senders))
        return dense(params, h) + total / jnp.maximum(_degrees(graph), 1)[:, None]

    def send(params, graph, h):
        return h @ params["neighbours"]

    return GraphLayer(name, init, send, combine, width=num_outputs, num_outputs=num_outputs, **options)


def attention(
    name: str, num_inputs: int, num_outputs: int, *, num_heads: int = 1, average: bool = False, **options
) -> GraphLayer:
    """Makes an attention layer: a weighted sum of h_j W over the neighbours and the node itself, plus b.

    The weights of node i are softmax_j(LeakyReLU(a . h_j W + c . h_i W)), for each head.

    Args:
      name, num_inputs, options: as in `graph_convolution`.
      num_outputs: of each head.
      num_heads: number of heads.
      average: whether the outputs of the heads are averaged. Otherwise they are concatenated.

    References: Velickovic et al. 2018, equations 1 to 6.
    """
    shape = (num_heads, num_outputs)

    def init(key):
        kernel, a, c = jax.random.split(key, 3)
        glorot = jax.nn.initializers.glorot_uniform()
        return {
            "kernel": glorot(kernel, (num_inputs, num_heads * num_outputs)),
            "bias": jnp.zeros(num_outputs if average else num_heads * num_outputs),
            "sender": glorot(a, shape),
            "receiver": glorot(c, shape),
        }

    def combine(params, graph, h, sent, received):
        rows = jnp.concatenate([sent, received]).reshape(-1, *shape)  # [V + H, heads, num_outputs]
        own_rows = rows[: sent.shape[0]]
        sender_terms = (rows * params["sender"][None]).sum(-1)
        receiver_terms = (own_rows * params["receiver"][None]).sum(-1)

        def score(x):
            return jax.nn.leaky_relu(x, 0.2)

        self_scores = score(sender_terms[: own_rows.shape[0]] + receiver_terms)  # [V, heads]
        edge_scores = score(_rows(sender_terms, graph.senders) + _rows(receiver_terms, graph.receivers))  # [E, heads]
        # The softmax of a receiver does not change if its largest score is subtracted, which keeps exp finite.
        peak = jax.lax.stop_gradient(self_scores.at[graph.receivers].max(edge_scores, mode="drop"))
        edge_weights = jnp.exp(edge_scores - _rows(peak, graph.receivers))
        self_weights = jnp.exp(self_scores - peak)
        edge_sums = _sums(graph, edge_weights[..., None] * _rows(rows, graph.senders))
        total = edge_sums + self_weights[..., None] * own_rows
        out = total / (_sums(graph, edge_weights) + self_weights)[..., None]
        return (out.mean(1) if average else out.reshape(out.shape[0], -1)) + params["bias"][None]

    def send(params, graph, h):
        return h @ params["kernel"]

    width = num_heads * num_outputs
    layer_outputs = num_outputs if average else num_heads * num_outputs
    return GraphLayer(name, init, send, combine, width=width, num_outputs=layer_outputs, from_sent=True, **options)


def typed(name: str, num_inputs: int, num_outputs: int, *, num_types: int, **options) -> GraphLayer:
    """Makes a layer for typed edges, h_i W + sum_r (mean of the neighbours' h_j over edges of type r) U_r + b.

    An edge whose type is outside of [0, num_types) makes its receiver's embedding NaN.

    Args:
      name, num_inputs, num_outputs, options: as in `graph_convolution`.
      num_types: R; edges have the types 0, ..., R - 1.

    References: Schlichtkrull et al. 2018, equation 2, with c_ir the number of neighbours by edges of type r.
    """

    def init(key):
        own_key, *type_keys = jax.random.split(key, num_types + 1)
        kernels = [init_dense(type_key, num_inputs, num_outputs)["kernel"] for type_key in type_keys]
        return init_dense(own_key, num_inputs, num_outputs) | {"neighbours": jnp.stack(kernels)}

    # A sender does not know by which types of edges its row travels, so it sends one row for each type.
    def send(params, graph, h):
        return jnp.concatenate([h @ params["neighbours"][r] for r in range(num_types)], 1)

    def combine(params, graph, h, sent, received):
        if graph.types is None:
            fail("x.types", "types of the edges [n, E]", None, "population.graph_data takes edge_types.")
        table = jnp.concatenate([sent, received]).reshape(-1, num_outputs)  # a row for each node and type
        num_nodes = h.shape[0]
        is_known_type = (graph.types >= 0) & (graph.types < num_types)
        # Means are taken over groups, the edges of one receiver and one type. An edge that does not count belongs to a
        # group out of range, which the sums drop.
        is_counted = is_known_type & (graph.receivers < num_nodes)
        group = jnp.where(is_counted, graph.receivers * num_types + graph.types, table.shape[0])
        place = jnp.where(group < table.shape[0], graph.senders * num_types + graph.types, table.shape[0])
        counts = jnp.zeros(num_nodes * num_types).at[group].add(1.0, mode="drop")
        total = jnp.zeros((num_nodes * num_types, num_outputs)).at[group].add(_rows(table, place), mode="drop")
        means = (total / jnp.maximum(counts, 1)[:, None]).reshape(num_nodes, num_types, num_outputs)
        has_unknown_type = jnp.zeros(num_nodes).at[graph.receivers].max(jnp.where(is_known_type, 0.0, 1.0), mode="drop")
        return dense(params, h) + means.sum(1) + jnp.where(has_unknown_type > 0, jnp.nan, 0.0)[:, None]

    width = num_types * num_outputs
    return GraphLayer(name, init, send, combine, width=width, num_outputs=num_outputs, **options)


def head(name: str, num_inputs: int, num_outputs: int, **options) -> GraphLayer:
    """Makes a dense layer, h W + b, which reads each node by itself.

    Args:
      name, num_inputs, num_outputs, options: as in `graph_convolution`.
    """

    def combine(params, graph, h, sent, received):
        return dense(params, h)

    return GraphLayer(
        name,
        init=lambda key: init_dense(key, num_inputs, num_outputs),
        send=None,
        combine=combine,
        width=0,
        num_outputs=num_outputs,
        **options,
    )
