"""Who arrives when: the events of a plain loop over a list, and the laws of staleness that hold for any delays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.algorithms.asynchronous import arrivals
from fedjax_sim.algorithms.asynchronous.arrivals import PATIENCE, _earlier, next_arrivals, take_off
from fedjax_sim.algorithms.asynchronous.clock_ticks import NEVER_ARRIVES, earliest, places_of
from fedjax_sim.algorithms.asynchronous.in_flight import CHECKS, Traffic
from fedjax_sim.network import Hazard, memoryless
from fedjax_sim.prng import stream
from fedjax_sim.sampling import full, with_clock, with_hazard
from fedjax_sim.sampling.permutation import permute
from fedjax_sim.types import Availability, Devices, Load, Spent, Work
from tests.laws import cases

KEY, LOAD = jax.random.key(3), Load(*jnp.zeros((3, 1)))


def ticks(ids):
    """Unequal, and often equal: 1 to 11 ticks, some clients ten times as slow."""
    return (1 + ids * 7 % 11) * np.where(ids % 6 == 0, 10, 1)


def devices(size, there=None) -> Devices:
    def spend(key, ids, load):
        took = (1 + ids * 7 % 11) * jnp.where(ids % 6 == 0, 10, 1)
        return Spent(jnp.zeros_like(took), took, jnp.zeros_like(took), took.astype(jnp.float32))

    rule = None if there is None else Availability(there)
    return Devices(size, spend, rule, ticks_per_second=10)


def nobody_early(ids, seconds):
    return (seconds >= 2 * PATIENCE) & (ids >= 0)


def window(ids, seconds):
    """Two of three clients, others in each second."""
    return (ids + seconds) % 3 != 0


def life(ids):
    """Ticks of work after which a hazard strikes: 3 to 19, where work takes 1 to 110."""
    return 3 + ids * 5 % 17


RISKY = Hazard(lambda key, ids: life(ids).astype(jnp.float32) / 10)


def keyed(t):
    return jax.random.fold_in(KEY, t)


permuted = jax.jit(permute, static_argnums=2)


class Loop:
    """The same events, one after the other."""

    def __init__(self, traffic: Traffic):
        self.traffic, self.rule = traffic, traffic.devices.availability
        size = traffic.devices.population_size
        ids = np.asarray(permute(stream(KEY, "first clients"), jnp.arange(traffic.concurrency), size))
        self.now, self.version, self.places, self.spare, self.sent = 0, 0, {}, [], 0
        for id in map(int, ids):
            self.send(id, 0, 0)

    def present(self, id, at):
        return self.rule is None or bool(self.rule.at(np.int32(id), np.int32(at // 10)))

    def send(self, id, at, base, seen_at=None):
        there = self.present(id, at if seen_at is None else seen_at)
        end = at + int(ticks(id))
        self.places[id] = self.leaving(id, at, end, base) or (end, base) if there else None
        self.sent += there

    def leaving(self, id, at, end, base):
        """("leaves", when, base) of a client that is gone at one of nine moments of its work, or on its arrival."""
        work = end - at
        moments = [at + work // CHECKS * i + work % CHECKS * i // CHECKS for i in range(CHECKS + 1)]
        gone = [min(moment, end - 1) for moment in moments if not self.present(id, moment)][:1]
        if self.traffic.hazard is not None and life(id) < work:
            gone.append(at + life(id))
        return ("leaves", min(gone), base) if gone else None

    def gone(self):
        """How many have left by now; their places are empty."""
        left = [id for id, x in self.places.items() if x and x[0] == "leaves" and x[1] <= self.now]
        self.places |= dict.fromkeys(left)
        return len(left)

    def candidates(self, key):
        traffic = self.traffic
        size = traffic.devices.population_size
        if traffic.refill == "same":
            return []
        drawn = permuted(stream(key, "candidates"), np.arange(traffic.num_candidates), size - traffic.concurrency)
        free = np.setdiff1d(np.arange(size), list(self.places))[np.asarray(drawn)]
        return sorted(map(int, free), key=lambda id: not self.present(id, self.now))

    def step(self, key):
        """[(id, base, gap, wait)] of the arrivals, and who was stopped."""
        traffic, found, begun, later = self.traffic, [], self.now, []
        single = traffic.buffer_size == 1
        stopped = [id for id, x in self.places.items() if x and self.version - x[-1] > traffic.max_staleness]
        self.places |= dict.fromkeys(stopped)
        pool, known = self.candidates(key), self.version
        self.pool = list(pool)
        while len(found) < traffic.block:
            flying = sorted((x[0], id) for id, x in self.places.items() if x and x[0] != "leaves")
            if not flying:
                break
            time, id = flying[0]
            base = self.places[id][-1]
            if base > known or self.version - base > traffic.max_staleness:
                break
            self.now = time
            found.append((id, base, self.version - base, time))
            full = len(found) == traffic.block
            self.version += single
            if traffic.refill == "other":
                del self.places[id]
                next = pool.pop(0)
                self.send(next, time, self.version + (full and not single), begun)
                x = self.places[next]
                if x and x[0] == "leaves" and len(flying) == 1 and not (full or single):  # no other will arrive
                    self.places[next] = (*x[:2], self.version + 1)
            elif single:
                self.send(id, time, self.version)
            else:
                later.append(id)
                self.places[id] = None
        self.version += bool(found) and not single
        if not found:  # until the first of those who will leave does, or for a minute
            leaving = [x[1] - self.now for x in self.places.values() if x]
            self.now += min(PATIENCE * 10, max(1, min(leaving, default=PATIENCE * 10)))
        for id in later:
            self.send(id, self.now, self.version)
        called = len(found) if traffic.refill == "other" else 0
        self.spare = self.pool[: traffic.block + traffic.num_refills][called:]
        return [(*x[:3], self.now - x[3]) for x in found], len(stopped)

    def fill(self, ids):
        """Empty places, given who holds a place after it: which of them others take is all that is not checked."""
        most, empty = self.traffic.num_refills, {id for id, x in self.places.items() if x is None}
        back = {id for id in empty if self.present(id, self.now)}
        others = [id for id in self.spare if self.present(id, self.now)][: min(most, len(empty))]
        gone, away = set(self.places) - ids, len(empty) - len(back)
        assert ids - set(self.places) == set(others) and gone <= empty and len(gone) == len(others)
        assert len(gone & back) == max(0, len(others) - away)  # first in the place of those who are away
        for id in gone:
            del self.places[id]
        return others, back - gone, most - len(others)


COMPILED = {"in blocks", "nobody early", "one by one", "stopped", "waiting", "windows", "windows, in blocks"}
GRID = {  # N, C, M, K, max_staleness, refill, availability
    "buffer": (40, 9, 4, 4, 9, "other", None),
    "few clients": (13, 9, 4, 4, 3, "other", None),
    "buffer of all": (30, 6, 6, 6, 9, "other", None),
    "waiting": (12, 9, 4, 4, 9, "same", None),
    "waiting for all": (7, 7, 7, 7, 0, "same", None),
    "one by one": (40, 9, 1, 1, 40, "other", None),
    "in blocks": (40, 9, 4, 1, 40, "other", None),
    "in blocks, the same": (9, 9, 5, 1, 40, "same", None),
    "stopped": (40, 12, 3, 3, 2, "other", None),
    "stopped, few others": (17, 12, 4, 1, 5, "other", None),
    "stopped, the same": (9, 9, 5, 1, 3, "same", None),
    "windows": (60, 12, 4, 4, 9, "other", window),
    "windows, few others": (17, 12, 4, 4, 9, "other", window),
    "windows, no others": (16, 12, 4, 1, 9, "other", window),
    "windows, in blocks": (60, 12, 4, 1, 9, "other", window),
    "windows, waiting": (12, 12, 4, 4, 9, "same", window),
    "windows, the same": (12, 12, 4, 1, 9, "same", window),
    "nobody early": (40, 9, 4, 1, 9, "other", nobody_early),
}


@pytest.mark.default_rows("stopped")
@pytest.mark.parametrize("hazard", [None, pytest.param(RISKY, marks=pytest.mark.full)], ids=["", "hazard"])
@pytest.mark.parametrize("name", cases.rows(GRID, COMPILED))
def test_events_are_those_of_a_loop(name, hazard):
    """Catches a client who is sent work and arrives in the same step and is forgotten, ties by place, another base,
    a place that is lost, a block that goes past a model that it makes, and clients whom a hazard does not stop."""
    size, *numbers, refill, there = GRID[name]
    traffic = Traffic(devices(size, there), *numbers, refill=refill, hazard=hazard)
    loop, flights = Loop(traffic), take_off(KEY, traffic, lambda ids: LOAD)
    step = jax.jit(lambda key, flights: next_arrivals(key, traffic, flights, lambda ids: LOAD))
    for t in range(25):
        expected, stopped = loop.step(keyed(t))
        interrupted = loop.gone()
        found, flights = step(keyed(t), flights)
        count = int(found.there.sum())
        rows = [x[:count].tolist() for x in (found.ids, found.bases, found.gaps, found.waited)]
        assert list(zip(*rows, strict=True)) == expected, (name, t)
        clock = flights.clock
        assert (int(clock.seconds) * 10 + int(clock.ticks), int(flights.version)) == (loop.now, loop.version)
        leaves = np.full(traffic.concurrency, NEVER_ARRIVES) if flights.leaves is None else np.asarray(flights.leaves)
        rows = (flights.ids, flights.bases, np.minimum(flights.due, leaves), leaves != NEVER_ARRIVES)
        held = {id: tuple(rest) for id, *rest in zip(*map(np.asarray, rows), strict=True)}
        others, back, most = loop.fill(set(held))
        again = {id for id in back if held[id][1] != NEVER_ARRIVES}
        assert len(again) == min(most, len(back)), (name, t)
        for id in (*others, *again):
            loop.send(id, loop.now, loop.version)
        expected = {id: x and (x[-1], x[-2] - loop.now, len(x) == 3) for id, x in loop.places.items()}
        assert {id: None if x[1] == NEVER_ARRIVES else x for id, x in held.items()} == expected, (name, t)
        assert (int(found.begun.sent), int(found.stopped)) == (loop.sent, stopped)
        assert interrupted == (0 if found.interrupted is None else int(found.interrupted))
        loop.sent = 0


def walked(traffic, steps, key=KEY):
    """Arrivals of many steps, stacked, and the last state."""

    def one(flights, key):
        found, flights = next_arrivals(key, traffic, flights, lambda ids: LOAD)
        return flights, found

    keys = jax.random.split(key, steps)
    return jax.device_get(jax.jit(lambda: jax.lax.scan(one, take_off(KEY, traffic, lambda ids: LOAD), keys))())


def exponential(size) -> Devices:
    def spend(key, ids, load):
        draws = jax.vmap(lambda id: jax.random.exponential(jax.random.fold_in(key, id)))(ids)
        took = (draws * 1000).astype(jnp.int32)
        return Spent(jnp.zeros_like(took), took, jnp.zeros_like(took), took.astype(jnp.float32))

    return Devices(size, spend, ticks_per_second=1000)


@pytest.mark.full
@pytest.mark.default_rows(1)
@pytest.mark.parametrize("make", [devices, exponential], ids=["by id", "exponential"])
@pytest.mark.parametrize("buffer, block, refill", [(4, 4, "other"), (4, 4, "same"), (1, 3, "other")])
def test_mean_staleness_is_that_of_the_number_in_flight(make, buffer, block, refill):
    """(C - 1) / K where places are filled at once, (C - K) / K where clients wait, whatever the delays: an identity, so
    the bound is what is left in flight at both ends. Catches a version too many, and arrivals that are lost."""
    size = 60
    traffic = Traffic(make(size), concurrency=12, block=block, buffer_size=buffer, max_staleness=400, refill=refill)
    flights, found = walked(traffic, 2000)
    there = found.there
    gaps, count = found.gaps[there].sum(), there.sum()
    law = (12 - 1) / buffer if refill == "other" else (12 - 4) / 4
    oldest = int(flights.version) - int(flights.bases.min()) + 1
    assert abs(gaps - law * count) <= 12 * oldest + 12, (gaps / count, law)
    assert 12 * oldest + 12 < 0.1 * law * count
    assert found.stopped.sum() == 0 and size == traffic.devices.population_size


@pytest.mark.full
def test_throughput_is_that_of_exponential_clients():
    """C clients of mean E[T] bring C / E[T] updates a second. 8,000 of them: five standard errors are 5.6 %."""
    traffic = Traffic(exponential(60), concurrency=12, block=4, buffer_size=4, max_staleness=400, refill="other")
    flights, found = walked(traffic, 2000)
    seconds = int(flights.clock.seconds) + int(flights.clock.ticks) / 1000
    assert abs(int(flights.arrived) / seconds / 12 - 1 / (1 - 0.0005)) < 0.056
    assert abs(found.busy.sum() / (12 * found.elapsed.sum(dtype=np.int64)) - 1) < 1e-5  # nobody waits


@pytest.mark.full
def test_nobody_is_in_flight_twice():
    """Catches a client that is drawn while it has a place, or twice in a step, with few clients and with many."""
    for size in (16, 2000):
        traffic = Traffic(devices(size), concurrency=12, block=4, buffer_size=4, max_staleness=50, refill="other")
        flights, found = walked(traffic, 300)
        ids = np.where(found.there, found.ids, -np.arange(1, 5))
        assert all(len(set(row)) == 4 for row in ids.tolist())
        assert len(set(flights.ids.tolist())) == 12 and found.ids.min() >= 0 and found.ids.max() < size
        counts = np.bincount(found.ids[found.there], minlength=size)
        assert counts.min() > 0 or size > 1000


@pytest.mark.full
def test_others_are_drawn_uniformly():
    """Each of 40 alike clients arrives equally often. Chi-square of 39 degrees, at most 1 error in 10,000: a client
    does not arrive again at once, which spreads arrivals more evenly than independent draws."""
    traffic = Traffic(exponential(40), concurrency=12, block=4, buffer_size=4, max_staleness=400, refill="other")
    _, found = walked(traffic, 4000)
    counts = np.bincount(found.ids[100:].ravel(), minlength=40)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 80.0, counts


@pytest.mark.full
@pytest.mark.parametrize("refill", ["other", "same"])
def test_clients_who_are_not_there_are_not_sent_work(refill):
    """Catches work for the absent, empty places that stay so, and time that stands still when nobody is there."""
    size = 60 if refill == "other" else 12
    traffic = Traffic(devices(size, window), concurrency=12, block=4, buffer_size=4, max_staleness=50, refill=refill)
    flights = take_off(KEY, traffic, lambda ids: LOAD)
    step = jax.jit(lambda key, flights: next_arrivals(key, traffic, flights, lambda ids: LOAD))
    assert (
        window(np.asarray(flights.ids), 0).tolist() == (_earlier(flights.due, flights.leaves) != NEVER_ARRIVES).tolist()
    )
    flying = 0
    for t in range(60):
        before, (found, flights) = flights, step(keyed(t), flights)
        ids, due, bases = map(np.asarray, (flights.ids, flights.due, flights.bases))
        fresh = (due != NEVER_ARRIVES) & ~np.isin(ids, np.asarray(before.ids)[np.asarray(before.due) != NEVER_ARRIVES])
        begun = int(before.clock.seconds), int(flights.clock.seconds)
        if refill == "other":
            assert (window(ids[fresh], begun[0]) | window(ids[fresh], begun[1])).all()
            flying += int(found.begun.sent) - int(found.there.sum() + found.interrupted)
            assert int(found.flying) == flying > 0
        else:
            sent = (due != NEVER_ARRIVES) & (bases == int(flights.version))
            assert window(ids[sent], begun[1]).all()
        assert len(set(ids.tolist())) == 12
        assert found.there.sum() >= min(4, (before.due != NEVER_ARRIVES).sum())
    assert refill == "other" or found.flying < 12


def phases(key, ids, load):
    """Download, work and message of some ticks each, and 10 J, 20 J and 30 J for them where they are asked for."""
    down, compute, up = 2 + ids % 5, 3 + ids % 11, 1 + ids % 7
    asked = zip((10.0, 20.0, 30.0), (load.bytes_down, load.flops, load.bytes_up), strict=True)
    return Spent(down, compute, up, sum(jnp.where(x > 0, joules, 0.0) for joules, x in asked))


LEAVING = {
    "presence": (Availability(lambda ids, seconds: (ids + seconds) % 4 != 0), None),
    "hazard": (None, Hazard(lambda key, ids: 0.1 + (ids * 7 % 13).astype(jnp.float32) / 10)),
}
LEAVING["both"] = LEAVING["presence"][0], LEAVING["hazard"][1]


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", LEAVING)
def test_who_leaves_is_lost_as_under_a_clock(name):
    """Everybody is sent work at time 0, by an asynchronous server and by one that waits: the same clients are lost, at
    the same ticks, with the same energy and as many messages on their way. Catches work of clients who leave that
    counts with the one server only."""
    size = 60
    rule, hazard = LEAVING[name]
    some = Devices(size, phases, rule, ticks_per_second=10)
    clocked = with_clock(full(size), some)
    clocked = clocked if hazard is None else with_hazard(clocked, hazard)
    work = Work(1, 1, 1, 1.0)
    traffic = Traffic(some, concurrency=size, block=4, buffer_size=4, max_staleness=9, refill="same", hazard=hazard)

    @jax.jit
    def both():
        cohort, _ = clocked.sample(KEY, clocked.tell(clocked.init(), work))
        return cohort, take_off(KEY, traffic, lambda ids: Load(*jnp.ones((3, *ids.shape))))

    cohort, flights = jax.device_get(both())
    order = np.argsort(flights.ids)
    due, leaves = np.asarray(flights.due)[order], np.asarray(flights.leaves)[order]
    reported, invited = np.asarray(cohort.reported), np.asarray(cohort.invited)
    np.testing.assert_array_equal(due != NEVER_ARRIVES, reported)
    np.testing.assert_array_equal(leaves != NEVER_ARRIVES, invited & ~reported)
    np.testing.assert_array_equal(np.minimum(due, leaves)[invited], np.asarray(cohort.timing.spent.total)[invited])
    begun = flights.begun
    assert 0 < reported.sum() < invited.sum() == begun.sent
    assert float(begun.joules) == pytest.approx(float(cohort.timing.spent.joules.sum()), rel=1e-6)
    assert int(begun.wasted) == int((cohort.timing.sent & ~cohort.reported).sum())


@pytest.mark.full
def test_a_server_whose_clients_all_leave_does_not_wait_a_minute():
    """Everybody leaves after 0.3 s of its work: a step without an arrival ends when the first has left, and others are
    sent work. Catches simulated time that is made of waiting."""
    hazard = Hazard(lambda key, ids: jnp.full(ids.shape, 0.3))
    some = Devices(
        40, lambda key, ids, load: phases(key, ids, Load(*jnp.ones((3, *ids.shape)))), None, ticks_per_second=10
    )
    traffic = Traffic(some, concurrency=12, block=1, buffer_size=1, max_staleness=50, refill="other", hazard=hazard)
    _, found = walked(traffic, 30)
    none = ~found.there.any(1)
    assert none.any() and found.elapsed[none].max() <= 2 + 4 + 3 and found.interrupted.sum() > 20


@pytest.mark.full
def test_nobody_is_there_yet():
    """Time goes on by a minute a step until somebody is. Catches a server that asks for ever at the same moment."""
    late = devices(40, nobody_early)
    traffic = Traffic(late, concurrency=12, block=4, buffer_size=4, max_staleness=50, refill="other")
    _, found = walked(traffic, 8)
    assert found.there.any(1).tolist() == [False, False, *[True] * 6]
    assert found.elapsed[:2].tolist() == [PATIENCE * 10] * 2 and found.begun.sent[:2].tolist() == [0, 12]
    assert found.flying[-1] == 12


def alike() -> Devices:
    """60 clients whose work takes two seconds."""

    def spend(key, ids, load):
        nothing = jnp.zeros_like(ids)
        return Spent(nothing, nothing + 20, nothing, jnp.ones(ids.shape))

    return Devices(60, spend, ticks_per_second=10)


@pytest.mark.full
@pytest.mark.parametrize("refill", ["other", "same"])
def test_the_share_that_arrives_is_that_of_the_hazard(refill):
    """exp(-2 / 4) of work of two seconds, where clients stay for four in the mean; of 4,000 and more that were begun,
    five standard errors; all places are filled at the end of each step. Catches clients who leave more or less often
    than time says, a place that is lost, and places that stay empty where many leave."""
    hazard = memoryless(4.0)
    traffic = Traffic(alike(), concurrency=12, block=4, buffer_size=4, max_staleness=400, refill=refill, hazard=hazard)
    _, found = walked(traffic, 1000)
    arrived, left = int(found.there.sum()), int(found.interrupted.sum())
    done, law = arrived + left, np.exp(-0.5)
    assert done > 4000 and abs(arrived / done - law) < 5 * np.sqrt(law * (1 - law) / done), arrived / done
    assert int(found.begun.sent.sum()) - done == int(found.flying[-1])
    assert (found.flying == 12).all()


@pytest.mark.full
def test_who_leaves_late_does_not_keep_others_away():
    """Ten minutes pass until one of two clients in flight leaves; others are there from the third minute on. Catches
    a server that looks for clients only when somebody has left."""

    def spend(key, ids, load):
        nothing = jnp.zeros_like(ids)
        return Spent(nothing, jnp.where(ids == first[0], 12000, 10), nothing, jnp.ones(ids.shape))

    def there(ids, seconds):
        return (ids == first[0]) | ((ids != first[1]) & (seconds >= 120))

    traffic = Traffic(devices(20), concurrency=2, block=1, buffer_size=1, max_staleness=50, refill="other")
    first = take_off(KEY, traffic, lambda ids: LOAD).ids
    late = Hazard(lambda key, ids: jnp.where(ids == first[0], 600.0, 1e6))
    some = Devices(20, spend, Availability(there), ticks_per_second=10)
    _, found = walked(traffic._replace(devices=some, hazard=late), 9)
    assert found.elapsed[:2].tolist() == [600, 600] and found.there[:, 0].tolist() == [False, False] + 7 * [True]


@pytest.mark.full
def test_the_last_clients_of_empty_places_return():
    """Two of four clients are there, from a minute on, and they are those who were to be first: no draw finds them, for
    their ids stand at empty places. Catches a server that waits for ever."""
    traffic = Traffic(devices(4), concurrency=2, block=1, buffer_size=1, max_staleness=50, refill="other")
    first = take_off(KEY, traffic, lambda ids: LOAD).ids

    def there(ids, seconds):
        return (seconds >= PATIENCE) & ((ids == first[0]) | (ids == first[1]))

    _, found = walked(traffic._replace(devices=devices(4, there)), 20)
    assert found.there[:, 0].tolist() == [False] + 19 * [True]
    assert set(found.ids[1:, 0].tolist()) <= set(first.tolist())


@pytest.mark.full
def test_a_client_whose_model_is_too_old_is_stopped():
    """Catches an update from a model that the ring no longer has, and a place that is never filled again."""
    traffic = Traffic(devices(40), concurrency=12, block=3, buffer_size=3, max_staleness=2, refill="other")
    _, found = walked(traffic, 300)
    assert found.gaps.max() == 2 and found.stopped.sum() > 50
    assert found.there.all() and found.flying.min() > 6
    assert found.begun.sent.sum() - found.there.sum() - found.stopped.sum() in range(12 + 1)


@pytest.mark.full
def test_no_update_is_older_than_the_ring():
    """Blocks of four that each make a version, of which three are kept. Catches an arrival whose base has left them."""
    traffic = Traffic(devices(40), concurrency=9, block=4, buffer_size=1, max_staleness=3, refill="other")
    flights = take_off(KEY, traffic, lambda ids: LOAD)
    step = jax.jit(lambda key, flights: next_arrivals(key, traffic, flights, lambda ids: LOAD))
    gaps, stopped = [], 0
    for t in range(40):
        found, flights = step(keyed(t), flights)
        gaps += found.gaps[found.there].tolist()
        stopped += int(found.stopped)
    assert max(gaps) == 3 and stopped > 0


@pytest.mark.full
def test_energy_of_those_who_are_sent_work():
    """Everybody's work takes 5 J. Catches energy of clients who were drawn and are not there."""

    def spend(key, ids, load):
        nothing = jnp.zeros_like(ids)
        return Spent(nothing, 1 + ids % 7, nothing, jnp.full(ids.shape, 5.0))

    some = Devices(20, spend, Availability(lambda ids, seconds: ids % 2 == 0), ticks_per_second=10)
    for refill in ("other", "same"):
        traffic = Traffic(some, concurrency=6, block=3, buffer_size=3, max_staleness=9, refill=refill)
        flights = take_off(KEY, traffic, lambda ids: LOAD)
        for t in range(6):
            found, flights = next_arrivals(keyed(t), traffic, flights, lambda ids: LOAD)
            assert float(found.begun.joules) == 5 * int(found.begun.sent), (refill, t)


