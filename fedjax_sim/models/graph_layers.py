"""Layers over graphs as segment sums, each in two halves, so that neighbours may live with another party.

`send` makes what a node's neighbours receive; `combine` makes its new embedding of what it receives. Between the two
lies everything that has to travel along an edge. Â = D^-1/2 (A + I) D^-1/2, where D holds the nodes' degrees + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.models.layers import dense, init_dense
from fedjax_sim.types import Array, GraphData
from fedjax_sim.validate import fail

__all__ = ["GraphLayer", "attention", "graph_convolution", "head", "known_edges", "sample_mean", "typed"]


class GraphLayer(NamedTuple):
    """One layer, written for one graph; V nodes of its own, H of other parties."""

    name: str  # of its parameters
    init: Callable  # (key) -> params
    send: Callable | None  # (params, graph, h [V, d]) -> [V, width]; None = neighbours play no part
    combine: Callable  # (params, graph, h [V, d], sent [V, width], received [H, width]) -> [V, d']
    width: int  # numbers that a node sends to each neighbour
    num_outputs: int  # d'
    activation: Callable = jax.nn.relu
    dropout: float = 0.0  # share of its inputs that training leaves out
    from_sent: bool = False  # `combine` reads what was sent, and of h nothing: it needs no inputs


def known_edges(graph: GraphData, there: Array) -> GraphData:
    """The graph with both ends of every edge that cannot be used moved out of range, where sums drop it.

    Args:
      there: [H] bool, whose embeddings of other parties' nodes are received.
    """
    nodes = graph.ids.shape[0]
    known = jnp.concatenate([graph.ids >= 0, there])
    beyond = known.shape[0]

    def usable(ends, limit):
        return (ends >= 0) & (ends < limit) & known[jnp.clip(ends, 0, beyond - 1)]

    good = usable(graph.senders, beyond) & usable(graph.receivers, nodes)
    senders, receivers = (jnp.where(good, ends, beyond) for ends in (graph.senders, graph.receivers))
    return graph._replace(senders=senders, receivers=receivers)


def _degrees(graph: GraphData) -> Array:
    """[V] float32 edges that a node receives; an edge that is listed twice counts twice."""
    return jnp.zeros(graph.ids.shape[0]).at[graph.receivers].add(1.0, mode="drop")


def _rows(table: Array, places: Array) -> Array:
    return table.at[places].get(mode="fill", fill_value=0)


def _sums(graph: GraphData, messages: Array) -> Array:
    """[V, ...] sums of the messages [E, ...] of each node's edges."""
    return jnp.zeros((graph.ids.shape[0], *messages.shape[1:])).at[graph.receivers].add(messages, mode="drop")


def graph_convolution(name: str, num_inputs: int, num_outputs: int, **options) -> GraphLayer:
    """Â h W + b; a node sends its row of h W over the root of its degree + 1.

    References: Kipf and Welling 2017, equation 2.
    """

    def send(params, graph, h):
        return (h @ params["kernel"]) * jax.lax.rsqrt(_degrees(graph) + 1)[:, None]

    def combine(params, graph, h, sent, received):
        total = _sums(graph, _rows(jnp.concatenate([sent, received]), graph.senders)) + sent
        return total * jax.lax.rsqrt(_degrees(graph) + 1)[:, None] + params["bias"][None]

    return GraphLayer(
        name,
        lambda key: init_dense(key, num_inputs, num_outputs),
        send,
        combine,
        num_outputs,
        num_outputs,
        from_sent=True,
        **options,
    )


def sample_mean(name: str, num_inputs: int, num_outputs: int, **options) -> GraphLayer:
    """h_i W + (mean of the neighbours' h_j) U + b, with all neighbours; the mean of none is 0.

    References: Hamilton, Ying and Leskovec 2017, section 3.3 (the mean aggregator, with concatenation).
    """

    def init(key):
        own, others = jax.random.split(key)
        return init_dense(own, num_inputs, num_outputs) | {
            "neighbours": init_dense(others, num_inputs, num_outputs)["kernel"]
        }

    def combine(params, graph, h, sent, received):
        total = _sums(graph, _rows(jnp.concatenate([sent, received]), graph.senders))
        return dense(params, h) + total / jnp.maximum(_degrees(graph), 1)[:, None]

    def send(params, graph, h):
        return h @ params["neighbours"]

    return GraphLayer(name, init, send, combine, num_outputs, num_outputs, **options)


