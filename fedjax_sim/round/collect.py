"""The clients' half of a round: a cohort trains, and its messages are accumulated; `seen` keeps each of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, tree, validate
from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.population.protocol import num_rows
from fedjax_sim.prng import stream
from fedjax_sim.round.costs import bytes_by_invited, client_wires, plan_of
from fedjax_sim.round.message import Message, Shared, Slot, client_round, usable_rows
from fedjax_sim.round.state import Bases, FederatedState, Gathered, mesh_of
from fedjax_sim.types import (
    Aggregator,
    Array,
    CheapReads,
    Cohort,
    Observed,
    Population,
    Received,
    Round,
    Star,
    Subpopulation,
)

ONE_BY_ONE = engine.Plan(1, 1)


def _size_classes(star: Star, population: Population) -> tuple[int, ...]:
    """Rows of the size classes by which `engine.fold` packs clients whose amounts of work differ; () = no packing."""
    # Packing sorts by the number of examples, so it needs `count`.
    if not isinstance(population, CheapReads):
        return ()
    num_steps = star.client.facts.num_steps
    classes = () if num_steps is None else tuple(population.capacities)
    # A single class helps only where clients differ in their number of steps: then clients of like length share a vmap,
    # of which the longest decides.
    if len(classes) < 2 and not callable(num_steps):
        return ()
    return classes or (num_rows(population),)


def _packing_options(star: Star, population: Population, cohort: Cohort) -> dict:
    """Returns the options of `engine.fold` that pack clients: their sizes, and the size classes; {} without packing."""
    if not (classes := _size_classes(star, population)):
        return {}
    # A client that will not report is not trained, so it costs what an empty client costs.
    sizes = jnp.where(cohort.reported, jax.vmap(population.count)(cohort.ids), 0)
    return {"sizes": sizes, "capacities": classes}


def _ids_of_places(ids: Array, plan: engine.Plan, mesh: Any) -> Array:
    """Returns the clients at the places of several devices, so that each receives the states for its own places.

    There is no client behind the last slot: -1. On one device, slots are as they are.
    """
    if mesh is None or engine.is_unplaced():
        return ids
    num_slots = ids.shape[0]
    return jnp.pad(ids, (0, engine.num_places(num_slots, plan, mesh) - num_slots), constant_values=-1)


def in_turn(star: Star, population: Population) -> bool:
    """Whether the chunks of a cohort are processed one after the other, in the order of the cohort.

    Each chunk then sees the aggregator's carry as the earlier chunks left it. This holds on one device, for clients
    that are not packed by size, and where no place of the population is ever empty.

    Args:
      star: the parts; `star.execution.mesh` says which devices share a cohort.
      population: all clients.
    """
    is_on_one_device = engine.is_unplaced() or mesh_of(star) is None
    return is_on_one_device and not _size_classes(star, population) and not isinstance(population, Subpopulation)


def _slot_function(star: Star) -> Callable:
    """One slot's work, as `engine.fold` calls it."""
    run_client = client_round(star)

    @partial(jax.jit, static_argnames="rows")  # traced once, though its shape is asked for before it runs
    def each(shared: Shared, slot: Slot, rows: int | None = None):
        # The hidden zero of `reproducible` is made from `shared`, so all clients use one zero. A zero for each client
        # would be computed again at every coordinate.
        with engine.one_device():  # a federation inside of a client shares no devices
            return engine.reproducible(partial(run_client, rows=rows), shared)(shared, slot)

    return each


def _accumulate_function(star: Star, num_slots: int) -> Callable:
    """Adds a chunk of messages to the carry, as `engine.fold` calls it."""

    def gather(shared: Shared, carry, messages: Message, slots: Slot, valid):
        sums, means, counters = carry
        messages = usable_rows(messages)
        # The engine pads the last chunk. A padding row gets a position outside of the cohort, where it writes nothing.
        position = jnp.where(valid, slots.position, num_slots)
        received = Received(messages.update, messages.weight, slots.id, position)
        round = Round(shared.cohort, shared.broadcast, shared.aggregator)
        sums = star.aggregator.accumulate(stream(shared.key, "aggregation"), round, sums, received)
        return sums, exact_sums.add(means, messages.means), counters + _counters(messages)

    return lambda shared, *args: engine.reproducible(gather, shared)(shared, *args)


