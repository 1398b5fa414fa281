"""This module makes random graphs. Each graph is a function of its options and a seed.

Host NumPy, in time that grows with the number of edges.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import numpy as np

from fedjax_sim import validate
from fedjax_sim.network.topology import Graph, from_edges, is_connected
from fedjax_sim.validate import FromData, Integer, PopulationSize, Share

TRIES = 10_000  # the most attempts to repair a random graph that is not simple


@validate.named_arguments
def erdos_renyi(population_size: PopulationSize, probability: Share, *, connected: bool = True, seed: int = 0) -> Graph:
    """Makes a graph in which each pair of nodes is joined with probability p, independently.

    Args:
      population_size: N.
      probability: p in [0, 1]. Below log(N) / N the graph is most likely not connected.
      connected: whether a graph that is not connected is refused.
      seed: of the draws.

    Returns: `Graph`.

    Raises: ValueError for a graph that is not connected, unless `connected` is False.

    Guarantees: The number of edges and the degrees have their laws
    (tests/network/test_random_graphs.py::test_erdos_renyi).

    References: Gilbert 1959.
    """
    rng = _rng(seed)
    pairs = _random_pairs(rng, population_size, probability)
    return _connected(from_edges(population_size, pairs), connected, "probability", probability)


@validate.named_arguments
def stochastic_block(
    population_size: PopulationSize,
    num_blocks: int,
    inside: Share,
    between: Share,
    *,
    connected: bool = True,
    seed: int = 0,
) -> Graph:
    """Makes a graph of blocks, in which pairs are joined more or less often inside of a block.

    The sizes of blocks differ by one node at most.

    Args:
      population_size: N.
      num_blocks: in [1, N]. A block holds consecutive node numbers.
      inside, between: the probabilities inside of a block and between two blocks, in [0, 1].
      connected: whether a graph that is not connected is refused.
      seed: of the draws.

    Returns: `Graph`.

    Raises: ValueError for a graph that is not connected, unless `connected` is False.

    Guarantees: Numbers of edges inside of blocks and between blocks have their laws
    (tests/network/test_random_graphs.py::test_stochastic_block).

    References: Holland, Laskey and Leinhardt 1983.
    """
    validate.integer("num_blocks", num_blocks, 1, population_size)
    rng = _rng(seed)
    blocks = np.array_split(np.arange(population_size), num_blocks)
    edges = [_random_pairs(rng, len(block), inside) + block[0] for block in blocks]
    # The pairs of a block with all later nodes form one rectangle, which is drawn at once.
    for block in blocks:
        num_later = population_size - block[-1] - 1
        pair_codes = _random_subset(rng, len(block) * num_later, between)
        edges.append(
            np.stack([pair_codes // max(num_later, 1) + block[0], pair_codes % max(num_later, 1) + block[-1] + 1], 1)
        )
    return _connected(from_edges(population_size, np.concatenate(edges)), connected, "between", between)


@validate.named_arguments
def k_regular(population_size: PopulationSize, degree: int, *, connected: bool = True, seed: int = 0) -> Graph:
    """Makes a random graph in which every node has the same number of neighbours.

    Half-edges are paired at random. Pairs that join a node to itself, or two nodes twice, are mixed again with as many
    other pairs, until there are none (the configuration model, repaired). Above a degree of N / 2 the complement is
    drawn.

    Args:
      population_size: N.
      degree: k in [0, N - 1]; N k must be even.
      connected: whether a graph that is not connected is refused.
      seed: of the draws.

    Returns: `Graph`.

    Raises: ValueError for an odd N k, and for a graph that is not connected, unless `connected` is False.

    Guarantees: The graph is simple and has that degree. It mixes nearly as fast as theory allows
    (tests/network/test_random_graphs.py::test_k_regular).

    References: Bollobas 1980.
    """
    validate.integer("degree", degree, 0, population_size - 1)
    if population_size * degree % 2:
        validate.fail("degree", f"an even number for N = {population_size} nodes", degree)
    complement_degree = population_size - 1 - degree
    # In a dense graph nearly all pairs exist already, so that repairs would rarely succeed.
    if complement_degree < degree:
        complement = k_regular(population_size, complement_degree, connected=False, seed=seed)
        adjacency = np.ones((population_size, population_size), bool)
        adjacency[complement.senders, complement.receivers] = False
        pairs = np.stack(np.nonzero(np.triu(adjacency, 1)), 1)
    else:
        pairs = _simple_pairs(_rng(seed), np.repeat(np.arange(population_size), degree), population_size)
    return _connected(from_edges(population_size, pairs), connected, "degree", degree)


@validate.named_arguments
def small_world(
    population_size: Annotated[Annotated[int, Integer(4)], FromData("population_size")],
    degree: int,
    probability: Share,
    *,
    connected: bool = True,
    seed: int = 0,
) -> Graph:
    """Makes a ring with edges to the `degree` nearest nodes, and rewires some of the edges at random.

    Args:
      population_size: N >= 4.
      degree: k, even, in [2, N - 2].
      probability: that the far end of an edge is drawn anew, among the nodes to which it makes a new edge; in [0, 1].
      connected: whether a graph that is not connected is refused.
      seed: of the draws.

    Returns: `Graph`.

    Raises: ValueError for a graph that is not connected, unless `connected` is False.

    Guarantees: Without rewiring the graph is a ring lattice, and it always has N k / 2 edges
    (tests/network/test_random_graphs.py::test_small_world).

    References: Watts and Strogatz 1998.
    """
    validate.integer("degree", degree, 2, population_size - 2)
    if degree % 2:
        validate.fail("degree", "an even number", degree)
    rng = _rng(seed)
    nodes = np.arange(population_size)
    near = np.repeat(nodes, degree // 2)
    far = (near + np.tile(np.arange(1, degree // 2 + 1), population_size)) % population_size
    is_rewired = rng.random(len(near)) < probability
    far[is_rewired] = rng.integers(0, population_size, is_rewired.sum())
    for _ in range(TRIES):
        is_wrong = _not_simple(near, far, population_size)
        if not is_wrong.any():
            return _connected(
                from_edges(population_size, np.stack([near, far], 1)), connected, "probability", probability
            )
        # Of two equal edges at least one was moved, and only rewired ends are drawn again.
        is_wrong &= is_rewired
        far[is_wrong] = rng.integers(0, population_size, is_wrong.sum())
    validate.fail("degree", f"a number of neighbours far below N = {population_size}", degree)


def _rng(seed: int) -> np.random.Generator:
    """Makes a generator from a seed, which is checked."""
    validate.integer("seed", seed, 0)
    return np.random.default_rng(seed)


def _random_subset(rng: np.random.Generator, count: int, probability: float) -> np.ndarray:
    """Chooses each of the numbers below `count` with this probability, independently."""
    num_chosen = rng.binomial(count, probability) if count else 0
    return rng.choice(count, num_chosen, replace=False, shuffle=False) if num_chosen else np.zeros(0, np.int64)


def _random_pairs(rng: np.random.Generator, size: int, probability: float) -> np.ndarray:
    """Chooses [E, 2] pairs i < j below `size`, each with this probability."""
    # Pair (i, j) has the code j (j - 1) / 2 + i.
    pair_codes = _random_subset(rng, size * (size - 1) // 2, probability)
    high = ((1 + np.sqrt(1 + 8 * pair_codes.astype(np.float64))) / 2).astype(np.int64)
    # The square root in float64 may be off by one for large codes.
    high -= high * (high - 1) // 2 > pair_codes
    high += high * (high + 1) // 2 <= pair_codes
    return np.stack([pair_codes - high * (high - 1) // 2, high], 1)


def _not_simple(one: np.ndarray, other: np.ndarray, size: int) -> np.ndarray:
    """Tells which edges [E] join a node to itself, or join two nodes that another edge joins too."""
    edge_codes = np.minimum(one, other).astype(np.int64) * size + np.maximum(one, other)
    _, place, counts = np.unique(edge_codes, return_inverse=True, return_counts=True)
    return (one == other) | (counts[place.reshape(-1)] > 1)


def _simple_pairs(rng: np.random.Generator, stubs: np.ndarray, size: int) -> np.ndarray:
    """Draws the edges of a random simple graph, in which half-edges are joined in pairs.

    Args:
      rng: draws the pairs.
      stubs: [2 E] integers in [0, size), the node of each half-edge.
      size: the number of nodes.

    Returns: [E, 2] nodes. No edge joins a node to itself, and no two edges join the same nodes.

    Raises: ValueError if none is found in `TRIES` attempts.
    """
    pairs = rng.permutation(stubs).reshape(-1, 2)
    for _ in range(TRIES):
        is_wrong = _not_simple(pairs[:, 0], pairs[:, 1], size)
        if not is_wrong.any():
            return pairs
        # Wrong pairs are mixed with as many random ones; among themselves they might have no solution.
        to_mix = np.union1d(np.flatnonzero(is_wrong), rng.integers(0, len(pairs), is_wrong.sum() + 1))
        pairs[to_mix] = rng.permutation(pairs[to_mix].reshape(-1)).reshape(-1, 2)
    validate.fail("degree", f"one for which a random graph of {size} nodes is found", len(stubs) / size)


def _connected(graph: Graph, connected: bool, name: str, value: float) -> Graph:
    """Returns the graph; raises if it is not connected although it should be."""
    validate.truth("connected", connected)
    if connected and not is_connected(graph):
        hint = "Nodes apart never agree. Raise it, take another seed, or say connected=False."
        validate.fail(name, "a connected graph", value, hint)
    return dataclasses.replace(graph, in_parts=not connected)