def attention(
    name: str, num_inputs: int, num_outputs: int, *, num_heads: int = 1, average: bool = False, **options
) -> GraphLayer:
    """Heads that weigh neighbours, and the node itself, by softmax(LeakyReLU(a . h_j W + c . h_i W)); plus b.

    Args:
      num_outputs: of each head. Heads stand side by side, or are averaged.

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
        table = jnp.concatenate([sent, received]).reshape(-1, *shape)
        own = table[: sent.shape[0]]
        sender, receiver = (table * params["sender"][None]).sum(-1), (own * params["receiver"][None]).sum(-1)

        def score(x):
            return jax.nn.leaky_relu(x, 0.2)

        to_self = score(sender[: own.shape[0]] + receiver)  # [V, heads]
        along = score(_rows(sender, graph.senders) + _rows(receiver, graph.receivers))  # [E, heads]
        peak = jax.lax.stop_gradient(to_self.at[graph.receivers].max(along, mode="drop"))
        weights, itself = jnp.exp(along - _rows(peak, graph.receivers)), jnp.exp(to_self - peak)
        total = _sums(graph, weights[..., None] * _rows(table, graph.senders)) + itself[..., None] * own
        out = total / (_sums(graph, weights) + itself)[..., None]
        return (out.mean(1) if average else out.reshape(out.shape[0], -1)) + params["bias"][None]

    def send(params, graph, h):
        return h @ params["kernel"]

    width, outputs = num_heads * num_outputs, num_outputs if average else num_heads * num_outputs
    return GraphLayer(name, init, send, combine, width, outputs, from_sent=True, **options)


def typed(name: str, num_inputs: int, num_outputs: int, *, num_types: int, **options) -> GraphLayer:
    """h_i W + sum over types r of (mean of the neighbours' h_j over edges of type r) U_r + b.

    An edge whose type is outside of [0, num_types) makes its receiver's embedding NaN.

    References: Schlichtkrull et al. 2018, equation 2, with c_ir the number of these neighbours.
    """

    def init(key):
        own, *others = jax.random.split(key, num_types + 1)
        kernels = [init_dense(one, num_inputs, num_outputs)["kernel"] for one in others]
        return init_dense(own, num_inputs, num_outputs) | {"neighbours": jnp.stack(kernels)}

    def send(params, graph, h):
        return jnp.concatenate([h @ params["neighbours"][r] for r in range(num_types)], 1)

    def combine(params, graph, h, sent, received):
        if graph.types is None:
            fail("x.types", "types of the edges [n, E]", None, "population.graph_data takes edge_types.")
        table = jnp.concatenate([sent, received]).reshape(-1, num_outputs)  # a row for each node and type
        nodes, known = h.shape[0], (graph.types >= 0) & (graph.types < num_types)
        group = jnp.where(known & (graph.receivers < nodes), graph.receivers * num_types + graph.types, table.shape[0])
        place = jnp.where(group < table.shape[0], graph.senders * num_types + graph.types, table.shape[0])
        counts = jnp.zeros(nodes * num_types).at[group].add(1.0, mode="drop")
        total = jnp.zeros((nodes * num_types, num_outputs)).at[group].add(_rows(table, place), mode="drop")
        means = (total / jnp.maximum(counts, 1)[:, None]).reshape(nodes, num_types, num_outputs)
        unknown = jnp.zeros(nodes).at[graph.receivers].max(jnp.where(known, 0.0, 1.0), mode="drop")
        return dense(params, h) + means.sum(1) + jnp.where(unknown > 0, jnp.nan, 0.0)[:, None]

    return GraphLayer(name, init, send, combine, num_types * num_outputs, num_outputs, **options)


def head(name: str, num_inputs: int, num_outputs: int, **options) -> GraphLayer:
    """h W + b of each node by itself."""

    def combine(params, graph, h, sent, received):
        return dense(params, h)

    return GraphLayer(
        name, lambda key: init_dense(key, num_inputs, num_outputs), None, combine, 0, num_outputs, **options
    )
