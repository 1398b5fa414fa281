"""Graphs on the host, and which party holds which of their nodes, edges or subgraphs.

A party that holds nodes knows the edges that they receive; those from another party's nodes are cut. Their senders are
its halo: node V + k of a graph of V nodes is halo[k], an address p * V + place, so that embeddings can be exchanged.
What has no halo drops its cut edges.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim import validate
from fedjax_sim.population.partition import generator
from fedjax_sim.types import GraphData
from fedjax_sim.validate import NonNegativeInt, PositiveInt

__all__ = [
    "PARTITIONS",
    "Parties",
    "edge_owners",
    "graph_data",
    "neighbourhoods",
    "node_owners",
    "parties_of",
    "stacked_graphs",
]

PARTITIONS = ("community", "label", "random")
PASSES = 10  # over all nodes, of the partition by community


class Parties(NamedTuple):
    """The graphs of P parties, padded alike."""

    graphs: GraphData  # leaves [P, ...]
    halo: np.ndarray  # [P, H] int32 addresses p * V + place of other parties' nodes; -1 = padding
    cut_edges: int  # directed edges between two parties, of which the receiver's holds one end


@validate.named_arguments
def graph_data(
    features: ArrayLike, edges: ArrayLike, *, directed: bool = False, edge_types: ArrayLike | None = None
) -> GraphData:
    """A graph from a list of edges.

    Args:
      features: [V, F], finite.
      edges: [K, 2] integers in [0, V), sender and receiver.
      directed: False adds every edge's reverse, with its type.
      edge_types: [K] integers >= 0.

    Returns: `GraphData` of NumPy arrays, edges sorted by receiver. Self-loops are left out (networks add their own),
    and an edge that is listed twice is kept once.

    Raises: ValueError for features that are not finite and for ends or types out of range.

    Guarantees: tests/population/graph/test_graphs.py::test_edges_are_made_simple.

    >>> graph = graph_data(np.eye(3), [[0, 1], [1, 0], [2, 2]])
    >>> graph.senders.tolist(), graph.receivers.tolist()
    ([1, 0], [0, 1])
    """
    x, ends = np.asarray(features, np.float32), np.asarray(edges)
    if x.ndim != 2 or not np.isfinite(x).all():
        validate.fail("features", "finite numbers [V, F]", x.shape if x.ndim != 2 else "NaN or infinity")
    if ends.ndim != 2 or ends.shape[1] != 2 or (ends.size and ends.dtype.kind not in "iu"):
        validate.fail("edges", "integers [K, 2]", f"{ends.dtype.name}{list(ends.shape)}")
    if ends.size and not (0 <= ends.min() and ends.max() < len(x)):
        validate.fail("edges", f"nodes in [0, {len(x)})", (int(ends.min()), int(ends.max())))
    kinds = np.zeros(len(ends), np.int64) if edge_types is None else np.asarray(edge_types)
    if kinds.shape != (len(ends),) or kinds.dtype.kind not in "iu" or (kinds < 0).any():
        validate.fail("edge_types", f"integers >= 0 [{len(ends)}]", f"{kinds.dtype.name}{list(kinds.shape)}")
    ends = ends.astype(np.int64)
    if not directed:
        ends, kinds = np.concatenate([ends, ends[:, ::-1]]), np.concatenate([kinds, kinds])
    rows = np.unique(np.stack([ends[:, 1], ends[:, 0], kinds], 1)[ends[:, 0] != ends[:, 1]], axis=0).astype(np.int32)
    types = None if edge_types is None else rows[:, 2]
    return GraphData(x, np.arange(len(x), dtype=np.int32), rows[:, 1], rows[:, 0], types)


def stacked_graphs(graphs: list[GraphData]) -> GraphData:
    """Graphs of different sizes as one batch, leaves [n, ...], padded to the largest."""
    nodes, edges = (max(1, *(len(leaf(graph)) for graph in graphs)) for leaf in (lambda g: g.ids, lambda g: g.senders))

    def padded(rows, length, value):
        out = np.full((length, *rows.shape[1:]), value, rows.dtype)
        out[: len(rows)] = rows
        return out

    fields = {"nodes": (nodes, 0), "ids": (nodes, -1), "senders": (edges, -1), "receivers": (edges, -1)}
    if graphs[0].types is not None:
        fields["types"] = (edges, 0)
    return GraphData(**{
        name: np.stack([padded(getattr(graph, name), *how) for graph in graphs]) for name, how in fields.items()
    })  # fmt: skip


@validate.named_arguments
def node_owners(
    graph: GraphData,
    num_parties: int,
    *,
    by: Literal["community", "label", "random"] = "community",
    labels: ArrayLike | None = None,
    seed: int = 0,
) -> np.ndarray:
    """The party of each node.

    Args:
      num_parties: P, at most the number of nodes.
      by: "random" (equal parts); "community" (equal parts with few edges between them: each node goes where most of its
        neighbours are, less the fuller a party is, in several passes); "label" (nodes in the order of their labels, in
        equal parts).
      labels: [V] integers, for "label".

    Returns: [V] int32 in [0, P); every party has a node.

    Guarantees: parts of equal size, to 10 % by community; communities cut fewer edges than chance
    (tests/population/graph/test_graphs.py::test_owners).

    References: Stanton and Kliot 2012 (linear deterministic greedy); Nishimura and Ugander 2013 (several passes).
    """
    validate.part("graph", graph, GraphData)
    size = len(graph.ids)
    validate.integer("num_parties", num_parties, 1, size, hint=f"There are {size} nodes.")
    rng = generator("node_owners", seed)
    order = rng.permutation(size)
    if by == "label":
        given = np.asarray(labels)
        if given.shape != (size,) or given.dtype.kind not in "iu":
            shown = None if labels is None else f"{given.dtype.name}{list(given.shape)}"
            validate.fail("labels", f"one label a node, integers [{size}]", shown)
        order = order[np.argsort(given[order], kind="stable")]
    owner = np.empty(size, np.int32)
    owner[order] = np.arange(size) * num_parties // size
    return _communities(graph, owner, num_parties, rng) if by == "community" else owner


def _communities(graph: GraphData, owner: np.ndarray, num_parties: int, rng: np.random.Generator) -> np.ndarray:
    size = len(owner)
    order, limit = _breadth_first(graph, rng), int(np.ceil(1.1 * size / num_parties))
    neighbours, starts = graph.senders, np.searchsorted(graph.receivers, np.arange(size + 1))
    owner = np.full(size, -1, np.int32)
    counts = np.zeros(num_parties, np.int64)
    for _ in range(PASSES):
        for node in order:
            if owner[node] >= 0:
                counts[owner[node]] -= 1
            near = owner[neighbours[starts[node] : starts[node + 1]]]
            votes = np.bincount(near[near >= 0], minlength=num_parties)
            scores = np.where(counts < limit, (votes + 1e-3) * (1 - counts / limit), -1)
            owner[node] = int(scores.argmax())
            counts[owner[node]] += 1
    for empty in np.flatnonzero(counts == 0):
        donor = np.flatnonzero(owner == counts.argmax())[0]
        counts[owner[donor]] -= 1
        owner[donor], counts[empty] = empty, 1
    return owner


def _breadth_first(graph: GraphData, rng: np.random.Generator) -> np.ndarray:
    """All nodes, each component from a random node outwards."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import breadth_first_order

    size = len(graph.ids)
    matrix = coo_array((np.ones(len(graph.senders)), (graph.receivers, graph.senders)), (size, size)).tocsr()
    seen, order = np.zeros(size, bool), []
    for start in rng.permutation(size):
        if not seen[start]:
            found = breadth_first_order(matrix, start, directed=False, return_predecessors=False)
            order.append(found[~seen[found]])
            seen[found] = True
    return np.concatenate(order)


