"""This module builds graphs on the host, and decides which party holds which nodes, edges or subgraphs of a graph.

A party that holds nodes knows the edges that its nodes receive. An edge that comes from another party's node is cut,
and its sender belongs to the halo of the receiving party. Node V + k of a party's graph of V nodes is halo[k]. A halo
entry is an address: p * V + place, for the node at this place of party p. So parties can exchange embeddings of these
nodes. An algorithm that does not read the halo drops the cut edges.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim import validate
from fedjax_sim.population.partition import generator
from fedjax_sim.types import GraphData, Learned
from fedjax_sim.validate import NonNegativeInt, PositiveInt

PARTITIONS = ("community", "label", "random")
PASSES = 10  # over all nodes, of the partition by community


class Parties(NamedTuple):
    """A `Parties` holds the graphs of P parties, padded to one size."""

    graphs: GraphData  # leaves [P, ...]
    halo: np.ndarray  # [P, H] int32 addresses p * V + place of other parties' nodes; -1 = padding
    cut_edges: int  # number of directed edges whose sender and receiver are at different parties


@validate.named_arguments
def graph_data(
    features: ArrayLike, edges: ArrayLike, *, directed: bool = False, edge_types: ArrayLike | None = None
) -> GraphData:
    """Builds a graph from a list of edges.

    Args:
      features: [V, F], finite, the features of each node.
      edges: [K, 2] integers in [0, V), the sender and the receiver of each edge.
      directed: False adds the reverse of every edge, with the same type.
      edge_types: [K] integers >= 0. None means that edges have no types.

    Returns: `GraphData` of NumPy arrays, with edges sorted by receiver. Self-loops are left out, since networks add
    their own. An edge that is listed twice with the same type is kept once.

    Raises: ValueError for features that are not finite and for ends or types out of range.

    Guarantees: without edge types, self-loops are left out, repeated edges are kept once, and directed edges keep their
    direction (tests/population/graph/test_graphs.py::test_edges_are_made_simple).

    >>> graph = graph_data(np.eye(3), [[0, 1], [1, 0], [2, 2]])
    >>> graph.senders.tolist(), graph.receivers.tolist()
    ([1, 0], [0, 1])
    """
    x = np.asarray(features, np.float32)
    ends = np.asarray(edges)
    if x.ndim != 2 or not np.isfinite(x).all():
        validate.fail("features", "finite numbers [V, F]", x.shape if x.ndim != 2 else "NaN or infinity")
    if ends.ndim != 2 or ends.shape[1] != 2 or (ends.size and ends.dtype.kind not in "iu"):
        validate.fail("edges", "integers [K, 2]", f"{ends.dtype.name}{list(ends.shape)}")
    if ends.size and not (0 <= ends.min() and ends.max() < len(x)):
        validate.fail("edges", f"nodes in [0, {len(x)})", (int(ends.min()), int(ends.max())))
    edge_kinds = np.zeros(len(ends), np.int64) if edge_types is None else np.asarray(edge_types)
    if edge_kinds.shape != (len(ends),) or edge_kinds.dtype.kind not in "iu" or (edge_kinds < 0).any():
        validate.fail("edge_types", f"integers >= 0 [{len(ends)}]", f"{edge_kinds.dtype.name}{list(edge_kinds.shape)}")
    ends = ends.astype(np.int64)
    if not directed:
        ends, edge_kinds = np.concatenate([ends, ends[:, ::-1]]), np.concatenate([edge_kinds, edge_kinds])
    # The receiver is the first column, so np.unique sorts the edges by receiver.
    is_no_self_loop = ends[:, 0] != ends[:, 1]
    rows = np.unique(np.stack([ends[:, 1], ends[:, 0], edge_kinds], 1)[is_no_self_loop], axis=0).astype(np.int32)
    types = None if edge_types is None else rows[:, 2]
    return GraphData(x, np.arange(len(x), dtype=np.int32), rows[:, 1], rows[:, 0], types)


def shared_graph(num_clients: int) -> tuple[Learned, ...]:
    """Returns the record that parties hold parts of one graph: their division and their edges depend on each other."""
    if num_clients == 1:
        return ()
    effect = "change which nodes and edges the other parties hold"
    return (Learned("the division of one graph among the parties", (), effect, ""),)


def stacked_graphs(graphs: list[GraphData]) -> GraphData:
    """Stacks graphs of different sizes to one batch with leaves [n, ...], padded to the largest graph.

    Args:
      graphs: n >= 1 of them, all with types of edges or none with them.
    """
    num_nodes, num_edges = (
        max(1, *(len(leaf(graph)) for graph in graphs)) for leaf in (lambda g: g.ids, lambda g: g.senders)
    )

    def padded(rows, length, value):
        padded_rows = np.full((length, *rows.shape[1:]), value, rows.dtype)
        padded_rows[: len(rows)] = rows
        return padded_rows

    # field -> length after padding, value of the padding
    fields = {
        "nodes": (num_nodes, 0),
        "ids": (num_nodes, -1),
        "senders": (num_edges, -1),
        "receivers": (num_edges, -1),
    }
    if graphs[0].types is not None:
        fields["types"] = (num_edges, 0)
    return GraphData(**{
        name: np.stack([padded(getattr(graph, name), *padding) for graph in graphs])
        for name, padding in fields.items()
    })  # fmt: skip


@validate.named_arguments
def node_owners(
    graph: GraphData,
    num_parties: int,
    *,
    by: str = "community",
    labels: ArrayLike | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Assigns each node of a graph to a party.

    Args:
      graph: V nodes.
      num_parties: P, at most the number of nodes.
      by: how nodes are assigned. "random" gives equal parts at random. "label" sorts the nodes by their labels and cuts
        them into equal parts. "community" gives about equal parts with few edges between them: in several passes, each
        node moves to the party of most of its neighbours, and a fuller party counts less.
      labels: [V] integers, for "label"; else they are not read, and may be None.
      seed: of the assignment.

    Returns: [V] int32 in [0, P). Every party has a node.

    Guarantees: parts have equal sizes, up to 10 % with "community", which cuts fewer edges than a random assignment
    (tests/population/graph/test_graphs.py::test_owners).

    References: Stanton and Kliot 2012 (linear deterministic greedy); Nishimura and Ugander 2013 (several passes).
    """
    validate.part("graph", graph, GraphData)
    validate.one_of("by", by, PARTITIONS)
    size = len(graph.ids)
    validate.integer("num_parties", num_parties, 1, size, hint=f"There are {size} nodes.")
    rng = generator("node_owners", seed)
    order = rng.permutation(size)
    if by == "label":
        node_labels = np.asarray(labels)
        if node_labels.shape != (size,) or node_labels.dtype.kind not in "iu":
            shown = None if labels is None else f"{node_labels.dtype.name}{list(node_labels.shape)}"
            validate.fail("labels", f"one label a node, integers [{size}]", shown)
        order = order[np.argsort(node_labels[order], kind="stable")]
    owner = np.empty(size, np.int32)
    owner[order] = np.arange(size) * num_parties // size
    return _communities(graph, owner, num_parties, rng) if by == "community" else owner


