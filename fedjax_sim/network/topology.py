"""This module holds graphs, which say which node can send to which. Host NumPy, in memory that grows with the edges."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import numpy as np
import scipy  # not scipy.sparse, which only graphs need: it is loaded where it is first read

from fedjax_sim import validate
from fedjax_sim.files import text_files
from fedjax_sim.types import FilePath
from fedjax_sim.validate import FromData, Integer, PopulationSize

PARTS_SHOWN = 5  # number of components whose sizes an error shows
NODE_NUMBERS = 1 << 62  # node numbers in a file that is renumbered must be smaller


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """N nodes and the edges along which they send. An undirected edge is stored in both directions.

    >>> graph = from_edges(3, [(0, 1), (1, 2)])
    >>> graph.num_edges, graph.in_degrees.tolist(), graph.neighbours()[0].tolist()
    (2, [1, 2, 1], [[1, 0], [0, 2], [1, 2]])
    """

    population_size: int  # N
    senders: np.ndarray  # [E] int32
    receivers: np.ndarray  # [E] int32; edges are sorted by receiver, then by sender
    directed: bool
    in_parts: bool = False  # True: the graph may be disconnected. False: algorithms refuse it if it is disconnected

    @property
    def num_edges(self) -> int:
        """The number of pairs of nodes that are joined; in a directed graph, the number of arrows."""
        return len(self.senders) if self.directed else len(self.senders) // 2

    @property
    def in_degrees(self) -> np.ndarray:
        """The number of nodes from which each node receives, [N]."""
        return np.bincount(self.receivers, minlength=self.population_size)

    @property
    def out_degrees(self) -> np.ndarray:
        """The number of nodes to which each node sends, [N]."""
        return np.bincount(self.senders, minlength=self.population_size)

    def places(self) -> np.ndarray:
        """Returns the place of each edge among the edges of its receiver, counted from 0, [E]."""
        starts = np.concatenate([[0], np.cumsum(self.in_degrees)])
        return np.arange(len(self.senders)) - starts[self.receivers]

    def neighbours(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the nodes from which each node receives, padded to the largest in-degree k, at least 1.

        Padding holds the node itself.

        Returns: (ids [N, k] int32, rising in each row before the padding; [N, k] bool, False for padding).
        """
        degrees = self.in_degrees
        max_degree = int(degrees.max(initial=1))
        ids = np.repeat(np.arange(self.population_size, dtype=np.int32)[:, None], max_degree, axis=1)
        ids[self.receivers, self.places()] = self.senders
        return ids, np.arange(max_degree) < degrees[:, None]

    def adjacency(self, values: np.ndarray | float = 1.0) -> scipy.sparse.csr_matrix:
        """Returns the adjacency matrix, [N, N] sparse float64.

        Row i has the values of the edges along which node i receives.

        Args:
          values: [E] in the order of the edges, or a number.
        """
        data = np.broadcast_to(np.asarray(values, np.float64), self.senders.shape)
        shape = (self.population_size, self.population_size)
        return scipy.sparse.csr_matrix((data, (self.receivers, self.senders)), shape)


@validate.named_arguments
def from_edges(population_size: PopulationSize, edges: Any, *, directed: bool = False, connected: bool = True) -> Graph:
    """Makes a graph from its edges.

    Args:
      population_size: N in [1, 2^31 - 1].
      edges: [E, 2] integers in [0, N): pairs of nodes; with `directed` (from, to). An edge may be listed twice.
      directed: whether nodes send along an edge in one direction only.
      connected: whether the graph has to be connected for learning. If True, algorithms refuse it if it is not
        connected.

    Returns: `Graph`.

    Raises: TypeError, ValueError for anything but a list of pairs of different nodes.

    Guarantees: Rows are sorted by id, and each edge counts once
    (tests/network/test_topology.py::test_edges_are_sorted_and_count_once).

    >>> from_edges(3, [(2, 0), (0, 2)]).num_edges
    1
    """
    pairs = np.asarray(edges)
    if pairs.size == 0:
        pairs = np.zeros((0, 2), np.int64)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu":
        validate.fail("edges", "pairs of integers [E, 2]", f"{pairs.dtype}{list(pairs.shape)}", error=TypeError)
    if pairs.size and not (pairs.min() >= 0 and pairs.max() < population_size):
        outside = pairs[((pairs < 0) | (pairs >= population_size)).any(1)][0]
        validate.fail("edges", f"nodes in [0, {population_size})", outside.tolist())
    if (is_loop := pairs[:, 0] == pairs[:, 1]).any():
        hint = "A node keeps a share of its own model without an edge."
        validate.fail("edges", "pairs of different nodes", pairs[is_loop][0].tolist(), hint)
    pairs = pairs.astype(np.int64)
    pairs = pairs if directed else np.concatenate([pairs, pairs[:, ::-1]])
    # The codes sort edges by receiver and then by sender; `unique` drops edges that are listed twice.
    edge_codes = np.unique(pairs[:, 1] * population_size + pairs[:, 0])
    receivers, senders = np.divmod(edge_codes, population_size)
    return Graph(population_size, senders.astype(np.int32), receivers.astype(np.int32), directed, not connected)


