"""Random graphs: each is a function of its options and a seed. Host NumPy, in time that grows with the edges."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import numpy as np

from fedjax_sim import validate
from fedjax_sim.network.topology import Graph, from_edges, is_connected
from fedjax_sim.validate import FromData, Integer, PopulationSize, Share

__all__ = ["erdos_renyi", "k_regular", "small_world", "stochastic_block"]

TRIES = 10_000  # to repair a random graph that is not simple


@validate.named_arguments
def erdos_renyi(population_size: PopulationSize, probability: Share, *, connected: bool = True, seed: int = 0) -> Graph:
    """Each pair of nodes is joined with this chance, independently.

    Args:
      probability: p in [0, 1]. Below log(N) / N the graph most likely falls apart.
      connected: whether a graph that falls apart is refused.

    Raises: ValueError for a graph that falls apart.

    Guarantees: number of edges and degrees have their laws (tests/network/test_random_graphs.py::test_erdos_renyi).

    References: Gilbert 1959.
    """
    rng = _rng(seed)
    pairs = _triangle(rng, population_size, probability)
    return _checked(from_edges(population_size, pairs), connected, "probability", probability)


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
    """Nodes in blocks of equal size; a pair is joined with one chance inside of a block and another between two.

    Args:
      num_blocks: in [1, N]; blocks hold neighbouring node numbers.
      inside, between: chances in [0, 1].

    Raises: ValueError for a graph that falls apart, unless `connected` is False.

    Guarantees: tests/network/test_random_graphs.py::test_stochastic_block.

    References: Holland, Laskey and Leinhardt 1983.
    """
    validate.integer("num_blocks", num_blocks, 1, population_size)
    rng, blocks = _rng(seed), np.array_split(np.arange(population_size), num_blocks)
    edges = [_triangle(rng, len(block), inside) + block[0] for block in blocks]
    for one in blocks:  # what lies behind it is one rectangle: all other blocks at once
        rest = population_size - one[-1] - 1
        code = _some(rng, len(one) * rest, between)
        edges.append(np.stack([code // max(rest, 1) + one[0], code % max(rest, 1) + one[-1] + 1], 1))
    return _checked(from_edges(population_size, np.concatenate(edges)), connected, "between", between)


@validate.named_arguments
def k_regular(population_size: PopulationSize, degree: int, *, connected: bool = True, seed: int = 0) -> Graph:
    """A random graph in which every node has the same number of neighbours.

    Half-edges are paired at random; pairs that join a node to itself, or two nodes twice, are mixed again with as many
    others until there are none: the configuration model, repaired. Above N / 2 the complement is drawn.

    Args:
      degree: k in [0, N - 1]; N k must be even.

    Raises: ValueError for an odd N k, and for a graph that falls apart, unless `connected` is False.

    Guarantees: simple, of that degree, and nearly as fast in mixing as theory allows
    (tests/network/test_random_graphs.py::test_k_regular).

    References: Bollobas 1980.
    """
    validate.integer("degree", degree, 0, population_size - 1)
    if population_size * degree % 2:
        validate.fail("degree", f"an even number for N = {population_size} nodes", degree)
    other = population_size - 1 - degree
    if other < degree:
        rest = k_regular(population_size, other, connected=False, seed=seed)
        full = np.ones((population_size, population_size), bool)
        full[rest.senders, rest.receivers] = False
        pairs = np.stack(np.nonzero(np.triu(full, 1)), 1)
    else:
        pairs = _simple(_rng(seed), np.repeat(np.arange(population_size), degree), population_size)
    return _checked(from_edges(population_size, pairs), connected, "degree", degree)


@validate.named_arguments
def small_world(
    population_size: Annotated[Annotated[int, Integer(4)], FromData("population_size")],
    degree: int,
    probability: Share,
    *,
    connected: bool = True,
    seed: int = 0,
) -> Graph:
    """A ring in which each node is joined to its `degree` nearest, and then each edge leads elsewhere with some chance.

    Args:
      degree: k, even, in [2, N - 1].
      probability: that the far end of an edge is drawn anew, among the nodes to which it makes a new edge; in [0, 1].

    Raises: ValueError for a graph that falls apart, unless `connected` is False.

    Guarantees: a ring lattice without rewiring, and always N k / 2 edges
    (tests/network/test_random_graphs.py::test_small_world).

    References: Watts and Strogatz 1998.
    """
    validate.integer("degree", degree, 2, population_size - 2)
    if degree % 2:
        validate.fail("degree", "an even number", degree)
    rng, nodes = _rng(seed), np.arange(population_size)
    near = np.repeat(nodes, degree // 2)
    far = (near + np.tile(np.arange(1, degree // 2 + 1), population_size)) % population_size
    moved = rng.random(len(near)) < probability
    far[moved] = rng.integers(0, population_size, moved.sum())
    for _ in range(TRIES):
        wrong = _not_simple(near, far, population_size)
        if not wrong.any():
            return _checked(
                from_edges(population_size, np.stack([near, far], 1)), connected, "probability", probability
            )
        wrong &= moved  # of two equal edges one was moved
        far[wrong] = rng.integers(0, population_size, wrong.sum())
    validate.fail("degree", f"a number of neighbours far below N = {population_size}", degree)


def _rng(seed: int) -> np.random.Generator:
    validate.integer("seed", seed, 0)
    return np.random.default_rng(seed)


def _some(rng: np.random.Generator, count: int, probability: float) -> np.ndarray:
    """Each of `count` things with this chance: a binomial number of distinct ones."""
    number = rng.binomial(count, probability) if count else 0
    return rng.choice(count, number, replace=False, shuffle=False) if number else np.zeros(0, np.int64)


def _triangle(rng: np.random.Generator, size: int, probability: float) -> np.ndarray:
    """[E, 2] pairs i < j below `size`, each with this chance; pair (i, j) has the code j (j - 1) / 2 + i."""
    code = _some(rng, size * (size - 1) // 2, probability)
    high = ((1 + np.sqrt(1 + 8 * code.astype(np.float64))) / 2).astype(np.int64)
    high -= high * (high - 1) // 2 > code
    high += high * (high + 1) // 2 <= code
    return np.stack([code - high * (high - 1) // 2, high], 1)


def _not_simple(one: np.ndarray, other: np.ndarray, size: int) -> np.ndarray:
    """[E] edges that join a node to itself, and all that join the same two nodes."""
    code = np.minimum(one, other).astype(np.int64) * size + np.maximum(one, other)
    _, place, counts = np.unique(code, return_inverse=True, return_counts=True)
    return (one == other) | (counts[place.reshape(-1)] > 1)


def _simple(rng: np.random.Generator, stubs: np.ndarray, size: int) -> np.ndarray:
    """[E, 2] edges of a random simple graph with these half-edges."""
    pairs = rng.permutation(stubs).reshape(-1, 2)
    for _ in range(TRIES):
        wrong = _not_simple(*pairs.T, size)
        if not wrong.any():
            return pairs
        again = np.union1d(np.flatnonzero(wrong), rng.integers(0, len(pairs), wrong.sum() + 1))
        pairs[again] = rng.permutation(pairs[again].reshape(-1)).reshape(-1, 2)
    validate.fail("degree", f"one for which a random graph of {size} nodes is found", len(stubs) / size)


def _checked(graph: Graph, connected: bool, name: str, value: float) -> Graph:
    validate.truth("connected", connected)
    if connected and not is_connected(graph):
        hint = "Nodes apart never agree. Raise it, take another seed, or say connected=False."
        validate.fail(name, "a connected graph", value, hint)
    return dataclasses.replace(graph, in_parts=not connected)