def _communities(graph: GraphData, owner: np.ndarray, num_parties: int, rng: np.random.Generator) -> np.ndarray:
    """Assigns nodes to parties by linear deterministic greedy partitioning, in several passes.

    In each pass each node moves to the party p of the largest (votes_p + 0.001) (1 - counts_p / limit). Here votes_p
    are its neighbours at p, counts_p the other nodes of p, and limit = ceil(1.1 V / P). A party with `limit` nodes
    takes no further one.

    Args:
      graph: V nodes, with edges sorted by receiver.
      owner: [V]; only its length counts.
      num_parties: P, in [1, V].
      rng: draws the order of the nodes.

    Returns: [V] int32 in [0, P). Every party has a node.
    """
    size = len(owner)
    order = _breadth_first(graph, rng)
    limit = int(np.ceil(1.1 * size / num_parties))
    neighbours = graph.senders
    starts = np.searchsorted(graph.receivers, np.arange(size + 1))  # edges are sorted by receiver
    owner = np.full(size, -1, np.int32)
    counts = np.zeros(num_parties, np.int64)
    for _ in range(PASSES):
        for node in order:
            if owner[node] >= 0:
                counts[owner[node]] -= 1
            neighbour_owners = owner[neighbours[starts[node] : starts[node + 1]]]
            votes = np.bincount(neighbour_owners[neighbour_owners >= 0], minlength=num_parties)
            # The small constant sends a node without assigned neighbours to the emptiest party.
            scores = np.where(counts < limit, (votes + 1e-3) * (1 - counts / limit), -1)
            owner[node] = int(scores.argmax())
            counts[owner[node]] += 1
    # Every party needs a node, so an empty party takes one from the largest.
    for empty_party in np.flatnonzero(counts == 0):
        moved_node = np.flatnonzero(owner == counts.argmax())[0]
        counts[owner[moved_node]] -= 1
        owner[moved_node], counts[empty_party] = empty_party, 1
    return owner


