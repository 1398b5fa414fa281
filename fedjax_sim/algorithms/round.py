"""A round's verbs over a `Star`: invite, collect, close; and observe, which replays one round.

    cohort, sampler_state = invite(star, key, state, population)
    gathered = collect(star, key, cohort, state, population)
    state, info = close(star, key, cohort, gathered, state._replace(sampler=sampler_state))

is a round of `federated`; other algorithms are other short assemblies of the same verbs
(tests/algorithms/test_seams.py has FedBuff, D-PSGD and a hierarchy).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import engine, tree, validate
from fedjax_sim.algorithms.compatibility import check_aggregate
from fedjax_sim.algorithms.costs import losses, message_spec, plan_of, traffic, two_words, wires, work_of
from fedjax_sim.algorithms.one_client import Message, Shared, Slot, client_round, stays_finite, usable_rows
from fedjax_sim.engine import exact
from fedjax_sim.population.protocol import num_rows
from fedjax_sim.prng import stream
from fedjax_sim.types import (
    Aggregator,
    Algorithm,
    Array,
    Cohort,
    Count,
    Mean,
    Noise,
    Observed,
    Outcome,
    Population,
    PyTree,
    Received,
    Round,
    Star,
    Wire,
)

__all__ = [
    "Aggregated",
    "FederatedState",
    "Gathered",
    "aggregate",
    "close",
    "collect",
    "initial_state",
    "invite",
    "observe",
    "remember",
    "seen",
]


class FederatedState(NamedTuple):
    """What the next round needs; one slot for each kind of part."""

    round: Array  # [] int32 rounds so far
    sampler: PyTree
    clients: PyTree  # [N, ...] per-client state; () if stateless
    memory: PyTree  # [N, ...] per-client memory of the transform
    transform: PyTree
    server: PyTree
    aggregator: PyTree = ()


class Gathered(NamedTuple):
    """What a cohort sent, and what its clients want to keep. `close` makes a new state of it."""

    carry: PyTree  # of the aggregator
    means: PyTree  # exact sums of (the clients' metrics, the transform's measurements)
    counts: dict[str, Array]  # [4] uint32 sums of the bytes of the clients' own counts
    arrived: Array  # [m] bool; a usable message came
    dropped: Array  # [m] bool; a message came that could not be used
    num_arrived: Array  # [] int32
    num_dropped: Array  # [] int32
    clients: tuple[PyTree, PyTree]  # per-client state: where rows go, and the rows [m, ...]
    memory: tuple[PyTree, PyTree]  # the same of the transform's per-client memory
    losses: Array | None  # [m] mean local loss, where the sampler observes it
    broadcast: PyTree
    up: Wire  # of one message
    down: Wire  # of one broadcast


class Aggregated(NamedTuple):
    """What the server has read off the messages, before its step."""

    update: PyTree  # the aggregate, behind the server's end of the transform
    transform: PyTree  # the transform's next state
    aggregator: PyTree  # the aggregator's next state
    means: dict[str, Mean]  # the clients' metrics over all messages
    metrics: dict[str, dict[str, Array]]  # of aggregator and transform, by part


def _mesh(star: Star) -> Any:
    return engine.device_mesh() if star.mesh == "all" else star.mesh


def initial_state(star: Star, params: PyTree, population: Population) -> FederatedState:
    """The state before the first round.

    Raises: ValueError where the sampler was made for another population, and for clients that remember while one of
    them may be drawn twice.
    """
    sampler, mesh = star.sampler, _mesh(star)
    design_size = getattr(sampler.design, "population_size", None)
    if design_size != population.size:
        validate.fail("sampler", f"a design for the population's {population.size} clients", design_size)
    server_state = star.server.init(params)
    broadcast = star.server.broadcast(server_state)
    client_state = star.client.init(broadcast)
    spec = message_spec(star, broadcast, population)
    memory = star.transform.init_client(spec)
    if sampler.design.replacement and jax.tree.leaves((client_state, memory)):
        hint = "A client drawn twice would remember one of its two messages."
        validate.fail("sampler", "a design without replacement, for clients remember", sampler.design.scheme, hint)
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


def invite(star: Star, key: Array, state: FederatedState) -> tuple[Cohort, PyTree]:
    """The cohort of a round, and the sampler's next state."""
    return engine.steady(star.sampler.sample)(stream(key, "sampling"), state.sampler)


def _unequal(star: Star, population: Population, cohort: Cohort) -> dict:
    """What `engine.fold` must know of clients that differ in their work."""
    steps = star.client.num_steps
    classed = steps is not None and hasattr(population, "capped")
    classes = getattr(population, "capacities", ()) if classed else ()
    if not hasattr(population, "count") or (len(classes) < 2 and not callable(steps)):
        return {}
    sizes = jnp.where(cohort.reported, jax.vmap(population.count)(cohort.ids), 0)
    return {"sizes": sizes, "capacities": classes or (num_rows(population),)}