def test_earliest_is_a_sort():
    """Catches ties by place, and counts at both ends."""
    rng = np.random.default_rng(0)
    for size, count in ((1, 1), (7, 7), (50, 8), (50, 1)):
        times = rng.integers(0, 6, size).astype(np.uint32)
        times[rng.random(size) < 0.2] = NEVER_ARRIVES
        ids = rng.permutation(1000)[:size].astype(np.int32)
        found = set(np.asarray(jax.jit(earliest, static_argnums=2)(times, ids, count)).tolist())
        assert found == set(np.lexsort((ids, times))[:count].tolist())


def test_places_are_those_of_numpy():
    """One to three kinds, around whole words of 32. Catches a place that is lost, doubled, or of another order."""
    rng = np.random.default_rng(1)
    compiled = jax.jit(places_of)
    for size in (1, 31, 32, 33, 64, 4097):
        for share in (0.0, 0.1, 0.5, 1.0):
            kind = rng.integers(0, 3, size)
            kinds = [(kind == i) & (rng.random(size) < share) for i in range(3)]
            for number in (1, 2, 3) if size == 33 else (3,):
                expected = np.concatenate([np.flatnonzero(x) for x in kinds[:number]])
                found = np.asarray(compiled(*kinds[:number]))
                assert found.tolist() == [*expected, *[size] * (size - len(expected))]


@pytest.mark.full
@pytest.mark.parametrize("refill", ["other", "same"])
def test_many_clients_are_sorted_and_few_counted(refill, monkeypatch):
    """The same events both ways, with equal times and absent clients. Catches ties by place, and a client that stands
    twice among those who may be next."""
    traffic = Traffic(
        devices(60 if refill == "other" else 5, window),
        concurrency=5,
        block=4,
        buffer_size=4,
        max_staleness=50,
        refill=refill,
    )
    counted = walked(traffic, 60)
    monkeypatch.setattr(arrivals, "MAX_COMPARED", 0)
    for a, b in zip(*map(jax.tree.leaves, (counted, walked(traffic, 60))), strict=True):
        np.testing.assert_array_equal(a, b)
