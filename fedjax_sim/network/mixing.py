"""This module holds mixing matrices, which give the weights of neighbours' models, as tables of neighbours.

Row i of W is stored as the neighbours of node i, in the order of their ids, with their weights. No array [N, N] is
held. The tables are arrays that an algorithm keeps in its state; `links` makes the weights of a round from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from fedjax_sim import tree, validate
from fedjax_sim.network.eigenvalues import laplacian_extremes
from fedjax_sim.network.topology import Graph
from fedjax_sim.types import Array, PyTree

LARGEST_TABLE = 1 << 30  # the largest size of a graph's tables, in bytes


class Links(NamedTuple):
    """A `Links` states the links of one round: from which nodes each node receives, and with which weights."""

    neighbours: Array  # [N, k] int32; padding holds the node itself
    weights: Array  # [N, k] float32 weights of the neighbours' models; 0 if nothing is sent
    up: Array  # [N] bool; False = the node does nothing in this round
    # [N] float32 the share of its model that a node gives to each neighbour; it keeps the rest. None = nodes take:
    # a node's own weight is 1 minus the sum of its weights.
    share: Array | None = None


class Mixing(NamedTuple):
    """A mixing matrix W, which may change from round to round, with the facts that algorithms read."""

    graph: Graph  # all edges that are ever used
    # On the host: `neighbours`, `weights` and `edges` [T, N, k], of T tables that take turns, and the other arrays that
    # `links` reads.
    tables: dict[str, np.ndarray]
    links: Callable  # (key, round [] int32, tables) -> Links
    keeps_constants: bool = False  # rows sum to 1 in every round, so nodes that agree do not change
    keeps_average: bool = False  # columns sum to 1 in every round, so the mean over nodes does not change
    symmetric: bool = False  # W is symmetric in every round
    static: bool = False  # W is the same in every round
    failures: int = 0  # number of failure wrappers around it, each of which draws from its own stream


def tables_of(graph: Graph, values: np.ndarray | float) -> dict[str, np.ndarray]:
    """Makes the tables of a graph: its neighbours, a value for each edge, and the number of each edge.

    Args:
      graph: any.
      values: [E] in the order of the graph's edges, or a number.

    Returns: {"neighbours", "weights", "edges"}, each [1, N, k]. Both directions of an undirected edge have the same
    number.

    Raises: MemoryError if a node has so many neighbours that rows padded to that number do not fit.
    """
    num_nodes = graph.population_size
    max_degree = int(graph.in_degrees.max(initial=1))
    hint = f"A node has {max_degree:,} neighbours, and every row is padded to them."
    validate.fits_in_memory("graph", 12 * num_nodes * max_degree, LARGEST_TABLE, hint=hint)
    ids, _ = graph.neighbours()
    weights = np.zeros(ids.shape, np.float32)
    edges = np.zeros(ids.shape, np.uint32)
    # A code for each edge, equal in both directions if the graph is undirected; its rank is the edge's number.
    ends = graph.receivers.astype(np.int64), graph.senders.astype(np.int64)
    edge_codes = ends[0] * num_nodes + ends[1] if graph.directed else np.minimum(*ends) * num_nodes + np.maximum(*ends)
    positions = graph.receivers, graph.places()
    weights[positions] = values
    edges[positions] = np.unique(edge_codes, return_inverse=True)[1].reshape(-1)
    return {"neighbours": ids[None], "weights": weights[None], "edges": edges[None]}


def constant_links(key: Array, round: Array, tables: dict[str, Array]) -> Links:
    """Returns the links of a round without failures: those of the table whose turn it is.

    Args:
      key: not used.
      round: [] int32.
      tables: of a `Mixing`.
    """
    turn = round % tables["weights"].shape[0]
    neighbours, weights = (tables[name][turn] for name in ("neighbours", "weights"))
    return Links(neighbours, weights, jnp.ones(weights.shape[0], bool), tables.get("share"))


def _taken(graph: Graph, values: np.ndarray, symmetric: bool) -> Mixing:
    """Makes a constant matrix with these weights of the edges, in which nodes take."""
    column_sums = np.bincount(graph.senders, values, graph.population_size)
    row_sums = np.bincount(graph.receivers, values, graph.population_size)
    # Rows sum to 1 by construction. Columns do too if each node gives in total what it takes.
    is_balanced = bool(np.abs(column_sums - row_sums).max(initial=0) < 1e-6)
    facts = {"keeps_constants": True, "keeps_average": is_balanced, "symmetric": symmetric, "static": True}
    return Mixing(graph, tables_of(graph, values), constant_links, **facts)


def laplacian(graph: Graph, *, step: float | None = None) -> Mixing:
    """Makes the matrix W = I - step L, with the graph's Laplacian L = D - A.

    Args:
      graph: undirected.
      step: gamma in (0, 2 / lambda_N). None = 2 / (lambda_2 + lambda_N), with which W contracts fastest, by (lambda_N -
        lambda_2) / (lambda_N + lambda_2). The own weight of a node with many neighbours may then be below 0.

    Returns: `Mixing`.

    Raises: ValueError for another step, with which nodes would not reach consensus.

    Guarantees: The matrices are as stated (tests/network/test_mixing.py::test_matrices), and other steps are refused
    (::test_steps_out_of_range). The matrix contracts as stated (::test_it_contracts_at_the_slem).

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
    """Makes the matrix W_ij = 1 / (1 + max(d_i, d_j)), which is symmetric for all degrees.

    A node needs only its own degree and those of its neighbours.

    Args:
      graph: undirected.

    Returns: `Mixing`.

    Guarantees: The matrix is as stated (tests/network/test_mixing.py::test_matrices).

    References: Xiao, Boyd and Kim 2007, section 2.2.

    >>> from fedjax_sim.network.topology import path
    >>> matrix_of(metropolis(path(2))).toarray().tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    _check_undirected(graph, "network.push is for directed ones.")
    degrees = graph.in_degrees
    return _taken(graph, 1 / (1 + np.maximum(degrees[graph.senders], degrees[graph.receivers])), True)


def neighbour_mean(graph: Graph) -> Mixing:
    """Node i takes the mean of its own model and those of its neighbours: W_ij = 1 / (1 + d_i).

    It keeps the average only if the weights of each node in all means sum to 1, as in regular graphs. Otherwise nodes
    agree on a mean in which some nodes weigh more than others (`theory.agreed_weights`): those to which more nodes
    listen. Algorithms that need the average refuse it.

    Args:
      graph: directed or undirected.

    Returns: `Mixing`.

    Guarantees: The matrices are as stated (tests/network/test_mixing.py::test_matrices), and biased where the facts say
    so (::test_pushing_corrects_what_taking_biases).
    """
    validate.part("graph", graph, Graph)
    degrees = graph.in_degrees
    # W is symmetric if all nodes of an undirected graph have the same degree.
    is_symmetric = not graph.directed and bool((degrees == degrees.max(initial=0)).all())
    return _taken(graph, 1 / (1 + degrees[graph.receivers]), is_symmetric)


def push(graph: Graph) -> Mixing:
    """Node j gives 1 / (1 + out-degree) of its model to each node that it sends to, and keeps as much.

    Columns of W sum to 1; rows need not. `algorithms.push_sum` takes this mixing.

    Args:
      graph: directed or undirected.

    Returns: `Mixing`.

    Guarantees: The matrix is as stated (tests/network/test_mixing.py::test_matrices,
    ::test_pushing_corrects_what_taking_biases).

    References: Kempe, Dobra and Gehrke 2003; Nedic and Olshevsky 2015, section 2.
    """
    validate.part("graph", graph, Graph)
    share = 1 / (1 + graph.out_degrees)
    tables = tables_of(graph, share[graph.senders]) | {"share": share.astype(np.float32)}
    return Mixing(graph, tables, constant_links, keeps_average=True, static=True)


def lazy(mixing: Mixing) -> Mixing:
    """Makes the matrix (I + W) / 2, which has no eigenvalue below 0 if W is symmetric.

    Then the nodes' values approach their mean without oscillating around it from round to round.

    Args:
      mixing: with the same weights in every round.

    Returns: `Mixing`.

    Raises: ValueError for a mixing whose weights change.

    Guarantees: The matrix is as stated (tests/network/test_mixing.py::test_matrices).

    References: Boyd, Ghosh, Prabhakar and Shah 2006.
    """
    validate.part("mixing", mixing, Mixing)
    if not mixing.static:
        validate.fail("mixing", "the same weights in every round", "others", "Make the constant one lazy.")
    halved = {name: mixing.tables[name] / np.float32(2) for name in ("weights", "share") if name in mixing.tables}
    return mixing._replace(tables=mixing.tables | halved)


def _check_undirected(graph: Graph, hint: str) -> None:
    """Refuses a directed graph."""
    validate.part("graph", graph, Graph)
    if graph.directed:
        validate.fail("graph", "an undirected graph", "a directed one", hint)


def matrix_of(mixing: Mixing, key: Array | None = None, round: int = 0) -> scipy.sparse.csr_matrix:
    """Returns W of one round as a sparse float64 matrix, on the host. `mixed` applies it node by node.

    Args:
      mixing: any.
      key: of the round's draws; any key for a mixing without draws.
      round: number of the round.

    Returns: [N, N].

    Guarantees: `mixed` is a product with this matrix
    (tests/network/test_mixing.py::test_mixing_is_a_product_with_the_matrix).
    """
    key = jax.random.key(0) if key is None else key
    links = jax.device_get(jax.jit(mixing.links)(key, jnp.int32(round), mixing.tables))
    num_nodes, max_degree = links.weights.shape
    rows = np.repeat(np.arange(num_nodes), max_degree)
    columns = links.neighbours.reshape(-1)
    values = links.weights.reshape(-1).astype(np.float64)
    off_diagonal = scipy.sparse.csr_matrix((values, (rows, columns)), (num_nodes, num_nodes))
    off_diagonal.eliminate_zeros()
    # The own weight: where nodes take, the rest of the row; where nodes give, the rest of the column.
    off_diagonal_sums = np.asarray(off_diagonal.sum(1 if links.share is None else 0)).ravel()
    return scipy.sparse.csr_matrix(off_diagonal + scipy.sparse.diags(1 - off_diagonal_sums))


def mixed(links: Links, values: PyTree, heard: PyTree = None) -> PyTree:
    """Computes W x: for every node, the weighted mean of its own value and its neighbours' values.

    Neighbours are added in the order of their ids.

    If nodes take, it is x_i + sum_j W_ij (x_j - x_i). So nodes that agree keep their bits, and with a symmetric W one
    node gains what the other loses. If nodes give, it is x_i - out_i s_i x_i + sum_j s_j x_j.

    Args:
      links: of the round. Inside of an algorithm, call `mixed` in `engine.reproducible`.
      values: leaves [N, ...] of floats. Sums of narrow floats (bfloat16) are float32, and rounded once.
      heard: the values that nodes send, if they differ from `values`.

    Returns: a pytree like `values`.

    Raises: TypeError for leaves that are not floats.

    Guarantees: The mean is kept to 1e-6 over a thousand rounds (tests/network/test_mixing.py::test_the_average_stays).
    The result is a product with `matrix_of` (::test_mixing_is_a_product_with_the_matrix). On more devices it has the
    same bits (tests/algorithms/gossip/test_dpsgd.py::test_same_bits_on_two_devices).

    >>> from fedjax_sim.network.topology import ring
    >>> halves = metropolis(ring(2))
    >>> mixed(halves.links(None, 0, halves.tables), jnp.array([1.0, 3.0])).tolist()
    [2.0, 2.0]
    """
    neighbours = jnp.asarray(links.neighbours)
    weights = jnp.asarray(links.weights)
    kept_share = None
    if links.share is not None:
        sent = (weights != 0).astype(jnp.int32)
        # Counts are integers, so that their sum does not depend on the order of additions.
        num_receivers = jnp.zeros(links.share.shape, jnp.int32).at[neighbours].add(sent)
        kept_share = 1 - num_receivers.astype(jnp.float32) * links.share

    def leaf(own_values, sent_values):
        if not jnp.issubdtype(own_values.dtype, jnp.inexact):
            hint = "A share of an integer is rounded to nothing."
            validate.fail("values", "floats, which nodes can mix", str(own_values.dtype), hint, TypeError)
        x = tree.widened(own_values)

        def spread(column):
            return column.reshape(-1, *[1] * (x.ndim - 1)).astype(x.dtype)

        def add(place, total):
            ids = neighbours[:, place]
            weight = spread(weights[:, place])
            heard = sent_values[ids].astype(x.dtype)
            return total + weight * (heard - x if kept_share is None else heard)

        # A loop over neighbours, because straight-line code is no faster on a CPU, and over several devices one gather
        # for each neighbour takes minutes to compile.
        start = x if kept_share is None else spread(kept_share) * x
        return jax.lax.fori_loop(0, weights.shape[1], add, start).astype(own_values.dtype)

    return jax.tree.map(leaf, values, values if heard is None else heard)