@validate.named_arguments
def from_csv(
    population_size: PopulationSize,
    file: FilePath,
    *,
    directed: bool = False,
    connected: bool = True,
    delimiter: str = "auto",
    renumber: bool = False,
    drop_self_loops: bool = False,
    drop_values: bool = False,
) -> Graph:
    """Makes a graph from a text file with two integers in each row, (from, to), such as edge lists of SNAP and KONECT.

    A first row in which both values begin with a letter is a header. Lines that begin with # or % are comments.

    Args:
      population_size: N.
      file: its path; in UTF-8.
      directed: as in `from_edges`.
      connected: as in `from_edges`.
      delimiter: between values: one character, "space" (spaces and tabs), or "auto", by the first row.
      renumber: whether nodes get the numbers 0 to N - 1, in the order of their numbers in the file, which may have
        gaps. The file must then have N nodes.
      drop_self_loops: whether edges from a node to itself are left out; otherwise they are refused.
      drop_values: whether values after the second one in a row, such as weights and times, are left out. Otherwise they
        are refused, unless they are equal in all rows: an edge has no weight here, and a mixing matrix makes its own.

    Returns: `Graph`.

    Raises: ValueError for a file that cannot be read or has no edge, and for a line that is no edge, which the error
    names.

    Guarantees: Files with headers, comments and other delimiters are read, also published edge lists
    (tests/network/test_topology.py::test_a_csv_of_edges, ::test_published_edge_lists). Weights are not left out
    unasked (::test_weights_are_not_dropped_in_silence).
    """
    edges: list[tuple[int, int]] = []
    values: list[str] = []  # after the second one in a row, of the first row that has any
    written: dict[int, str] = {}  # node -> its text in the file
    rows = text_files.table_rows("file", file, delimiter=delimiter, comments=("#", "%"), spaces=True)
    for row_index, (line_number, row) in enumerate(rows):
        pair = row[:2]
        hint = f"Line {line_number} of {file}."
        # A header: skipped, although it is no edge.
        if not row_index and len(pair) == 2 and all(text[:1].isalpha() for text in pair):
            continue
        if len(pair) < 2 or not all(_is_integer(text) for text in pair):
            hint = f"{hint} {text_files.one_column(row, delimiter)}".strip()
            validate.fail("file", "two integers a row", row, hint)
        values = values or row[2:]
        if row[2:] and row[2:] != values and not drop_values:
            what = "Edges have no weights here; a mixing matrix makes its own."
            rule = "two nodes a row, and no values beside them that differ from row to row"
            validate.fail("file", rule, row, f"{hint} {what} To leave the values out: drop_values = true.")
        for text in pair if renumber else ():
            if written.setdefault(int(text), text) != text:
                what = "Are they two nodes? Write each in one way."
                validate.fail("file", f"one way to write node {written[int(text)]}", text, f"{hint} {what}")
        sender = int(pair[0])
        receiver = int(pair[1])
        if drop_self_loops and sender == receiver:
            continue
        if sender == receiver:
            validate.fail("file", "two different nodes", row, f"{hint} Leave such edges out: drop_self_loops = true.")
        # Nodes that are renumbered may have any number below 2^62, which int64 holds.
        upper_bound = NODE_NUMBERS if renumber else population_size
        if not (0 <= sender < upper_bound and 0 <= receiver < upper_bound):
            hint += " Nodes are numbered from 0." if population_size in (sender, receiver) else ""
            hint += "" if renumber else " To number the file's nodes anew: renumber = true."
            validate.fail("file", f"two different nodes in [0, {upper_bound})", row, hint)
        edges.append((sender, receiver))
    if not edges:
        validate.fail("file", "an edge a row", "none", f"In {file}.")
    pairs = np.array(edges)
    if renumber:
        # `unique` sorts the nodes, so new numbers follow the order of the old ones.
        nodes, new_numbers = np.unique(pairs, return_inverse=True)
        if len(nodes) != population_size:
            hint = f"The graph needs as many clients: {len(nodes)}."
            validate.fail("population_size", "as many as the file has nodes", population_size, hint)
        pairs = new_numbers.reshape(-1, 2)
    return from_edges(population_size, pairs, directed=directed, connected=connected)


