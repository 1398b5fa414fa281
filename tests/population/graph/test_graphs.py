"""Graphs, their partitions over parties, and the graph data sets."""

import jax
import numpy as np
import pytest

from fedjax_sim import population
from fedjax_sim.population.graph.graphs import molecule, read_cora
from fedjax_sim.population.graph.partition import stacked_graphs
from tests.refusals import refused

RNG = np.random.default_rng(0)
EDGES = RNG.integers(0, 30, (80, 2))
GRAPH = population.graph_data(RNG.normal(size=(30, 4)), EDGES, edge_types=RNG.integers(0, 3, 80))


def undirected(graph):
    return {(min(a, b), max(a, b)) for a, b in zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True)}


def test_edges_are_made_simple():
    """Catches self-loops and doubles that would count twice in a degree, and a direction that is lost."""
    graph = population.graph_data(np.eye(4), [[0, 1], [0, 1], [1, 0], [2, 2], [3, 1]], directed=True)
    assert list(zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True)) == [(1, 0), (0, 1), (3, 1)]
    both = population.graph_data(np.eye(4), [[0, 1], [3, 1]])
    assert len(both.senders) == 4 and undirected(both) == {(0, 1), (1, 3)}
    assert population.graph_data(np.eye(2), np.zeros((0, 2), int)).senders.tolist() == []


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"features": [[np.nan]]}, "features: expected finite"),
        ({"features": [1.0]}, "features"),
        ({"edges": [[0, 4]]}, r"edges: expected nodes in \[0, 4\)"),
        ({"edges": [[-1, 0]]}, "edges"),
        ({"edges": [[0.5, 1]]}, "edges: expected integers"),
        ({"edge_types": [0, 1]}, "edge_types"),
        ({"edge_types": [-1]}, "edge_types"),
    ],
)
def test_wrong_graphs_are_refused(wrong, words):
    """Catches an index that JAX would clamp."""
    with pytest.raises(ValueError, match=words):
        population.graph_data(**({"features": np.eye(4), "edges": [[0, 1]]} | wrong))


def test_owners():
    """Catches unequal or empty parts, and communities that cut as many edges as chance."""
    blocks = population.stochastic_blocks(num_clients=1, degree_between=0.5).test["x"]
    graph = jax.tree.map(lambda x: x[0], blocks)
    cut = {}
    for by in ("random", "community"):
        owner = population.node_owners(graph, 4, by=by)
        sizes = np.bincount(owner, minlength=4)
        assert sizes.min() >= 90 and sizes.max() <= 110
        cut[by] = (owner[graph.senders] != owner[graph.receivers]).mean()
    assert abs(cut["random"] - 0.75) < 0.06 and cut["community"] < 0.3
    labels = RNG.integers(0, 3, 30)
    owner = population.node_owners(GRAPH, 3, by="label", labels=labels)
    assert (
        np.bincount(owner).tolist() == [10, 10, 10] and (np.diff(owner[np.argsort(labels, kind="stable")]) >= -2).all()
    )
    assert sum(len(np.unique(labels[owner == p])) for p in range(3)) <= 5  # a party's labels follow each other
    with pytest.raises(ValueError, match="num_parties"):
        population.node_owners(GRAPH, 31)
    with pytest.raises(ValueError, match="labels"):
        population.node_owners(GRAPH, 3, by="label")
    with pytest.raises(ValueError, match=r"labels: .* integers"):  # NaN has a place of its own in an order
        population.node_owners(GRAPH, 3, by="label", labels=np.full(30, np.nan))


def spelled(parties):
    """(sender id, receiver id, type) of every edge of every party, with halo addresses resolved."""
    graphs, found = parties.graphs, []
    width = graphs.ids.shape[1]
    for p in range(len(graphs.ids)):
        addresses = np.where(parties.halo[p] >= 0, parties.halo[p], 0)
        ids = np.concatenate([graphs.ids[p], np.where(parties.halo[p] >= 0, graphs.ids.reshape(-1)[addresses], -1)])
        real = graphs.receivers[p] >= 0
        rows = (ids[graphs.senders[p][real]], graphs.ids[p][graphs.receivers[p][real]], graphs.types[p][real])
        assert graphs.receivers[p][real].max(initial=0) < width
        found += list(zip(*(row.tolist() for row in rows), strict=True))
    return found


def whole(graph):
    return sorted(zip(graph.senders.tolist(), graph.receivers.tolist(), graph.types.tolist(), strict=True))


