"""Link prediction as a federated data set: edges to learn from, edges to test on, and pairs that are not joined."""

from __future__ import annotations

import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.federated_data import PADDING, FederatedData
from fedjax_sim.population.graph_partition import node_owners, parties_of, stacked
from fedjax_sim.population.partition import generator
from fedjax_sim.population.population import stored
from fedjax_sim.types import GraphData

__all__ = ["link_data"]


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
    as many pairs that are not joined in the whole graph as edges. `test` is the whole graph without the test edges.

    Guarantees: no test edge is in a graph that anybody sees, no pair without a link is an edge
    (tests/population/test_graphs.py::test_links_are_kept_apart).
    """
    validate.in_range("test_share", test_share, 0, 1, open_low=True, open_high=True)
    validate.integer("embedding_size", embedding_size)
    rng, size = generator("link_data", seed), len(graph.ids)
    once = graph.senders < graph.receivers
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
    owner = node_owners(seen, num_clients, by=partition, labels=labels, seed=seed)
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
    central = {"x": stacked([seen]), **rows([tested], [apart(np.arange(size), count)])}
    shape = (graph.nodes.shape[1],)
    return FederatedData(train, central, None, shape, embedding_size, "link_prediction", name=name)
