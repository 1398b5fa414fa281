"""The clients' half of a round: a cohort trains, and its messages are accumulated; `seen` keeps each of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, tree, validate
from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.population.protocol import count_of, num_rows
from fedjax_sim.prng import stream
from fedjax_sim.round.costs import bytes_by_invited, client_wires, plan_of
from fedjax_sim.round.extension import Extension
from fedjax_sim.round.inputs import inputs_of
from fedjax_sim.round.message import Message, Shared, Slot, client_round, usable_rows
from fedjax_sim.round.state import FederatedState, Gathered, mesh_of
from fedjax_sim.types import Aggregator, Array, CheapReads, Cohort, Observed, Population, PyTree, Received, Round, Star

NO_EXTENSION = Extension()


class Tally(NamedTuple):
    """The sums over the messages of the chunks so far."""

    carry: PyTree  # the aggregator's
    means: PyTree  # exact sums of (the clients' metrics, the transform's measurements)
    # [k] uint32: how many messages arrived, how many were dropped, then the sums of the bytes of each count
    counters: Array


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
    sizes = jnp.where(cohort.reported, jax.vmap(partial(count_of, population))(cohort.ids), 0)
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
    return is_on_one_device and not _size_classes(star, population) and not inputs_of(star, population).may_skip


def _slot_function(star: Star, read: Callable, extension: Extension) -> Callable:
    """One slot's work, as `engine.fold` calls it; `read` and `extension` as for `client_round`."""
    run_client = client_round(star, read, extension)

    @partial(jax.jit, static_argnames="rows")  # traced once, though its shape is asked for before it runs
    def each(shared: Shared, slot: Slot, rows: int | None = None):
        # The hidden zero of `reproducible` is made from `shared`, so all clients use one zero. A zero for each client
        # would be computed again at every coordinate.
        with engine.one_device():  # a federation inside of a client shares no devices
            return engine.reproducible(partial(run_client, rows=rows), shared)(shared, slot)

    return each


def _accumulate_function(star: Star, num_slots: int) -> Callable:
    """Adds a chunk of messages to the carry, as `engine.fold` calls it."""

    def gather(shared: Shared, tally: Tally, messages: Message, slots: Slot, valid: Array) -> Tally:
        messages = usable_rows(messages)
        # The engine pads the last chunk. A padding row gets a position outside of the cohort, where it writes nothing.
        position = jnp.where(valid, slots.position, num_slots)
        received = Received(messages.update, messages.weight, slots.id, position)
        round = Round(shared.cohort, shared.broadcast, shared.aggregator)
        carry = star.aggregator.accumulate(stream(shared.key, "aggregation"), round, tally.carry, received)
        means = exact_sums.add(tally.means, messages.means)
        return Tally(carry, means, tally.counters + _counters(messages))

    return lambda shared, *args: engine.reproducible(gather, shared)(shared, *args)


def _counters(messages: Message) -> Array:
    """Counts a chunk: how many arrived and were dropped, then the bytes of each count, [k] uint32 in one vector."""
    columns = [messages.arrived[:, None], messages.dropped[:, None], *jax.tree.leaves(messages.counts)]
    return jnp.concatenate([x.astype(jnp.uint32) for x in columns], axis=1).sum(0, dtype=jnp.uint32)


def _split_counters(counters: Array, counts_spec: dict[str, Any]) -> tuple[Array, Array, dict[str, Array]]:
    """Takes the vector of `_counters` apart.

    Args:
      counters: [k] uint32, summed over all chunks.
      counts_spec: for each count of the clients, the shape of its bytes, [4] or [8].

    Returns: (how many messages arrived [1], how many were dropped [1], the sums of the bytes of each count), uint32.
    """
    counts, structure = jax.tree.flatten(counts_spec)
    ends = np.cumsum([1, 1, *(x.size for x in counts)])
    num_arrived, num_dropped, *byte_sums = jnp.split(counters, ends[:-1])
    return num_arrived, num_dropped, jax.tree.unflatten(structure, byte_sums)


def _empty_tally(star: Star, message: Message, num_slots: int) -> Tally:
    """The tally before the first message; `message` is the spec of one message, m = `num_slots`."""
    carry = star.aggregator.init(message.update, num_slots)
    num_counters = 2 + sum(x.size for x in jax.tree.leaves(message.counts))
    return Tally(carry, exact_sums.zeros(message.means), jnp.zeros(num_counters, jnp.uint32))


def _check_arguments(star: Star, cohort: Cohort, population: Population, extension: Extension) -> None:
    """Raises the errors of `collect` for another extension, and for clients that cannot do what is asked of them."""
    if not isinstance(extension, Extension):
        hint = "`round.bases.starting_from(bases)` makes one from start models."
        validate.fail("extension", "an Extension", type(extension).__name__, hint, TypeError)
    if cohort.work is not None and star.client.facts.all_steps is None:
        hint = "It would do all of its work, whatever the sampler says; a client of your own states `all_steps`."
        validate.fail(
            "client", "one that can stop early, for the sampler's clients do part of their work", "another", hint
        )
    if not star.client.facts.pulled and jax.eval_shape(population.client, cohort.ids[0]).pull is not None:
        hint = "Attackers would train as honest clients do; take client.local_sgd or client.proximal."
        validate.fail("client", "one that obeys the pull of constrained attackers", "another", hint)


