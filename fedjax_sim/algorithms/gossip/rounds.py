"""The steps of a round without a server: nodes train, combine their models, and finish the round."""

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
from fedjax_sim.types import Algorithm, Array, Cohort, Count, Evaluated, ParamsKind, Population, PyTree, Wire, Work


def links_of(nodes: Nodes, key: Array, state: NodesState) -> Links:
    """The links over which nodes receive messages in the round of this key."""
    return engine.reproducible(nodes.mixing.links)(stream(key, "network"), state.star.round, state.tables)


def train_nodes(nodes: Nodes, key: Array, state: NodesState, population: Population, up: Array) -> Trained:
    """Does the local work of the nodes that are up.

    Args:
      nodes: the parts.
      key: of the round.
      state: before the round.
      population: all nodes.
      up: [N] bool, the nodes that are up in this round.

    Guarantees: a node that is down keeps its state
    (tests/algorithms/gossip/test_dpsgd.py::test_a_node_that_is_down_stays), and so does a node whose result is not
    finite (::test_a_result_that_is_not_finite).
    """
    # All nodes are the cohort, and those that are up report.
    ids = jnp.arange(up.shape[0], dtype=jnp.int32)
    cohort = Cohort(ids, jnp.ones(ids.shape, bool), up)
    gathered = collect(nodes.star, key, cohort, state.star, population)
    aggregated = aggregate(nodes.star, key, cohort, gathered, state.star)
    memory, rows = gathered.clients
    before, memory = engine.take(memory, ids)

    def states_and_metrics(before, rows, arrived, means):
        metrics = {name: mean.total / mean.weight for name, mean in means.items()}
        return tree.where(arrived, rows, before), metrics

    after, client_metrics = engine.reproducible(states_and_metrics)(before, rows, gathered.arrived, aggregated.means)
    info = tree.joined_metrics({"client": client_metrics, "aggregator": aggregated.metrics["aggregator"]})
    info |= unusable(nodes.star, cohort, gathered.dropped, gathered.num_dropped)
    info |= {"clients_reported": gathered.num_arrived}
    return Trained(
        memory=memory, before=before, after=after, sent=aggregated.update, arrived=gathered.arrived, info=info
    )


def mean_over(models: PyTree, counted: Array | None) -> PyTree:
    """The mean model of the nodes that count.

    Args:
      models: leaves [N, ...].
      counted: [N] bool, the nodes that count; None = all.
    """
    if counted is None:
        return jax.tree.map(lambda x: x.mean(0), models)
    num_counted = jnp.maximum(counted.sum(), 1)
    counted_models = tree.widened(tree.where(counted, models, tree.zeros_like(models)))
    return jax.tree.map(
        lambda x, like: (x.sum(0) / num_counted.astype(x.dtype)).astype(like.dtype), counted_models, models
    )


def distance(models: PyTree, counted: Array | None = None) -> Array:
    """Computes the consensus distance: the root of the nodes' mean squared distance from their mean model, [].

    Args:
      models: leaves [N, ...].
      counted: [N] bool, the nodes that count; None = all.
    """
    wide = jax.tree.map(lambda x: x.astype(tree.at_least_float32(x.dtype)).reshape(x.shape[0], -1), models)
    differences = jax.tree.map(lambda x, mean: x - mean[None], wide, mean_over(wide, counted))
    squared_distances = sum((x * x).sum(1) for x in jax.tree.leaves(differences))
    return jnp.sqrt(mean_over(squared_distances, counted))


