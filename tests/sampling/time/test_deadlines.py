"""Deadlines, over-selection and radio budgets, against what a loop over the clients would do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from fedjax_sim import aggregation, algorithms, client, engine, network, run, sampling, server, transform
from fedjax_sim.privacy.reading import mechanism_from
from fedjax_sim.round.round import invite
from fedjax_sim.types import Devices, Noise, Spent, Work
from tests.laws import cases, problems as p
from tests.sampling.time.problems import DOWN, STEP, UP, WORK, N, tables, told

KEY = jax.random.key(0)
TOTAL = DOWN + 5 * STEP + UP
MIDDLE = int(np.sort(TOTAL)[N // 2])


def clocked(**options):
    return sampling.with_clock(sampling.full(N), tables(**options))


def drawn(sampler, key=KEY, work=WORK):
    return jax.device_get(sampler.sample(key, told(sampler, work)))


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("seconds", [MIDDLE / 1000, 10.0, 0.001, (TOTAL[0] - 1) / 1000, 1.001])
def test_deadline(seconds):
    """Against a comparison of two numbers. Catches who arrives at the last tick and is dropped, a tick that floats lose
    (1.001 s are 1,001), a round beyond its deadline, a late message on its way that nobody sent, and one that was not
    begun and somebody did."""
    ticks = round(seconds * 1000)
    cohort, state = drawn(sampling.with_deadline(clocked(), seconds))
    np.testing.assert_array_equal(cohort.reported, ticks >= TOTAL)
    np.testing.assert_array_equal(cohort.timing.sent, ticks > DOWN + 5 * STEP)
    np.testing.assert_array_equal(cohort.timing.spent.total, np.minimum(TOTAL, ticks))
    assert state.clock.seconds * 1000 + state.clock.ticks == min(TOTAL.max(), ticks)
    assert cohort.metrics["late"] == (TOTAL > ticks).sum()


def test_partial_work_is_the_most_that_fits():
    """Every deadline of a grid, against a search by hand. Catches a step too many or too few, work that is done though
    not even one step fits, and a share that the client rounds up."""
    sampler = clocked()
    for ticks in np.linspace(50, TOTAL.max() + 10, 6).astype(int):
        cohort, state = drawn(sampling.with_deadline(sampler, ticks / 1000, late="partial"))
        fits = np.clip((ticks - DOWN - UP) // STEP, 0, 5)
        np.testing.assert_array_equal(cohort.reported, fits >= 1)
        np.testing.assert_array_equal(cohort.work[fits >= 1], fits[fits >= 1])
        np.testing.assert_array_equal(cohort.timing.spent.total[fits >= 1], (DOWN + UP + STEP * fits)[fits >= 1])
        assert cohort.work.dtype == np.int32 and cohort.metrics["late"] == (fits < 1).sum()
        assert cohort.metrics["shortened"] == ((fits >= 1) & (fits < 5)).sum()
        assert state.clock.seconds * 1000 + state.clock.ticks == cohort.timing.spent.total.max() <= ticks


@pytest.mark.full
def test_shortened_clients_that_are_not_needed():
    """A message that over-selection or a radio budget leaves out is not one of partial work: every count is of those
    who report, whatever wraps the deadline."""
    short = sampling.with_deadline(clocked(), MIDDLE / 1000, late="partial")
    for wrapped in (sampling.with_over_selection(short, 3), sampling.with_radio_budget(short, airtime_seconds=0.3)):
        cohort, _ = drawn(wrapped)
        found = cohort.metrics["shortened"]
        assert found == (cohort.reported & (cohort.work < 5)).sum() < drawn(short)[0].metrics["shortened"]


@pytest.mark.full
def test_partial_work_of_stragglers():
    """Catches a deadline that gives a straggler its work back."""
    slow = sampling.with_clock(sampling.with_stragglers(sampling.full(N), 1.0), tables())
    cohort, _ = drawn(slow)
    steps = np.ceil(cohort.work * 5).astype(int)
    np.testing.assert_array_equal(cohort.timing.spent.compute, STEP * steps)
    limited, _ = drawn(sampling.with_deadline(slow, MIDDLE / 1000, late="partial"))
    fits = np.minimum((MIDDLE - DOWN - UP) // STEP, steps)
    np.testing.assert_array_equal(limited.work[fits >= 1], fits[fits >= 1])


@pytest.mark.full
def test_who_would_leave_after_the_deadline():
    """Catches a client that is lost at a moment at which, with less work, its message has long arrived; and one that
    leaves before and reports."""
    leaves = np.full(N, 10**6)
    leaves[[1, 4]] = 1, 2
    there = lambda ids, seconds: seconds < jnp.asarray(leaves)[ids]  # noqa: E731
    times = {"down": np.full(N, 1), "step": np.full(N, 700), "up": np.full(N, 99)}
    away = sampling.with_clock(sampling.full(N), tables(**times, there=there), checks=64)
    assert drawn(away)[0].reported.sum() == N - 2
    cohort, _ = drawn(sampling.with_deadline(away, 1.6, late="partial"))
    assert np.flatnonzero(~cohort.reported).tolist() == [1] and cohort.metrics["interrupted"] == 1
    assert set(cohort.work.tolist()) == {2} and cohort.timing.spent.total[[1, 4]].tolist() == [1040, 1500]
    dropped, _ = drawn(sampling.with_deadline(away, 1.6))
    assert dropped.reported.sum() == 0 and dropped.metrics["late"] == N - 1 and dropped.metrics["interrupted"] == 1


@pytest.mark.full
def test_who_leaves_with_shorter_work():
    """Two of five steps fit, and clients leave while they send, or compute. By hand: times, energy, what was on its
    way. Catches who spends what the long work would have, and a message that was begun and is not counted."""
    leaves = jnp.where(jnp.arange(N) < 6, 230.0, 150.0) / 1000
    hazard = network.Hazard(lambda key, ids: leaves[ids])
    times = tables(np.full(N, 10), np.full(N, 100), np.full(N, 50))
    inside = sampling.with_hazard(sampling.with_clock(sampling.full(N), times), hazard)
    cohort, _ = drawn(sampling.with_deadline(inside, 0.28, late="partial"))
    assert set(cohort.work.tolist()) == {2} and not cohort.reported.any() and cohort.metrics["interrupted"] == N
    assert np.stack(cohort.timing.spent[:3], 1).tolist() == 6 * [[10, 200, 30]] + 6 * [[10, 150, 0]]
    np.testing.assert_allclose(cohort.timing.spent.joules, 6 * [10 + 2000 + 3000] + 6 * [10 + 1500], rtol=1e-6)
    assert cohort.timing.sent.tolist() == 6 * [True] + 6 * [False]


@pytest.mark.full
def test_a_place_for_both_messages():
    """Three of six clients are late after the first of two messages of 100 bytes: a place is for both, airtime is what
    was used. Catches a first message that takes none."""

    def spend(key, ids, load):
        slow = jnp.where(ids < 3, 100, 5)
        first = load.flops >= 500
        ticks = [
            jnp.where(load.bytes_down > 0, 1, 0) + 0 * ids,
            jnp.where(first, 1, jnp.where(load.flops > 0, slow, 0)),
        ]
        return Spent(*ticks, jnp.where(load.bytes_up > 0, 1, 0) + 0 * ids, jnp.zeros(ids.shape))

    work = Work(200, 8, 5, 1.0, 1.0, before=Work(100, 4, None, 1000.0))
    clocked = sampling.with_clock(sampling.full(6), Devices(6, spend, ticks_per_second=10))
    late = sampling.with_deadline(clocked, 2.0)
    for budget, places in ((1200, 6), (1199, 5), (600, 3)):
        cohort, _ = drawn(sampling.with_radio_budget(late, budget_bytes=budget, order="id"), work=work)
        assert cohort.timing.begun.tolist() == [i < places for i in range(6)]
        assert cohort.timing.sent.tolist() == [3 <= i < places for i in range(6)]
        assert 100 * (cohort.timing.begun.sum() + cohort.timing.sent.sum()) <= budget
    for ticks, begun, sent in ((3, 3, 0), (4, 3, 0), (5, 4, 1), (8, 5, 2), (9, 6, 3)):  # of one message each
        cohort, _ = drawn(sampling.with_radio_budget(late, airtime_seconds=ticks / 10, order="id"), work=work)
        assert (cohort.timing.begun.sum(), cohort.timing.sent.sum()) == (begun, sent)


@pytest.mark.full
def test_a_generous_deadline():
    """Three rounds of FedAvg. Catches a deadline that changes anything where nobody is late."""
    speeds = {"speed": network.lognormal(1e6, 1.0), "bandwidth_down": network.constant(1e6)}
    devices = network.heterogeneous(p.NUM_CLIENTS, **speeds, bandwidth_up=network.constant(1e5))
    timed = sampling.with_clock(sampling.uniform(p.NUM_CLIENTS, 5), devices)
    found = []
    for sampler in (timed, sampling.with_deadline(timed, 60.0), sampling.with_deadline(timed, 60.0, late="partial")):
        made = algorithms.fedavg(p.linear_loss, sampler, optax.sgd(0.1), num_steps=3, batch_size=2, mesh=None)
        found.append(run(KEY, made, jnp.array(p.START), p.ragged(), 3))
    (state, history), (dropped, same), (partial, other) = found
    assert p.digest(state.server) == p.digest(dropped.server)
    for a, b in zip(jax.tree.leaves(state.server), jax.tree.leaves(partial.server), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)  # the loop over steps is compiled otherwise
    for records in (same.records, other.records):
        assert [r["simulated_seconds"] for r in records] == [r["simulated_seconds"] for r in history.records]
        assert {r["late"] for r in records} == {0} == {r["wasted_bytes"] for r in records}


def test_what_was_sent_was_sent():
    """Bytes of one round with a deadline. Catches late messages that cost nothing, and joules that do not add up."""
    speeds = {"speed": network.constant(1e9), "bandwidth_down": network.constant(1e9)}
    devices = network.heterogeneous(
        p.NUM_CLIENTS,
        **speeds,
        bandwidth_up=network.tiers([0.5, 0.5], [12.0, 120.0]),
        radio_watts=network.constant(3.0),
    )
    late = sampling.with_deadline(sampling.with_clock(sampling.full(p.NUM_CLIENTS), devices), 0.5)
    made = algorithms.fedavg(p.linear_loss, late, optax.sgd(0.1), num_steps=1, mesh=None)
    people = p.ragged()
    _, info = jax.jit(made.step)(KEY, made.init(KEY, jnp.array(p.START), people), people)
    record = {name: x.total() if hasattr(x, "total") else float(x) for name, x in info.items()}
    assert record["uplink_bytes"] == 12 * p.NUM_CLIENTS  # a message takes 1 s or 0.1 s: all have begun
    assert record["wasted_bytes"] == 12 * record["late"] > 0
    assert record["clients_reported"] == p.NUM_CLIENTS - record["late"] > 0
    assert record["wasted_joules"] == pytest.approx(1.5 * record["late"], rel=0.01)
    assert record["joules"] == pytest.approx(record["wasted_joules"] + 0.3 * record["clients_reported"], rel=0.01)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("quantile", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_first_of_two_messages_was_sent(quantile):
    """Deadlines throughout a round of two passes, against a comparison of numbers. Catches a gradient that was sent
    while its client still trained and that nobody counted, a second message that had not been begun, and a radio whose
    first message is nobody's."""
    work = WORK._replace(bytes_up=24, bytes_down=12, before=Work(4, 8, None, 2.0))
    first, second = DOWN + 2 * STEP, 2 * DOWN + 7 * STEP + UP  # until each message is begun
    ticks = int(np.quantile(np.concatenate([first, second, second + UP]), quantile))
    late = sampling.with_deadline(clocked(), ticks / 1000)
    cohort, _ = drawn(late, work=work)
    np.testing.assert_array_equal(cohort.reported, second + UP <= ticks)
    np.testing.assert_array_equal(cohort.timing.sent, second < ticks)
    np.testing.assert_array_equal(cohort.timing.begun, first < ticks)
    few, _ = drawn(sampling.with_radio_budget(late, budget_bytes=24.0 * 5, order="id"), work=work)
    on_air = np.isin(few.ids, np.flatnonzero(first < ticks)[:5])
    np.testing.assert_array_equal(few.timing.begun, on_air)
    np.testing.assert_array_equal(few.timing.sent, on_air & (second < ticks))