def _announced(population: Population, ids: Array) -> Array:
    """Returns the ids of a cohort, after a store on disk was asked to read these clients' data ahead.

    The ids pass through `announce`, so that the reads begin before the first client trains.
    """
    if not isinstance(population, CheapReads) or engine.is_unplaced():
        return ids
    return population.announce(ids)


def _reporting(star: Star, key: Array, round: Round) -> Array:
    """Returns whose message may reach the aggregator, [m] bool; `key` is the key of the round."""
    reported = round.cohort.reported
    if star.aggregator.stays is None:
        return reported
    # A client that leaves a secure sum counts as one that did not report.
    return reported & engine.reproducible(star.aggregator.stays)(stream(key, "aggregation"), round)


def collect(
    star: Star,
    key: Array,
    cohort: Cohort,
    state: FederatedState,
    population: Population,
    *,
    extension: Extension = NO_EXTENSION,
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
      extension: what the algorithm adds to the slots of the cohort. With `bases.starting_from` clients start from
        models of their own, in place of the broadcast.

    Returns: `Gathered`; leaves with a cohort axis are [m, ...].

    Raises: ValueError where the cohort has partial work (`Cohort.work`) and the client cannot stop early, or the
    population pulls attackers (`population.constrained`) and the client does not obey; TypeError for counts whose dtype
    is not an integer, and for an extension of another type.

    Guarantees: counts are exact (tests/round/test_collect.py::test_counts_are_exact, ::test_counts_are_counts);
    algorithms with other topologies than one server are composed of these steps and match NumPy
    (tests/algorithms/hierarchy/test_seams.py::test_fedbuff, ::test_dpsgd, ::test_hierarchy); clients may start from
    earlier models (tests/algorithms/asynchronous/test_asynchronous.py::test_fedbuff_is_the_event_loop); an aggregator
    sees zeros for the absent (tests/aggregation/test_gather.py::test_rule_sees_rows_by_id_and_zeros_for_the_absent).
    """
    _check_arguments(star, cohort, population, extension)
    inputs = inputs_of(star, population)
    each = _slot_function(star, inputs.read, extension)
    ids = cohort.ids
    num_slots = ids.shape[0]
    announced_ids = _announced(population, ids)
    broadcast = engine.reproducible(star.server.broadcast)(state.server)
    reads_round = star.client.facts.reads_round
    shared = Shared(
        key=key,
        broadcast=broadcast,
        transform=state.transform,
        population=population,
        cohort=cohort,
        aggregator=state.aggregator,
        extension=extension.shared,
        round=state.round if reads_round else None,
    )
    positions = jnp.arange(num_slots, dtype=jnp.int32)
    mesh = mesh_of(star)
    packing_options = _packing_options(star, population, cohort)
    plan = star.execution.plan or inputs.plan or plan_of(star, broadcast, population)
    held_ids = ids if packing_options else _ids_of_places(ids, plan, mesh)
    client_rows, clients = engine.take(state.clients, held_ids)
    memory_rows, memory = engine.take(state.memory, held_ids)
    # Keys follow from the client's id and not from its slot: results do not depend on the order of the cohort.
    keys = engine.client_keys(stream(key, "client"), ids), engine.client_keys(stream(key, "transform"), ids)
    reported = _reporting(star, key, Round(cohort, broadcast, state.aggregator))
    slots = Slot(
        position=positions,
        id=announced_ids,
        keys=keys,
        reported=reported,
        worked=inputs.works(cohort, reported),
        client=client_rows,
        memory=memory_rows,
        work=cohort.work,
        extension=extension.rows,
        version=extension.versions if reads_round else None,
    )
    message, _ = jax.eval_shape(each, shared, jax.tree.map(lambda x: x[0], slots))
    tally = tree.varying(_empty_tally(star, message, num_slots), state.round)
    held = Slot._make(name in ("client", "memory") for name in Slot._fields)
    fold_options = {"plan": plan, "mesh": mesh, "held": held, **packing_options}
    if inputs.may_skip:
        fold_options["there"] = slots.worked
    renewed = extension.renewed
    if renewed is not None:
        # The carry already holds what is shared, and each chunk changes it. So every chunk reads it from the carry, and
        # `shared` holds no second copy.
        shared = shared._replace(extension=None)
        fold_options["renewed"] = lambda shared, tally: shared._replace(extension=renewed(tally.carry))
    tally, by_slot = engine.fold(each, _accumulate_function(star, num_slots), shared, tally, slots, **fold_options)
    num_arrived, num_dropped, counts = _split_counters(tally.counters, message.counts)
    losses = None
    if star.sampler.observe is not None:
        losses = jnp.where(by_slot.arrived, by_slot.loss, jnp.nan)  # chunks that the engine skipped hold zeros
    up, down = client_wires(star, broadcast, population)
    return Gathered(
        carry=tally.carry,
        means=tally.means,
        counts=counts,
        arrived=by_slot.arrived,
        dropped=by_slot.dropped,
        num_arrived=num_arrived[0].astype(jnp.int32),
        num_dropped=num_dropped[0].astype(jnp.int32),
        clients=(clients, by_slot.client),
        memory=(memory, by_slot.memory),
        losses=losses,
        broadcast=broadcast,
        up=up,
        down=down,
        by_invited=bytes_by_invited(star, broadcast, population),
    )


def seen(star: Star, key: Array, cohort: Cohort, state: FederatedState, population: Population) -> Observed:
    """Collects a cohort's messages with an aggregator that keeps every one, and returns what the server sees of them.

    Args: as for `collect`.

    Raises: as `collect`.

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
