"""Clients in flight: who trains on which version of the model, and whose messages arrive next. Event-driven, exact.

C places hold a client each. A client in flight is three numbers: its id, the version of the model that it was sent, and
the ticks until its message arrives; its update is computed when it arrives. A step of the server takes the next
arrivals by time, equal times by id. Among them may be clients that were sent work during the same step. Where clients
may leave, a fourth number says when one does whose message never arrives: it keeps its place until then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.algorithms.asynchronous.clock_ticks import NEVER_ARRIVES, advanced, earliest, last, places_of
from fedjax_sim.algorithms.asynchronous.in_flight import Begun, Traffic, Trip, trips
from fedjax_sim.network.devices import there_at
from fedjax_sim.prng import stream
from fedjax_sim.sampling.permutation import others, permute
from fedjax_sim.types import Array, Clock

__all__ = ["PATIENCE", "Arrivals", "Flights", "next_arrivals", "take_off"]

PATIENCE = 60  # seconds until a server looks again for clients when nobody is in flight
COUNTED = 1024  # clients; more are sorted


class Flights(NamedTuple):
    """The state between two steps."""

    ids: Array  # [C] int32, all different; an empty place keeps its last one
    bases: Array  # [C] int32 version of the model that the client trains on
    due: Array  # [C] uint32 ticks from now until its message is there; `NEVER_ARRIVES` at an empty place
    version: Array  # [] int32 versions so far, those of skipped steps included
    clock: Clock
    arrived: Array  # [] int32 messages so far
    begun: Begun  # since the last step that was told
    leaves: Array | None  # [C] uint32 ticks from now until it leaves, if its message never arrives; `NEVER_ARRIVES` at
    # other places; None = nobody leaves


class Arrivals(NamedTuple):
    """The messages that a step takes, in their order; L of M places are filled."""

    ids: Array  # [M] int32, all different where somebody arrives
    there: Array  # [M] bool; the first L
    bases: Array  # [M] int32 version of the model that each was sent
    gaps: Array  # [M] int32 staleness: versions between that one and the one that the update is applied to
    waited: Array  # [M] uint32 ticks from the arrival to the step's end
    elapsed: Array  # [] uint32 ticks that the step takes
    busy: Array  # [] float32 ticks that clients were at work, over all places
    flying: Array  # [] int32 clients in flight after it
    stopped: Array  # [] int32 clients stopped, for their model was too old
    begun: Begun
    interrupted: Array | None  # [] int32 clients who left; None = nobody leaves


class _Entry(NamedTuple):
    """Clients who may be next, each [n]."""

    time: Array  # uint32 ticks from the step's beginning
    ids: Array
    bases: Array
    rank: Array  # int32: the arrival that it was sent work after; -1 = it was in flight already
    leaves: Array | None  # uint32 ticks from the step's beginning until it leaves, if its message never arrives


def take_off(key: Array, traffic: Traffic, load: Callable) -> Flights:
    """The state before the first step: C clients, all subsets equally likely, have been sent version 0.

    Args:
      load: (ids [c]) -> `Load`, what a model and its training ask of these clients.
    """
    places = jnp.arange(traffic.concurrency, dtype=jnp.int32)
    ids = permute(stream(key, "first clients"), places, traffic.devices.population_size)
    version, seconds, ticks, arrived = (
        jnp.zeros((), jnp.int32) for _ in range(4)
    )  # a state is donated: no array twice
    clock, now = Clock(seconds, ticks), jnp.zeros_like(ids, jnp.uint32)
    trip = trips(key, traffic, load, ids, there_at(traffic.devices, ids, seconds))
    due, leaves = trip.ends(traffic, clock, now)
    begun = trip.begun(traffic, key, clock, now)
    return Flights(ids, jnp.zeros_like(ids), due, version, clock, arrived, begun, leaves)


def next_arrivals(key: Array, traffic: Traffic, flights: Flights, load: Callable) -> tuple[Arrivals, Flights]:
    """The next arrivals, and the state after the server has used them and sent work to clients in their places.

    A client whose model is more than `max_staleness` versions old at a step's beginning is stopped: its place is empty.
    So is that of a client who leaves before its message has arrived, from the end of the step in which it does.
    Then the next M arrivals are taken. With `refill` "other", the place of each goes at once to a client drawn
    uniformly from those who, at the step's beginning, were there and had no place, an empty one either; nobody is drawn
    twice in a step, so no client is twice in a buffer. With "same" it is the client who arrived, once the next version
    is there. Places left empty are filled at the end of a step, at most `Traffic.num_refills` of them: by others who
    are there, then by their last clients. An update whose base is made in this very step cannot be computed yet, so the
    step ends before it (`buffer_size` 1 and several arrivals a step).

    Args:
      key: of the step.
      load: as in `take_off`.

    Guarantees: the events of a NumPy loop that handles them one by one
    (tests/algorithms/asynchronous/test_arrivals.py::test_events_are_those_of_a_loop).
    """
    m, unit = traffic.block, traffic.devices.ticks_per_second
    old = ~_empty(flights) & (flights.version - flights.bases > traffic.max_staleness)
    flights = _emptied(flights, old)
    places = earliest(flights.due, flights.ids, m)
    fresh = jnp.full_like(places, -1)
    leaves = None if flights.leaves is None else flights.leaves[places]
    waiting = _Entry(flights.due[places], flights.ids[places], flights.bases[places], fresh, leaves)
    if traffic.refill == "same":  # who is sent work after the i-th arrival is the i-th of them
        waiting = _ordered(waiting)
    candidates, present, spare = _candidates(key, traffic, flights, waiting)
    trip = trips(key, traffic, load, candidates, present)
    start, arrive, leaves = _settled(traffic, flights.clock, waiting.time, trip)
    sent = _Entry(arrive, candidates, fresh, fresh, leaves)
    entries, count = _joined(traffic, flights.version, waiting, start, sent)
    rank = jnp.arange(m, dtype=jnp.int32)
    there = rank < count
    time, ids, bases = (x[:m] for x in entries[:3])
    elapsed = jnp.where(count > 0, jnp.where(there, time, 0).max(), _patience(flights, unit))

    stays = (entries.rank < count) & jnp.concatenate([~there, jnp.ones(m, bool)])  # M of 2M
    left = _at(jnp.nonzero(stays, size=m)[0], entries)
    due = flights.due.at[places].set(left.time)
    begun = trip.begun(traffic, key, flights.clock, jnp.where(there, start, NEVER_ARRIVES))
    versions = count if traffic.buffer_size == 1 else (count > 0).astype(jnp.int32)
    after = Flights(
        flights.ids.at[places].set(left.ids),
        flights.bases.at[places].set(left.bases),
        jnp.where(due == NEVER_ARRIVES, NEVER_ARRIVES, due - elapsed),
        flights.version + versions,
        advanced(flights.clock, elapsed, unit),
        flights.arrived + count,
        jax.tree.map(jnp.add, flights.begun, begun),
        flights.leaves,
    )
    interrupted = None
    if traffic.loses:
        leaving = flights.leaves.at[places].set(left.leaves)
        gone = (leaving != NEVER_ARRIVES) & (leaving <= elapsed)
        interrupted = gone.sum(dtype=jnp.int32)
        after = after._replace(leaves=jnp.where(gone | (leaving == NEVER_ARRIVES), NEVER_ARRIVES, leaving - elapsed))
    after = _filled(key, traffic, after, load, spare, count)
    end, own_end = _earlier(flights.due, flights.leaves), _earlier(arrive, leaves)
    own = jnp.where(there & (own_end != NEVER_ARRIVES), jnp.minimum(own_end, elapsed) - jnp.minimum(start, elapsed), 0)
    busy = jnp.where(end == NEVER_ARRIVES, 0, jnp.minimum(end, elapsed))
    gaps = flights.version + (rank if traffic.buffer_size == 1 else 0) - bases
    arrivals = Arrivals(
        ids,
        there,
        bases,
        jnp.where(there, gaps, 0),
        jnp.where(there, elapsed - time, 0),
        elapsed,
        busy.astype(jnp.float32).sum() + own.astype(jnp.float32).sum(),
        (~_empty(after)).sum(dtype=jnp.int32),
        old.sum(dtype=jnp.int32),
        after.begun,
        interrupted,
    )
    return arrivals, after._replace(begun=jax.tree.map(jnp.zeros_like, after.begun))


def _patience(flights: Flights, ticks_per_second: int) -> Array:
    """[] uint32 ticks that a step without an arrival takes: until the first client has left, a minute at most."""
    minute = jnp.uint32(PATIENCE * ticks_per_second)
    if flights.leaves is None:
        return minute
    return jnp.clip(flights.leaves.min(), 1, minute)


def _earlier(due: Array, leaves: Array | None) -> Array:
    """When clients are done, or leave; `NEVER_ARRIVES` at an empty place."""
    return due if leaves is None else jnp.minimum(due, leaves)


def _empty(flights: Flights) -> Array:
    """[C] bool: places without a client."""
    return _earlier(flights.due, flights.leaves) == NEVER_ARRIVES


def _emptied(flights: Flights, places: Array) -> Flights:
    """Without the clients at `places` [C] bool."""
    due, leaves = (x if x is None else jnp.where(places, NEVER_ARRIVES, x) for x in (flights.due, flights.leaves))
    return flights._replace(due=due, leaves=leaves)


def _ordered(entry: _Entry) -> _Entry:
    """By time, equal times by id; of a client who is there twice, the earlier entry of its two first.

    Counting who comes before each takes n^2 comparisons, and up to a thousand clients less time than a sort.
    """
    time, ids, number = entry.time, entry.ids, jnp.arange(entry.ids.size, dtype=jnp.int32)
    if number.size > COUNTED:
        leaves, structure = jax.tree.flatten(entry)
        return jax.tree.unflatten(structure, jax.lax.sort(leaves, num_keys=2))

    def first(at, id, own):  # [n] whom this one comes before
        return jnp.where(at == time, jnp.where(id == ids, own < number, id < ids), at < time)

    places = jax.vmap(first)(time, ids, number).sum(0, dtype=jnp.int32)
    return _at(jnp.zeros_like(number).at[places].set(number, unique_indices=True), entry)


def _at(index: Array, entry: _Entry) -> _Entry:
    return jax.tree.map(lambda x: x[index], entry)


def _candidates(key: Array, traffic: Traffic, flights: Flights, waiting: _Entry) -> tuple[Array, Array, Array]:
    """([M] who is sent work after the i-th arrival, whether they are there, and those with others who may be left)."""
    m = traffic.block
    if traffic.refill == "same":
        start = jnp.full_like(waiting.time, last(waiting.time)) if traffic.waits else waiting.time
        start = jnp.where(start == NEVER_ARRIVES, 0, start)
        seconds = advanced(flights.clock, start, traffic.devices.ticks_per_second).seconds
        return waiting.ids, there_at(traffic.devices, waiting.ids, seconds), waiting.ids[:0]
    size = traffic.devices.population_size
    ranks = jnp.arange(traffic.num_candidates, dtype=jnp.int32)
    ids = others(flights.ids, permute(stream(key, "candidates"), ranks, size - traffic.concurrency), size)
    present = there_at(traffic.devices, ids, flights.clock.seconds)
    if traffic.devices.availability is None:  # all are there
        return ids[:m], present[:m], ids
    first = places_of(present, ~present)[: m + traffic.num_refills]
    return ids[first[:m]], present[first[:m]], ids[first]


def _settled(traffic: Traffic, clock: Clock, waiting: Array, trip: Trip) -> tuple[Array, Array, Array | None]:
    """([M] when the clients who follow the next arrivals are sent work, and as `Trip.ends`.)

    The i-th arrival follows from the earlier ones alone, so M turns are exact; none is needed unless one
    arrives within the step.
    """
    if traffic.waits:
        start = jnp.where(waiting == NEVER_ARRIVES, NEVER_ARRIVES, last(waiting))
        return start, *trip.ends(traffic, clock, start)

    def arriving(times):
        return trip.ends(traffic, clock, times)[0]

    def again(times):
        return jnp.sort(jnp.concatenate([waiting, arriving(times)]))[: traffic.block]

    def earlier(pair):
        times = again(pair[1])
        return (times != pair[1]).any(), times

    first = jnp.sort(waiting)
    unsettled = (arriving(first) < first[-1]).any()
    _, times = jax.lax.while_loop(lambda pair: pair[0], earlier, (unsettled, first))
    return times, *trip.ends(traffic, clock, times)


def _joined(traffic: Traffic, version: Array, waiting: _Entry, start: Array, sent: _Entry) -> tuple[_Entry, Array]:
    """(All 2M clients who were next or are sent work, by the times of their messages, and L: how many arrive.)"""
    m, rank = traffic.block, jnp.arange(traffic.block, dtype=jnp.int32)
    if traffic.buffer_size == 1:
        bases = version + 1 + rank
    else:  # the last arrival makes the version
        made = traffic.waits | (rank >= (start != NEVER_ARRIVES).sum(dtype=jnp.int32) - 1)
        bases = version + made.astype(jnp.int32)
    entries = _ordered(
        jax.tree.map(lambda a, b: jnp.concatenate([a, b]), waiting, sent._replace(bases=bases, rank=rank))
    )
    time, base = entries.time[:m], entries.bases[:m]
    known = (time != NEVER_ARRIVES) & (base <= version)
    if traffic.buffer_size == 1:
        known &= version + rank - base <= traffic.max_staleness
    return entries, jnp.where(known, m, rank).min()


def _filled(key: Array, traffic: Traffic, flights: Flights, load: Callable, spare: Array, called: Array) -> Flights:
    """With the empty places filled: by the candidates whom no arrival called, first in the place of clients who are
    away; then by the last clients of places, whom no draw finds."""
    most, nobody = traffic.num_refills, traffic.concurrency

    def fill(flights):
        seconds, empty, rank = flights.clock.seconds, _empty(flights), jnp.arange(most)
        gone = empty & ~there_at(traffic.devices, flights.ids, seconds)
        kinds = (empty,) if traffic.devices.availability is None else (gone, empty & ~gone)
        new, number, away = jnp.zeros(most, jnp.int32), 0, gone.sum(dtype=jnp.int32)
        if spare.size:
            free = (jnp.arange(spare.size) >= called) & there_at(traffic.devices, spare, seconds)
            chosen = places_of(free).at[rank].get(mode="fill", fill_value=spare.size)
            new = spare.at[chosen].get(mode="clip")
            number = jnp.minimum(free.sum(dtype=jnp.int32), empty.sum(dtype=jnp.int32))
        turn = jnp.where(rank < number, rank, jnp.maximum(number, away) + rank - number)
        places = places_of(*kinds).at[turn].get(mode="fill", fill_value=nobody)
        ids = jnp.where(rank < number, new, flights.ids.at[places].get(mode="fill", fill_value=0))
        own, now = stream(key, "empty places"), jnp.zeros_like(ids, jnp.uint32)
        trip = trips(own, traffic, load, ids, places < nobody)
        due, leaves = trip.ends(traffic, flights.clock, now)
        begun = trip.begun(traffic, own, flights.clock, now)
        filled = flights._replace(
            ids=flights.ids.at[places].set(ids, mode="drop"),
            bases=flights.bases.at[places].set(flights.version, mode="drop"),
            due=flights.due.at[places].set(due, mode="drop"),
            begun=jax.tree.map(jnp.add, flights.begun, begun),
        )
        if leaves is None:
            return filled
        return filled._replace(leaves=flights.leaves.at[places].set(leaves, mode="drop"))

    return jax.lax.cond(_empty(flights).any(), fill, lambda flights: flights, flights)