def _counters(messages: Message) -> Array:
    """Counts a chunk: how many arrived and were dropped, then the bytes of each count, [k] uint32 in one vector."""
    columns = [messages.arrived[:, None], messages.dropped[:, None], *jax.tree.leaves(messages.counts)]
    return jnp.concatenate([x.astype(jnp.uint32) for x in columns], axis=1).sum(0, dtype=jnp.uint32)


def collect(
    star: Star, key: Array, cohort: Cohort, state: FederatedState, population: Population, bases: Bases | None = None
) -> Gathered:
    """Trains the cohort from the server's broadcast, and accumulates the messages in the aggregator's carry.

    No state changes here: `close` makes the next state from the result, or an algorithm does so with `aggregate` and
    `remember`. An algorithm may call this function twice in a round, with two broadcasts: Mime does.

    Args:
      star: the parts of the federation.
      key: of the round; clients, transform and aggregator each derive a stream of their own from it.
      cohort: of `invite`, or any other `Cohort` with the sampler's number of slots m.
      state: gives the broadcast (`state.server`), the clients' states and memories, and the state of transform and
        aggregator.
      population: all clients. A client whose id is outside of [0, N) is dropped and counted.
      bases: the models from which the clients start, each from a model of its own, in place of the broadcast.
        Aggregators see the broadcast all the same. None: every client starts from the broadcast.

    Returns: `Gathered`; leaves with a cohort axis are [m, ...].

    Raises: ValueError where the cohort has partial work (`Cohort.work`) and the client cannot stop early, or the
    population pulls attackers (`population.constrained`) and the client does not obey; TypeError for counts whose dtype
    is not an integer.

    Guarantees: counts are exact (tests/round/test_round.py::test_counts_are_exact, ::test_counts_are_counts);
    algorithms with other topologies than one server are composed of these steps and match NumPy
    (tests/algorithms/hierarchy/test_seams.py::test_fedbuff, ::test_dpsgd, ::test_hierarchy); clients may start from
    earlier models (tests/algorithms/asynchronous/test_asynchronous.py::test_fedbuff_is_the_event_loop); an aggregator
    sees zeros for the absent (tests/aggregation/test_gather.py::test_rule_sees_rows_by_id_and_zeros_for_the_absent).
    """
    if cohort.work is not None and star.client.facts.all_steps is None:
        hint = "It would do all of its work, whatever the sampler says; a client of your own states `all_steps`."
        validate.fail(
            "client", "one that can stop early, for the sampler's clients do part of their work", "another", hint
        )
    if not star.client.facts.pulled and jax.eval_shape(population.client, cohort.ids[0]).pull is not None:
        hint = "Attackers would train as honest clients do; take client.local_sgd or client.proximal."
        validate.fail("client", "one that obeys the pull of constrained attackers", "another", hint)
    each = _slot_function(star)
    num_slots = cohort.ids.shape[0]
    ids = cohort.ids
    # A store on disk reads the cohort's data ahead. Its ids pass through `announce`, so that the reads begin before the
    # first client trains.
    announces = isinstance(population, CheapReads) and not engine.is_unplaced()
    announced_ids = population.announce(ids) if announces else ids
    broadcast = engine.reproducible(star.server.broadcast)(state.server)
    if bases is None:
        models = None
        slot_bases = None
    else:
        models = bases.models
        slot_bases = (bases.index, bases.factors)
    round_number = state.round if star.client.facts.reads_round else None
    version = None if bases is None or round_number is None else bases.versions
    shared = Shared(key, broadcast, state.transform, population, cohort, state.aggregator, models, round_number)
    positions = jnp.arange(num_slots, dtype=jnp.int32)
    mesh = mesh_of(star)
    packing_options = _packing_options(star, population, cohort)
    plan = ONE_BY_ONE if star.client.federation is not None else None  # inside, clients are vmapped
    plan = star.execution.plan or plan or plan_of(star, broadcast, population)
    held_ids = ids if packing_options else _ids_of_places(ids, plan, mesh)
    client_rows, clients = engine.take(state.clients, held_ids)
    memory_rows, memory = engine.take(state.memory, held_ids)
    # Keys follow from the client's id and not from its slot: results do not depend on the order of the cohort.
    keys = tuple(engine.client_keys(stream(key, name), ids) for name in ("client", "transform"))
    reported = cohort.reported
    if star.aggregator.stays is not None:  # a client that leaves a secure sum counts as one that did not report
        round = Round(cohort, broadcast, state.aggregator)
        reported &= engine.reproducible(star.aggregator.stays)(stream(key, "aggregation"), round)
    uploads = cohort.reported if cohort.timing.sent is None else cohort.timing.sent  # as `costs.traffic` counts them
    worked = reported if star.client.federation is None else uploads
    slots = Slot(
        positions, announced_ids, keys, reported, worked, client_rows, memory_rows, cohort.work, slot_bases, version
    )
    message, _ = jax.eval_shape(each, shared, jax.tree.map(lambda x: x[0], slots))
    counts, structure_of_counts = jax.tree.flatten(message.counts)
    ends = np.cumsum([1, 1, *(x.size for x in counts)])  # of arrived, dropped and each count, among the counters
    empty_carry = star.aggregator.init(message.update, num_slots)
    carry = tree.varying((empty_carry, exact_sums.zeros(message.means), jnp.zeros(ends[-1], jnp.uint32)), state.round)
    held = Slot(*[name in ("client", "memory") for name in Slot._fields])
    fold_options = {"plan": plan, "mesh": mesh, "held": held, **packing_options}
    if isinstance(population, Subpopulation):
        fold_options["there"] = worked
    if bases is not None and bases.kept is not None:
        # The carry already holds these models, and each chunk changes them. So every chunk reads them from the carry,
        # and `shared` holds no second copy.
        shared = shared._replace(models=None)
        fold_options["renewed"] = lambda shared, carry: shared._replace(models=bases.kept(carry[0]))
    carry, per_slot = engine.fold(each, _accumulate_function(star, num_slots), shared, carry, slots, **fold_options)
    sums, means, counters = carry
    num_arrived, num_dropped, *counts = jnp.split(counters, ends[:-1])
    client_rows, memory_rows, arrived, dropped, losses = per_slot
    if star.sampler.observe is not None:
        losses = jnp.where(arrived, losses, jnp.nan)  # chunks that the engine skipped hold zeros
    return Gathered(
        sums,
        means,
        jax.tree.unflatten(structure_of_counts, counts),
        arrived,
        dropped,
        num_arrived[0].astype(jnp.int32),
        num_dropped[0].astype(jnp.int32),
        (clients, client_rows),
        (memory, memory_rows),
        None if star.sampler.observe is None else losses,
        broadcast,
        *client_wires(star, broadcast, population),
        bytes_by_invited(star, broadcast, population),
    )