def test_parties_hold_the_graph():
    """Catches an edge at two parties or at none, a halo that points to the wrong node, features of another node."""
    owner = population.node_owners(GRAPH, 4, by="random")
    parties = population.parties_of(GRAPH, node_owner=owner)
    assert sorted(spelled(parties)) == whole(GRAPH)
    assert parties.cut_edges == (owner[GRAPH.senders] != owner[GRAPH.receivers]).sum() > 0
    ids = parties.graphs.ids
    for p in range(4):
        assert ids[p][ids[p] >= 0].tolist() == np.flatnonzero(owner == p).tolist()
        np.testing.assert_array_equal(parties.graphs.nodes[p][ids[p] >= 0], GRAPH.nodes[owner == p])
    by_edge = population.parties_of(GRAPH, edge_owner=population.edge_owners(GRAPH, 3))
    assert sorted(spelled(by_edge)) == whole(GRAPH) and by_edge.cut_edges == 0 and (by_edge.halo == -1).all()
    held = population.neighbourhoods(GRAPH, 3, hops=1)
    some = population.parties_of(GRAPH, held=held)
    for p in range(3):
        inside = [edge for edge in whole(GRAPH) if held[p][edge[0]] and held[p][edge[1]]]
        one = population.Parties(jax.tree.map(lambda x, p=p: x[p : p + 1], some.graphs), some.halo[p : p + 1], 0)
        assert sorted(spelled(one)) == inside
    with pytest.raises(ValueError, match="one of the three"):
        population.parties_of(GRAPH)
    for held in ([[True]], np.ones((2, 30))):
        with pytest.raises(ValueError, match=r"held: expected bool \[P, 30\]"):
            population.parties_of(GRAPH, held=held)
    with pytest.raises(ValueError, match="num_parties"):
        population.neighbourhoods(GRAPH, 0)
    with pytest.raises(ValueError, match="none at party 1"):
        population.parties_of(GRAPH, node_owner=np.where(np.arange(30) < 9, 0, 2))


def test_both_directions_of_an_edge_go_to_one_party():
    """Catches half an edge."""
    owner = population.edge_owners(GRAPH, 4)
    party = dict(zip(zip(GRAPH.senders.tolist(), GRAPH.receivers.tolist(), strict=True), owner.tolist(), strict=True))
    assert all(party[b, a] == p for (a, b), p in party.items()) and set(party.values()) == {0, 1, 2, 3}


def test_labels_are_at_one_party():
    """Catches a test label among those to train on, and one that is lost."""
    data = population.stochastic_blocks(num_clients=5, num_nodes=100, labelled_share=0.3)
    train, test, central = data.train.examples, data.local_test.examples, data.test
    known = {}
    for rows in (train, test):
        y, ids = np.asarray(rows["y"]), np.asarray(rows["x"].ids)
        known.update(zip(ids[y >= 0].tolist(), y[y >= 0].tolist(), strict=True))
    assert (np.asarray(train["y"]) >= 0).sum() == 30 and (np.asarray(test["y"]) >= 0).sum() == 70 and len(known) == 100
    tested = np.flatnonzero(central["y"][0] >= 0)
    assert [known[i] for i in tested] == central["y"][0][tested].tolist() and len(tested) == 70


def test_karate_club():
    """Catches an edge mistyped: degrees as published."""
    data = population.karate_club(num_clients=3)
    graph = jax.tree.map(lambda x: x[0], data.test["x"])
    degrees = np.bincount(graph.receivers, minlength=34)
    assert len(graph.senders) == 2 * 78 and degrees[[0, 33, 32, 2, 11]].tolist() == [16, 17, 12, 10, 1]
    assert (data.test["y"] >= 0).sum() == 32 and (np.asarray(data.train.examples["y"]) >= 0).sum() == 2


def test_stochastic_blocks():
    """Catches degrees inside and between exchanged. The mean degree of 400 nodes has a deviation of 0.15."""
    data = population.stochastic_blocks(num_clients=1, degree_inside=7.0, degree_between=2.0)
    graph = jax.tree.map(lambda x: x[0], data.test["x"])
    block = np.arange(400) // 100
    inside = block[graph.senders] == block[graph.receivers]
    assert abs(inside.sum() / 400 - 7) < 0.9 and abs((~inside).sum() / 400 - 2) < 0.5