def _is_integer(text: str) -> bool:
    """Tells whether a text is an integer that Python can read."""
    digits = text.removeprefix("-")
    # Python refuses to convert more than 4,300 digits.
    return digits.isascii() and digits.isdigit() and len(digits) < 4000


@validate.named_arguments
def ring(population_size: PopulationSize) -> Graph:
    """Makes a graph in which node i is joined to i - 1 and i + 1 modulo N.

    Args:
      population_size: N.

    Guarantees: Edges and degrees are as stated (tests/network/test_topology.py::test_families).

    >>> ring(16).num_edges
    16
    """
    nodes = np.arange(population_size if population_size > 1 else 0)
    return from_edges(population_size, np.stack([nodes, (nodes + 1) % population_size], 1))


@validate.named_arguments
def path(population_size: PopulationSize) -> Graph:
    """Makes a graph in which node i is joined to i - 1 and i + 1.

    It is a ring without the edge between the last node and the first.

    Args:
      population_size: N.

    Guarantees: Edges and degrees are as stated (tests/network/test_topology.py::test_families).
    """
    nodes = np.arange(population_size - 1)
    return from_edges(population_size, np.stack([nodes, nodes + 1], 1))


@validate.named_arguments
def star(population_size: PopulationSize) -> Graph:
    """Makes a graph in which node 0, the hub, is joined to all other nodes.

    Args:
      population_size: N.

    Guarantees: Edges and degrees are as stated (tests/network/test_topology.py::test_families).
    """
    nodes = np.arange(1, population_size)
    return from_edges(population_size, np.stack([0 * nodes, nodes], 1))


def complete(population_size: PopulationSize) -> Graph:
    """Makes a graph in which every node is joined to every other node, with N (N - 1) / 2 edges.

    Args:
      population_size: N, up to 4,096.

    Guarantees: Edges and degrees are as stated (tests/network/test_topology.py::test_families).

    >>> complete(16).num_edges
    120
    """
    validate.integer("population_size", population_size, 1, 4096, hint="Everybody hears everybody: that is a server.")
    return from_edges(population_size, np.stack(np.triu_indices(population_size, 1), 1))


