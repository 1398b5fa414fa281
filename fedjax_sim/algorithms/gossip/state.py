"""The parts and states that algorithms without a server share: nodes train their own models, and then mix them.

Models are in client memory, one row for each node. `collect` trains the nodes as clients of a cohort of everybody.
There is no server. Where nodes send their models to their neighbours alone, the message of the star is a placeholder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedjax_sim import aggregation, engine, sampling, server, tree, validate
from fedjax_sim.algorithms.gossip.node_clocks import TIME_METRICS, NodeTiming, start_of
from fedjax_sim.network import Mixing
from fedjax_sim.network.topology import check_connected
from fedjax_sim.population.protocol import sizes_of
from fedjax_sim.round.costs import ROUND_METRICS
from fedjax_sim.round.options import ExecutionOptions
from fedjax_sim.round.state import FederatedState, initial_state
from fedjax_sim.transform import identity
from fedjax_sim.types import (
    Aggregator,
    AggregatorFacts,
    Array,
    ClientUpdate,
    Devices,
    Execution,
    Metric,
    Population,
    PyTree,
    Star,
    UpdateTransform,
)
from fedjax_sim.validate import Default

NODE_METRICS = (
    *ROUND_METRICS,
    Metric("edges", "links over which nodes sent", "count"),
    Metric("consensus_distance", "distance of nodes from their mean model (root mean square)", pooled="last"),
    *TIME_METRICS,
)


class GossipOptions(ExecutionOptions, total=False):
    """The options of the nodes' devices and of waiting, and the execution options; `dpsgd` describes them."""

    devices: Annotated[Devices | None, Default(None)]
    barrier: Annotated[str, Default("global")]


class Nodes(NamedTuple):
    """A `Nodes` holds the parts of a federation without a server."""

    star: Star  # the nodes as clients; its server holds the initial model
    mixing: Mixing  # the mixing matrix of each round
    timing: NodeTiming  # the nodes' devices
    models: Callable  # (states [N, ...]) -> the nodes' models [N, ...]
    message: Callable  # (state of one node) -> its message to each neighbour, before the transform; for its size
    attackers: Callable | None  # (key, ids) -> [N] bool, the nodes that means leave out; None = nobody attacks


class NodesState(NamedTuple):
    """The state between two rounds; models are in `star.clients`."""

    star: FederatedState
    tables: dict[str, Array]  # tables of the mixing, such as neighbours and weights [T, N, k], and of the nodes
    clock: PyTree  # `Clock` of [N]: when each node was done with its last round; () where time is not simulated


class Trained(NamedTuple):
    """The nodes after their local work, before they mix; leaves [N, ...], by id."""

    memory: PyTree  # the client memory, into which the next states are written
    before: PyTree  # the nodes' states before their local work
    after: PyTree  # their states after it; equal to `before` for nodes that are down or whose result cannot be used
    # The nodes' messages, where the star's aggregator keeps them: {"updates": [N, ...], "weights": [N]} of
    # `kept_by_node`
    sent: PyTree
    arrived: Array  # [N] bool; the result could be used
    info: dict[str, Array]  # of the training


def check_average(mixing: Mixing, *, constants: bool = True) -> None:
    """Raises ValueError for a mixing with which nodes would not reach the minimum of their mean objective.

    A mixing is refused if it changes the average of the nodes' models, or if its graph falls into parts.

    Args:
      mixing: whose facts are read.
      constants: True also refuses a mixing that changes models which agree.

    Guarantees: D-PSGD refuses `network.push` on a directed graph and `network.neighbour_mean` on a star, and consensus,
    clipped gossip and CHOCO refuse the latter (tests/algorithms/gossip/test_dpsgd.py::test_what_is_refused).
    """
    validate.part("mixing", mixing, Mixing)
    if not (mixing.keeps_average and (mixing.keeps_constants or not constants)):
        hint = "Take metropolis; or push_sum with network.push, for directed graphs."
        rule = "one that keeps the nodes' average" + " and their agreement" * constants
        validate.fail("mixing", rule, "another", hint)
    check_connected("mixing", mixing.graph)