def test_molecules():
    """Catches labels that the bonds do not say, a class that hardly occurs, ids that two molecules share."""
    data = population.molecules(num_clients=3, graphs_per_client=5, num_test=200)
    graphs, y = data.test["x"], data.test["y"]
    for i in range(50):
        real = graphs.receivers[i] >= 0
        kinds = graphs.nodes[i].argmax(1)
        senders, receivers = (kinds[ends[i][real]].tolist() for ends in (graphs.senders, graphs.receivers))
        pairs = set(zip(senders, receivers, strict=True))
        assert ((1, 2) in pairs) == bool(y[i])
    assert 0.35 < y.mean() < 0.65
    ids = np.concatenate([np.asarray(data.train.examples["x"].ids).reshape(-1), graphs.ids.reshape(-1)])
    assert len(np.unique(ids[ids >= 0])) == (ids >= 0).sum()
    graph, _ = molecule(np.random.default_rng(0), 14, np.full(4, 0.25))
    assert np.bincount(graph.receivers).max() <= 4


def test_cora(shared_data):
    """Catches a split or a feature that is not the published one."""
    graph, labels, parts = read_cora(str(shared_data / "cora"))
    assert graph.nodes.shape == (2708, 1433) and len(graph.senders) == 2 * 5278 and np.bincount(labels).min() == 180
    assert [len(parts[name]) for name in ("train", "validation", "test")] == [140, 500, 1000]
    assert np.bincount(labels[parts["train"]]).tolist() == [20] * 7
    np.testing.assert_allclose(graph.nodes.sum(1), 1, rtol=1e-5)
    data = population.cora(directory=str(shared_data / "cora"), num_clients=4)
    assert data.train.size == 4 and data.num_outputs == 7


def test_broken_cora_is_refused(tmp_path):
    """Catches words out of range and files that are none."""
    with pytest.raises(ValueError, match="directory"):
        population.cora(directory=str(tmp_path / "none"))
    (tmp_path / "cora.npz").write_bytes(b"PK\x03\x04 not one")
    with pytest.raises(ValueError):
        population.cora(directory=str(tmp_path))
    arrays = {"feature_indptr": [0, 1, 2], "feature_indices": [0, 1433], "edges": [[0, 1]], "labels": [0, 1]}
    arrays |= {"train": [0], "validation": [0], "test": [1]}
    np.savez(tmp_path / "cora.npz", **{name: np.array(x) for name, x in arrays.items()})
    with pytest.raises(ValueError, match="words in"):
        population.cora(directory=str(tmp_path))


def test_arguments_are_named_as_they_were_given():
    """Catches errors about the argument of a function that the user did not call, and arrays taken for graphs."""
    node = {"labels": np.zeros(30, int), "train": np.array([0]), "test": np.array([1]), "name": "n"}
    for make in (lambda graph, **o: population.node_data(graph, **node, **o), population.link_data):
        for options, words in (({"num_clients": 31}, "num_clients: expected"), ({"partition": "x"}, "partition: exp")):
            with pytest.raises(ValueError, match=words):
                make(GRAPH, **options)
        with pytest.raises(TypeError, match="graph: expected a GraphData"):
            make(np.eye(3))
    for call in (population.node_owners, population.edge_owners, population.neighbourhoods):
        with pytest.raises(TypeError, match="graph: expected a GraphData"):
            call(np.eye(3), 2)
    with pytest.raises(ValueError, match="directed: expected True or False"):
        population.graph_data(np.eye(3), [[0, 1]], directed="no")


def test_stacked_keeps_what_it_pads():
    """Catches padding that is a node or an edge."""
    small = population.graph_data(np.ones((2, 4)), [[0, 1]], edge_types=[2])
    batch = stacked_graphs([GRAPH, small])
    assert batch.ids[1].tolist() == [0, 1] + [-1] * 28
    assert (batch.receivers[1] >= 0).sum() == 2 and batch.types[1][:2].tolist() == [2, 2]


def test_links_are_kept_apart():
    """Catches a test edge in a party's graph or in the test graph, and an edge that is called none."""
    whole = jax.tree.map(lambda x: x[0], population.karate_club(num_clients=1).test["x"])
    data = population.link_data(whole, num_clients=3, test_share=0.25)
    edges = undirected(whole)
    central = {name: np.asarray(data.test[name][0]) for name in ("pairs", "y")}
    tested = {tuple(sorted(pair)) for pair in central["pairs"][central["y"] == 1].tolist()}
    assert len(tested) == round(0.25 * 78) == (central["y"] == 0).sum() and tested <= edges
    assert not {tuple(sorted(pair)) for pair in central["pairs"][central["y"] == 0].tolist()} & edges
    graph = jax.tree.map(lambda x: x[0], data.test["x"])
    assert undirected(graph) == edges - tested
    rows = jax.device_get(data.train.examples)
    for p in range(3):
        ids = rows["x"].ids[p]
        real = rows["x"].receivers[p] >= 0
        real &= rows["x"].senders[p] < len(ids)
        own = {(ids[a], ids[b]) for a, b in zip(rows["x"].senders[p][real], rows["x"].receivers[p][real], strict=True)}
        assert not {tuple(sorted(edge)) for edge in own} & tested
        pairs, y = ids[rows["pairs"][p]], rows["y"][p]
        assert {tuple(sorted(pair)) for pair in pairs[y == 1].tolist()} == {tuple(sorted(edge)) for edge in own}
        assert not {tuple(sorted(pair)) for pair in pairs[y == 0].tolist()} & edges