@pytest.mark.full
def test_gradients_that_nobody_waits_for():
    """Mime under a deadline that everybody misses while they train. Catches a first pass whose bytes nobody counts."""
    devices = network.heterogeneous(p.NUM_CLIENTS, speed=1e3, bandwidth_down=1e9, bandwidth_up=1e9, latency=0.1)
    clocked = sampling.with_clock(sampling.full(p.NUM_CLIENTS), devices)
    work = {"num_steps": 1000, "batch_size": 2, "weighting": "uniform", "mesh": None}
    made = algorithms.mime(p.linear_loss, sampling.with_deadline(clocked, 2.0), optax.sgd(0.1), **work)
    _, history = run(KEY, made, jnp.array(p.START), p.ragged(), 1)
    record = history.records[-1]
    assert record["late"] == p.NUM_CLIENTS and record["clients_reported"] == 0
    assert record["uplink_bytes"] == record["wasted_bytes"] == 12 * p.NUM_CLIENTS  # of each its gradient alone
    assert record["joules"] == record["wasted_joules"]


def test_over_selection_takes_the_first():
    """Against a sort, with equal arrivals and fewer reports than needed. Catches ties by slot, a round that waits for
    the slow, and one that ends before the last message that counts."""
    times = {"down": DOWN, "step": np.repeat([100, 10, 50], 4), "up": np.zeros(N, int)}
    same = sampling.with_clock(sampling.cyclic(N, 7), tables(**{**times, "down": np.ones(N)}))
    state = told(same)
    state = state._replace(sampler=state.sampler._replace(position=jnp.uint32(8)))  # 8, ..., 11, 0, 1, 2
    for count, chosen, end in ((2, {8, 9}, 251), (5, {8, 9, 10, 11, 0}, 501)):
        cohort, after = jax.device_get(jax.jit(sampling.with_over_selection(same, count).sample)(KEY, state))
        assert set(cohort.ids[cohort.reported].tolist()) == chosen
        assert int(after.clock.seconds * 1000 + after.clock.ticks) == end == int(cohort.timing.spent.total.max())
        assert int(cohort.metrics["not_needed"]) == 7 - count
    alike = sampling.with_clock(sampling.cyclic(N, 7), tables(*[np.ones(N)] * 3))
    cohort, _ = jax.device_get(jax.jit(sampling.with_over_selection(alike, 3).sample)(KEY, state))
    assert set(cohort.ids[cohort.reported].tolist()) == {0, 1, 2}
    few = sampling.with_over_selection(sampling.with_clock(sampling.with_dropout(sampling.full(N), 0.6), tables()), 11)
    cohort, _ = drawn(few)
    assert 0 < cohort.reported.sum() < 11 and cohort.metrics["not_needed"] == 0
    assert cohort.timing.spent.total.max() == TOTAL.max()


