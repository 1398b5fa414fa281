"""Mixing matrices: what share of a neighbour's model a node takes, as tables of neighbours.

Row i of W is node i's neighbours, in the order of their ids, and their weights; nothing here is [N, N]. The tables are
arrays that an algorithm keeps in its state; `links` makes a round's weights of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import sparse

from fedjax_sim import tree, validate
from fedjax_sim.network.eigenvalues import laplacian_extremes
from fedjax_sim.network.topology import Graph
from fedjax_sim.types import Array, PyTree

__all__ = [
    "Links",
    "Mixing",
    "constant_links",
    "laplacian",
    "lazy",
    "matrix_of",
    "metropolis",
    "mixed",
    "neighbour_mean",
    "push",
    "tables_of",
]

LARGEST_TABLE = 1 << 30  # bytes


class Links(NamedTuple):
    """Who hears whom in one round."""

    neighbours: Array  # [N, k] int32; the node itself in padding
    weights: Array  # [N, k] float32 shares of the neighbours' models; 0 where nothing is sent
    up: Array  # [N] bool; False = the node does nothing in this round
    share: Array | None = None  # [N] float32 what a node gives to each neighbour: it keeps what it does not give away.
    # None = a node takes: it keeps 1 minus the sum of its weights


class Mixing(NamedTuple):
    """A mixing matrix W, which may change from round to round, with the facts that algorithms ask for."""

    graph: Graph  # all edges that are ever used
    tables: dict[str, np.ndarray]  # on the host; `neighbours`, `weights`, `edges` [T, N, k], and what `links` needs
    links: Callable  # (key, round [] int32, tables) -> Links
    keeps_constants: bool = False  # rows add up to 1 in every round: nodes that agree stay as they are
    keeps_average: bool = False  # columns do: the mean over the nodes never moves
    symmetric: bool = False  # in every round
    static: bool = False  # the same in every round
    failures: int = 0  # wrappers that fail around it; each draws from a stream of its own


def tables_of(graph: Graph, values: np.ndarray) -> dict[str, np.ndarray]:
    """The tables of a graph: its neighbours, a value for each edge, and the edge's number; those of one round.

    Args:
      values: [E] or a number, in the order of the graph's edges.

    Raises: MemoryError where a node has so many neighbours that rows padded to their number do not fit.
    """
    size, width = graph.population_size, int(graph.in_degrees.max(initial=1))
    hint = f"A node has {width:,} neighbours, and every row is padded to them."
    validate.fits_in_memory("graph", 12 * size * width, LARGEST_TABLE, hint=hint)
    ids, _ = graph.neighbours()
    weights, edges = np.zeros(ids.shape, np.float32), np.zeros(ids.shape, np.uint32)
    pairs = graph.receivers.astype(np.int64), graph.senders.astype(np.int64)
    code = pairs[0] * size + pairs[1] if graph.directed else np.minimum(*pairs) * size + np.maximum(*pairs)
    place = graph.receivers, graph.places()
    weights[place], edges[place] = values, np.unique(code, return_inverse=True)[1].reshape(-1)
    return {"neighbours": ids[None], "weights": weights[None], "edges": edges[None]}


def constant_links(key: Array, round: Array, tables: dict[str, Array]) -> Links:
    """The links of a round in which everybody is there: the table whose turn it is."""
    turn = round % tables["weights"].shape[0]
    neighbours, weights = (tables[name][turn] for name in ("neighbours", "weights"))
    return Links(neighbours, weights, jnp.ones(weights.shape[0], bool), tables.get("share"))


def _taken(graph: Graph, values: np.ndarray, symmetric: bool) -> Mixing:
    """A constant matrix with these weights of the edges, in which nodes take."""
    columns = np.bincount(graph.senders, values, graph.population_size)
    rows = np.bincount(graph.receivers, values, graph.population_size)
    balanced = bool(np.abs(columns - rows).max(initial=0) < 1e-6)
    facts = {"keeps_constants": True, "keeps_average": balanced, "symmetric": symmetric, "static": True}
    return Mixing(graph, tables_of(graph, values), constant_links, **facts)


def laplacian(graph: Graph, *, step: float | None = None) -> Mixing:
    """W = I - step L, with the graph's Laplacian L = D - A.

    Args:
      graph: undirected.
      step: gamma in (0, 2 / lambda_N); None = 2 / (lambda_2 + lambda_N), with which W contracts fastest, by
        (lambda_N - lambda_2) / (lambda_N + lambda_2). A node with many neighbours may then weigh its own model below 0.

    Raises: ValueError for another step, for which nodes would not agree.

    Guarantees: tests/network/test_mixing.py::test_matrices, ::test_steps_out_of_range; contracts as stated
    (::test_it_contracts_at_the_slem).

    References: Olfati-Saber and Murray 2004; Xiao and Boyd 2004, section 4.1 (the best constant).
    """
    validate.part("graph", graph, Graph)
    least, most = laplacian_extremes(graph)
    if step is None:
        if not least:
            hint = "Without a path between all nodes none contracts. Join them, or give a step."
            validate.fail("graph", "a connected one, which has a best step", "one that falls apart", hint)
        step = 2 / (least + most)
    hint = f"With lambda_N = {most:g} other steps do not contract."
    validate.in_range("step", step, 0, 2 / most if most else np.inf, open_low=True, open_high=True, hint=hint)
    return _taken(graph, np.full(len(graph.senders), step), True)


def metropolis(graph: Graph) -> Mixing:
    """W_ij = 1 / (1 + max(d_i, d_j)): symmetric, whatever the degrees, and each node needs its neighbours' alone.

    Args:
      graph: undirected.

    Guarantees: tests/network/test_mixing.py::test_matrices.

    References: Xiao, Boyd and Kim 2007, section 2.2.

    >>> from fedjax_sim.network.topology import path
    >>> matrix_of(metropolis(path(2))).toarray().tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    _check_undirected(graph, "network.push is for directed ones.")
    degrees = graph.in_degrees
    return _taken(graph, 1 / (1 + np.maximum(degrees[graph.senders], degrees[graph.receivers])), True)


