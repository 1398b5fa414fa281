"""Graphs and mixing matrices: what they state of themselves holds in every round, on every platform."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, engine, network, sampling
from fedjax_sim.config.signatures import public_names
from tests.laws import cases, problems as p

MADE = {name: make() for name, make in cases.CASES["network"].items()}
GRAPHS = [name for name, made in MADE.items() if isinstance(made, network.Graph)]
MIXINGS = [name for name, made in MADE.items() if isinstance(made, network.Mixing)]


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name):
    """Catches unsorted edges, loops, double ones, one direction without the other, another graph for the same seed."""
    graph, again = MADE[name], cases.CASES["network"][name]()
    pairs = graph.receivers.astype(int) * graph.population_size + graph.senders
    assert (np.diff(pairs) > 0).all() and (graph.senders != graph.receivers).all()
    assert graph.senders.dtype == graph.receivers.dtype == np.int32
    ways = set(zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True))
    assert graph.directed or {(b, a) for a, b in ways} == ways
    np.testing.assert_array_equal([graph.senders, graph.receivers], [again.senders, again.receivers])


def links_of(mixing, steady=True):
    links = engine.reproducible(mixing.links) if steady else mixing.links
    return jax.jit(links), jax.tree.map(jnp.asarray, mixing.tables)


@pytest.mark.default_rows("metropolis", "push", "random_matching", "with_link_failures")
@pytest.mark.parametrize("name", MIXINGS)
def test_facts_hold(name):
    """Ten rounds: rows and columns that add up to 1, symmetry, constancy, as stated; neighbours are the graph's.

    Catches a fact that promises too much, a negative weight, an edge that the graph has not, other dtypes."""
    mixing = MADE[name]
    links, tables = links_of(mixing)
    whole = mixing.graph.adjacency().toarray() > 0
    keys = jax.random.split(jax.random.key(3), 10)
    matrices = [network.matrix_of(mixing, key, t).toarray() for t, key in enumerate(keys)]
    for t, key in enumerate(keys):
        found, matrix = links(key, jnp.int32(t), tables), matrices[t]
        assert (found.neighbours.dtype, found.weights.dtype, found.up.dtype) == (jnp.int32, jnp.float32, bool)
        assert (found.weights >= 0).all() and not (matrix - np.diag(matrix.diagonal()))[~whole].any()
        assert mixing.keeps_constants <= (np.abs(matrix.sum(1) - 1).max() < 1e-6)
        assert mixing.keeps_average <= (np.abs(matrix.sum(0) - 1).max() < 1e-6)
        assert mixing.symmetric <= (matrix == matrix.T).all()
        assert p.digest(found) == p.digest(links(key, jnp.int32(t), tables))
    assert mixing.static <= all((matrix == matrices[0]).all() for matrix in matrices)
    assert mixing.keeps_constants or mixing.keeps_average


@pytest.mark.default_rows("cuda")
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_mixings_lower(platform):
    """Catches code that only a CPU's compiler takes, and calls of Python."""
    with engine.compiling_for(platform):
        for name in MIXINGS:
            links, tables = links_of(MADE[name])
            text = links.trace(jax.random.key(0), jnp.int32(0), tables).lower(lowering_platforms=(platform,)).as_text()
            assert "custom_call @xla_python" not in text


def two_parts(**options) -> network.Graph:
    """Node 0 alone, and a ring of the others."""
    nodes = np.arange(1, p.NUM_CLIENTS)
    return network.from_edges(p.NUM_CLIENTS, np.stack([nodes, np.roll(nodes, 1)], 1), **options)


def takes_a_graph() -> list[str]:
    """Algorithms that have an argument for a graph or a mixing over one."""
    functions = {name: getattr(algorithms, name) for name in public_names("fedjax_sim.algorithms")}
    signatures = {name: inspect.signature(f).parameters for name, f in functions.items() if inspect.isfunction(f)}
    return [name for name, arguments in signatures.items() if {"graph", "mixing"} & arguments.keys()]


def made_on(name: str, graph: network.Graph):
    """The algorithm on this graph, with its required options."""
    mixing = cases.CASES["algorithms"][name].mixing(graph)
    given = {
        "loss_fn": p.linear_loss, "optimizer": optax.sgd(p.RATE), "sampler": sampling.uniform(p.NUM_CLIENTS, 4),
        "mixing": mixing, "graph": graph, "edge": cases.CASES["algorithms"]["fedavg"]().parts,
        "num_steps": 1, "radius": 1.0,
    }  # fmt: skip
    factory = getattr(algorithms, name)
    return factory(**{key: value for key, value in given.items() if key in inspect.signature(factory).parameters})


@pytest.mark.parametrize("name", takes_a_graph())
def test_a_graph_in_several_parts_is_refused(name):
    """With the number and sizes of the parts, and the remedy where a list seems to be numbered from 1.

    Catches parts that train apart without a word: 200 rounds of D-PSGD left a consensus distance of 1.65.
    """
    told = rf"(mixing|graph): expected a connected graph, got '2 parts, of {p.NUM_CLIENTS - 1}, 1 nodes'. .* from 1\?"
    with pytest.raises(ValueError, match=told):
        made_on(name, two_parts())
    takes_a_matrix = isinstance(cases.CASES["algorithms"][name].mixing(cases.GRAPH), np.ndarray)
    if not takes_a_matrix:  # that of edges, which are clients of another kind of population
        assert made_on(name, two_parts(connected=False)) and made_on(name, network.ring(p.NUM_CLIENTS))