@pytest.mark.full
def test_random_arrivals():
    """20,000 cohorts of clients who are alike but for jitter: chi-square above 1e-6. Catches places by id or slot."""
    alike = {name: network.constant(100.0) for name in ("speed", "bandwidth_down", "bandwidth_up")}
    timed = sampling.with_clock(sampling.full(N), network.heterogeneous(N, **alike, jitter=0.5))
    first = sampling.with_over_selection(timed, 3)
    state, keys = told(first), jax.random.split(jax.random.key(2), 20_000)
    reported = np.asarray(jax.jit(jax.vmap(lambda key: first.sample(key, state)[0].reported))(keys))
    assert (reported.sum(1) == 3).all()
    assert stats.chisquare(reported.sum(0) * (1 - 1 / N) / (1 - 3 / N)).pvalue > 1e-6


def test_radio_budget():
    """Bytes, and airtime in both orders, against a loop. Catches one that is sent and is a byte too long, an empty
    place, a sum that wraps, and one without a place that costs airtime."""
    timed = sampling.with_clock(sampling.with_dropout(sampling.full(N), 0.3), tables())
    plain, _ = drawn(timed)
    there = [i for i in range(N) if plain.reported[i]]
    by_arrival = sorted(there, key=lambda i: (DOWN[i] + 5 * STEP[i], i))
    for order, ranked in (("id", there), ("arrival", by_arrival)):
        for budget in (0, 1, 150, 400, 10_000):
            cohort, _ = drawn(sampling.with_radio_budget(timed, airtime_seconds=max(budget, 0.5) / 1000, order=order))
            sums = np.cumsum(UP[ranked])
            fits = {i for i, used in zip(ranked, sums, strict=True) if used <= budget}
            sent = set(np.flatnonzero(cohort.timing.sent))
            assert set(np.flatnonzero(cohort.reported)) == fits == sent, (order, budget)
            assert cohort.timing.spent.up[[i for i in there if i not in fits]].sum() == 0
            assert cohort.metrics["no_radio"] == len(there) - len(fits)
    cohort, _ = drawn(sampling.with_radio_budget(timed, budget_bytes=3.9 * WORK.bytes_up))
    assert set(np.flatnonzero(cohort.reported)) == set(by_arrival[:3])
    for count, size in ((4, 9_000_001), (7, 2**24 - 1)):  # in floats, 36,000,003 bytes are 4 times 9,000,001
        sized = WORK._replace(bytes_up=size)
        for missing in (0, 1):
            cohort, _ = drawn(sampling.with_radio_budget(clocked(), budget_bytes=count * size - missing), work=sized)
            assert cohort.reported.sum() == count - missing
    forever = tables(*[np.full(N, 1)] * 2, np.full(N, 700_000_000))
    cohort, _ = drawn(sampling.with_radio_budget(sampling.with_clock(sampling.full(N), forever), airtime_seconds=1e6))
    assert cohort.reported.sum() == 1