def neighbour_mean(graph: Graph) -> Mixing:
    """Node i takes the mean of its own model and its neighbours': W_ij = 1 / (1 + d_i).

    It keeps the average only where every node is heard as much as it hears, as in regular graphs; elsewhere nodes agree
    on a mean in which those who are heard more count more (`theory.agreed_weights`), and algorithms that need the
    average refuse it.

    Guarantees: tests/network/test_mixing.py::test_matrices; biased where it says so
    (::test_pushing_corrects_what_taking_biases).
    """
    validate.part("graph", graph, Graph)
    degrees = graph.in_degrees
    mutual = not graph.directed and bool((degrees == degrees.max(initial=0)).all())
    return _taken(graph, 1 / (1 + degrees[graph.receivers]), mutual)


def push(graph: Graph) -> Mixing:
    """Node j gives 1 / (1 + out-degree) of its model to each one that it sends to, and keeps as much: columns of W add
    up to 1, rows need not. What `algorithms.push_sum` takes.

    Guarantees: tests/network/test_mixing.py::test_matrices, ::test_pushing_corrects_what_taking_biases.

    References: Kempe, Dobra and Gehrke 2003; Nedic and Olshevsky 2015, section 2.
    """
    validate.part("graph", graph, Graph)
    share = 1 / (1 + graph.out_degrees)
    tables = tables_of(graph, share[graph.senders]) | {"share": share.astype(np.float32)}
    return Mixing(graph, tables, constant_links, keeps_average=True, static=True)


def lazy(mixing: Mixing) -> Mixing:
    """(I + W) / 2: no eigenvalue of a symmetric W is below 0 any more, so nothing oscillates.

    Raises: ValueError for a mixing whose weights are not the same in every round.

    Guarantees: tests/network/test_mixing.py::test_matrices.

    References: Boyd, Ghosh, Prabhakar and Shah 2006.
    """
    validate.part("mixing", mixing, Mixing)
    if not mixing.static:
        validate.fail("mixing", "the same weights in every round", "others", "Make the constant one lazy.")
    halved = {name: mixing.tables[name] / np.float32(2) for name in ("weights", "share") if name in mixing.tables}
    return mixing._replace(tables=mixing.tables | halved)


