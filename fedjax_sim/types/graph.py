"""`GraphData` is a graph as an example of a client: loaders make it, and graph networks read it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedjax_sim.types.data import Array


class GraphData(NamedTuple):
    """One graph of at most V nodes and E directed edges, padded; in a batch each leaf has a leading axis.

    An undirected edge is stored as two directed edges. A sender in [V, V + H) is one of H nodes that another party
    holds: its embeddings are received, not computed (`population.graph.partition`). Loaders make leaves of NumPy.
    """

    nodes: Array | np.ndarray  # [V, F] features; rows of padding may hold anything
    ids: Array | np.ndarray  # [V] int32, a node's identity, the same at every party; -1 = padding
    senders: Array | np.ndarray  # [E] int32, the node at which each edge begins, in [0, V + H)
    # [E] int32 in [0, V), the node at which each edge ends; an edge with another end is padding
    receivers: Array | np.ndarray
    types: Array | np.ndarray | None = None  # [E] int32 in [0, R), the relation of each edge; None = edges have none
