"""Link prediction as a federated data set: edges to learn from, edges to test on, and pairs that are not joined."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.federated_data import PADDING, FederatedData
from fedjax_sim.population.graph.partition import PARTITIONS, node_owners, parties_of, stacked_graphs
from fedjax_sim.population.partition import generator
from fedjax_sim.population.population import stored
from fedjax_sim.types import GraphData

__all__ = ["link_data", "with_links"]


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
    """Link prediction over parties: which nodes are joined?

    Args:
      graph: undirected, of `graph_data`.
      num_clients, partition, labels: parties, as `node_owners` has them. Each trains on its own graph, whose cut edges
        it does not have.
      test_share: of the edges in (0, 1), kept from everybody and tested on.
      embedding_size: outputs of the model.

    Returns: `FederatedData`, task "link_prediction": `x`, `pairs` [L, 2] and `y` [L] of `models.link_prediction`, with
    as many pairs that are not joined in the whole graph as edges, or half of the pairs of nodes where these are too
    few. `test` is the whole graph without the test edges.

    Raises: ValueError for a directed graph, for options out of range, and for a graph where all nodes are joined.

    Guarantees: no test edge is in a graph that anybody sees, no pair without a link is an edge
    (tests/population/graph/test_graphs.py::test_links_are_kept_apart); a pair that edges of several types join is one
    link (::test_a_pair_of_several_types_is_one_link).
    """

    def owners(seen: GraphData) -> np.ndarray:
        return node_owners(seen, num_clients, by=partition, labels=labels, seed=seed)

    validate.part("graph", graph, GraphData)
    validate.integer("num_clients", num_clients, 1, len(graph.ids), hint=f"There are {len(graph.ids)} nodes.")
    validate.one_of("partition", partition, PARTITIONS)
    return _links(graph, owners, num_clients, test_share, embedding_size, name, seed)


def with_links(
    data: FederatedData, *, test_share: float = 0.2, embedding_size: int = 16, seed: int = 0
) -> FederatedData:
    """The data set whose parties hold one graph, with links to predict in the place of labels.

    Args:
      data: of `node_data`, such as `cora` or `stochastic_blocks`; its parties keep their nodes.
      test_share, embedding_size, seed: as in `link_data`.

    Returns: see `link_data`. In a config, [data.with_links]; the model is a graph network, trained by FedAvg or others
    of its kind.

    Raises: TypeError, ValueError for data of another kind, and as `link_data`.

    Guarantees: nodes stay at their party (tests/population/graph/test_graphs.py::test_links_of_a_data_set).

    >>> from fedjax_sim.population import karate_club
    >>> data = with_links(karate_club(), test_share=0.1)
    >>> data.task, data.train.size, int((data.test["y"] == 1).sum())
    ('link_prediction', 2, 8)
    """
    if not isinstance(data, FederatedData):
        validate.fail("data", "a FederatedData", type(data).__name__, "population.karate_club(), say.", TypeError)
    if data.task != "node_classification" or not hasattr(data.train, "examples"):
        validate.fail("data", "one graph over parties (population.node_data)", (data.name, data.task))
    held = np.asarray(data.train.examples["x"].ids)
    graph = GraphData(*(None if leaf is None else np.asarray(leaf[0]) for leaf in data.test["x"]))
    real = graph.receivers >= 0
    types = None if graph.types is None else graph.types[real]
    graph = graph._replace(senders=graph.senders[real], receivers=graph.receivers[real], types=types)
    owner = np.zeros(len(graph.ids), np.int32)
    for party, ids in enumerate(held):
        owner[ids[ids >= 0]] = party
    return _links(graph, lambda seen: owner, len(held), test_share, embedding_size, f"{data.name} links", seed)


def _links(
    graph: GraphData,
    owners: Callable,
    num_clients: int,
    test_share: float,
    embedding_size: int,
    name: str,
    seed: int,
) -> FederatedData:
    validate.in_range("test_share", test_share, 0, 1, open_low=True, open_high=True)
    validate.integer("embedding_size", embedding_size)
    rng, size = generator("link_data", seed), len(graph.ids)
    there, back = (a * np.int64(size) + b for a, b in ((graph.senders, graph.receivers), graph[3:1:-1]))
    if len(np.setdiff1d(there, back)):
        validate.fail("graph", "one whose edges have both directions", "a directed graph", "graph_data makes such.")
    once = np.flatnonzero(graph.senders < graph.receivers)
    once = once[np.sort(np.unique(there[once], return_index=True)[1])]  # a pair may have edges of several types
    edges = rng.permutation(np.stack([graph.senders[once], graph.receivers[once]], 1))
    count = round(test_share * len(edges))
    if not 0 < count < len(edges):
        validate.fail("test_share", f"a share that leaves edges of {len(edges)} on both sides", test_share)
    tested = edges[:count]
    taken = set((edges[:, 0] * np.int64(size) + edges[:, 1]).tolist())
    kept = ~np.isin(
        np.minimum(graph.senders, graph.receivers) * np.int64(size) + np.maximum(graph.senders, graph.receivers),
        tested[:, 0] * np.int64(size) + tested[:, 1],
    )
    types = None if graph.types is None else graph.types[kept]
    seen = graph._replace(senders=graph.senders[kept], receivers=graph.receivers[kept], types=types)
    owner = owners(seen)
    parties = parties_of(seen, node_owner=owner)

    def apart(nodes: np.ndarray, wanted: int) -> np.ndarray:
        """Pairs of these nodes that are not joined."""
        most = min(wanted, len(nodes) * (len(nodes) - 1) // 4)
        found: set[tuple[int, int]] = set()
        for _ in range(100 * max(most, 1)):
            if len(found) >= most:
                break
            a, b = sorted(rng.choice(nodes, 2, replace=False).tolist())
            if a * size + b not in taken:
                found.add((a, b))
        return np.array(sorted(found), np.int64).reshape(-1, 2)

    def rows(joined: list[np.ndarray], others: list[np.ndarray]) -> dict[str, np.ndarray]:
        length = max(1, *(len(a) + len(b) for a, b in zip(joined, others, strict=True)))
        pairs, y = np.zeros((len(joined), length, 2), np.int32), np.full((len(joined), length), PADDING, np.int32)
        for i, (a, b) in enumerate(zip(joined, others, strict=True)):
            pairs[i, : len(a) + len(b)] = np.concatenate([a, b])
            y[i, : len(a)], y[i, len(a) : len(a) + len(b)] = 1, 0
        return {"pairs": pairs, "y": y}

    joined, others = [], []
    for p in range(num_clients):
        nodes = np.flatnonzero(owner == p)
        place = np.full(size, -1)
        place[nodes] = np.arange(len(nodes))
        inside = edges[count:][(owner[edges[count:]] == p).all(1)]
        joined.append(place[inside])
        others.append(place[apart(nodes, len(inside))] if len(nodes) > 1 else np.zeros((0, 2), int))
    train = stored({"x": parties.graphs, **rows(joined, others)}, np.arange(num_clients + 1))
    unjoined = apart(np.arange(size), count)
    if not len(unjoined):
        validate.fail("graph", "pairs of nodes that are not joined", "a complete graph", "An AUC needs both kinds.")
    central = {"x": stacked_graphs([seen]), **rows([tested], [unjoined])}
    shape = (graph.nodes.shape[1],)
    return FederatedData(train, central, None, shape, embedding_size, "link_prediction", name=name)
