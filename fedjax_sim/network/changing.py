"""This module holds mixing that changes over rounds: pairs of nodes that meet, and links or nodes that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.network.mixing import Links, Mixing, constant_links, tables_of
from fedjax_sim.network.topology import Graph, exponential
from fedjax_sim.prng import counter_bits, fold_in, stream
from fedjax_sim.types import Array
from fedjax_sim.validate import FromData, Integer, ShareBelowOne


@validate.named_arguments
def one_peer_exponential(population_size: Annotated[Annotated[int, Integer(2)], FromData("population_size")]) -> Mixing:
    """In round t node i receives from i - 2^(t mod ceil(log2 N)) only, and takes the mean of the two models.

    Rows and columns sum to 1. If N is a power of 2, nodes agree exactly on the average after log2 N rounds.

    Args:
      population_size: N >= 2.

    Returns: `Mixing`.

    Guarantees: Exact agreement needs that many rounds, and no fewer (tests/network/test_changing.py::test_one_peer).

    References: Assran et al. 2019, section 5; Ying et al. 2021, section 4.
    """
    hops = 1 << np.arange((population_size - 1).bit_length())
    nodes = np.arange(population_size)
    ids = ((nodes[None] - hops[:, None]) % population_size).astype(np.int32)[..., None]
    edges = np.arange(ids.size, dtype=np.uint32).reshape(ids.shape)
    # One table for each hop; `constant_links` takes the table whose turn it is.
    tables = {"neighbours": ids, "weights": np.full(ids.shape, 0.5, np.float32), "edges": edges}
    return Mixing(exponential(population_size), tables, constant_links, keeps_constants=True, keeps_average=True)


def random_matching(graph: Graph) -> Mixing:
    """In each round some neighbours meet in pairs, and both take the mean of their models. No node meets two others.

    Every edge draws a number. An edge is used if its number is the lowest at both of its ends. So edge (i, j) is used
    with probability 1 / (d_i + d_j - 1).

    Args:
      graph: undirected.

    Returns: `Mixing`.

    Raises: ValueError for a directed graph.

    Guarantees: Nodes meet in pairs, with that probability (tests/network/test_changing.py::test_matching).

    References: Boyd, Ghosh, Prabhakar and Shah 2006, section 3 (pairwise averages).
    """
    validate.part("graph", graph, Graph)
    if graph.directed:
        validate.fail("graph", "an undirected graph", "a directed one", "Take epidemic: nodes push to one another.")

    def links(key, round, tables):
        base_links = constant_links(key, round, tables)
        numbers = _draws(stream(key, "matching"), tables["edges"][0], base_links.weights)
        lowest_slot = numbers.argmin(1)
        preferred_node = jnp.take_along_axis(base_links.neighbours, lowest_slot[:, None], 1)[:, 0]
        ids = jnp.arange(preferred_node.shape[0], dtype=jnp.int32)
        # A pair meets if each end prefers the other; a node without edges prefers itself.
        is_mutual = (preferred_node[preferred_node] == ids) & (preferred_node != ids)
        is_used = (jnp.arange(numbers.shape[1])[None] == lowest_slot[:, None]) & is_mutual[:, None]
        return base_links._replace(weights=jnp.where(is_used, base_links.weights, 0))

    facts = {"keeps_constants": True, "keeps_average": True, "symmetric": True}
    return Mixing(graph, tables_of(graph, 0.5), links, **facts)


def epidemic(graph: Graph) -> Mixing:
    """In each round every node gives half of its model to one random neighbour (push gossip), for `push_sum`.

    Args:
      graph: directed or undirected; nodes give along its edges.

    Returns: `Mixing`.

    Guarantees: Each neighbour of a node is equally likely (tests/network/test_changing.py::test_epidemic).

    References: Kempe, Dobra and Gehrke 2003, section 2.
    """
    validate.part("graph", graph, Graph)
    tables = tables_of(graph, 0.5)
    backwards = Graph(graph.population_size, graph.receivers, graph.senders, graph.directed)
    # The out-neighbours of all nodes in one list, by sender: `targets`, with `starts` and `degrees` of each sender.
    order = np.lexsort((graph.receivers, graph.senders))
    starts = np.concatenate([[0], np.cumsum(backwards.in_degrees)[:-1]])
    tables |= {
        "targets": np.append(graph.receivers[order], 0).astype(np.int32),
        "starts": starts.astype(np.int32),
        "degrees": graph.out_degrees.astype(np.int32),
        "share": np.full(graph.population_size, 0.5, np.float32),
    }

    def links(key, round, tables):
        base_links = constant_links(key, round, tables)
        degrees = tables["degrees"]
        ids = jnp.arange(degrees.shape[0], dtype=jnp.uint32)
        unit_draws = (counter_bits(stream(key, "epidemic"), ids) >> 8).astype(jnp.float32) * 2.0**-24
        neighbour_index = jnp.minimum((unit_draws * degrees.astype(jnp.float32)).astype(jnp.int32), degrees - 1)
        # A node without out-neighbours has the target -1, which is no node.
        target = jnp.where(degrees > 0, tables["targets"][tables["starts"] + jnp.maximum(neighbour_index, 0)], -1)
        is_used = target[base_links.neighbours] == ids.astype(jnp.int32)[:, None]
        return base_links._replace(weights=jnp.where(is_used, base_links.weights, 0))

    return Mixing(graph, tables, links, keeps_average=True)


@validate.named_arguments
def with_link_failures(mixing: Mixing, rate: ShareBelowOne) -> Mixing:
    """Each edge fails in a round with probability `rate`, in both directions, independently.

    Whatever a failed edge would carry stays with its sender.

    Args:
      mixing: symmetric, or one in which nodes give (`push`, `epidemic`).
      rate: in [0, 1).

    Returns: `Mixing`.

    Raises: ValueError for a mixing that would no longer keep the average.

    Guarantees: The average stays, and edges fail at that rate (tests/network/test_changing.py::test_failures). Around
    other failures, the wrapper adds its own failures independently (::test_failures_around_failures).
    """

    def links(key, round, tables):
        base_links = mixing.links(key, round, tables)
        edges = tables["edges"][round % tables["edges"].shape[0]]
        is_up = ~_happens(_wrapper_key(stream(key, "links"), mixing), edges, rate)
        return base_links._replace(weights=jnp.where(is_up, base_links.weights, 0))

    return _failing(mixing, links)


@validate.named_arguments
def with_node_failures(mixing: Mixing, rate: ShareBelowOne) -> Mixing:
    """Each node fails in a round with probability `rate`, independently.

    A failed node does not train, no node receives from it, and its model does not change.

    Args:
      mixing, rate: as in `with_link_failures`.

    Returns: `Mixing`.

    Raises: as `with_link_failures`.

    Guarantees: Nodes fail at that rate (tests/network/test_changing.py::test_failures). A failed node does not change
    (tests/algorithms/gossip/test_dpsgd.py::test_a_node_that_is_down_stays).
    """

    def links(key, round, tables):
        base_links = mixing.links(key, round, tables)
        ids = jnp.arange(base_links.up.shape[0], dtype=jnp.uint32)
        up = base_links.up & ~_happens(_wrapper_key(stream(key, "nodes"), mixing), ids, rate)
        return _without(base_links, up)

    return _failing(mixing, links)


def _without(links: Links, up: Array) -> Links:
    """Returns the links between nodes that are up; the others have weight 0."""
    both_up = up[:, None] & up[links.neighbours]
    return links._replace(weights=jnp.where(both_up, links.weights, 0), up=up)


def _failing(mixing: Mixing, links: Callable) -> Mixing:
    """Replaces the links by links that may fail; raises if failures would change the average."""
    validate.part("mixing", mixing, Mixing)
    nodes_give = "share" in mixing.tables
    if not (mixing.symmetric or nodes_give):
        hint = "What one node does not hear another must not lose: take metropolis, or push on a directed graph."
        validate.fail("mixing", "a symmetric one, or one in which nodes give", "another", hint)
    return mixing._replace(links=links, static=False, failures=mixing.failures + 1)


def _wrapper_key(key: Array, inner: Mixing) -> Array:
    """Returns the key of one wrapper among several, so that two wrappers fail independently."""
    return fold_in(key, inner.failures) if inner.failures else key


def _draws(key: Array, counters: Array, weights: Array) -> Array:
    """A random number for each edge, equal at both of its ends; the largest number if there is no edge."""
    # The shift leaves 31 bits, so that no edge draws the number that stands for no edge.
    return jnp.where(weights != 0, counter_bits(key, counters) >> 1, jnp.uint32(2**32 - 1))


def _happens(key: Array, counters: Array, rate: float) -> Array:
    """Draws True with probability `rate`, rounded to a multiple of 2^-32, for each counter."""
    return counter_bits(key, counters) < jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
