"""This module makes link prediction a federated data set: edges to train on, edges to test on, and unjoined pairs."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.federated_data import PADDING, FederatedData
from fedjax_sim.population.graph.partition import PARTITIONS, node_owners, parties_of, shared_graph, stacked_graphs
from fedjax_sim.population.partition import generator
from fedjax_sim.population.population import Stored, stored
from fedjax_sim.types import GraphData


def link_data(
    graph: GraphData,
    *,
    num_clients: int = 1,
    partition: str = "community",
    labels: np.ndarray | None = None,
    test_share: float = 0.2,
    embedding_size: int = 16,
    name: str = "links",
    seed: int = 0,
) -> FederatedData:
    """Builds a data set for link prediction over parties: which nodes of a graph are joined?

    Args:
      graph: undirected, of `graph_data`.
      num_clients: P parties. Each of them trains on its own part of the graph, without the cut edges.
      partition, labels: how nodes are assigned to parties, the arguments `by` and `labels` of `node_owners`.
      test_share: share of the edges in (0, 1) that is hidden from all parties and tested on.
      embedding_size: the number of outputs of the model.
      name: of the data set.
      seed: of the split, the partition and the unjoined pairs.

    Returns: `FederatedData` of the task "link_prediction", with `x`, `pairs` [L, 2] and `y` [L] as
    `models.link_prediction` expects them. A client has as many unjoined pairs of nodes as it has edges, but at most
    half of all pairs of its nodes. `test` is the whole graph without the test edges. Unjoined means not joined in the
    whole graph.

    Raises: ValueError for a directed graph, for options out of range, and for a graph in which all nodes are joined.

    Guarantees: no test edge is in a graph that any party sees, and no unjoined pair is an edge
    (tests/population/graph/test_graphs.py::test_links_are_kept_apart). A pair that edges of several types join is one
    link (::test_a_pair_of_several_types_is_one_link).
    """

    def owners(visible_graph: GraphData) -> np.ndarray:
        return node_owners(visible_graph, num_clients, by=partition, labels=labels, seed=seed)

    validate.part("graph", graph, GraphData)
    validate.integer("num_clients", num_clients, 1, len(graph.ids), hint=f"There are {len(graph.ids)} nodes.")
    validate.one_of("partition", partition, PARTITIONS)
    return _links(
        graph, owners, num_clients, test_share=test_share, embedding_size=embedding_size, name=name, seed=seed
    )


def with_links(
    data: FederatedData, *, test_share: float = 0.2, embedding_size: int = 16, seed: int = 0
) -> FederatedData:
    """Replaces the labels of a graph data set by links to predict. The parties keep their nodes.

    Args:
      data: of `node_data`, such as `cora` or `stochastic_blocks`.
      test_share, embedding_size, seed: as in `link_data`.

    Returns: see `link_data`. In a config this is [data.with_links]. The model is a graph network, trained by FedAvg or
    a similar algorithm.

    Raises: TypeError or ValueError for data of another kind, and as `link_data`.

    Guarantees: nodes stay at their party (tests/population/graph/test_graphs.py::test_links_of_a_data_set).

    >>> from fedjax_sim.population import karate_club
    >>> data = with_links(karate_club(), test_share=0.1)
    >>> data.task, data.train.size, int((data.test["y"] == 1).sum())
    ('link_prediction', 2, 8)
    """
    if not isinstance(data, FederatedData):
        validate.fail("data", "a FederatedData", type(data).__name__, "population.karate_club(), say.", TypeError)
    if data.task != "node_classification" or not isinstance(data.train, Stored):
        validate.fail("data", "one graph over parties (population.node_data)", (data.name, data.task))
    party_ids = np.asarray(data.train.examples["x"].ids)  # [P, V], the ids of each party's nodes, -1 in padding
    graph: GraphData = jax.tree.map(lambda leaf: np.asarray(leaf[0]), data.test["x"])
    is_edge = graph.receivers >= 0  # the others are padding
    types = None if graph.types is None else graph.types[is_edge]
    graph = graph._replace(senders=graph.senders[is_edge], receivers=graph.receivers[is_edge], types=types)
    # The ids of nodes are their row numbers in the whole graph.
    owner = np.zeros(len(graph.ids), np.int32)
    for party, ids in enumerate(party_ids):
        owner[ids[ids >= 0]] = party
    return _links(
        graph,
        lambda visible_graph: owner,
        len(party_ids),
        test_share=test_share,
        embedding_size=embedding_size,
        name=f"{data.name} links",
        seed=seed,
    )


def _links(
    graph: GraphData,
    owners: Callable[[GraphData], np.ndarray],
    num_clients: int,
    *,
    test_share: float,
    embedding_size: int,
    name: str,
    seed: int,
) -> FederatedData:
    """Builds the data set of `link_data`: test edges are hidden first, then the nodes are given to parties.

    Of M joined pairs of nodes, round(test_share M) are test links. A client with v nodes has as many unjoined pairs as
    links, at most floor(v (v - 1) / 4), and fewer where 100 draws a pair do not find them. The test set has as many
    unjoined pairs as test links, with V in the place of v.

    Args:
      graph: undirected, V nodes. Both directions of each edge are listed.
      owners: maps the graph without its test edges to the party of each node, [V] integers in [0, P).
      num_clients: P parties.
      test_share: in (0, 1). It must leave both a test link and another one.
      embedding_size: the number of outputs of the model, >= 1.
      name: of the data set.
      seed: of the split and of the unjoined pairs.

    Raises: ValueError for a directed graph, a share that leaves a side without links, and a graph in which all nodes
      are joined.
    """
    validate.in_range("test_share", test_share, 0, 1, open_low=True, open_high=True)
    validate.integer("embedding_size", embedding_size)
    rng = generator("link_data", seed)
    size = len(graph.ids)
    # A pair (a, b) of nodes is encoded as a * size + b, in int64 since it may exceed 32 bits.
    forward = graph.senders * np.int64(size) + graph.receivers
    reverse = graph.receivers * np.int64(size) + graph.senders
    if len(np.setdiff1d(forward, reverse)):
        validate.fail("graph", "one whose edges have both directions", "a directed graph", "graph_data makes such.")
    # One direction of each edge is a link. A pair with edges of several types is one link, too.
    one_direction = np.flatnonzero(graph.senders < graph.receivers)
    one_direction = one_direction[np.sort(np.unique(forward[one_direction], return_index=True)[1])]
    links = rng.permutation(np.stack([graph.senders[one_direction], graph.receivers[one_direction]], 1))
    num_test = round(validate.as_written(test_share) * len(links))
    if not 0 < num_test < len(links):
        validate.fail("test_share", f"a share that leaves edges of {len(links)} on both sides", test_share)
    test_links = links[:num_test]
    linked_pairs = set((links[:, 0] * np.int64(size) + links[:, 1]).tolist())
    is_visible = ~np.isin(
        np.minimum(graph.senders, graph.receivers) * np.int64(size) + np.maximum(graph.senders, graph.receivers),
        test_links[:, 0] * np.int64(size) + test_links[:, 1],
    )
    types = None if graph.types is None else graph.types[is_visible]
    visible_graph = graph._replace(
        senders=graph.senders[is_visible], receivers=graph.receivers[is_visible], types=types
    )
    owner = owners(visible_graph)
    parties = parties_of(visible_graph, node_owner=owner)

    def unjoined_pairs(nodes: np.ndarray, wanted: int) -> np.ndarray:
        """Draws pairs of these nodes that are not joined, [at most wanted, 2]."""
        # In a dense graph the unjoined pairs may be few, so the number of pairs and of attempts is limited.
        most = min(wanted, len(nodes) * (len(nodes) - 1) // 4)
        drawn: set[tuple[int, int]] = set()
        for _ in range(100 * max(most, 1)):
            if len(drawn) >= most:
                break
            a, b = sorted(rng.choice(nodes, 2, replace=False).tolist())
            if a * size + b not in linked_pairs:
                drawn.add((a, b))
        return np.array(sorted(drawn), np.int64).reshape(-1, 2)

    def rows(joined: list[np.ndarray], unjoined: list[np.ndarray]) -> dict[str, np.ndarray]:
        """Returns `pairs` and `y` of several graphs, padded to one length: joined pairs, then unjoined ones."""
        length = max(1, *(len(a) + len(b) for a, b in zip(joined, unjoined, strict=True)))
        pairs = np.zeros((len(joined), length, 2), np.int32)
        y = np.full((len(joined), length), PADDING, np.int32)
        for i, (a, b) in enumerate(zip(joined, unjoined, strict=True)):
            pairs[i, : len(a) + len(b)] = np.concatenate([a, b])
            y[i, : len(a)] = 1
            y[i, len(a) : len(a) + len(b)] = 0
        return {"pairs": pairs, "y": y}

    joined = []
    unjoined = []
    for p in range(num_clients):
        nodes = np.flatnonzero(owner == p)
        place = np.full(size, -1)  # of a node in the party's graph
        place[nodes] = np.arange(len(nodes))
        inner_links = links[num_test:][(owner[links[num_test:]] == p).all(1)]
        joined.append(place[inner_links])
        no_pairs = np.zeros((0, 2), int)
        unjoined.append(place[unjoined_pairs(nodes, len(inner_links))] if len(nodes) > 1 else no_pairs)
    examples = {"x": parties.graphs, **rows(joined, unjoined)}
    train = stored(examples, np.arange(num_clients + 1), learned=shared_graph(num_clients))
    unjoined_test_pairs = unjoined_pairs(np.arange(size), num_test)
    if not len(unjoined_test_pairs):
        validate.fail("graph", "pairs of nodes that are not joined", "a complete graph", "An AUC needs both kinds.")
    central_test = {"x": stacked_graphs([visible_graph]), **rows([test_links], [unjoined_test_pairs])}
    return FederatedData(
        train=train,
        test=central_test,
        held_out=None,
        input_shape=(graph.nodes.shape[1],),
        num_outputs=embedding_size,
        task="link_prediction",
        name=name,
    )