def edge_owners(graph: GraphData, num_parties: int, *, seed: int = 0) -> np.ndarray:
    """The party of each edge, at random in equal parts; both directions of an edge go to one party. [E] int32.

    Guarantees: every party has an edge (tests/population/graph/test_graphs.py::test_every_party_has_an_edge).
    """
    validate.part("graph", graph, GraphData)
    low, high = np.minimum(graph.senders, graph.receivers), np.maximum(graph.senders, graph.receivers)
    _, pair = np.unique(np.stack([low, high], 1), axis=0, return_inverse=True)
    number = int(pair.max()) + 1 if len(pair) else 0
    validate.integer("num_parties", num_parties, 1, number, hint=f"There are {number} edges.")
    party = generator("edge_owners", seed).permutation(number) * num_parties // number
    return party[pair.reshape(-1)].astype(np.int32)


@validate.named_arguments
def neighbourhoods(
    graph: GraphData, num_parties: PositiveInt, *, hops: NonNegativeInt = 2, num_centres: int = 1, seed: int = 0
) -> np.ndarray:
    """[P, V] bool: each party's nodes, those within so many hops of its random centres; parties may share nodes."""
    validate.part("graph", graph, GraphData)
    size = len(graph.ids)
    validate.integer("num_centres", num_centres, 1, size)
    rng = generator("neighbourhoods", seed)
    held = np.zeros((num_parties, size), bool)
    for party in held:
        party[rng.choice(size, num_centres, replace=False)] = True
        for _ in range(hops):
            party[graph.senders[party[graph.receivers]]] = True
    return held


