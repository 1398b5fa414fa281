"""The clients' half of a round: a cohort trains, and its messages are accumulated; and the same with each kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree, validate
from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.population.protocol import num_rows
from fedjax_sim.prng import stream
from fedjax_sim.round.costs import bytes_by_invited, client_wires, plan_of
from fedjax_sim.round.message import Message, Shared, Slot, client_round, usable_rows
from fedjax_sim.round.state import Bases, FederatedState, Gathered, mesh_of
from fedjax_sim.types import Aggregator, Array, Cohort, Observed, Population, Received, Round, Star

__all__ = ["collect", "everything", "in_turn", "seen"]

ONE_BY_ONE = engine.Plan(1, 1)


def _capacities(star: Star, population: Population) -> tuple[int, ...]:
    """Rows of the size classes by which `engine.fold` packs clients that differ in their amount of work; () = none."""
    steps = star.client.facts.num_steps
    classed = steps is not None and hasattr(population, "capped")
    classes = getattr(population, "capacities", ()) if classed else ()
    if not hasattr(population, "count") or (len(classes) < 2 and not callable(steps)):
        return ()
    return tuple(classes) or (num_rows(population),)


def _packed(star: Star, population: Population, cohort: Cohort) -> dict:
    """Options of `engine.fold` where clients are packed: their sizes, and the size classes."""
    if not (capacities := _capacities(star, population)):
        return {}
    sizes = jnp.where(cohort.reported, jax.vmap(population.count)(cohort.ids), 0)
    return {"sizes": sizes, "capacities": capacities}


def in_turn(star: Star, population: Population) -> bool:
    """Whether chunks of a cohort follow each other in its order, each seeing what the ones before made of the
    aggregator's carry: without a mesh, of clients that are not packed by size, in places that are never empty."""
    alone = engine.is_unplaced() or mesh_of(star) is None
    return alone and not _capacities(star, population) and not hasattr(population, "there")


def _each(star: Star) -> Callable:
    """One slot's work, as `engine.fold` calls it."""
    one = client_round(star)

    @partial(jax.jit, static_argnames="rows")  # traced once, though its shape is asked for before it runs
    def each(shared: Shared, slot: Slot, rows: int | None = None):
        return engine.steady(partial(one, rows=rows), shared)(shared, slot)  # clients share its zero

    return each


def _accumulate(star: Star, num_slots: int) -> Callable:
    """Adds a chunk of messages to the carry, as `engine.fold` calls it."""

    def gather(shared: Shared, carry, messages: Message, slots: Slot, valid):
        sums, means, arrived, dropped, counts = carry
        messages = usable_rows(messages)
        position = jnp.where(valid, slots.position, num_slots)
        received = Received(messages.update, messages.weight, slots.id, position)
        round = Round(shared.cohort, shared.broadcast, shared.aggregator)
        sums = star.aggregator.accumulate(stream(shared.key, "aggregation"), round, sums, received)
        arrived = arrived + messages.arrived.sum(dtype=jnp.int32)
        counts = jax.tree.map(lambda total, x: total + x.sum(0, dtype=jnp.uint32), counts, messages.counts)
        return (
            sums,
            exact_sums.add(means, messages.means),
            arrived,
            dropped + messages.dropped.sum(dtype=jnp.int32),
            counts,
        )

    return lambda shared, *args: engine.steady(gather, shared)(shared, *args)