def _each(star: Star) -> Callable:
    """One slot's work, as `engine.fold` calls it."""
    one = client_round(star)

    @partial(jax.jit, static_argnames="rows")  # traced once, though its shape is asked for before it runs
    def each(shared: Shared, slot: Slot, rows: int | None = None):
        return engine.steady(partial(one, rows=rows))(shared, slot)

    return each


def _accumulate(star: Star, num_slots: int) -> Callable:
    """Adds a chunk of messages to the carry, as `engine.fold` calls it."""

    def gather(shared: Shared, carry, messages: Message, slots: Slot, valid):
        sums, means, arrived, dropped, counts = carry
        messages = usable_rows(messages)
        position = jnp.where(valid, slots.position, num_slots)
        received = Received(messages.update, messages.weight, slots.id, position)
        round = Round(*shared.cohort, shared.broadcast, shared.aggregator)
        sums = star.aggregator.accumulate(stream(shared.key, "aggregation"), round, sums, received)
        arrived = arrived + messages.arrived.sum(dtype=jnp.int32)
        counts = jax.tree.map(lambda total, x: total + x.sum(0, dtype=jnp.uint32), counts, messages.counts)
        return sums, exact.add(means, messages.means), arrived, dropped + messages.dropped.sum(dtype=jnp.int32), counts

    return lambda *args: engine.steady(gather)(*args)


def collect(star: Star, key: Array, cohort: Cohort, state: FederatedState, population: Population) -> Gathered:
    """Trains the cohort from what the server broadcasts, and folds the messages into the aggregator's carry.

    Nothing is kept yet: `close` makes a new state of what was gathered, or `aggregate` and `remember` do by themselves.
    """
    if cohort.work is not None and star.client.all_steps is None:
        hint = "It would do all of its work, whatever the sampler says; an own client states `all_steps`."
        validate.fail(
            "client", "one that can stop early, for the sampler's clients do part of their work", "another", hint
        )
    each, num_slots = _each(star), cohort.ids.shape[0]
    ids = cohort.ids
    announces = hasattr(population, "announce") and not engine.is_unplaced()
    wanted = population.announce(ids) if announces else ids
    broadcast = engine.steady(star.server.broadcast)(state.server)
    zero = jnp.zeros((), jnp.int32)
    shared = Shared(key, broadcast, state.transform, population, cohort, state.aggregator)
    positions = jnp.arange(num_slots, dtype=jnp.int32)
    client_rows, clients = engine.take(state.clients, ids)
    memory_rows, memory = engine.take(state.memory, ids)
    keys = tuple(engine.client_keys(stream(key, name), ids) for name in ("client", "transform"))
    slots = Slot(positions, wanted, keys, cohort.reported, client_rows, memory_rows, cohort.work)
    message, _ = jax.eval_shape(each, shared, jax.tree.map(lambda x: x[0], slots))
    counts = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), message.counts)
    empty = star.aggregator.init(message.update, num_slots)
    carry = tree.varying((empty, exact.zeros(message.means), zero, zero, counts), state.round)
    plan = plan_of(star, broadcast, population) if star.plan is None else star.plan
    how = {"plan": plan, "mesh": _mesh(star), **_unequal(star, population, cohort)}
    carry, per_slot = engine.fold(each, _accumulate(star, num_slots), shared, carry, slots, **how)
    table, means, num_arrived, num_dropped, counts = carry
    client_rows, memory_rows, arrived, dropped, losses = per_slot
    return Gathered(
        table,
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
        *wires(star, broadcast, population),
    )


def aggregate(star: Star, key: Array, cohort: Cohort, gathered: Gathered, state: FederatedState) -> Aggregated:
    """What the messages come to: the aggregator's result behind the server's end of the transform."""
    rule, round = star.aggregator, Round(*cohort, gathered.broadcast, state.aggregator)
    update, metrics, *kept = rule.finalize(stream(key, "aggregation"), round, gathered.carry)
    found, measured = exact.total(gathered.means)
    update, transform_state, transform_metrics = star.transform.on_server(
        stream(key, "transform_server"), cohort, update, state.transform, measured, rule.sensitivity
    )
    metrics = {"aggregator": metrics, "transform": transform_metrics}
    return Aggregated(update, transform_state, *(kept or [()]), found, metrics)


def _shares(noise: Noise) -> int:
    """The messages that a distributed noise counts on."""
    details = noise.details._asdict() if hasattr(noise.details, "_asdict") else noise.details or {}
    return details.get("cohort_size", 1)


def remember(cohort: Cohort, gathered: Gathered, usable: Array | bool = True) -> tuple[PyTree, PyTree]:
    """Per-client state and memory of all clients, with what those whose messages arrived want to keep, if `usable`."""
    (clients, client_rows), (memory, memory_rows) = gathered.clients, gathered.memory
    kept = engine.put(clients, cohort.ids, client_rows, gathered.arrived & usable)
    return kept, engine.put(memory, cohort.ids, memory_rows, gathered.arrived & usable)