def test_a_pair_of_several_types_is_one_link():
    """Catches a pair that is trained as joined by one of its types, and tested by another."""
    twice = population.graph_data(GRAPH.nodes, np.concatenate([EDGES, EDGES]), edge_types=np.repeat([0, 1], len(EDGES)))
    data = population.link_data(twice, test_share=0.4)
    seen = []
    for examples in (data.test, data.train.examples):
        pairs, y = np.asarray(examples["pairs"][0]), np.asarray(examples["y"][0])
        seen.append([tuple(sorted(pair)) for pair in pairs[y == 1].tolist()])
    assert not set(seen[0]) & set(seen[1]) and set(seen[0]) | set(seen[1]) == undirected(twice)
    assert all(len(pairs) == len(set(pairs)) for pairs in seen)
    assert sorted(set(np.asarray(data.test["x"].types[0]).tolist())) == [0, 1]


def test_links_of_a_data_set():
    """Catches nodes that change their party, a test edge in a party's graph, and fewer pairs than there are."""
    club = population.karate_club(num_clients=3)
    data = population.with_links(club, test_share=0.25)
    np.testing.assert_array_equal(data.train.examples["x"].ids, club.train.examples["x"].ids)
    central = {name: np.asarray(data.test[name][0]) for name in ("pairs", "y")}
    tested = {tuple(sorted(pair)) for pair in central["pairs"][central["y"] == 1].tolist()}
    edges = undirected(jax.tree.map(lambda x: x[0], club.test["x"]))
    assert len(tested) == 20 == (central["y"] == 0).sum()
    assert undirected(jax.tree.map(lambda x: x[0], data.test["x"])) == edges - tested
    with pytest.raises(ValueError, match="data: expected one graph over parties"):
        population.with_links(population.molecules(num_clients=2, graphs_per_client=3, num_test=4))
    with pytest.raises(TypeError, match="data: expected a FederatedData"):
        population.with_links(GRAPH)


def test_links_that_cannot_be_judged_are_refused():
    """Catches a complete graph, whose AUC was 0, and a directed one, whose edges could be called none."""
    complete = [(i, j) for i in range(8) for j in range(i)]
    with refused("graph", rule="not joined"):
        population.link_data(population.graph_data(np.eye(8), complete))
    with refused("graph", rule="both directions"):
        population.link_data(population.graph_data(np.eye(8), complete, directed=True))


def test_wrong_owners_are_refused():
    """Catches a node of party -1: nobody had it, and the halo gave its neighbours another node's embedding."""
    for options in ({"node_owner": [0, -1] * 15}, {"edge_owner": np.full(len(GRAPH.senders), -1)}):
        with pytest.raises(ValueError, match=r"(node|edge)_owner: expected parties >= 0"):
            population.parties_of(GRAPH, **options)
    lonely = population.graph_data(np.eye(3), np.zeros((0, 2), int))
    with pytest.raises(ValueError, match="edge_owner: expected parties"):
        population.parties_of(lonely, edge_owner=np.zeros(0, int))


def test_every_party_has_an_edge():
    """Catches more parties than edges, some of them without any: directions were counted."""
    path = population.graph_data(np.eye(4), [[0, 1], [1, 2], [2, 3]])
    assert sorted(set(population.edge_owners(path, 3).tolist())) == [0, 1, 2]
    with refused("num_parties", rule="[1, 3]"):
        population.edge_owners(path, 4)


@pytest.mark.parametrize("train", [[-1], [4], [True, False, False, False], [], [[0]], [0.0]])
def test_wrong_nodes_are_refused(train):
    """Catches -1, which gave padding a label or none, a mask that is read as the nodes 0 and 1."""
    path = population.graph_data(np.eye(4), [[0, 1], [1, 2], [2, 3]])
    with pytest.raises(ValueError, match="train: expected nodes"):
        population.node_data(path, np.array([0, 1, 0, 1]), np.array(train), np.array([2, 3]), name="path")