def _check_undirected(graph: Graph, hint: str) -> None:
    validate.part("graph", graph, Graph)
    if graph.directed:
        validate.fail("graph", "an undirected graph", "a directed one", hint)


def matrix_of(mixing: Mixing, key: Array | None = None, round: int = 0) -> sparse.csr_matrix:
    """W of one round as a sparse float64 matrix, on the host: what `mixed` applies, node by node.

    Args:
      key: of the round's draws; any for a mixing without.

    Guarantees: tests/network/test_mixing.py::test_mixing_is_a_product_with_the_matrix.
    """
    key = jax.random.key(0) if key is None else key
    links = jax.device_get(jax.jit(mixing.links)(key, jnp.int32(round), mixing.tables))
    size, width = links.weights.shape
    rows, columns = np.repeat(np.arange(size), width), links.neighbours.reshape(-1)
    values = links.weights.reshape(-1).astype(np.float64)
    off = sparse.csr_matrix((values, (rows, columns)), (size, size))
    off.eliminate_zeros()
    away = np.asarray(off.sum(1 if links.share is None else 0)).ravel()
    return sparse.csr_matrix(off + sparse.diags(1 - away))


def mixed(links: Links, values: PyTree, heard: PyTree = None) -> PyTree:
    """W x: every node's weighted mean of its own and its neighbours' values, neighbours in the order of their ids.

    Where nodes take it is x_i + sum_j W_ij (x_j - x_i), so that nodes that agree keep their bits, and of a symmetric W
    what one gains the other loses. Where nodes give it is x_i - out_i s_i x_i + sum_j s_j x_j.

    Args:
      links: of the round. Inside of an algorithm call it in `engine.steady`.
      values: leaves [N, ...] of floats; sums of narrow ones (bfloat16) are float32, and rounded once.
      heard: what nodes send, where that is something else than their values.

    Guarantees: the mean is kept to 1e-6 over a thousand rounds (tests/network/test_mixing.py::test_the_average_stays);
    a product with `matrix_of` (::test_mixing_is_a_product_with_the_matrix); on more devices the same bits
    (tests/algorithms/gossip/test_dpsgd.py::test_same_bits_on_two_devices).

    >>> from fedjax_sim.network.topology import ring
    >>> halves = metropolis(ring(2))
    >>> mixed(halves.links(None, 0, halves.tables), jnp.array([1.0, 3.0])).tolist()
    [2.0, 2.0]
    """
    neighbours, weights = jnp.asarray(links.neighbours), jnp.asarray(links.weights)
    kept = None
    if links.share is not None:
        sent = (weights != 0).astype(jnp.int32)
        given = jnp.zeros(links.share.shape, jnp.int32).at[neighbours].add(sent)  # integers: in any order
        kept = 1 - given.astype(jnp.float32) * links.share

    def leaf(own, sent):
        if not jnp.issubdtype(own.dtype, jnp.inexact):
            hint = "A share of an integer is rounded to nothing."
            validate.fail("values", "floats, which nodes can mix", str(own.dtype), hint, TypeError)
        x = tree.widened(own)

        def spread(column):
            return column.reshape(-1, *[1] * (x.ndim - 1)).astype(x.dtype)

        def add(place, total):
            ids, weight = neighbours[:, place], spread(weights[:, place])
            heard = sent[ids].astype(x.dtype)
            return total + weight * (heard - x if kept is None else heard)

        # a loop: straight-line code is no faster on a CPU, and over devices a gather each takes minutes to compile
        return jax.lax.fori_loop(0, weights.shape[1], add, x if kept is None else spread(kept) * x).astype(own.dtype)

    return jax.tree.map(leaf, values, values if heard is None else heard)