def finish(
    nodes: Nodes,
    key: Array,
    state: NodesState,
    links: Links,
    *,
    memory: PyTree,
    before: PyTree,
    rows: PyTree,
    work: Work | None,
) -> tuple[NodesState, dict[str, Any]]:
    """Finishes a round: makes the next state, and the info of messages, consensus and time.

    Nodes that are down keep their states. If the other nodes' states and models, in the initial model's dtypes, are not
    all finite, the round is skipped: every node keeps its state.

    Args:
      nodes: the parts.
      key: of the round.
      state: before the round.
      links: of the round.
      memory: of `Trained`.
      before, rows: the nodes' states before the round and after mixing, [N, ...].
      work: of one node, for its time; None where time is not simulated.

    Guarantees: at a learning rate at which float32 overflows, all nodes' models stay finite, and the info counts
    skipped rounds or dropped clients (tests/algorithms/gossip/test_dpsgd.py::test_a_round_that_diverges_is_skipped).
    """

    def next_rows(before, rows):
        # A model in the wider dtype of a state may be finite, and overflow in the dtype in which it is used.
        is_finite = engine.all_finite((rows, tree.cast_like(nodes.models(rows), state.star.server)))
        rows = tree.where(is_finite & links.up, rows, before)
        return is_finite, rows, distance(nodes.models(rows), state.tables.get("honest"))

    is_finite, rows, consensus_distance = engine.reproducible(next_rows)(before, rows)
    num_sent = (links.weights != 0).sum(dtype=jnp.int32)
    num_bytes = message_bytes(nodes, rows)
    info = {
        "skipped_rounds": (~is_finite).astype(jnp.int32),
        "uplink_bytes": Count.of(num_sent, num_bytes),
        "edges": num_sent // (2 if nodes.mixing.symmetric else 1),  # an undirected edge carries two messages
        "consensus_distance": consensus_distance,
    }
    clock = state.clock
    if nodes.timing.devices is not None:
        assert work is not None, "where time is simulated, the work is known"
        load = asked_of(work, state.tables["examples"], links, num_bytes)
        clock, num_saturated = engine.reproducible(partial(clocks_after_round, nodes.timing))(key, clock, links, load)
        info |= engine.reproducible(partial(times, nodes.timing))(clock, links.up) | {SATURATED.name: num_saturated}
    everyone = jnp.ones(links.up.shape, bool)
    clients = engine.put(memory, jnp.arange(links.up.shape[0], dtype=jnp.int32), rows, everyone)
    return NodesState(state.star._replace(round=state.star.round + 1, clients=clients), state.tables, clock), info


def message_bytes(nodes: Nodes, rows: PyTree) -> int:
    """The bytes that a node sends to each neighbour in a round.

    Args:
      rows: the nodes' states, arrays or specs [N, ...].
    """
    node_spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
    message = jax.eval_shape(nodes.message, node_spec)
    plain = Wire(tree.num_values(message), 8 * tree.num_bytes(message))
    bits = nodes.star.transform.wire(message, plain).bits
    return -(-bits // 8)


def node_algorithm(nodes: Nodes, combine: Callable) -> Algorithm:
    """Makes an algorithm in whose rounds all nodes train and then combine what they have.

    Args:
      nodes: the parts.
      combine: (Links, Trained) -> the nodes' next states [N, ...], traced in `engine.reproducible`.

    Returns: an Algorithm; its model is the mean over the nodes, and each node's own model is personal. `parts` is None,
    because no accountant covers messages that neighbours see.

    Guarantees: the bits are the same on any devices
    (tests/algorithms/gossip/test_dpsgd.py::test_same_bits_on_two_devices); no epsilon is stated (::test_no_epsilon).
    """

    size = nodes.mixing.graph.population_size

    def init(key, params, population):
        return begun(nodes, params, population)

    def step(key, state, population):
        if nodes.attackers is not None:
            # With the key that `corrupted` uses, so that both know the same attackers.
            is_attacker = nodes.attackers(stream(key, "aggregation"), jnp.arange(size, dtype=jnp.int32))
            state = state._replace(tables=state.tables | {"honest": ~is_attacker})
        links = links_of(nodes, key, state)
        trained_nodes = train_nodes(nodes, key, state, population, links.up)
        rows = engine.reproducible(combine)(links, trained_nodes._replace(memory=(), info={}))
        work = work_of(nodes.star, state.star.server, population) if nodes.timing.devices is not None else None
        before = trained_nodes.before
        state, info = finish(nodes, key, state, links, memory=trained_nodes.memory, before=before, rows=rows, work=work)
        return state, trained_nodes.info | info

    evaluated = Evaluated(personal=partial(own_models, nodes))
    mean = partial(mean_model, nodes)
    return Algorithm(init, step, mean, evaluated=evaluated, metrics=NODE_METRICS, params_kind=ParamsKind.MEAN)


def own_models(nodes: Nodes, state: NodesState, ids: Array) -> PyTree:
    """The models of the nodes `ids`, leaves [len(ids), ...], in the initial model's dtypes."""
    models_of = engine.reproducible(lambda rows, like: tree.cast_like(nodes.models(rows), like))
    return models_of(engine.take(state.star.clients, ids)[0], state.star.server)


def mean_model(nodes: Nodes, state: NodesState) -> PyTree:
    """The mean of the models of all nodes that do not attack, in the initial model's dtypes."""
    ids = jnp.arange(nodes.mixing.graph.population_size, dtype=jnp.int32)
    mean = engine.reproducible(lambda rows, counted, like: tree.cast_like(mean_over(nodes.models(rows), counted), like))
    return mean(engine.take(state.star.clients, ids)[0], state.tables.get("honest"), state.star.server)
