"""Mixing that changes from round to round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_sim import network
from tests.refusals import refused

RAGGED = network.erdos_renyi(16, 0.25, seed=3)
ONE_WAY = network.exponential(16)
ROUNDS = 2000


def weights_of(mixing, rounds=ROUNDS):
    """[rounds, N, N] what is sent, without what nodes keep; and who is up."""
    tables = jax.tree.map(jnp.asarray, mixing.tables)
    links = jax.jit(jax.vmap(lambda key: mixing.links(key, jnp.int32(0), tables)))
    found = jax.device_get(links(jax.random.split(jax.random.key(8), rounds)))
    size = mixing.graph.population_size
    whole = np.zeros((rounds, size, size), np.float32)
    for place in range(found.weights.shape[2]):
        rows = np.arange(size)[None], np.arange(rounds)[:, None]
        np.add.at(whole, (rows[1], rows[0], found.neighbours[:, :, place]), found.weights[:, :, place])
    return whole, found.up


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("size, exact", [(16, True), (12, False)])
def test_one_peer(size, exact):
    """Nodes agree on the average after log2 N rounds if N is a power of 2. Catches a table that is read out of turn."""
    mixing = network.one_peer_exponential(size)
    product, rounds = np.eye(size), (size - 1).bit_length()
    for t in range(rounds):
        matrix = network.matrix_of(mixing, round=t).toarray()
        np.testing.assert_allclose([matrix.sum(0), matrix.sum(1)], 1)
        assert (matrix > 0).sum() == 2 * size
        before, product = product, matrix @ product
    assert np.allclose(product, 1 / size) == exact and not np.allclose(before, 1 / size)


def test_matching():
    """Pairs, each edge with probability 1 / (d_i + d_j - 1): 5 standard deviations of 2,000 rounds, for each edge.

    Catches a node that meets two, a matching that some edge never enters, and numbers that differ at the two ends."""
    found, up = weights_of(network.random_matching(RAGGED))
    assert up.all() and (found == found.transpose(0, 2, 1)).all()
    assert set(np.unique(found)) == {0.0, 0.5} and (found > 0).sum(2).max() == 1
    chance = 1 / (np.add.outer(RAGGED.in_degrees, RAGGED.in_degrees) - 1)
    rates, there = (found > 0).mean(0), RAGGED.adjacency().toarray() > 0
    assert (rates[~there] == 0).all()
    error = np.abs(rates - chance)[there] / np.sqrt(chance * (1 - chance) / ROUNDS)[there]
    assert error.max() < 5


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("graph", [RAGGED, ONE_WAY], ids=["ragged", "directed"])
def test_epidemic(graph):
    """Each node gives half to one of its neighbours, all as likely (chi-square at 1e-4); columns add up to 1."""
    mixing = network.epidemic(graph)
    found, _ = weights_of(mixing)
    assert ((found > 0).sum(1) == 1).all() and set(np.unique(found)) == {0.0, 0.5}
    counts = (found > 0).sum(0)
    for sender in range(16):
        there = graph.adjacency().toarray()[:, sender] > 0
        assert counts[~there, sender].sum() == 0
        assert there.sum() == 1 or stats.chisquare(counts[there, sender]).pvalue > 1e-4 / 16
    np.testing.assert_allclose(network.matrix_of(mixing, jax.random.key(1)).toarray().sum(0), 1)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("base", ["metropolis", "push", "matching"])
def test_failures(base):
    """Columns always add up to 1; an edge is there at the product of the rates; the nodes that are down say nothing.

    Catches a failure that takes one direction of an edge, or what it carried out of the sum. 5 standard deviations."""
    mixing = {
        "metropolis": lambda: network.metropolis(RAGGED),
        "push": lambda: network.push(ONE_WAY),
        "matching": lambda: network.random_matching(RAGGED),
    }[base]()
    failing = network.with_node_failures(network.with_link_failures(mixing, 0.3), 0.2)
    assert failing.keeps_average and not failing.static
    found, up = weights_of(failing)
    usual, _ = weights_of(mixing)
    rate = 0.7 * 0.8**2
    expected = (usual > 0).mean(0) * rate
    there = expected > 0
    error = np.abs((found > 0).mean(0) - expected)[there] / np.sqrt(expected * (1 - expected) / ROUNDS)[there]
    assert error.max() < 5 and abs(up.mean() - 0.8) < 5 * np.sqrt(0.16 / up.size)
    down = ~up
    assert not (found > 0)[down].any() and not (found > 0).transpose(0, 2, 1)[down].any()
    assert base == "push" or (found == found.transpose(0, 2, 1)).all()
    for seed in range(3):
        matrix = network.matrix_of(failing, jax.random.key(seed)).toarray()
        np.testing.assert_allclose(matrix.sum(0), 1, atol=1e-6)
    nothing, _ = weights_of(network.with_link_failures(mixing, 0.0), 20)
    assert (nothing == usual[:20]).all() or base == "matching"


def test_what_is_refused():
    """Catches failures that would move the average of a directed graph."""
    with refused("mixing", rule="symmetric"):
        network.with_link_failures(network.neighbour_mean(ONE_WAY), 0.1)
    with pytest.raises(ValueError, match="graph: expected an undirected graph"):
        network.random_matching(ONE_WAY)
    for rate in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="rate: expected a number"):
            network.with_node_failures(network.metropolis(RAGGED), rate)


def test_failures_around_failures():
    """Wrappers of a kind fail independently: under three of them 0.7 x 0.6 x 0.5 of the links, or nodes, are there; 5
    standard deviations. Catches a second wrapper that draws what the first one drew, and so does nothing."""
    base = network.metropolis(network.ring(16))
    for kind, wrap in (("links", network.with_link_failures), ("nodes", network.with_node_failures)):
        mixing, rate = base, 1.0
        for failing in (0.3, 0.4, 0.5):
            mixing, rate = wrap(mixing, failing), rate * (1 - failing)
        found, up = weights_of(mixing)
        there = (found > 0)[:, 0, 1] if kind == "links" else up[:, 3]
        assert abs(there.mean() - rate) < 5 * np.sqrt(rate * (1 - rate) / ROUNDS)
    assert mixing.failures == 3
    mixed = network.with_link_failures(network.with_node_failures(network.with_link_failures(base, 0.3), 0.2), 0.4)
    rate = 0.7 * 0.64 * 0.6
    found, _ = weights_of(mixed)
    assert abs((found > 0)[:, 0, 1].mean() - rate) < 5 * np.sqrt(rate * (1 - rate) / ROUNDS)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("size", [1, 5])
def test_nobody_to_hear(size):
    """Nodes without an edge keep what they have, to the bit. Catches tables without a column, which cannot be read."""
    alone, x = network.from_edges(size, []), jnp.arange(size, dtype=jnp.float32) / 3
    for mixing in (
        network.metropolis(alone),
        network.push(alone),
        network.random_matching(alone),
        network.epidemic(alone),
        network.with_node_failures(network.with_link_failures(network.neighbour_mean(alone), 0.5), 0.5),
    ):

        @jax.jit
        def round(key, tables, mixing=mixing):
            links = mixing.links(key, jnp.int32(0), tables)
            return network.mixed(links, x), links.weights

        found, weights = round(jax.random.key(0), mixing.tables)
        assert (found == x).all() and not (weights != 0).any()
