"""Finds the next arrivals of an asynchronous server: an exact simulation of clients in flight, event by event.

There are C places, each with a client in flight. A client in flight is three numbers: its id, the version of the model
that it was sent, and the ticks until its message arrives. Its update is computed when it arrives. A step of the server
takes the next arrivals by time, equal times by id. Among them may be clients that were sent work during the same step.
Where clients may leave, a client has a fourth number: the moment at which it leaves if its message never arrives. It
keeps its place until then.
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

PATIENCE = 60  # seconds until a server looks again for clients when nobody is in flight
MAX_COMPARED = 1024  # up to so many clients are put in order by comparing all pairs; more are sorted


class Flights(NamedTuple):
    """The state between two steps."""

    ids: Array  # [C] int32, all different; an empty place keeps its last client's id
    bases: Array  # [C] int32 version of the model that the client trains on
    due: Array  # [C] uint32 ticks from now until its message arrives; `NEVER_ARRIVES` at an empty place
    version: Array  # [] int32 versions so far, those of skipped steps included
    clock: Clock
    arrived: Array  # [] int32 messages so far
    begun: Begun  # the work that was begun and is in no info yet
    # [C] uint32 ticks from now until the client leaves, if its message never arrives; `NEVER_ARRIVES` at other places;
    # None = nobody leaves
    leaves: Array | None


class Arrivals(NamedTuple):
    """The messages that a step takes, in the order of arrival; the first L of M rows are filled."""

    ids: Array  # [M] int32, all different where somebody arrives
    there: Array  # [M] bool; True in the first L rows
    bases: Array  # [M] int32 version of the model that each client was sent
    gaps: Array  # [M] int32 staleness: versions between the base and the version that the update is applied to
    waited: Array  # [M] uint32 ticks from the arrival to the step's end
    elapsed: Array  # [] uint32 ticks that the step takes
    busy: Array  # [] float32 ticks that clients were at work, summed over all places
    flying: Array  # [] int32 clients in flight after the step
    stopped: Array  # [] int32 clients stopped because their model was too old
    begun: Begun  # the work that clients were sent since the last step
    interrupted: Array | None  # [] int32 clients who left; None = nobody leaves


class _Entry(NamedTuple):
    """Clients whose messages may be among the next arrivals, each [n]."""

    time: Array  # uint32 ticks from the step's beginning until the message arrives
    ids: Array
    bases: Array
    rank: Array  # int32: the arrival after which the client was sent work; -1 = it was in flight before the step
    leaves: Array | None  # uint32 ticks from the step's beginning until it leaves, if its message never arrives


def take_off(key: Array, traffic: Traffic, load: Callable) -> Flights:
    """Makes the state before the first step: C clients, all subsets equally likely, have been sent version 0.

    Args:
      key: of the run's start.
      traffic: how clients come and go.
      load: (ids [c]) -> `Load`, the work that a model and its training ask of these clients.
    """
    places = jnp.arange(traffic.concurrency, dtype=jnp.int32)
    ids = permute(stream(key, "first clients"), places, traffic.devices.population_size)
    # A state is donated to the program that makes the next one, so no array may be in it twice.
    version, seconds, ticks, arrived = (jnp.zeros((), jnp.int32) for _ in range(4))
    clock = Clock(seconds, ticks)
    now = jnp.zeros_like(ids, jnp.uint32)
    trip = trips(key, traffic, load, ids, there_at(traffic.devices, ids, seconds))
    arrival_ticks, leaves = trip.ends(traffic, clock, now)
    begun = trip.begun(traffic, key, clock, now)
    return Flights(
        ids=ids,
        bases=jnp.zeros_like(ids),
        due=arrival_ticks,
        version=version,
        clock=clock,
        arrived=arrived,
        begun=begun,
        leaves=leaves,
    )


def next_arrivals(key: Array, traffic: Traffic, flights: Flights, load: Callable) -> tuple[Arrivals, Flights]:
    """Takes the next arrivals, and sends work to clients in their places.

    A step has this order:
      1. A client whose model is more than `max_staleness` versions old at the step's beginning is stopped, and its
         place becomes empty.
      2. The next M arrivals are taken. With `refill` "other", the place of each goes at once to a client drawn
         uniformly from those who were there at the step's beginning and had no place, not even an empty one. Nobody is
         drawn twice in a step, so no client is twice in a buffer. With "same" the client who arrived keeps its place,
         and is sent the next version once that is there.
      3. A client who leaves before its message has arrived keeps its place until the end of the step; then it is empty.
      4. Empty places are filled, at most `Traffic.num_refills` of them: by other clients who are there, then by their
         last clients.

    An update whose base is made in the same step cannot be computed yet. So the step ends before it, which happens with
    `buffer_size` 1 and several arrivals in a step.

    Args:
      key: of the step.
      traffic: how clients come and go.
      flights: the state before the step.
      load: as in `take_off`.

    Returns: (`Arrivals`, the state after the step).

    Guarantees: the events are those of a NumPy loop that handles them one by one
    (tests/algorithms/asynchronous/test_arrivals.py::test_events_are_those_of_a_loop).
    """
    m = traffic.block
    ticks_per_second = traffic.devices.ticks_per_second
    is_too_old = ~_is_empty(flights) & (flights.version - flights.bases > traffic.max_staleness)
    flights = _emptied(flights, is_too_old)
    # At most M clients in flight arrive. With the M clients that are sent work after them, 2M clients may be next.
    places = earliest(flights.due, flights.ids, m)
    minus_one = jnp.full_like(places, -1)  # as a rank: in flight before the step
    leaves = None if flights.leaves is None else flights.leaves[places]
    waiting = _Entry(flights.due[places], flights.ids[places], flights.bases[places], minus_one, leaves)
    if traffic.refill == "same":  # the client that is sent work after the i-th arrival is the i-th of these
        waiting = _ordered(waiting)
    candidates, present, spare = _candidates(key, traffic, flights, waiting)
    trip = trips(key, traffic, load, candidates, present)
    start, arrive, leaves = _settled(traffic, flights.clock, waiting.time, trip)
    newly_sent = _Entry(arrive, candidates, minus_one, minus_one, leaves)  # `_joined` sets their bases and ranks
    entries, count = _joined(traffic, flights.version, waiting, start, newly_sent)
    rank = jnp.arange(m, dtype=jnp.int32)
    arrives = rank < count
    time, ids, bases = (x[:m] for x in entries[:3])
    elapsed = jnp.where(count > 0, jnp.where(arrives, time, 0).max(), _ticks_without_arrival(flights, ticks_per_second))

    # Of the 2M entries M stay in flight: who did not arrive, and was in flight or was sent work after an arrival of
    # this step.
    stays = (entries.rank < count) & jnp.concatenate([~arrives, jnp.ones(m, bool)])
    staying = _at(jnp.nonzero(stays, size=m)[0], entries)
    arrival_ticks = flights.due.at[places].set(staying.time)
    begun = trip.begun(traffic, key, flights.clock, jnp.where(arrives, start, NEVER_ARRIVES))
    num_versions = count if traffic.buffer_size == 1 else (count > 0).astype(jnp.int32)
    after = Flights(
        ids=flights.ids.at[places].set(staying.ids),
        bases=flights.bases.at[places].set(staying.bases),
        due=jnp.where(arrival_ticks == NEVER_ARRIVES, NEVER_ARRIVES, arrival_ticks - elapsed),
        version=flights.version + num_versions,
        clock=advanced(flights.clock, elapsed, ticks_per_second),
        arrived=flights.arrived + count,
        begun=jax.tree.map(jnp.add, flights.begun, begun),
        leaves=flights.leaves,
    )
    interrupted = None
    if flights.leaves is not None:
        leaving = flights.leaves.at[places].set(staying.leaves)
        has_left = (leaving != NEVER_ARRIVES) & (leaving <= elapsed)
        interrupted = has_left.sum(dtype=jnp.int32)
        remaining = jnp.where(has_left | (leaving == NEVER_ARRIVES), NEVER_ARRIVES, leaving - elapsed)
        after = after._replace(leaves=remaining)
    after = _filled(key, traffic, after, load, spare=spare, called=count)
    # Busy ticks within the step: of clients who were in flight at its beginning, and of those sent work during it.
    end = _earlier(flights.due, flights.leaves)
    new_end = _earlier(arrive, leaves)
    new_busy = jnp.where(
        arrives & (new_end != NEVER_ARRIVES), jnp.minimum(new_end, elapsed) - jnp.minimum(start, elapsed), 0
    )
    busy = jnp.where(end == NEVER_ARRIVES, 0, jnp.minimum(end, elapsed))
    gaps = flights.version + (rank if traffic.buffer_size == 1 else 0) - bases
    arrivals = Arrivals(
        ids=ids,
        there=arrives,
        bases=bases,
        gaps=jnp.where(arrives, gaps, 0),
        waited=jnp.where(arrives, elapsed - time, 0),
        elapsed=elapsed,
        busy=busy.astype(jnp.float32).sum() + new_busy.astype(jnp.float32).sum(),
        flying=(~_is_empty(after)).sum(dtype=jnp.int32),
        stopped=is_too_old.sum(dtype=jnp.int32),
        begun=after.begun,
        interrupted=interrupted,
    )
    return arrivals, after._replace(begun=jax.tree.map(jnp.zeros_like, after.begun))


def _ticks_without_arrival(flights: Flights, ticks_per_second: int) -> Array:
    """[] uint32 ticks that a step without an arrival takes: until the first client has left, a minute at most."""
    minute = jnp.uint32(PATIENCE * ticks_per_second)
    if flights.leaves is None:
        return minute
    return jnp.clip(flights.leaves.min(), 1, minute)


def _earlier(due: Array, leaves: Array | None) -> Array:
    """The ticks until clients are done or leave; `NEVER_ARRIVES` at an empty place."""
    return due if leaves is None else jnp.minimum(due, leaves)


def _is_empty(flights: Flights) -> Array:
    """Tells which places have no client, [C] bool."""
    return _earlier(flights.due, flights.leaves) == NEVER_ARRIVES


def _emptied(flights: Flights, places: Array) -> Flights:
    """Returns the flights without the clients at `places` [C] bool."""
    due, leaves = (x if x is None else jnp.where(places, NEVER_ARRIVES, x) for x in (flights.due, flights.leaves))
    return flights._replace(due=due, leaves=leaves)


def _ordered(entry: _Entry) -> _Entry:
    """Puts clients in order by time, equal times by id; of two entries of one client the earlier entry comes first.

    Args:
      entry: n clients in any order, each field [n]; times in uint32 ticks from the step's beginning, `NEVER_ARRIVES`
        without a message. Such clients come last.

    Returns: the same n clients in order. The place of client i in it is the number of clients j with
    (time_j, id_j, j) < (time_i, id_i, i), compared one number after the other.
    """
    time = entry.time
    ids = entry.ids
    index = jnp.arange(entry.ids.size, dtype=jnp.int32)
    if index.size > MAX_COMPARED:
        leaves, structure = jax.tree.flatten(entry)
        return jax.tree.unflatten(structure, jax.lax.sort(leaves, num_keys=2))

    # A client's place is the number of clients before it. Counting takes n^2 comparisons, and up to a thousand clients
    # less time than a sort by two keys.
    def comes_before(own_time, own_id, own_index):  # [n] bool: the entries that this entry comes before
        return jnp.where(own_time == time, jnp.where(own_id == ids, own_index < index, own_id < ids), own_time < time)

    places = jax.vmap(comes_before)(time, ids, index).sum(0, dtype=jnp.int32)
    return _at(jnp.zeros_like(index).at[places].set(index, unique_indices=True), entry)


def _at(index: Array, entry: _Entry) -> _Entry:
    """Returns the rows `index` of all fields."""
    return jax.tree.map(lambda x: x[index], entry)


def _candidates(key: Array, traffic: Traffic, flights: Flights, waiting: _Entry) -> tuple[Array, Array, Array]:
    """Draws the clients who are sent work after the next arrivals.

    Args:
      key: of the step.
      traffic: how clients come and go.
      flights: the state before the step, without the clients that are stopped.
      waiting: the M next arrivals, each field [M]; with `refill` "same" in order of arrival.

    Returns: three arrays.
      - [M] int32 ids: the client who is sent work after the i-th arrival. With "same" it is the client who arrives.
      - [M] bool: whether this client is there. With "same" it is looked up when the client is sent work, else at the
        step's beginning.
      - [S] int32 ids: the first array together with further candidates, who may fill places that stay empty; S is at
        most M + `Traffic.num_refills`. With "same" it is empty, S = 0.
    """
    m = traffic.block
    if traffic.refill == "same":
        # With a buffer of several updates, clients wait for the version that is made after the last arrival.
        start = jnp.full_like(waiting.time, last(waiting.time)) if traffic.waits else waiting.time
        start = jnp.where(start == NEVER_ARRIVES, 0, start)
        seconds = advanced(flights.clock, start, traffic.devices.ticks_per_second).seconds
        return waiting.ids, there_at(traffic.devices, waiting.ids, seconds), waiting.ids[:0]
    size = traffic.devices.population_size
    ranks = jnp.arange(traffic.num_candidates, dtype=jnp.int32)
    ids = others(flights.ids, permute(stream(key, "candidates"), ranks, size - traffic.concurrency), size)
    present = there_at(traffic.devices, ids, flights.clock.seconds)
    if traffic.devices.availability is None:  # everybody is there
        return ids[:m], present[:m], ids
    order = places_of(present, ~present)[: m + traffic.num_refills]  # those who are there come first
    return ids[order[:m]], present[order[:m]], ids[order]


def _settled(traffic: Traffic, clock: Clock, waiting: Array, trip: Trip) -> tuple[Array, Array, Array | None]:
    """Finds the times at which the clients who follow the next arrivals are sent work.

    With `refill` "other" the i-th client is sent work at the i-th arrival, and may itself be among the next arrivals.
    So the times of the arrivals are a fixed point. It is found by repetition: the i-th arrival depends on earlier
    arrivals alone, so M turns at most give it exactly. No turn is needed unless a new client arrives within the step.

    Args:
      traffic: the static facts of all clients in flight, among them M (`block`).
      clock: the time of the step's start.
      waiting: [M] uint32, ticks until the messages of the clients in flight.
      trip: of the clients who are sent work.

    Returns: ([M] uint32 ticks until each is sent work, and both results of `Trip.ends`).
    """
    if traffic.waits:
        start = jnp.where(waiting == NEVER_ARRIVES, NEVER_ARRIVES, last(waiting))
        return start, *trip.ends(traffic, clock, start)

    def arriving(times):
        return trip.ends(traffic, clock, times)[0]

    def next_times(times):
        return jnp.sort(jnp.concatenate([waiting, arriving(times)]))[: traffic.block]

    def one_turn(carry):
        _, old_times = carry
        times = next_times(old_times)
        return (times != old_times).any(), times

    first_times = jnp.sort(waiting)
    is_unsettled = (arriving(first_times) < first_times[-1]).any()
    _, times = jax.lax.while_loop(lambda carry: carry[0], one_turn, (is_unsettled, first_times))
    return times, *trip.ends(traffic, clock, times)


def _joined(traffic: Traffic, version: Array, waiting: _Entry, start: Array, sent: _Entry) -> tuple[_Entry, Array]:
    """Joins the clients in flight and the clients who are sent work, in the order of their messages.

    Args:
      traffic: the static facts of all clients in flight, among them M (`block`) and the oldest base that counts.
      version: [] int32 before the step.
      waiting: the M clients in flight whose messages arrive first.
      start: [M] uint32, when each of `sent` is sent work.
      sent: the M clients who are sent work.

    Returns: (all 2M entries in order, [] int32 the number L of arrivals that the step takes).
    """
    m = traffic.block
    rank = jnp.arange(traffic.block, dtype=jnp.int32)
    if traffic.buffer_size == 1:  # each arrival makes a version, which the next client is sent
        bases = version + 1 + rank
    else:  # the last arrival makes the version
        gets_new_version = traffic.waits | (rank >= (start != NEVER_ARRIVES).sum(dtype=jnp.int32) - 1)
        bases = version + gets_new_version.astype(jnp.int32)
    entries = _ordered(
        jax.tree.map(lambda a, b: jnp.concatenate([a, b]), waiting, sent._replace(bases=bases, rank=rank))
    )
    time = entries.time[:m]
    base = entries.bases[:m]
    # The step ends before the first message that never arrives, or whose base is made in this step or is too old.
    can_be_used = (time != NEVER_ARRIVES) & (base <= version)
    if traffic.buffer_size == 1:
        can_be_used &= version + rank - base <= traffic.max_staleness
    return entries, jnp.where(can_be_used, m, rank).min()


def _filled(key: Array, traffic: Traffic, flights: Flights, load: Callable, *, spare: Array, called: Array) -> Flights:
    """Fills empty places at the end of a step.

    Candidates whom no arrival called come first; they go to the places of clients who are away, then to other empty
    places. The places that are then still empty go to their own last clients, whom no draw selects.

    Args:
      key: of the step.
      traffic: how clients come and go.
      flights: the state at the end of the step.
      load: as in `take_off`.
      spare: [S] int32 ids, the candidates of `_candidates`.
      called: [] int32 in [0, M], how many of them were sent work after an arrival; these come first.
    """
    max_refills = traffic.num_refills
    no_place = traffic.concurrency  # an index outside of the places: what is written there is dropped

    def fill(flights):
        seconds = flights.clock.seconds
        is_empty = _is_empty(flights)
        rank = jnp.arange(max_refills)
        is_away = is_empty & ~there_at(traffic.devices, flights.ids, seconds)
        kinds = (is_empty,) if traffic.devices.availability is None else (is_away, is_empty & ~is_away)
        new_ids = jnp.zeros(max_refills, jnp.int32)
        num_new = 0
        num_away = is_away.sum(dtype=jnp.int32)
        if spare.size:
            is_free = (jnp.arange(spare.size) >= called) & there_at(traffic.devices, spare, seconds)
            chosen = places_of(is_free).at[rank].get(mode="fill", fill_value=spare.size)
            new_ids = spare.at[chosen].get(mode="clip")
            num_new = jnp.minimum(is_free.sum(dtype=jnp.int32), is_empty.sum(dtype=jnp.int32))
        # Empty places are numbered with those of absent clients first. New clients take the first places. Own clients
        # follow, and skip the places whose own client is away.
        turn = jnp.where(rank < num_new, rank, jnp.maximum(num_new, num_away) + rank - num_new)
        places = places_of(*kinds).at[turn].get(mode="fill", fill_value=no_place)
        ids = jnp.where(rank < num_new, new_ids, flights.ids.at[places].get(mode="fill", fill_value=0))
        trip_key = stream(key, "empty places")
        now = jnp.zeros_like(ids, jnp.uint32)
        trip = trips(trip_key, traffic, load, ids, places < no_place)
        arrival_ticks, leaves = trip.ends(traffic, flights.clock, now)
        begun = trip.begun(traffic, trip_key, flights.clock, now)
        filled = flights._replace(
            ids=flights.ids.at[places].set(ids, mode="drop"),
            bases=flights.bases.at[places].set(flights.version, mode="drop"),
            due=flights.due.at[places].set(arrival_ticks, mode="drop"),
            begun=jax.tree.map(jnp.add, flights.begun, begun),
        )
        if leaves is None:
            return filled
        return filled._replace(leaves=flights.leaves.at[places].set(leaves, mode="drop"))

    return jax.lax.cond(_is_empty(flights).any(), fill, lambda flights: flights, flights)