def parties_of(
    graph: GraphData,
    *,
    node_owner: ArrayLike | None = None,
    edge_owner: ArrayLike | None = None,
    held: ArrayLike | None = None,
) -> Parties:
    """The parties' graphs, from one of three partitions.

    Args:
      node_owner: [V], each node's party, which knows the edges that it receives; edges from other parties' nodes are
        cut, and their senders are the halo.
      edge_owner: [E], each edge's party, which holds both ends: nodes stand at several parties, one without an edge at
        none.
      held: [P, V] bool, each party's nodes and the edges among them; nodes and edges that nobody holds are left out.

    Raises: ValueError for owners below 0, of another shape, and for a party without a node.

    Guarantees: nodes, edges and features are those of the whole graph, but for what is left out, each cut edge once
    (tests/population/graph/test_graphs.py::test_parties_hold_the_graph).
    """
    given = [x for x in (node_owner, edge_owner, held) if x is not None]
    if len(given) != 1:
        validate.fail("node_owner, edge_owner, held", "one of the three", len(given))
    validate.part("graph", graph, GraphData)
    size, ends = len(graph.ids), (graph.senders, graph.receivers)
    if held is not None:
        nodes = np.asarray(held)
        if nodes.ndim != 2 or nodes.shape[1] != size or nodes.dtype != bool:
            validate.fail("held", f"bool [P, {size}]", f"{nodes.dtype.name}{list(nodes.shape)}")
        edges = nodes[:, ends[0]] & nodes[:, ends[1]]
    else:
        owner = np.asarray(given[0])
        rule = f"a party for each {'node' if edge_owner is None else 'edge'}"
        if owner.shape != ((size,) if edge_owner is None else ends[0].shape) or owner.dtype.kind not in "iu":
            validate.fail("node_owner" if edge_owner is None else "edge_owner", rule, owner.shape)
        if not owner.size or owner.min() < 0:
            shown = int(owner.min()) if owner.size else "nothing"
            validate.fail("node_owner" if edge_owner is None else "edge_owner", "parties >= 0, one at least", shown)
        parties = np.arange(int(owner.max()) + 1)[:, None]
        if edge_owner is None:
            nodes, edges = owner[None] == parties, owner[ends[1]][None] == parties
        else:
            edges = owner[None] == parties
            nodes = np.zeros((len(parties), size), bool)
            for end in ends:
                nodes[np.nonzero(edges)[0], end[np.nonzero(edges)[1]]] = True
    if not nodes.any(1).all():
        validate.fail("parties", "a node at each party", f"none at party {int(np.flatnonzero(~nodes.any(1))[0])}")
    place = np.cumsum(nodes, 1) - 1  # of each node at its party
    width = int(nodes.sum(1).max())
    outside = [np.unique(ends[0][mine][~own[ends[0][mine]]]) for own, mine in zip(nodes, edges, strict=True)]
    graphs = []
    for own, mine, where, others in zip(nodes, edges, place, outside, strict=True):
        senders, inside = ends[0][mine], own[ends[0][mine]]
        local = np.where(inside, where[senders], width + np.searchsorted(others, senders)).astype(np.int32)
        receivers = where[ends[1][mine]].astype(np.int32)
        types = None if graph.types is None else graph.types[mine]
        graphs.append(GraphData(graph.nodes[own], graph.ids[own], local, receivers, types))
    halo = np.full((len(nodes), max(1, *(len(others) for others in outside))), -1, np.int32)
    for row, others in zip(halo, outside, strict=True):
        holder = nodes[:, others].argmax(0)
        row[: len(others)] = holder * width + place[holder, others]
    cut = sum(int((~own[ends[0][mine]]).sum()) for own, mine in zip(nodes, edges, strict=True))
    return Parties(stacked_graphs(graphs), halo, cut)
