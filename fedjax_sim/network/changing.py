"""Mixing that changes from round to round: nodes that meet one at a time, and links and nodes that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.network.mixing import Links, Mixing, constant_links, tables_of
from fedjax_sim.network.topology import Graph, exponential
from fedjax_sim.prng import counter_bits, stream
from fedjax_sim.types import Array
from fedjax_sim.validate import FromData, Integer, ShareBelowOne

__all__ = ["epidemic", "one_peer_exponential", "random_matching", "with_link_failures", "with_node_failures"]


@validate.named_arguments
def one_peer_exponential(population_size: Annotated[Annotated[int, Integer(2)], FromData("population_size")]) -> Mixing:
    """In round t node i hears i - 2^(t mod ceil(log2 N)) alone, and takes the mean of the two models.

    Rows and columns add up to 1. If N is a power of 2, nodes agree exactly on the average after log2 N rounds.

    Guarantees: that many rounds, and no fewer (tests/network/test_changing.py::test_one_peer).

    References: Assran et al. 2019, section 5; Ying et al. 2021, section 4.
    """
    hops = 1 << np.arange((population_size - 1).bit_length())
    nodes = np.arange(population_size)
    ids = ((nodes[None] - hops[:, None]) % population_size).astype(np.int32)[..., None]
    edges = np.arange(ids.size, dtype=np.uint32).reshape(ids.shape)
    tables = {"neighbours": ids, "weights": np.full(ids.shape, 0.5, np.float32), "edges": edges}
    return Mixing(exponential(population_size), tables, constant_links, keeps_constants=True, keeps_average=True)


def random_matching(graph: Graph) -> Mixing:
    """In each round some neighbours meet in pairs, and both take the mean of their models; nobody meets two.

    Every edge draws a number, and those lowest at both of their ends are used: edge (i, j) with probability
    1 / (d_i + d_j - 1).

    Args:
      graph: undirected.

    Guarantees: pairs, with that probability (tests/network/test_changing.py::test_matching).

    References: Boyd, Ghosh, Prabhakar and Shah 2006, section 3 (pairwise averages).
    """
    validate.part("graph", graph, Graph)
    if graph.directed:
        validate.fail("graph", "an undirected graph", "a directed one", "Take epidemic: nodes push to one another.")

    def links(key, round, tables):
        found = constant_links(key, round, tables)
        numbers = _draws(stream(key, "matching"), tables["edges"][0], found.weights)
        own = numbers.argmin(1)
        chosen = jnp.take_along_axis(found.neighbours, own[:, None], 1)[:, 0]
        ids = jnp.arange(chosen.shape[0], dtype=jnp.int32)
        met = (chosen[chosen] == ids) & (chosen != ids)
        used = (jnp.arange(numbers.shape[1])[None] == own[:, None]) & met[:, None]
        return found._replace(weights=jnp.where(used, found.weights, 0))

    facts = {"keeps_constants": True, "keeps_average": True, "symmetric": True}
    return Mixing(graph, tables_of(graph, 0.5), links, **facts)


def epidemic(graph: Graph) -> Mixing:
    """In each round every node gives half of its model to one random neighbour (push gossip), for `push_sum`.

    Guarantees: each neighbour of a node is as likely (tests/network/test_changing.py::test_epidemic).

    References: Kempe, Dobra and Gehrke 2003, section 2.
    """
    validate.part("graph", graph, Graph)
    tables = tables_of(graph, 0.5)
    backwards = Graph(graph.population_size, graph.receivers, graph.senders, graph.directed)
    order = np.lexsort((graph.receivers, graph.senders))
    starts = np.concatenate([[0], np.cumsum(backwards.in_degrees)[:-1]])
    tables |= {
        "targets": np.append(graph.receivers[order], 0).astype(np.int32),
        "starts": starts.astype(np.int32),
        "degrees": graph.out_degrees.astype(np.int32),
        "share": np.full(graph.population_size, 0.5, np.float32),
    }

    def links(key, round, tables):
        found, degrees = constant_links(key, round, tables), tables["degrees"]
        ids = jnp.arange(degrees.shape[0], dtype=jnp.uint32)
        luck = (counter_bits(stream(key, "epidemic"), ids) >> 8).astype(jnp.float32) * 2.0**-24
        which = jnp.minimum((luck * degrees.astype(jnp.float32)).astype(jnp.int32), degrees - 1)
        target = jnp.where(degrees > 0, tables["targets"][tables["starts"] + jnp.maximum(which, 0)], -1)
        used = target[found.neighbours] == ids.astype(jnp.int32)[:, None]
        return found._replace(weights=jnp.where(used, found.weights, 0))

    return Mixing(graph, tables, links, keeps_average=True)


@validate.named_arguments
def with_link_failures(mixing: Mixing, rate: ShareBelowOne) -> Mixing:
    """Each edge is down in a round with this chance, both ways, independently; what it would carry stays where it is.

    Args:
      mixing: symmetric, or one in which nodes give (`push`, `epidemic`).
      rate: in [0, 1).

    Raises: ValueError for a mixing that would no longer keep the average.

    Guarantees: the average stays, and edges fail at that rate (tests/network/test_changing.py::test_failures); around
    other failures it adds its own, independently (::test_failures_around_failures).
    """

    def links(key, round, tables):
        found = mixing.links(key, round, tables)
        edges = tables["edges"][round % tables["edges"].shape[0]]
        there = ~_chance(_own(stream(key, "links"), mixing), edges, rate)
        return found._replace(weights=jnp.where(there, found.weights, 0))

    return _failing(mixing, links)


@validate.named_arguments
def with_node_failures(mixing: Mixing, rate: ShareBelowOne) -> Mixing:
    """Each node is down in a round with this chance: it does not train, nobody hears it, and its model stays.

    Args and Raises: as for `with_link_failures`.

    Guarantees: tests/network/test_changing.py::test_failures; a node that is down is as it was
    (tests/algorithms/gossip/test_dpsgd.py::test_a_node_that_is_down_stays).
    """

    def links(key, round, tables):
        found = mixing.links(key, round, tables)
        ids = jnp.arange(found.up.shape[0], dtype=jnp.uint32)
        up = found.up & ~_chance(_own(stream(key, "nodes"), mixing), ids, rate)
        return _without(found, up)

    return _failing(mixing, links)


def _without(links: Links, up: Array) -> Links:
    """The links between nodes that are up."""
    there = up[:, None] & up[links.neighbours]
    return links._replace(weights=jnp.where(there, links.weights, 0), up=up)


def _failing(mixing: Mixing, links: Callable) -> Mixing:
    validate.part("mixing", mixing, Mixing)
    gives = "share" in mixing.tables
    if not (mixing.symmetric or gives):
        hint = "What one node does not hear another must not lose: take metropolis, or push on a directed graph."
        validate.fail("mixing", "a symmetric one, or one in which nodes give", "another", hint)
    return mixing._replace(links=links, static=False, failures=mixing.failures + 1)


def _own(key: Array, inner: Mixing) -> Array:
    """The key of one wrapper among several: what fails twice fails independently."""
    return jax.random.fold_in(key, inner.failures) if inner.failures else key


def _draws(key: Array, counters: Array, weights: Array) -> Array:
    """A number for each edge, the same at both of its ends; the largest where there is none."""
    return jnp.where(weights != 0, counter_bits(key, counters) >> 1, jnp.uint32(2**32 - 1))


def _chance(key: Array, counters: Array, rate: float) -> Array:
    """True with probability `rate`, rounded to a multiple of 2^-32, for each counter."""
    return counter_bits(key, counters) < jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
