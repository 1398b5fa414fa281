"""Random graphs have the laws of their families, and a seed decides them."""

import numpy as np
import pytest
from scipy import stats

from fedjax_sim import network

MAKES = {
    "erdos_renyi": lambda seed: network.erdos_renyi(60, 0.2, seed=seed),
    "k_regular": lambda seed: network.k_regular(60, 4, seed=seed),
    "k_regular, dense": lambda seed: network.k_regular(20, 13, seed=seed),  # by its complement
    "small_world": lambda seed: network.small_world(60, 4, 0.3, seed=seed),
    "stochastic_block": lambda seed: network.stochastic_block(60, 3, 0.4, 0.1, seed=seed),
}


@pytest.mark.parametrize("name", MAKES)
def test_a_seed_decides(name):
    """Catches a graph that another run would draw otherwise, and a seed that nobody reads."""
    one, again, other = (MAKES[name](seed).adjacency().toarray() for seed in (1, 1, 2))
    assert (one == again).all() and (one != other).any() and (one == one.T).all() and not one.diagonal().any()


def test_erdos_renyi():
    """Every pair at its rate: chi-square of 400 graphs over the 28 pairs of 8 nodes at 1e-4, which a pair that is
    never drawn, or drawn twice as often, fails."""
    graphs = [network.erdos_renyi(8, 0.3, connected=False, seed=seed) for seed in range(400)]
    counts = sum(graph.adjacency().toarray() for graph in graphs)[np.triu_indices(8, 1)]
    excess = ((counts - 120) ** 2 / (400 * 0.3 * 0.7)).sum()
    assert stats.chi2.sf(excess, 28) > 1e-4 and excess > stats.chi2.ppf(1e-4, 28)
    large = network.erdos_renyi(20_000, 2e-3, seed=3)
    pairs = 20_000 * 19_999 / 2
    assert abs(large.num_edges - 2e-3 * pairs) < 5 * np.sqrt(2e-3 * pairs)  # 6e-7
    assert network.erdos_renyi(9, 1.0).num_edges == 36


def test_stochastic_block():
    """Catches blocks whose rates are swapped, and rectangles that miss a block. Five standard deviations: 6e-7 each."""
    graph = network.stochastic_block(3001, 3, 0.02, 0.004, seed=5)
    block = np.searchsorted(np.cumsum([1001, 1000, 1000]), np.arange(3001), side="right")
    ends = block[graph.senders], block[graph.receivers]
    for one in range(3):
        for other in range(one + 1):
            pairs = 1000 * 1000 if one != other else 1000 * 999 / 2
            rate = 0.02 if one == other else 0.004
            found = ((ends[0] == one) & (ends[1] == other)).sum() / (2 if one == other else 1)
            assert abs(found - rate * pairs) < 5 * np.sqrt(rate * pairs) + 0.003 * rate * pairs


@pytest.mark.parametrize("size, degree", [(16, 3), (16, 8), (16, 14), (16, 15), (200, 6), (9, 4)])
def test_k_regular(size, degree):
    """Catches multiple edges that leave a degree short, and a graph that mixes much worse than random ones do."""
    graph = network.k_regular(size, degree, seed=4)
    assert (graph.in_degrees == degree).all() and graph.num_edges == size * degree // 2
    if size == 200:
        assert network.algebraic_connectivity(graph) > degree - 2 * np.sqrt(degree - 1) - 0.4  # Friedman: to o(1)


def test_small_world():
    """Catches a lattice of another degree, edges that are lost in rewiring, a chance that is not the one asked for."""
    lattice = network.small_world(40, 6, 0.0)
    ring = {frozenset((i, (i + hop) % 40)) for i in range(40) for hop in (1, 2, 3)}
    edges = lambda graph: {frozenset(pair) for pair in zip(graph.senders, graph.receivers, strict=True)}  # noqa: E731
    assert edges(lattice) == ring
    for chance in (0.2, 1.0):
        moved = [network.small_world(40, 6, chance, connected=False, seed=seed) for seed in range(40)]
        assert {graph.num_edges for graph in moved} == {120}
        kept = sum(len(ring & edges(graph)) for graph in moved) / (40 * 120)
        expected = (1 - chance) + chance * 6 / 39  # a moved edge may fall on the lattice again
        assert abs(kept - expected) < 0.04
    dense = network.small_world(12, 8, 0.2, seed=1)  # where most moved edges fall on others, and are moved again
    stays = np.random.default_rng(1).random(48) >= 0.2
    near = {frozenset((i // 4, (i // 4 + 1 + i % 4) % 12)) for i in range(48) if stays[i]}
    assert near <= edges(dense) and dense.num_edges == 48  # an edge that was not moved is where it was


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: network.erdos_renyi(50, 0.01), "probability: expected a connected graph"),
        (lambda: network.erdos_renyi(50, float("nan")), "probability: expected a number"),
        (lambda: network.stochastic_block(40, 2, 0.5, 0.0), "between: expected a connected graph"),
        (lambda: network.k_regular(7, 3), "degree: expected an even number"),
        (lambda: network.k_regular(7, 7), "degree: expected an integer in"),
        (lambda: network.k_regular(40, 1), "degree: expected a connected graph"),
        (lambda: network.small_world(40, 3, 0.1), "degree: expected an even number"),
        (lambda: network.hypercube(12), "population_size: expected a power of 2"),
        (lambda: network.complete(5000), "population_size: expected an integer in"),
    ],
)
def test_what_is_refused(make, words):
    """Catches a graph of islands that a run takes for connected."""
    with pytest.raises(ValueError, match=words):
        make()
    assert network.erdos_renyi(50, 0.01, connected=False).population_size == 50