def collect(
    star: Star, key: Array, cohort: Cohort, state: FederatedState, population: Population, bases: Bases | None = None
) -> Gathered:
    """Trains the cohort from what the server broadcasts, and accumulates the messages in the aggregator's carry.

    No state is changed: `close` makes the next one from the result, or an algorithm does it by `aggregate` and
    `remember`. Calling it twice in a round, from two broadcasts, is allowed: Mime does.

    Args:
      cohort: of `invite`, or any other `Cohort` with the sampler's number of slots m.
      state: gives the broadcast (`state.server`), the clients' states and memories, and the state of transform and
        aggregator. A client outside of [0, N) is dropped and counted.
      bases: what the clients start from, each from a model of its own, in place of the broadcast, which aggregators see
        all the same.

    Returns: `Gathered`; leaves with a cohort axis are [m, ...].

    Raises: ValueError where the cohort has partial work (`Cohort.work`) and the client cannot stop early, or the
    population pulls attackers (`population.constrained`) and the client does not obey; TypeError for counts of another
    dtype than integers.

    Guarantees: counts are exact (tests/round/test_round.py::test_counts_are_exact, ::test_counts_are_counts);
    other algorithms than those of one server are composed of these steps and match NumPy
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
    each, num_slots = _each(star), cohort.ids.shape[0]
    ids = cohort.ids
    announces = hasattr(population, "announce") and not engine.is_unplaced()
    wanted = population.announce(ids) if announces else ids
    broadcast = engine.steady(star.server.broadcast)(state.server)
    zero = jnp.zeros((), jnp.int32)
    models, own = (None, None) if bases is None else (bases.models, (bases.index, bases.factors))
    number = state.round if star.client.facts.reads_round else None
    version = None if bases is None or number is None else bases.versions
    shared = Shared(key, broadcast, state.transform, population, cohort, state.aggregator, models, number)
    positions = jnp.arange(num_slots, dtype=jnp.int32)
    client_rows, clients = engine.take(state.clients, ids)
    memory_rows, memory = engine.take(state.memory, ids)
    keys = tuple(engine.client_keys(stream(key, name), ids) for name in ("client", "transform"))
    reported = cohort.reported
    if star.aggregator.stays is not None:
        round = Round(cohort, broadcast, state.aggregator)
        reported &= engine.steady(star.aggregator.stays)(stream(key, "aggregation"), round)
    uploads = cohort.reported if cohort.timing.sent is None else cohort.timing.sent  # as `costs.traffic` counts them
    worked = reported if star.client.federation is None else uploads
    slots = Slot(positions, wanted, keys, reported, worked, client_rows, memory_rows, cohort.work, own, version)
    message, _ = jax.eval_shape(each, shared, jax.tree.map(lambda x: x[0], slots))
    counts = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), message.counts)
    empty = star.aggregator.init(message.update, num_slots)
    carry = tree.varying((empty, exact_sums.zeros(message.means), zero, zero, counts), state.round)
    plan = ONE_BY_ONE if star.client.federation is not None else None  # inside, clients are vmapped
    plan = star.execution.plan or plan or plan_of(star, broadcast, population)
    how = {"plan": plan, "mesh": mesh_of(star), **_packed(star, population, cohort)}
    if hasattr(population, "there"):
        how["there"] = worked
    if bases is not None and bases.kept is not None:  # no second copy of them beside the carry's
        shared = shared._replace(models=None)
        how["renewed"] = lambda shared, carry: shared._replace(models=bases.kept(carry[0]))
    carry, per_slot = engine.fold(each, _accumulate(star, num_slots), shared, carry, slots, **how)
    sums, means, num_arrived, num_dropped, counts = carry
    client_rows, memory_rows, arrived, dropped, losses = per_slot
    if star.sampler.observe is not None:
        losses = jnp.where(arrived, losses, jnp.nan)  # skipped chunks have zeros
    return Gathered(
        sums,
        means,
        counts,
        arrived,
        dropped,
        num_arrived,
        num_dropped,
        (clients, client_rows),
        (memory, memory_rows),
        None if star.sampler.observe is None else losses,
        broadcast,
        *client_wires(star, broadcast, population),
        bytes_by_invited(star, broadcast, population),
    )


def seen(star: Star, key: Array, cohort: Cohort, state: FederatedState, population: Population) -> Observed:
    """`Observed` of a cohort: `collect` with an aggregator that keeps every message, and what the server sees of them.

    Args and Raises: as for `collect`.

    Guarantees: tests/round/test_round.py::test_observe_is_the_round.
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
    """The star's aggregator, but one that keeps each slot's message and weight, in whatever dtype they were sent."""

    def init(update_spec, num_slots):
        return engine.buffer((update_spec, jax.ShapeDtypeStruct((), jnp.float32)), num_slots)

    def accumulate(key, round, carry, received):
        return engine.fill(carry, received.slots, (received.updates, received.weights))

    return star.aggregator._replace(init=init, accumulate=accumulate)