@validate.named_arguments
def torus(
    population_size: Annotated[Annotated[int, Integer(4)], FromData("population_size")], *, rows: int | None = None
) -> Graph:
    """Makes a grid whose rows and columns are rings: node r C + c lies in row r of R and column c of C.

    Args:
      population_size: N, a product of two integers of at least 2.
      rows: R, a divisor of N; None = the divisor that is nearest to a square. R and C are at least 2.

    Raises: ValueError for a number of rows that does not divide N.

    Guarantees: Edges and degrees are as stated (tests/network/test_topology.py::test_families).

    >>> torus(16).num_edges
    32
    """
    if rows is None:
        rows = max(divisor for divisor in range(1, int(population_size**0.5) + 1) if population_size % divisor == 0)
    hint = f"N = {population_size} has to be a product of two integers of at least 2."
    validate.integer("rows", rows, 2, population_size // 2, hint=hint)
    if population_size % rows:
        validate.fail("rows", f"a divisor of N = {population_size}", rows)
    grid = np.arange(population_size).reshape(rows, -1)
    # Each node is joined to the next one in its column and in its row.
    edges = [np.stack([grid, np.roll(grid, -1, axis)], -1).reshape(-1, 2) for axis in (0, 1)]
    return from_edges(population_size, np.concatenate(edges))


@validate.named_arguments
def hypercube(population_size: PopulationSize) -> Graph:
    """Makes a graph of N = 2^d nodes, which are joined if their numbers differ in one bit: degree d, diameter d.

    Args:
      population_size: N, a power of 2.

    Guarantees: Edges and degrees are as stated (tests/network/test_topology.py::test_families).
    """
    if population_size & (population_size - 1):
        validate.fail("population_size", "a power of 2", population_size)
    nodes = np.arange(population_size)
    bits = 1 << np.arange(population_size.bit_length() - 1)
    edges = [np.stack([nodes, nodes ^ bit], 1) for bit in bits]
    return from_edges(population_size, np.concatenate(edges) if edges else [])


@validate.named_arguments
def exponential(population_size: PopulationSize) -> Graph:
    """Makes a directed graph in which node i sends to i + 1, i + 2, i + 4, ... modulo N.

    Each node has ceil(log2 N) outgoing arrows.

    Args:
      population_size: N.

    Guarantees: Edges and degrees are as stated (tests/network/test_topology.py::test_families).

    References: Assran et al. 2019 (stochastic gradient push), section 5; Ying et al. 2021, section 3.
    """
    nodes = np.arange(population_size)
    hops = [1 << exponent for exponent in range((population_size - 1).bit_length())]
    edges = [np.stack([nodes, (nodes + hop) % population_size], 1) for hop in hops]
    return from_edges(population_size, np.concatenate(edges) if edges else [], directed=True)


def remove_node(graph: Graph, node: int, *, connected: bool = True) -> Graph:
    """Returns the graph without a node and its edges. Nodes with higher numbers move down by one.

    Args:
      graph: of at least two nodes.
      node: in [0, N).
      connected: as in `from_edges`. If the graph itself may be disconnected, so may the result.

    Returns: `Graph`.

    Guarantees: A ring becomes a path, and a star without its hub is disconnected
    (tests/network/test_topology.py::test_points_of_failure). This is refused unless it is intended
    (::test_a_removed_node_keeps_what_is_meant).
    """
    validate.part("graph", graph, Graph)
    validate.integer("node", node, 0, graph.population_size - 1)
    validate.truth("connected", connected)
    if graph.population_size == 1:
        validate.fail("graph", "at least two nodes", 1, "Nobody would be left.")
    edges = np.stack([graph.senders, graph.receivers], 1).astype(np.int64)
    edges = edges[(edges != node).all(1)]
    connected = connected and not graph.in_parts
    return from_edges(graph.population_size - 1, edges - (edges > node), directed=graph.directed, connected=connected)


def hears_back(graph: Graph) -> bool:
    """Tells whether every node can be reached from all nodes that it reaches.

    This is true of undirected graphs, connected or not.

    Args:
      graph: directed or not.

    Guarantees: In a directed graph, arrows count in their direction only
    (tests/network/test_topology.py::test_directed_connection_is_strong).
    """
    kinds = ("strong", "weak")
    num_components = {
        kind: scipy.sparse.csgraph.connected_components(graph.adjacency(), connection=kind, return_labels=False)
        for kind in kinds
    }
    # A weak component is a union of strong components. If there are as many of each, no arrow leads from one strong
    # component to another.
    return num_components["strong"] == num_components["weak"]


def is_connected(graph: Graph) -> bool:
    """Tells whether every node can reach every other node, along the arrows of a directed graph.

    Guarantees: In a directed graph, arrows count in their direction only
    (tests/network/test_topology.py::test_directed_connection_is_strong, ::test_points_of_failure).
    """
    options = {"directed": graph.directed, "connection": "strong"}
    return scipy.sparse.csgraph.connected_components(graph.adjacency(), return_labels=False, **options) == 1


def check_connected(name: str, graph: Graph) -> None:
    """Refuses a graph that is not connected, unless this is intended (`Graph.in_parts`).

    Arrows count in both directions.

    Nodes in two components never agree, so the mean of their models does not minimise any objective.

    Args:
      name: of the argument with the graph, for errors.
      graph: the graph to check.

    Raises: ValueError with the number of components and the sizes of the largest.

    Guarantees: Every gossip algorithm refuses such a graph
    (tests/laws/test_gossip.py::test_a_graph_in_several_parts_is_refused).

    >>> check_connected("mixing", from_edges(5, [(0, 1), (2, 3)]))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedjax_sim.InvalidArgument: mixing: expected a connected graph, got '3 parts, of 2, 2, 1 nodes'. Nodes ...
    """
    _, part_of_node = scipy.sparse.csgraph.connected_components(graph.adjacency(), directed=False)
    sizes = sorted(np.bincount(part_of_node).tolist(), reverse=True)
    if len(sizes) == 1 or graph.in_parts:
        return
    shown_sizes = ", ".join(f"{size:,}" for size in sizes[:PARTS_SHOWN]) + ", ..." * (len(sizes) > PARTS_SHOWN)
    hint = "Nodes in two parts never agree. Add edges, or make the graph with connected=False if that is meant."
    isolated = np.flatnonzero(graph.in_degrees + graph.out_degrees == 0)
    # If node 0 is the only node without edges, the list is probably numbered from 1.
    if isolated.tolist() == [0]:
        hint += " Node 0 alone has no edge: are the nodes of the list numbered from 1?"
    validate.fail(name, "a connected graph", f"{len(sizes):,} parts, of {shown_sizes} nodes", hint)