def nodes_of(
    client: ClientUpdate,
    mixing: Mixing,
    *,
    models: Callable = lambda state: state["model"],
    message: Callable = lambda state: state["model"],
    aggregator: Aggregator | None = None,
    transform: UpdateTransform | None = None,
    attackers: Callable | None = None,
    devices: Devices | None = None,
    barrier: str = "global",
    **execution: Unpack[ExecutionOptions],
) -> Nodes:
    """Makes the parts of an algorithm without a server, around a client whose state holds its model.

    Args:
      client: a node's local work, such as one made by `training`.
      mixing: the mixing matrix of each round.
      models, message, attackers: as in `Nodes`.
      aggregator: of the star's messages; None for messages that are placeholders.
      transform: of these messages; None leaves them as they are.
      devices, barrier: as in `dpsgd`.
      execution: options of `Execution`.
    """
    size = mixing.graph.population_size
    timing = NodeTiming.checked(devices, barrier, size)
    sampler = sampling.full(size)
    rule = aggregation.total() if aggregator is None else aggregator
    message_transform = identity() if transform is None else transform
    star = Star(
        sampler=sampler,
        client=client,
        aggregator=rule,
        server=server.replacement(),
        transform=message_transform,
        execution=Execution(**execution),
    )
    return Nodes(star=star, mixing=mixing, timing=timing, models=models, message=message, attackers=attackers)


def training(local: ClientUpdate, start: Callable, at: Callable, moved: Callable) -> ClientUpdate:
    """Makes a client that trains from its own state and keeps the result.

    Its message is the largest magnitude in its update. The check of usable messages then covers the update, as it does
    for every client, and the update itself is sent to nobody.

    Args:
      local: trains from a model.
      start: (params) -> a node's state before the first round.
      at: (state) -> the model from which the node trains, in the dtypes of the initial model or wider.
      moved: (state, update) -> the state after training.
    """

    def apply(key, broadcast, state, data):
        report, _ = local.apply(key, tree.cast_like(at(state), broadcast), (), data)
        peaks = [engine.largest_magnitude(x).astype(jnp.float32) for x in jax.tree.leaves(report.update)]
        return report._replace(update=engine.largest_magnitude(jnp.stack(peaks))), moved(state, report.update)

    return local._replace(init=start, apply=apply)


def kept_by_node() -> Aggregator:
    """Makes an aggregator that keeps each node's message and weight, one row for each node.

    Rows from which nothing arrived are zeros.
    """

    def init(update_spec, num_slots):
        return engine.buffer({"updates": update_spec, "weights": jax.ShapeDtypeStruct((), jnp.float32)}, num_slots)

    def accumulate(key, round, carry, received):
        return engine.fill(carry, received.slots, {"updates": received.updates, "weights": received.weights})

    def finalize(key, round, carry):
        return engine.all_rows(carry, jnp.arange(carry.place.shape[0], dtype=jnp.int32)), {}

    return Aggregator(init, accumulate, finalize, AggregatorFacts(weighted=False))


def begun(nodes: Nodes, params: PyTree, population: Population) -> NodesState:
    """Makes the state before the first round.

    Args:
      nodes: the parts.
      params: the model from which all nodes start.
      population: each client is a node.

    Raises: ValueError where the numbers of clients and of nodes differ.
    """
    if population.size != nodes.mixing.graph.population_size:
        hint = "Each client is a node."
        validate.fail(
            "mixing", f"a graph of the population's {population.size} clients", nodes.mixing.graph.population_size, hint
        )
    star = initial_state(nodes.star, params, population)
    tables = jax.tree.map(jnp.asarray, nodes.mixing.tables)
    if nodes.timing.devices is not None:
        tables["examples"] = sizes_of(population)
    if nodes.attackers is not None:
        tables["honest"] = jnp.ones(nodes.mixing.graph.population_size, bool)
    return NodesState(star, tables, start_of(nodes.timing, nodes.mixing.graph.population_size))