def _breadth_first(graph: GraphData, rng: np.random.Generator) -> np.ndarray:
    """Orders all nodes, each connected component from a random node outwards.

    Args:
      graph: V nodes. Directions of edges do not count.
      rng: draws the first node of each component.

    Returns: [V] integers, each node once.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import breadth_first_order

    size = len(graph.ids)
    adjacency = coo_array((np.ones(len(graph.senders)), (graph.receivers, graph.senders)), (size, size)).tocsr()
    is_ordered = np.zeros(size, bool)
    order = []
    for start in rng.permutation(size):
        if not is_ordered[start]:
            component = breadth_first_order(adjacency, start, directed=False, return_predecessors=False)
            order.append(component[~is_ordered[component]])
            is_ordered[component] = True
    return np.concatenate(order)


def edge_owners(graph: GraphData, num_parties: int, *, seed: int = 0) -> np.ndarray:
    """Assigns each edge of a graph to a party, at random in equal parts.

    Args:
      graph: E directed edges. Both directions of an edge, and edges of several types, go to one party.
      num_parties: P, at most the number of joined pairs of nodes.
      seed: of the assignment.

    Returns: [E] int32 in [0, P).

    Guarantees: every party has an edge (tests/population/graph/test_graphs.py::test_every_party_has_an_edge).
    """
    validate.part("graph", graph, GraphData)
    low_ends = np.minimum(graph.senders, graph.receivers)
    high_ends = np.maximum(graph.senders, graph.receivers)
    _, pair_of_edge = np.unique(np.stack([low_ends, high_ends], 1), axis=0, return_inverse=True)
    num_pairs = int(pair_of_edge.max()) + 1 if len(pair_of_edge) else 0
    validate.integer("num_parties", num_parties, 1, num_pairs, hint=f"There are {num_pairs} edges.")
    party_of_pair = generator("edge_owners", seed).permutation(num_pairs) * num_parties // num_pairs
    return party_of_pair[pair_of_edge.reshape(-1)].astype(np.int32)


@validate.named_arguments
def neighbourhoods(
    graph: GraphData, num_parties: PositiveInt, *, hops: NonNegativeInt = 2, num_centres: int = 1, seed: int = 0
) -> np.ndarray:
    """Gives each party all nodes within some hops of random centres. Parties may share nodes.

    Args:
      graph: V nodes.
      num_parties: P.
      hops: how many edges a node may be away from a centre.
      num_centres: of each party.
      seed: of the centres.

    Returns: [P, V] bool, which nodes each party holds.
    """
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
    """Builds the parties' graphs from exactly one of three partitions; the other two are None.

    Args:
      graph: V nodes and E edges.
      node_owner: [V], the party of each node, or None. The party knows the edges that its nodes receive. Edges from
        other parties' nodes are cut, and their senders are the halo.
      edge_owner: [E], the party of each edge, or None. The party holds both ends, so a node may be at several parties.
        A node without an edge is at no party.
      held: [P, V] bool, the nodes of each party, or None. The party also holds the edges among them. Nodes and edges
        that no party holds are left out.

    Raises: ValueError for owners below 0 or of another shape, and for a party without a node.

    Guarantees: nodes, edges and features are those of the whole graph, except for those that are left out, and each cut
    edge occurs once (tests/population/graph/test_graphs.py::test_parties_hold_the_graph).
    """
    partitions = [x for x in (node_owner, edge_owner, held) if x is not None]
    if len(partitions) != 1:
        validate.fail("node_owner, edge_owner, held", "one of the three", len(partitions))
    validate.part("graph", graph, GraphData)
    size = len(graph.ids)
    ends = (graph.senders, graph.receivers)
    # `nodes` [P, V] and `edges` [P, E] say which nodes and edges each party has.
    if held is not None:
        nodes = np.asarray(held)
        if nodes.ndim != 2 or nodes.shape[1] != size or nodes.dtype != bool:
            validate.fail("held", f"bool [P, {size}]", f"{nodes.dtype.name}{list(nodes.shape)}")
        edges = nodes[:, ends[0]] & nodes[:, ends[1]]
    else:
        owner = np.asarray(partitions[0])
        rule = f"a party for each {'node' if edge_owner is None else 'edge'}"
        if owner.shape != ((size,) if edge_owner is None else ends[0].shape) or owner.dtype.kind not in "iu":
            validate.fail("node_owner" if edge_owner is None else "edge_owner", rule, owner.shape)
        if not owner.size or owner.min() < 0:
            shown = int(owner.min()) if owner.size else "nothing"
            validate.fail("node_owner" if edge_owner is None else "edge_owner", "parties >= 0, one at least", shown)
        parties = np.arange(int(owner.max()) + 1)[:, None]
        if edge_owner is None:
            nodes = owner[None] == parties
            edges = owner[ends[1]][None] == parties
        else:
            edges = owner[None] == parties
            nodes = np.zeros((len(parties), size), bool)
            for end in ends:
                nodes[np.nonzero(edges)[0], end[np.nonzero(edges)[1]]] = True
    if not nodes.any(1).all():
        validate.fail("parties", "a node at each party", f"none at party {int(np.flatnonzero(~nodes.any(1))[0])}")
    places = np.cumsum(nodes, 1) - 1  # [P, V], where a node stands among the nodes of a party that holds it
    width = int(nodes.sum(1).max())  # nodes of the largest party, to which all are padded
    # Of each party, the senders of its edges that it does not hold: its halo, as node numbers of the whole graph.
    halo_nodes = [
        np.unique(ends[0][party_edges][~party_nodes[ends[0][party_edges]]])
        for party_nodes, party_edges in zip(nodes, edges, strict=True)
    ]
    graphs = []
    for party_nodes, party_edges, party_places, halo_of_party in zip(nodes, edges, places, halo_nodes, strict=True):
        senders = ends[0][party_edges]
        is_inside = party_nodes[ends[0][party_edges]]
        # Nodes of the halo are numbered behind the padded nodes of the party.
        halo_places = width + np.searchsorted(halo_of_party, senders)
        local_senders = np.where(is_inside, party_places[senders], halo_places).astype(np.int32)
        receivers = party_places[ends[1][party_edges]].astype(np.int32)
        types = None if graph.types is None else graph.types[party_edges]
        graphs.append(GraphData(graph.nodes[party_nodes], graph.ids[party_nodes], local_senders, receivers, types))
    halo = np.full((len(nodes), max(1, *(len(halo_of_party) for halo_of_party in halo_nodes))), -1, np.int32)
    for addresses, halo_of_party in zip(halo, halo_nodes, strict=True):
        holder = nodes[:, halo_of_party].argmax(0)
        addresses[: len(halo_of_party)] = holder * width + places[holder, halo_of_party]
    num_cut = sum(
        int((~party_nodes[ends[0][party_edges]]).sum()) for party_nodes, party_edges in zip(nodes, edges, strict=True)
    )
    return Parties(stacked_graphs(graphs), halo, num_cut)
