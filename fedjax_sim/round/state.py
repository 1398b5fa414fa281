"""The records of a round: the state between two rounds, and the values that a round's steps pass to each other."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, validate
from fedjax_sim.round.compatibility import check_distinct
from fedjax_sim.round.costs import message_spec, own_state, work_of
from fedjax_sim.types import Array, Mean, Population, PyTree, Star, Wire


class FederatedState(NamedTuple):
    """The state between two rounds: one field for each kind of part."""

    round: Array  # [] int32 rounds so far
    sampler: PyTree
    clients: PyTree  # [N, ...] per-client state; () if stateless
    memory: PyTree  # [N, ...] per-client memory of the transform; () if it has none
    transform: PyTree  # the transform's server-side state
    server: PyTree  # the server's state, which holds the model
    aggregator: PyTree = ()  # the aggregator's state from the round before; () if stateless


class Gathered(NamedTuple):
    """A cohort's accumulated messages, and the new states of its clients: the result of `collect`."""

    carry: PyTree  # the aggregator's carry, with all messages accumulated
    means: PyTree  # exact sums of (the clients' metrics, the transform's measurements)
    counts: dict[str, Array]  # [4] uint32 sums of the bytes of the clients' own counts, the lowest first
    arrived: Array  # [m] bool; a usable message arrived
    dropped: Array  # [m] bool; a message arrived that cannot be used
    num_arrived: Array  # [] int32
    num_dropped: Array  # [] int32
    clients: tuple[PyTree, PyTree]  # per-client state: the store of all clients, and the cohort's new rows [m, ...]
    memory: tuple[PyTree, PyTree]  # the same for the transform's per-client memory
    losses: Array | None  # [m] mean local loss, NaN where nothing arrived; None where the sampler does not observe it
    broadcast: PyTree  # what the clients received
    up: Wire  # size of one message, in a cohort of all slots
    down: Wire  # size of one broadcast
    by_invited: np.ndarray | None = None  # `costs.bytes_by_invited`


class Aggregated(NamedTuple):
    """The aggregate of a round's messages, before the server's step: the result of `aggregate`."""

    update: PyTree  # the aggregate, after the server's end of the transform
    transform: PyTree  # the transform's next state
    aggregator: PyTree  # the aggregator's next state
    means: dict[str, Mean]  # the clients' metrics, pooled over all messages
    metrics: dict[str, dict[str, Array]]  # {"aggregator": its metrics by name, "transform": its metrics by name}


def mesh_of(star: Star) -> Any:
    """The devices that share a cohort: a `jax.sharding.Mesh`, or None for one device."""
    return engine.mesh_for(star.execution.mesh)


def initial_state(star: Star, params: PyTree, population: Population) -> FederatedState:
    """Makes the state before the first round.

    Args:
      star: the parts; a sampler with `tell` receives the cost of a round (`Work`) here.
      params: the model that training starts from.
      population: all clients; its size must be that of the sampler's design.

    Raises: ValueError where the sampler was made for another population size, and for clients (or a transform) with
    per-client state if a client may be drawn twice in a round.

    Guarantees: samplers receive bytes, steps and operations
    (tests/round/test_round.py::test_samplers_are_told_and_observe,
    tests/round/test_costs.py::test_quadratic_clients_have_known_work); every client begins with the state of a client
    that never took part (tests/round/test_state.py::test_everybody_begins_alike).
    """
    sampler = star.sampler
    mesh = mesh_of(star)
    design_size = getattr(sampler.design, "population_size", None)
    if design_size != population.size:
        validate.fail("sampler", f"a design for the population's {population.size} clients", design_size)
    server_state = star.server.init(params)
    broadcast = star.server.broadcast(server_state)
    client_state = own_state(star, broadcast, population)
    spec = message_spec(star, broadcast, population)
    memory = star.transform.init_client(spec)
    if jax.tree.leaves((client_state, memory)):
        check_distinct(sampler, "A client drawn twice would keep the state of one of its two messages.")
    state = FederatedState(
        round=jnp.zeros((), jnp.int32),
        sampler=sampler.init()
        if sampler.tell is None
        else sampler.tell(sampler.init(), work_of(star, params, population)),
        clients=engine.store(client_state, population.size, mesh=mesh),
        memory=engine.store(memory, population.size, mesh=mesh, name="transform"),
        transform=star.transform.init(spec),
        server=server_state,
        aggregator=() if star.aggregator.start is None else star.aggregator.start(spec),
    )
    return jax.tree.map(jnp.asarray, state)
