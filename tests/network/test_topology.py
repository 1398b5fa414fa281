"""Graphs: who hears whom, how many edges there are, and what is left when a node is gone."""

import numpy as np
import pytest

from fedjax_sim import network
from fedjax_sim.network import topology
from tests.refusals import refused

FAMILIES = {
    "ring": (network.ring, 16, 2),
    "path": (network.path, 15, None),
    "star": (network.star, 15, None),
    "complete": (network.complete, 120, 15),
    "torus": (network.torus, 32, 4),
    "hypercube": (network.hypercube, 32, 4),
    "exponential": (network.exponential, 64, 4),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    """Catches an edge too many or too few, one that leads one way only, a loop, a graph that falls apart."""
    make, edges, degree = FAMILIES[name]
    graph = make(16)
    assert graph.num_edges == edges and network.is_connected(graph)
    assert graph.in_degrees.sum() == graph.out_degrees.sum() == edges * (1 if graph.directed else 2)
    assert degree is None or ((graph.in_degrees == degree).all() and (graph.out_degrees == degree).all())
    ways = set(zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True))
    assert len(ways) == len(graph.senders) and all(a != b for a, b in ways)
    assert graph.directed or {(b, a) for a, b in ways} == ways
    ids, there = graph.neighbours()
    assert [sorted(a for a, b in ways if b == i) for i in range(16)] == [
        row[mask].tolist() for row, mask in zip(ids, there, strict=True)
    ]
    assert (ids[~there] == np.nonzero(~there)[0]).all()


@pytest.mark.parametrize("make", [network.ring, network.path, network.star, network.complete, network.exponential])
def test_few_nodes(make):
    """Catches a loop, or a doubled edge, among one, two or three nodes."""
    assert make(1).num_edges == 0
    assert make(2).num_edges == (2 if make is network.exponential else 1)
    assert network.is_connected(make(3)) and (make(3).in_degrees <= 2).all()


def test_small_tori():
    """Catches both edges between two rows counted, and sides that do not multiply to N."""
    assert network.torus(4).num_edges == 4 and network.torus(6, rows=2).num_edges == 9
    assert network.torus(12, rows=2).in_degrees.tolist() == [3] * 12
    for size, rows in ((7, None), (12, 5), (12, 12), (12, 1)):
        with pytest.raises(ValueError, match="rows: expected"):
            network.torus(size, rows=rows)


def test_edges_are_sorted_and_count_once():
    """Catches edges in the order of a file, an edge listed both ways that counts twice, a direction that is lost."""
    graph = network.from_edges(4, [(3, 0), (0, 3), (2, 0), (0, 1)])
    assert graph.num_edges == 3 and graph.neighbours()[0][0].tolist() == [1, 2, 3]
    one_way = network.from_edges(4, [(3, 0), (2, 0), (0, 1)], directed=True)
    assert one_way.in_degrees.tolist() == [2, 1, 0, 0] and one_way.out_degrees.tolist() == [1, 0, 1, 1]
    np.testing.assert_array_equal(one_way.adjacency().toarray()[0], [0, 0, 1, 1])


@pytest.mark.parametrize(
    "edges, error, words",
    [
        ([(0, 4)], ValueError, r"edges: expected nodes in \[0, 4\), got \[0, 4\]"),
        ([(-1, 2)], ValueError, "edges: expected nodes"),
        ([(1, 1)], ValueError, "edges: expected pairs of different nodes"),
        ([(0.0, 1.0)], TypeError, "edges: expected pairs of integers"),
        ([(0, 1, 2)], TypeError, "edges: expected pairs of integers"),
    ],
)
def test_wrong_edges(edges, error, words):
    """Catches an edge to nobody, which would be one to the last node, and a loop."""
    with pytest.raises(error, match=words):
        network.from_edges(4, edges)


def test_a_csv_of_edges(tmp_path):
    """Catches a header taken for an edge, a blank line, a first edge behind a mark of UTF-8."""
    file = tmp_path / "edges.csv"
    file.write_text("from,to,weight\n0,1,5\n\n2,1,5\n")
    graph = network.from_csv(3, str(file))
    assert graph.num_edges == 2 and not graph.directed
    assert network.from_csv(3, str(file), directed=True).out_degrees.tolist() == [1, 0, 1]
    file.write_bytes(b"\xef\xbb\xbf0,1\r\n 2 , 1\r\n")  # a mark of UTF-8, spaces, Windows line ends
    assert network.from_csv(3, file).num_edges == 2


def test_two_texts_of_a_number_are_no_node(tmp_path):
    """Catches nodes 007 and 7 that become one."""
    file = tmp_path / "edges.csv"
    file.write_text("7,8\n007,9\n")
    with refused("file", value="007", rule="node 7", hint="Line 2"):
        network.from_csv(3, str(file), renumber=True)


def test_weights_are_not_dropped_in_silence(tmp_path):
    """Catches a graph of equal edges from a file in which their weights differ."""
    file = tmp_path / "edges.csv"
    file.write_text("from,to,weight\n0,1,5\n2,1,7\n")
    with refused("file", value=["2", "1", "7"], hint="drop_values"):
        network.from_csv(3, str(file))
    assert network.from_csv(3, str(file), drop_values=True).num_edges == 2


SNAP = """# Undirected graph: ca-Tiny.txt
# Nodes: 4 Edges: 4
# FromNodeId\tToNodeId
3466\t937
937\t3466
937\t10310
10310\t 5052
5052\t5052
"""
KONECT = "% sym unweighted\n% 3 4 4\n3466 937\n937  10310 1 1167609600\n10310 5052\n5052 5052\n"