def test_wrappers_compose():
    """A deadline around over-selection and the other way round. Catches a clock put back twice, or by the wrong one."""
    for deadline in (MIDDLE - 1, MIDDLE + 1, 10**6):
        for wrap in (
            lambda s, d=deadline: sampling.with_deadline(sampling.with_over_selection(s, N // 2 + 1), d / 1000),
            lambda s, d=deadline: sampling.with_over_selection(sampling.with_deadline(s, d / 1000), N // 2 + 1),
        ):
            cohort, state = drawn(sampling.with_distinct_clients(wrap(clocked())))
            end = min(MIDDLE, deadline)
            assert set(np.flatnonzero(cohort.reported)) == set(np.flatnonzero(end >= TOTAL))
            clock = state.sampler.clock
            assert clock.seconds * 1000 + clock.ticks == end == cohort.timing.spent.total.max()


def secured(sampler):
    parts = client.local_sgd(p.linear_loss, optax.sgd(p.RATE), client.work(weighting="uniform", num_steps=2))
    rule = aggregation.secure_sum(aggregation.modular_sum(5.0), 2, dropout=0.05)
    how = transform.quantize(8, range=1.0, integers=True)
    return algorithms.federated(sampler, parts, rule, server.optimizer(optax.sgd(1.0)), how, mesh=None)


TIMED = {
    "error_feedback": lambda sampler: algorithms.fedavg(
        p.linear_loss,
        sampler,
        optax.sgd(p.RATE),
        num_steps=2,
        transform=transform.error_feedback(transform.top_k(0.4)),
        mesh=None,
    ),
    "scaffold": lambda sampler: algorithms.scaffold(
        p.linear_loss, sampler, optax.sgd(p.RATE), num_steps=2, weighting="uniform", mesh=None
    ),
    "secure_sum": secured,
}


@pytest.mark.full
@pytest.mark.optimised
@pytest.mark.parametrize("name", cases.rows(TIMED, ["scaffold"]))
def test_time_acts_through_the_cohort_alone(name):
    """Twelve rounds of Poisson cohorts, some of nobody, with clients who leave or are late, and the same cohorts given
    to a sampler without a clock: one state of server, clients and memories, and one log but for its times. Who never
    reports keeps what it had.

    Catches who is late and keeps what it would have kept, a wait for nobody that a part takes for a round, a mask of
    somebody who left that stays in the sum."""
    slow = {"speed": network.lognormal(1e3, 1.0), "bandwidth_down": network.constant(1e6)}
    devices = network.heterogeneous(p.NUM_CLIENTS, **slow, bandwidth_up=network.constant(1e6), jitter=0.5)
    timed = sampling.with_hazard(
        sampling.with_clock(sampling.poisson(p.NUM_CLIENTS, 0.08), devices), network.memoryless(2.0)
    )
    made = TIMED[name](sampling.with_deadline(timed, 0.3))
    start, data, cohorts = jnp.array(p.START), p.ragged(), []
    first, step = made.init(KEY, start, data), jax.jit(made.step)
    state, invited, infos = first, jax.jit(lambda key, state: invite(made.parts, key, state)[0]), []
    for t in range(12):
        cohort = invited(jax.random.fold_in(KEY, t), state)
        cohorts.append(cohort._replace(metrics={}).timed(spent=None, lost={}))
        state, info = step(jax.random.fold_in(KEY, t), state, data)
        infos.append(info)
    rows = jax.tree.map(lambda *x: jnp.stack(x), *cohorts)

    def sample(key, t):
        return jax.tree.map(lambda x: x[t], rows), t + 1

    written = timed._replace(init=lambda: jnp.int32(0), sample=sample, tell=None, devices=None, metrics=())
    other = TIMED[name](written)
    again, step = other.init(KEY, start, data), jax.jit(other.step)
    for t, info in enumerate(infos):
        again, found = step(jax.random.fold_in(KEY, t), again, data)
        assert p.digest(jax.device_get(found)) == p.digest(jax.device_get({name: info[name] for name in found}))
    assert p.digest(jax.device_get(again._replace(sampler=()))) == p.digest(jax.device_get(state._replace(sampler=())))
    counts = {name: [int(info[name]) for info in infos] for name in ("clients_invited", "late", "interrupted")}
    assert min(counts["clients_invited"]) == 0 < min(sum(counts["late"]), sum(counts["interrupted"]))
    reports = np.array([int(info["clients_reported"]) for info in infos])
    assert (reports <= np.asarray(rows.reported).sum(1)).all() and reports.sum() > 3
    never = np.setdiff1d(rows.ids[rows.invited], rows.ids[rows.reported])
    before, after = (jax.tree.map(lambda x: x[never], (x.clients, x.memory)) for x in (first, state))
    assert len(never) > 3 and p.digest(jax.device_get(before)) == p.digest(jax.device_get(after))


@pytest.mark.full
def test_resumed_on_other_devices(tmp_path):
    """Four rounds in one go, and two on one device and two on another number. Catches a clock, a price or energy that a
    checkpoint loses or devices decide."""
    speeds = {"speed": network.lognormal(100.0, 1.0), "bandwidth_down": network.constant(100.0)}
    speeds |= {"bandwidth_up": network.constant(10.0), "compute_watts": network.constant(2.0)}
    there = network.bernoulli(0.8, slot_seconds=1)
    devices = network.heterogeneous(p.NUM_CLIENTS, **speeds, availability=there)
    timed = sampling.with_clock(sampling.uniform(p.NUM_CLIENTS, 20), devices, num_invited=11, overhead_seconds=0.5)
    sampler = sampling.with_over_selection(sampling.with_deadline(timed, 9.0, late="partial"), 6)

    def trained(rounds, mesh, folder, **options):
        made = algorithms.fedavg(
            p.linear_loss, sampler, optax.sgd(0.1), num_epochs=1, batch_size=2, mesh=mesh, plan=engine.Plan(2, 4)
        )
        return run(KEY, made, jnp.array(p.START), p.ragged(), rounds, directory=tmp_path / folder, **options)

    state, history = trained(4, None, "whole")
    trained(2, None, "parts")
    other, rest = trained(4, engine.device_mesh(2), "parts", resume=True)
    assert p.digest(jax.device_get(state)) == p.digest(jax.device_get(other))
    logs = [(tmp_path / folder / "metrics.jsonl").read_bytes() for folder in ("whole", "parts")]
    assert logs[0] == logs[1] and history.summary["wasted_joules"] == rest.summary["wasted_joules"] > 0


def test_what_an_accountant_makes_of_it():
    """Catches an epsilon where a client's speed decides about others, of records whose number decides whether their
    client sends, with neighbours of which one gives its place to another, or at a rate of those who are invited."""
    central, local = (Noise("gaussian", "central", 1.0, 1.0, "client"), Noise("gaussian", "local", 1.0, 1.0, "record"))
    details = {"steps": 1, "sampling": "poisson", "rate": 0.1}
    fixed, drawn_by_coin = (
        sampling.with_clock(inner, tables()) for inner in (sampling.uniform(N, 6), sampling.poisson(N, 0.3))
    )
    assert mechanism_from(fixed.design, central) == mechanism_from(sampling.uniform(N, 6).design, central)
    timely = mechanism_from(sampling.with_deadline(drawn_by_coin, 1.0).design, central)
    assert (timely.scheme, timely.adjacency, timely.thinned) == ("poisson", "add_or_remove_one", True)
    first = mechanism_from(sampling.with_over_selection(fixed, 3).design, central)
    assert (first.adjacency, first.moves, first.rate) == ("replace_one", 2, 0.5)
    members = sampling.with_membership(sampling.uniform(N, 6), [1, 5], num_invited=2)
    assert mechanism_from(members.design, central).rate == 0.5
    everyone = sampling.with_over_selection(sampling.with_clock(sampling.full(N), tables()), 3)
    for adjacency in ("add_or_remove_one", "zero_out"):
        with pytest.raises(ValueError, match="gives its place to another"):
            mechanism_from(everyone.design, central, adjacency=adjacency)
    away = sampling.with_clock(sampling.uniform(N, 6), tables(there=lambda ids, seconds: ids > 0))
    others = "no client decides who else takes part"
    for sampler, noise, told_ in (
        (away, central, others),
        (sampling.with_deadline(away, 1.0), central, others),
        (sampling.with_over_selection(drawn_by_coin, 3), central, others),
        (sampling.with_radio_budget(fixed, budget_bytes=9.0), central, others),
        (sampling.with_membership(sampling.poisson(N, 0.3), [1, 5], num_invited=2), central, others),
        (sampling.with_deadline(fixed, 1.0), local._replace(details=details), "respond whatever they hold"),
        (sampling.with_deadline(fixed, 1.0), central._replace(place="distributed"), "as many messages"),
    ):
        with pytest.raises(ValueError, match=told_):
            mechanism_from(sampler.design, noise)


def test_wrong_input():
    """Catches values out of range, and a limit inside of what changes who is below it."""
    timed = sampling.with_clock(sampling.uniform(N, 4), tables())
    for wrong, told_ in (
        (lambda: sampling.with_deadline(timed, float("nan")), "seconds"),
        (lambda: sampling.with_deadline(timed, 0.0009), "at least one tick, 0.001 s"),
        (lambda: sampling.with_deadline(timed, 1.0, late="later"), "late"),
        (lambda: sampling.with_deadline(sampling.with_over_selection(timed, 2), 1.0, late="partial"), "put with_deadl"),
        (lambda: sampling.with_over_selection(timed, 5), "num_reports"),
        (lambda: sampling.with_over_selection(sampling.with_over_selection(timed, 3), 2), "without another limit"),
        (lambda: sampling.with_radio_budget(timed), "exactly one of the two"),
        (lambda: sampling.with_radio_budget(timed, budget_bytes=1.0, airtime_seconds=1.0), "exactly one of the two"),
        (lambda: sampling.with_radio_budget(timed, airtime_seconds=2e6), "airtime_seconds"),
        (lambda: sampling.with_radio_budget(timed, budget_bytes=1.0, order="size"), "order"),
        (lambda: sampling.with_over_selection(sampling.with_clock(sampling.with_replacement(N, 4), tables()), 2),
         "different clients"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=told_):
            wrong()
