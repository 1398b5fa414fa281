"""Whose reports do not count, and why: every count of a round against events in NumPy."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import network, sampling
from fedjax_sim.prng import stream
from fedjax_sim.sampling.time.lost_reports import NEVER, losing, lost_to
from fedjax_sim.types import Clock
from tests.sampling.time.problems import DOWN, STEP, UP, WORK, N, tables, told

KEY = jax.random.key(11)
LEAVES = np.random.default_rng(7).integers(1, 4, N)  # the second from which a client is not there; one is never
LEAVES[3] = 0
SLOTS, CHECKS = 9, 8
TOTAL = DOWN + 5 * STEP + UP


def there(ids, seconds):
    return seconds < jnp.asarray(LEAVES)[ids]


@functools.cache
def lossy():
    """Clients who drop out or are silent, of whom those who are there are invited."""
    drawn = sampling.with_response_rates(sampling.uniform(N, N), [0.9, 0.7])
    drawn = sampling.with_membership(sampling.with_dropout(drawn, 0.2), [1, 1, 1, 1, 1, 2])
    return sampling.with_clock(drawn, tables(there=there), num_invited=SLOTS, checks=CHECKS)


causes_of = jax.jit(lost_to)


@functools.cache
def rounds_of(sampler):
    """key -> what the sampler makes of it and its first state, compiled once."""
    state, sample = sampler.init() if sampler.tell is None else told(sampler), jax.jit(sampler.sample)
    return lambda key: jax.device_get(sample(key, state))


def first_moments(ids):
    """When each client is seen to be gone, or none is: 10^9."""
    compute = 5 * STEP[ids]
    parts = [compute // CHECKS * i + compute % CHECKS * i // CHECKS for i in range(CHECKS + 1)]
    moments = np.stack([*(DOWN[ids] + part for part in parts), TOTAL[ids]])
    gone = moments // 1000 >= LEAVES[ids]
    first = np.where(gone, moments, 10**9).min(0)
    return np.where(gone.any(0), np.minimum(first, TOTAL[ids] - 1), 10**9)


def expected(cohort, lost, deadline=None, first=None):
    """{name: ids} of those who are lost, by what comes first: leaving, a deadline, the arrival of the first few."""
    ids = np.asarray(cohort.ids)[np.asarray(cohort.invited)]
    leaves, ends = first_moments(ids), TOTAL[ids]
    events = {"interrupted": leaves, "late": np.full(len(ids), 10**9 if deadline is None else deadline)}
    told_lost = {name: np.isin(ids, sorted(found)) for name, found in lost.items()}
    fine = (ends <= events["late"]) & (leaves == 10**9) & ~np.any(list(told_lost.values()), axis=0)
    closes, among = 10**9, fine
    if first is not None and fine.sum() >= first:
        order = [i for i in np.lexsort((ids, ends)) if fine[i]][:first]
        closes, among = ends[order[-1]], np.isin(np.arange(len(ids)), order)
    found = {name: set() for name in (*lost, "interrupted", "late", "not_needed")}
    for i, id in enumerate(ids.tolist()):
        moments = {name: times[i] for name, times in events.items()} | {"not_needed": closes}
        name = min(moments, key=lambda name: moments[name])
        if moments[name] < ends[i]:
            found[name].add(id)
        elif not among[i]:
            found[next((name for name in told_lost if told_lost[name][i]), "not_needed")].add(id)
    return found


WRAPPERS = {
    "nothing": (lambda s: s, {}),
    "deadline": (lambda s: sampling.with_deadline(s, 1.1), {"deadline": 1100}),
    "first": (lambda s: sampling.with_over_selection(s, 3), {"first": 3}),
    "deadline inside": (
        lambda s: sampling.with_over_selection(sampling.with_deadline(s, 1.1), 3), {"deadline": 1100, "first": 3}
    ),
    "deadline outside": (
        lambda s: sampling.with_deadline(sampling.with_over_selection(s, 3), 1.1), {"deadline": 1100, "first": 3}
    ),
    "short deadline outside": (
        lambda s: sampling.with_deadline(sampling.with_over_selection(s, 6), 0.7), {"deadline": 700, "first": 6}
    ),
}  # fmt: skip


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", WRAPPERS)
def test_every_client_is_counted_once(name):
    """40 rounds in which clients are away, drop out, are silent, leave, are late or not needed: ids and counts.

    Catches counts of clients who were not invited, one client under two names, and a later cause that hides the first.
    """
    wrap, limits = WRAPPERS[name]
    plain, wrapped, seen = rounds_of(lossy()), rounds_of(wrap(lossy())), {}
    for t in range(40):
        key = jax.random.fold_in(KEY, t)
        (whole, _), (cohort, _) = plain(key), wrapped(key)
        invited = set(cohort.ids[cohort.invited].tolist())
        lost = {x: _drawn(key, x) & invited for x in ("silent", "dropped")}
        lost["dropped"] -= lost["silent"]
        found, causes = expected(cohort, lost, **limits), jax.device_get(causes_of(cohort))
        for cause, ids in found.items():
            if cause in cohort.metrics:
                assert set(cohort.ids[causes[cause]].tolist()) == ids, (t, cause)
                assert cohort.metrics[cause] == len(ids)
            else:
                assert not ids
            seen[cause] = seen.get(cause, 0) + len(ids)
        assert cohort.invited.sum() == cohort.reported.sum() + sum(map(len, found.values()))
        np.testing.assert_array_equal(whole.invited, cohort.invited)
    kinds = {"silent", "dropped", *(["late"] if "deadline" in limits else ["interrupted"])}
    assert all(seen[kind] > 0 for kind in kinds), seen


EVERYBODY = {
    "dropped": sampling.with_dropout(sampling.full(N), 0.2),
    "silent": sampling.with_response_rates(sampling.full(N), [0.9, 0.7]),
}


def _drawn(key, name):
    """Who would be lost of all N clients, were everybody invited."""
    return set(np.flatnonzero(rounds_of(EVERYBODY[name])(key)[0].timing.lost[name] < NEVER).tolist())


@pytest.mark.full
def test_candidates_are_not_counted():
    """Of ten candidates half drop out; four places. Catches a count over candidates, in every wrapper that chooses."""
    drawn = sampling.with_dropout(sampling.uniform(N, 10), 0.5)
    for sampler in (
        sampling.power_of_choice(drawn, 4),
        sampling.with_membership(drawn, [1, 9], num_invited=4),
        sampling.with_clock(drawn, tables(there=lambda ids, seconds: ids % 2 == 0), num_invited=4),
        sampling.with_clock(sampling.with_membership(drawn, [1, 9]), tables()),
    ):
        for t in range(20):
            cohort, _ = rounds_of(sampler)(jax.random.fold_in(KEY, t))
            assert int(cohort.metrics["dropped"]) == int((cohort.invited & ~cohort.reported).sum()), t


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("airtime", [0.15, 0.4, 1.0])
def test_a_channel_that_late_messages_use(airtime):
    """Airtime of a round with a deadline, in both orders. Catches messages on their way that take no place."""
    timed = sampling.with_clock(sampling.full(N), tables())
    deadline = int(np.median(TOTAL))
    late = sampling.with_deadline(timed, deadline / 1000)
    cohort, _ = rounds_of(sampling.with_radio_budget(late, airtime_seconds=airtime))(KEY)
    ready, left, place = DOWN + 5 * STEP, 1000 * airtime, set()
    for i in np.lexsort((np.arange(N), ready)):
        used = min(UP[i], deadline - ready[i])
        if used <= 0:
            continue
        left -= used
        if left < 0:
            break
        place.add(int(i))
    assert set(np.flatnonzero(cohort.timing.sent).tolist()) == place
    assert set(np.flatnonzero(cohort.reported).tolist()) == {i for i in place if TOTAL[i] <= deadline}
    assert int(cohort.timing.spent.up.sum()) <= 1000 * airtime
    assert int(cohort.reported.sum() + cohort.metrics["late"] + cohort.metrics["no_radio"]) == N


def test_messages_shorter_than_a_tick():
    """Places by number of messages, none of which takes a tick. Catches one without a place that counts as sent."""
    timed = sampling.with_clock(sampling.full(N), tables(up=np.zeros(N)))
    cohort, _ = rounds_of(sampling.with_radio_budget(timed, budget_bytes=3.5 * WORK.bytes_up))(KEY)
    first = np.lexsort((np.arange(N), DOWN + 5 * STEP))[:3]
    assert set(np.flatnonzero(cohort.timing.sent)) == set(first) == set(np.flatnonzero(cohort.reported))
    assert int(cohort.metrics["no_radio"]) == N - 3


@pytest.mark.full
def test_hazards_and_deadlines_in_any_order():
    """The earlier of two moments counts, whichever wrapper is outside; partial work may end before a client leaves.
    Catches clients late who had left, and work that a client does after it left."""
    risk = network.memoryless(0.8)
    timed = sampling.with_clock(sampling.full(N), tables())
    alone = sampling.with_hazard(timed, risk)
    leaves_after = jax.jit(lambda key: risk.leaves_after(stream(key, "hazard"), jnp.arange(N)))
    for limit in (0.5, 1.0, 1.5):
        inside = sampling.with_deadline(alone, limit)
        outside = sampling.with_hazard(sampling.with_deadline(timed, limit), risk)
        within = sampling.with_deadline(alone, limit, late="partial")
        partial = sampling.with_hazard(sampling.with_deadline(timed, limit, late="partial"), risk)
        draws = [rounds_of(s) for s in (inside, outside, within, partial)]
        for t in range(10):
            key = jax.random.fold_in(KEY, t)
            found = [draw(key) for draw in draws]
            jax.tree.map(np.testing.assert_array_equal, *found[:2])
            (cohort, _), _, (kept, _), (short, _) = found
            assert cohort.metrics["late"] + cohort.metrics["interrupted"] + cohort.reported.sum() == N
            leaves = np.asarray(leaves_after(key)) * 1000
            fits = np.clip((int(limit * 1000) - DOWN - UP) // STEP, 1, 5)
            whole = DOWN + STEP * fits + UP <= limit * 1000
            np.testing.assert_array_equal(short.reported, whole & (leaves >= STEP * fits))
            before = leaves.astype(int) + DOWN < np.minimum(DOWN + STEP * fits + UP, int(limit * 1000))
            np.testing.assert_array_equal(kept.reported, whole & ~(before & (leaves < 5 * STEP)))
            assert not bool((kept.timing.sent & ~kept.reported & (leaves < STEP * fits)).any())
            assert bool((kept.timing.sent | ~kept.reported).all())


@pytest.mark.full
def test_shorter_work_of_clients_that_are_lost():
    """Clients drop out, are silent or report nothing, and leave before a deadline with partial work, or would have.

    Catches a client that dropped out and reports, since its shorter work ends before it leaves."""
    drawn = sampling.with_response_rates(sampling.with_dropout(sampling.full(N), 0.4), [1.0, 0.7, 0.8])

    def mute(key, state):  # a sampler of somebody's own, that loses reports and does not say why
        cohort, state = drawn.sample(key, state)
        return cohort._replace(reported=cohort.reported & (cohort.ids != 3)), state

    regained = 0
    for timed in (
        lambda s: sampling.with_clock(s, tables(there=there)),
        lambda s: sampling.with_hazard(sampling.with_clock(s, tables()), network.memoryless(0.8)),
    ):
        whole, heard = timed(drawn), timed(sampling.full(N))
        short = [sampling.with_deadline(s, 0.9, late="partial") for s in (timed(drawn._replace(sample=mute)), heard)]
        rounds = [rounds_of(s) for s in (*short, whole, drawn)]
        for t in range(20):
            key = jax.random.fold_in(KEY, t)
            some, everyone, long, lossy_alone = (draw(key)[0] for draw in rounds)
            silent = ~lossy_alone.reported | (np.arange(N) == 3)
            np.testing.assert_array_equal(some.reported, everyone.reported & ~silent)
            np.testing.assert_array_equal(some.timing.sent, everyone.timing.sent & ~silent)
            jax.tree.map(np.testing.assert_array_equal, some.timing.spent, everyone.timing.spent)
            counts = sum(int(some.metrics[name]) for name in ("silent", "dropped", "interrupted", "late"))
            named = any(where[3] for where in causes_of(some).values())
            assert counts + some.reported.sum() == N - (not some.reported[3] and not named)
            regained += int((some.reported & ~long.reported).sum())
    assert regained > 20


def test_times_near_the_end_of_int32():
    """Clients whose phases last as long as any: those who are there for ever arrive. Catches moments that wrap."""
    forever = tables(*[np.full(N, 715_827_840)] * 3, there=lambda ids, seconds: (seconds >= 0) & (ids >= 0))
    clocked = sampling.with_clock(sampling.full(N), forever)
    state = told(clocked, WORK._replace(steps=1))
    state = state._replace(clock=Clock(jnp.int32(5), jnp.int32(999)))
    cohort, _ = clocked.sample(KEY, state)
    assert bool(cohort.reported.all()) and int(cohort.metrics["interrupted"]) == 0


def test_wrong_order():
    """Catches wrappers whose numbers would not follow from those inside of them."""
    timed = sampling.with_clock(sampling.uniform(N, 6), tables())
    limited, first = sampling.with_over_invitation(sampling.uniform(N, 6), 3), sampling.with_over_selection(timed, 3)
    counted = sampling.with_distinct_clients(sampling.uniform(N, 6))
    risk = network.memoryless(1.0)
    for wrong, words in (
        (lambda: sampling.with_dropout(timed, 0.1), "one without a clock, for with_dropout"),
        (lambda: sampling.with_response_rates(timed, [0.5]), "one without a clock, for with_response_rates"),
        (lambda: sampling.with_clock(limited, tables()), "one without a limit of reports, for with_clock, got 3"),
        (lambda: sampling.with_membership(limited, [1]), "one without a limit of reports, for with_membership"),
        (lambda: sampling.power_of_choice(limited, 2), "one without a limit of reports, for power_of_choice"),
        (lambda: sampling.with_hazard(first, risk), "one without a limit of reports, for with_hazard"),
        (lambda: sampling.with_hazard(sampling.with_radio_budget(timed, budget_bytes=9.0), risk), "without a limit"),
        *(
            (lambda a=a, b=b: sampling.with_deadline(sampling.with_deadline(timed, 1.0, late=a), 2.0, late=b),
             "one without a deadline")
            for a, b in itertools.product(("dropped", "partial"), repeat=2)
        ),
        (lambda: sampling.with_dropout(counted, 0.1), "Put with_distinct_clients around with_dropout"),
        (lambda: sampling.with_clock(counted, tables()), "Put with_distinct_clients around with_clock"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            wrong()


def test_a_cause_that_a_users_own_sampler_states():
    """Fault: an `assert` where clients are lost to a cause, and the cohort does not say who sent a message."""
    clocked = sampling.with_clock(sampling.full(N), tables())

    def leaves_at_once(key, cohort):
        return losing(cohort, "interrupted", cohort.ids == 0, 1)

    short = sampling.with_deadline(clocked.then(leaves_at_once), 0.9, late="partial")
    cohort, _ = jax.jit(short.sample)(KEY, told(short))
    assert not bool(cohort.reported[0]) and int(cohort.metrics["interrupted"]) == 1
    assert bool((cohort.timing.sent >= cohort.reported).all())