@pytest.mark.parametrize("text", [SNAP, KONECT, SNAP.replace("\t", ";"), "\ufeff" + SNAP.replace("\n", "\r\n")])
def test_published_edge_lists(tmp_path, text):
    """SNAP's and KONECT's files: a path 3466 - 937 - 10310 - 5052. Catches a comment that is an edge, a delimiter that
    is none, nodes that nobody has, and loops that are passed over without a word."""
    file = tmp_path / "ca-Tiny.txt"
    file.write_text(text, newline="")
    graph = network.from_csv(4, str(file), renumber=True, drop_self_loops=True)
    senders, receivers = graph.senders, graph.receivers  # 937, 3466, 5052, 10310 are 0, 1, 2, 3
    assert list(zip(senders, receivers, strict=True)) == [(1, 0), (3, 0), (0, 1), (3, 2), (0, 3), (2, 3)]
    with pytest.raises(ValueError, match="drop_self_loops = true"):
        network.from_csv(4, str(file), renumber=True)
    with refused("population_size", value=5, hint=": 4"):
        network.from_csv(5, str(file), renumber=True, drop_self_loops=True)
    with pytest.raises(ValueError, match="renumber = true"):
        network.from_csv(5, str(file), drop_self_loops=True)
    file.write_text("0 1\n1 99999999999999999999\n")
    with pytest.raises(ValueError, match=r"nodes in \[0, 4611686018427387904\)"):
        network.from_csv(3, str(file), renumber=True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"0,1\n1,x\n", r"file: expected two integers a row, got \['1', 'x'\]. Line 2 of"),
        (b"0,1\n2\n", "file: expected two integers a row"),
        (b"0," + b"1" * 5000 + b"\n", "file: expected two integers a row"),
        (b"0,x\n1,2\n", r"file: expected two integers a row, got \['0', 'x'\]. Line 1"),
        ("\u0663,\u0664\n1,2\n".encode(), "file: expected two integers a row.* Line 1"),
        (b"0.0,1.0\n1,2\n", "file: expected two integers a row.* Line 1"),
        (b"0|1\n1|2\n", r"file: expected two integers a row.* The first line has one value.* delimiter = '\|'"),
        (b"0,1\n3,2,7\n12,1\n", r"\[0, 12\).* Line 3 of .* numbered from 0. To number .* renumber = true"),
        (b"from,to\n0,1_0\n", "file: expected two integers a row.* Line 2"),
        (b"from,to\n\n0,99999999999999999999\n", r"file: expected two different nodes in \[0, 12\).* Line 3"),
        (b"0,1\n-1,2\n", "file: expected two different nodes.* Line 2"),
        (b"0,1\n2,2\n", "file: expected two different nodes.* Line 2 .* drop_self_loops = true"),
        (b"from,to\n", "file: expected an edge a row, got 'none'"),
        (b"", "file: expected an edge a row, got 'none'"),
        ("von,\xfcber\n0,1\n".encode("latin-1"), "file: expected a CSV file in UTF-8, got .*UnicodeDecodeError"),
        (b"0," + b"1" * 200_000 + b"\n", "file: expected a CSV file in UTF-8, got .*field larger"),
    ],
    ids=lambda x: str(x)[:24],
)
def test_files_that_are_no_edges(tmp_path, text, told):
    """Catches an edge that is passed over as a header, and a number that is guessed."""
    file = tmp_path / "edges.csv"
    file.write_bytes(text)
    with pytest.raises(ValueError, match=told):
        network.from_csv(12, file)
    with refused("file", rule="UTF-8", hint="FileNotFoundError"):
        network.from_csv(12, tmp_path / "other.csv")


def test_points_of_failure():
    """Catches a removed node that stays as an island: then every graph would fall apart. L5."""
    ring = network.remove_node(network.ring(16), 5)
    path = network.path(15)
    assert ring.num_edges == 14 and sorted(ring.in_degrees) == sorted(path.in_degrees)
    np.testing.assert_allclose(network.laplacian_extremes(ring), network.laplacian_extremes(path), atol=1e-12)
    for hub, connectivity in ((0, 0.0), (3, 1.0)):
        rest = network.remove_node(network.star(16), hub)
        np.testing.assert_allclose(network.algebraic_connectivity(rest), connectivity, atol=1e-12)
        assert network.is_connected(rest) == (hub == 3)
    with pytest.raises(ValueError, match="graph: expected at least two nodes"):
        network.remove_node(network.ring(1), 0)


def test_a_removed_node_keeps_what_is_meant():
    """Catches parts that were meant and are refused after a node has gone, and a hint that cannot be followed."""
    parts = network.from_edges(5, [(0, 1), (2, 3)], connected=False)
    hub = network.star(4)
    for graph in (network.remove_node(parts, 4), network.remove_node(hub, 0, connected=False)):
        topology.check_connected("graph", graph)
    for graph in (network.remove_node(hub, 0), network.remove_node(network.path(3), 1, connected=True)):
        with refused("graph", hint="connected=False"):
            topology.check_connected("graph", graph)
    with pytest.raises(ValueError, match="connected: expected True or False"):
        network.remove_node(hub, 0, connected=None)


def test_directed_connection_is_strong():
    """Catches a one-way street that counts as connected."""
    assert not network.is_connected(network.from_edges(3, [(0, 1), (1, 2)], directed=True))
    assert not network.hears_back(network.from_edges(3, [(0, 1), (1, 2)], directed=True))
    assert not network.hears_back(network.from_edges(3, [(0, 1), (1, 0), (1, 2)], directed=True))
    assert network.hears_back(network.from_edges(4, [(0, 1), (1, 0), (2, 3), (3, 2)], directed=True))
    assert network.hears_back(network.from_edges(4, [(0, 1)])) and network.hears_back(network.exponential(8))
    assert network.is_connected(network.from_edges(3, [(0, 1), (1, 2), (2, 0)], directed=True))