def close(
    star: Star, key: Array, cohort: Cohort, gathered: Gathered, state: FederatedState, *, usable: Array | bool = True
) -> tuple[FederatedState, dict[str, Any]]:
    """The server's step on what was gathered, and the round's info.

    Args:
      usable: False skips the round, as do a round without usable messages and a server step that is not finite: model
        and memories stay as they are.
    """

    def stepped(key, cohort, carry, state):
        table, means, arrived, _ = carry
        found = aggregate(star, key, cohort, gathered._replace(carry=table, means=means), state)
        check_aggregate(found.update, star.server, tree.spec(star.server.params(state.server)))
        moved = star.server.apply(stream(key, "server"), found.update, state.server)
        released, noise = star.transform.releases_when_empty, star.transform.noise
        fit = (arrived > 0) | released
        if noise is not None and noise.place == "distributed":
            fit = arrived >= _shares(noise)  # fewer messages hold less noise: nothing is released
        fit = fit if usable is True else fit & usable
        fit &= tree.all_finite(star.server.params(moved)) & stays_finite(state.server, moved)
        kept = released & tree.all_finite(found.transform)  # what was released was released
        moved = tree.where(fit, moved, state.server)
        pooled = {name: mean.total / mean.weight for name, mean in found.means.items()}
        length = optax.tree.norm(tree.subtract(star.server.params(moved), star.server.params(state.server)))
        transform = tree.where(fit | kept, found.transform, state.transform)
        return fit, transform, moved, length, {"client": pooled} | found.metrics, found.aggregator

    carry = gathered.carry, gathered.means, gathered.num_arrived, gathered.num_dropped
    fit, transform, server, length, metrics, own = engine.steady(stepped)(key, cohort, carry, state)
    round, sampler = state.round + 1, state.sampler
    clients, memory = remember(cohort, gathered, fit)
    if star.sampler.observe is not None:
        sampler = star.sampler.observe(sampler, cohort, Outcome(gathered.arrived, gathered.losses))
    aggregator = tree.where(fit, own, state.aggregator)
    new = FederatedState(round, sampler, clients, memory, transform, server, aggregator)
    info = traffic(cohort, gathered.up, gathered.down)
    info |= losses(star, cohort, gathered.dropped, gathered.num_dropped)
    info |= {
        "clients_invited": info["downlink_bytes"].number,
        "clients_reported": gathered.num_arrived,
        "skipped_rounds": (~fit).astype(jnp.int32),
        "update_norm": length,
    }
    counts = {name: Count(jnp.ones((), jnp.int32), two_words(x)) for name, x in gathered.counts.items()}
    return new, _info(info, sampler=cohort.metrics, **metrics, counts=counts)


def _info(own: dict, **parts: dict) -> dict:
    """The round's own numbers and the metrics of its parts, none of which may bear the name of one of those."""
    metrics = tree.joined(parts)
    for name in ("round", "epsilon", *own):
        if name in metrics:
            validate.fail("metrics", "names that no other part uses", name, "Rename it in the loss or the part.")
    return metrics | own


def observe(algorithm: Algorithm, key: Array, state: PyTree, population: Population) -> Observed:
    """What the server saw in the round that `algorithm.step(key, state, population)` makes: rounds are pure.

    Args:
      key: of that round; `run` gives round t the key fold_in(key, t), so replay with that one.
      state: before the round.

    Returns: `Observed`: the broadcast, the messages as they arrived, their weights, and whose they were. An aggregator
    that hides single messages from the server (a modular sum) is looked through.

    Raises: ValueError for an algorithm that has no `observe` of its own.

    Guarantees: the mean of the messages is the round's update
    (tests/algorithms/test_round.py::test_observe_is_the_round).
    """
    if algorithm.observe is None:
        validate.fail(
            "algorithm", "one that can replay its rounds", None, "Give it `observe`, or build it from a Star."
        )
    return algorithm.observe(key, state, population)


def seen(star: Star, key: Array, cohort: Cohort, state: FederatedState, population: Population) -> Observed:
    """`collect`, with every message kept as it arrives."""
    gathered = collect(star._replace(aggregator=_everything(star)), key, cohort, state, population)
    rows = gathered.carry
    return Observed(gathered.broadcast, rows["updates"], rows["weights"], cohort.ids)


def _everything(star: Star) -> Aggregator:
    """An aggregator that holds each slot's message as it is, in whatever dtype it was sent."""

    def init(update_spec, num_slots):
        return {"updates": engine.buffer(update_spec, num_slots), "weights": jnp.zeros(num_slots, jnp.float32)}

    def accumulate(key, round, carry, received):
        return engine.fill(carry, received.slots, {"updates": received.updates, "weights": received.weights})

    return star.aggregator._replace(init=init, accumulate=accumulate)