def seen(star: Star, key: Array, cohort: Cohort, state: FederatedState, population: Population) -> Observed:
    """Collects a cohort's messages with an aggregator that keeps every one, and returns what the server sees of them.

    Args and Raises: as for `collect`.

    Returns: `Observed`. An aggregator with a `view` of its own, such as a secure sum, decides what its server sees.

    Guarantees: under the mean, the messages and weights that are seen give the round's change of the model, and clients
    that do not report are seen as zeros of weight 0 (tests/round/test_round.py::test_observe_is_the_round).
    """
    gathered = collect(star._replace(aggregator=everything(star)), key, cohort, state, population)
    slots = jnp.arange(cohort.ids.shape[0], dtype=jnp.int32)
    updates, weights = engine.all_rows(gathered.carry, slots)
    if star.aggregator.view is not None:
        round = Round(cohort, gathered.broadcast, state.aggregator)
        received = Received(updates, weights, cohort.ids, slots)
        updates, weights = star.aggregator.view(stream(key, "aggregation"), round, received)
    return Observed(gathered.broadcast, updates, weights, cohort.ids)


def everything(star: Star) -> Aggregator:
    """The star's aggregator, changed to keep each slot's message and weight, in the dtypes in which they were sent."""

    def init(update_spec, num_slots):
        return engine.buffer((update_spec, jax.ShapeDtypeStruct((), jnp.float32)), num_slots)

    def accumulate(key, round, carry, received):
        return engine.fill(carry, received.slots, (received.updates, received.weights))

    return star.aggregator._replace(init=init, accumulate=accumulate)
