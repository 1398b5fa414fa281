"""The rounds of algorithms without a server: train, combine, finish."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree
from fedjax_sim.algorithms.gossip.node_clocks import asked_of, clocks_after_round, times
from fedjax_sim.algorithms.gossip.state import NODE_METRICS, Nodes, NodesState, Trained, begun
from fedjax_sim.network import Links
from fedjax_sim.network.devices import SATURATED
from fedjax_sim.prng import stream
from fedjax_sim.round.costs import unusable, work_of
from fedjax_sim.round.round import aggregate, collect
from fedjax_sim.types import Algorithm, Array, Cohort, Count, Evaluated, Population, PyTree, Wire, Work

__all__ = [
    "distance",
    "finish",
    "links_of",
    "mean_model",
    "mean_over",
    "message_bytes",
    "node_algorithm",
    "own_models",
    "train",
]


def links_of(nodes: Nodes, key: Array, state: NodesState) -> Links:
    """Who hears whom in the round of this key."""
    return engine.steady(nodes.mixing.links)(stream(key, "network"), state.star.round, state.tables)


def train(nodes: Nodes, key: Array, state: NodesState, population: Population, up: Array) -> Trained:
    """Local work of the nodes that are up.

    Args:
      up: [N] bool.

    Guarantees: a node that is down stays as it is
    (tests/algorithms/gossip/test_dpsgd.py::test_a_node_that_is_down_stays), and so does the model of one whose result
    is not finite (::test_a_result_that_is_not_finite).
    """
    ids = jnp.arange(up.shape[0], dtype=jnp.int32)
    cohort = Cohort(ids, jnp.ones(ids.shape, bool), up)
    gathered = collect(nodes.star, key, cohort, state.star, population)
    found = aggregate(nodes.star, key, cohort, gathered, state.star)
    memory, rows = gathered.clients
    before, memory = engine.take(memory, ids)

    def told(before, rows, arrived, means):
        pooled = {name: mean.total / mean.weight for name, mean in means.items()}
        return tree.where(arrived, rows, before), pooled

    after, pooled = engine.steady(told)(before, rows, gathered.arrived, found.means)
    info = tree.joined_metrics({"client": pooled, "aggregator": found.metrics["aggregator"]})
    info |= unusable(nodes.star, cohort, gathered.dropped, gathered.num_dropped)
    return Trained(
        memory, before, after, found.update, gathered.arrived, info | {"clients_reported": gathered.num_arrived}
    )


def mean_over(models: PyTree, counted: Array | None) -> PyTree:
    """The mean over the nodes that count, all by default."""
    if counted is None:
        return jax.tree.map(lambda x: x.mean(0), models)
    number = jnp.maximum(counted.sum(), 1)
    kept = tree.widened(tree.where(counted, models, tree.zeros_like(models)))
    return jax.tree.map(lambda x, like: (x.sum(0) / number.astype(x.dtype)).astype(like.dtype), kept, models)


def distance(models: PyTree, counted: Array | None = None) -> Array:
    """[] the root of the nodes' mean squared distance from their mean model.

    Args:
      models: [N, ...]. counted: [N] bool, whose models count; None = all.
    """
    wide = jax.tree.map(lambda x: x.astype(tree.at_least_float32(x.dtype)).reshape(x.shape[0], -1), models)
    away = jax.tree.map(lambda x, mean: x - mean[None], wide, mean_over(wide, counted))
    return jnp.sqrt(mean_over(sum((x * x).sum(1) for x in jax.tree.leaves(away)), counted))


def finish(
    nodes: Nodes, key: Array, state: NodesState, links: Links, memory: PyTree, before: PyTree, rows: PyTree, work: Work
) -> tuple[NodesState, dict[str, Any]]:
    """The next state, and what the network says of the round.

    Args:
      links: of the round. memory: of `Trained`.
      before, rows: the nodes' states before the round and after mixing, [N, ...]. Those of nodes that are down do not
        change; where the others' states and models, in the initial model's dtypes, are not all finite the round is
        skipped.
      work: of one node, for its time.

    Guarantees: tests/algorithms/gossip/test_dpsgd.py::test_a_round_that_diverges_is_skipped.
    """

    def told(before, rows):
        fit = tree.all_finite((rows, tree.cast(nodes.models(rows), state.star.server)))
        rows = tree.where(fit & links.up, rows, before)
        return fit, rows, distance(nodes.models(rows), state.tables.get("honest"))

    fit, rows, away = engine.steady(told)(before, rows)
    sent, num_bytes = (links.weights != 0).sum(dtype=jnp.int32), message_bytes(nodes, rows)
    info = {
        "skipped_rounds": (~fit).astype(jnp.int32),
        "uplink_bytes": Count.of(sent, num_bytes),
        "edges": sent // (2 if nodes.mixing.symmetric else 1),
        "consensus_distance": away,
    }
    clock = state.clock
    if nodes.timing.devices is not None:
        load = asked_of(work, state.tables["examples"], links, num_bytes)
        clock, slow = engine.steady(partial(clocks_after_round, nodes.timing))(key, clock, links, load)
        info |= engine.steady(partial(times, nodes.timing))(clock, links.up) | {SATURATED.name: slow}
    everyone = jnp.ones(links.up.shape, bool)
    clients = engine.put(memory, jnp.arange(links.up.shape[0], dtype=jnp.int32), rows, everyone)
    return NodesState(state.star._replace(round=state.star.round + 1, clients=clients), state.tables, clock), info


def message_bytes(nodes: Nodes, rows: PyTree) -> int:
    """The bytes that a node sends to each neighbour."""
    one = jax.eval_shape(nodes.message, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows))
    bits = nodes.star.transform.wire(one, Wire(tree.num_values(one), 8 * tree.num_bytes(one))).bits
    return -(-bits // 8)


def node_algorithm(nodes: Nodes, combine: Callable) -> Algorithm:
    """An algorithm whose round is: train, then combine.

    Args:
      combine: (Links, Trained) -> the nodes' next states [N, ...], traced in `engine.steady`.

    Returns: an Algorithm; its model is the mean over the nodes, and each node's own is personal. `parts` is None: no
    accountant covers messages that neighbours see.

    Guarantees: the same bits on any devices (tests/algorithms/gossip/test_dpsgd.py::test_same_bits_on_two_devices); no
    epsilon is stated (::test_no_epsilon).
    """

    size = nodes.mixing.graph.population_size

    def init(key, params, population):
        return begun(nodes, params, population)

    def step(key, state, population):
        if nodes.attackers is not None:
            bad = nodes.attackers(stream(key, "aggregation"), jnp.arange(size, dtype=jnp.int32))  # as `corrupted` asks
            state = state._replace(tables=state.tables | {"honest": ~bad})
        links = links_of(nodes, key, state)
        done = train(nodes, key, state, population, links.up)
        rows = engine.steady(combine)(links, done._replace(memory=(), info={}))
        work = work_of(nodes.star, state.star.server, population) if nodes.timing.devices is not None else None
        state, info = finish(nodes, key, state, links, done.memory, done.before, rows, work)
        return state, done.info | info

    evaluated = Evaluated(personal=partial(own_models, nodes))
    return Algorithm(init, step, partial(mean_model, nodes), evaluated=evaluated, metrics=NODE_METRICS)


def own_models(nodes: Nodes, state: NodesState, ids: Array) -> PyTree:
    """The models of these nodes, leaves [len(ids), ...]."""
    own = engine.steady(lambda rows, like: tree.cast(nodes.models(rows), like))
    return own(engine.take(state.star.clients, ids)[0], state.star.server)


def mean_model(nodes: Nodes, state: NodesState) -> PyTree:
    """The mean of the models of all nodes that do not attack."""
    ids = jnp.arange(nodes.mixing.graph.population_size, dtype=jnp.int32)
    mean = engine.steady(lambda rows, counted, like: tree.cast(mean_over(nodes.models(rows), counted), like))
    return mean(engine.take(state.star.clients, ids)[0], state.tables.get("honest"), state.star.server)
