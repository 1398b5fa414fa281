"""Simulated time: it changes nothing where everybody is waited for, and every tick is accounted for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from fedjax_sim import aggregation, algorithms, network, run, sampling, theory
from fedjax_sim.algorithms.asynchronous.clock_ticks import advanced
from fedjax_sim.prng import client_key
from fedjax_sim.round.costs import spending_metrics
from fedjax_sim.sampling.time.cut import cut_cohort
from fedjax_sim.sampling.time.round_cost import price_of
from fedjax_sim.types import Clock, Cohort, Devices, Spent, Timing, Work
from tests.laws import problems as p
from tests.refusals import refused
from tests.sampling.time.problems import DOWN, STEP, UP, WATTS, WORK, N, tables, told

KEY = jax.random.key(0)
TOTAL = DOWN + 5 * STEP + UP
RUN = {"num_steps": 2, "batch_size": 2, "plan": p.PLAN, "mesh": None}


def recipe(sampler, **options):
    return algorithms.fedavg(p.linear_loss, sampler, optax.sgd(0.1), **RUN | options)


def drawn(sampler, state):
    return jax.device_get(jax.jit(sampler.sample)(KEY, state))


def everywhere(size=p.NUM_CLIENTS, **options):
    speeds = {"speed": network.lognormal(100.0, 1.0), "bandwidth_down": network.constant(100.0)}
    return network.heterogeneous(size, **speeds, bandwidth_up=network.lognormal(10.0, 1.0), jitter=0.2, **options)


def test_a_clock_changes_no_draw():
    """Of who is invited and who reports, where everybody is waited for. Catches a clock that spends a sampler's key,
    and devices that draw from its streams."""
    plain = sampling.with_dropout(sampling.poisson(p.NUM_CLIENTS, 0.3), 0.3)
    clocked = sampling.with_clock(plain, everywhere())
    assert clocked.design == plain.design
    work = Work(12, 12, 2, 10.0, 5.0)

    @jax.jit
    @jax.vmap
    def both(key):
        return plain.sample(key, plain.init())[0], clocked.sample(key, clocked.tell(clocked.init(), work))[0]

    alone, timed = jax.device_get(both(jax.random.split(KEY, 50)))
    for name in ("ids", "invited", "reported"):
        np.testing.assert_array_equal(getattr(alone, name), getattr(timed, name))
    assert all((timed.metrics[name] == x).all() for name, x in alone.metrics.items())
    assert len(np.unique(timed.timing.spent.total[timed.invited])) > 50


@pytest.mark.full
def test_time_changes_no_number():
    """A run of three rounds that waits for everybody. Catches a clock that changes a draw, a bit or the design."""
    plain = sampling.with_dropout(sampling.uniform(p.NUM_CLIENTS, 7), 0.3)
    alike = {"speed": 100.0, "bandwidth_down": 100.0, "bandwidth_up": 10.0, "compute_watts": 1.0}
    clocked = sampling.with_clock(plain, network.heterogeneous(p.NUM_CLIENTS, **alike, jitter=0.2))
    assert clocked.design == plain.design
    (state, history), (timed, other) = (
        run(KEY, recipe(sampler, num_steps=1), jnp.array(p.START), p.ragged(), 3) for sampler in (plain, clocked)
    )
    assert p.digest(state.server) == p.digest(timed.server)
    for before, after in zip(history.records, other.records, strict=True):
        assert before.items() <= after.items()
        new = {"round_seconds", "simulated_seconds", "client_seconds", "joules", "wasted_joules", "utilisation"}
        assert after.keys() - before.keys() == new | {"saturated_clients"}
        assert after["saturated_clients"] == 0
    times = [record["round_seconds"] for record in other.records]
    assert min(times) > 0 and other.summary["simulated_seconds"] == pytest.approx(sum(times), rel=1e-5)
    assert other.summary["round_seconds"] == pytest.approx(np.mean(times), rel=1e-5)
    assert 0 < other.summary["wasted_joules"] < other.summary["joules"]


def test_the_clock_is_exact():
    """5,000 rounds of two cohorts against Python's integers, at a tick of 1/3 ms and an overhead of no whole tick.

    Catches a clock that drifts as float32 would, a maximum over slots that nobody was invited to, an overhead that is
    lost in a wrapper, and a wrapper that puts the clock back by the wrong time.
    """
    devices = tables(ticks_per_second=3000)
    whole = sampling.with_clock(sampling.poisson(N, 0.3), devices, overhead_seconds=0.0015, idle_seconds=1.0)
    for overhead, ticks in ((2.007, 2007), (2.0071, 2008)):  # 2.007 * 1000 is above 2007 in floats
        alone = sampling.with_clock(sampling.full(N), tables(), overhead_seconds=overhead)
        clock = alone.sample(KEY, told(alone))[1].clock
        assert clock.seconds * 1000 + clock.ticks == TOTAL.max() + ticks
    short = sampling.with_deadline(whole, 0.4)

    @jax.jit
    def times(state):
        def one(state, t):
            cohort, state = short.sample(jax.random.fold_in(KEY, t), state)
            return state, (cohort.ids, cohort.invited, state.clock, cohort.metrics["round_seconds"])

        return jax.lax.scan(one, state, jnp.arange(5000))[1]

    ids, invited, clock, lengths = jax.device_get(times(told(short)))
    expected = []
    for who, asked in zip(ids, invited, strict=True):
        last = min(max(TOTAL[who][asked]), 1200) if asked.any() else 3000
        expected.append(last + 5)  # ceil(0.0015 * 3000)
    assert set(invited.sum(1)) >= {0, 1, 2} and 1205 in expected and min(expected) < 1205
    np.testing.assert_array_equal(clock.seconds.astype(np.int64) * 3000 + clock.ticks, np.cumsum(expected))
    assert (clock.ticks < 3000).all() and (clock.ticks >= 0).all()
    np.testing.assert_allclose(lengths, np.array(expected) / 3000, rtol=1e-6)


def test_a_long_life_of_the_clock():
    """Catches a sum that wraps: near the longest round, and 68 years on."""
    late = Clock(jnp.int32(2**31 - 3_000_000), jnp.int32(999))
    clock = late.moved(jnp.int32(2**31 - 2**21), 1000).moved(jnp.int32(-(2**31 - 2**21)), 1000)
    assert [int(x) for x in clock] == [2**31 - 3_000_000, 999]
    for ticks in (2**31 - 1, 3 * 715_827_840, -(2**31), -1):
        clock = Clock(jnp.int32(10_000_000), jnp.int32(999_999)).moved(jnp.int32(ticks), 1_000_000)
        assert [int(x) for x in clock] == list(divmod(10_000_000_999_999 + ticks, 1_000_000))
    ages = tables(*[np.full(N, 715_827_840)] * 3)
    forever = sampling.with_clock(sampling.full(N), ages, overhead_seconds=2**30 / 1000)
    soon = sampling.with_deadline(forever, 2.0)
    _, state = forever.sample(KEY, told(forever, WORK._replace(steps=1)))
    assert [int(x) for x in state.clock] == list(divmod(2**31 - 2**21 + 2**30, 1000))
    _, state = soon.sample(KEY, told(soon, WORK._replace(steps=1)))
    assert [int(x) for x in state.clock] == list(divmod(2000 + 2**30, 1000))
    years = sampling.with_clock(sampling.full(N), tables(*[np.full(N, 715_827_840)] * 3, ticks_per_second=1))
    state = told(years, WORK._replace(steps=1))
    for expected in (2**31 - 2**21, np.inf, np.inf, np.inf, np.inf):  # 68 years a round: from the second on past it
        cohort, state = years.sample(KEY, state)
        assert float(cohort.metrics["simulated_seconds"]) == expected


def test_a_clock_past_its_life():
    """Of steps of up to 2^32 ticks of a second. Catches a clock that wraps twice, and is finite again."""
    clock = Clock(jnp.int32(1), jnp.int32(0))
    for ticks in (2**32 - 2, 5, 2**32 - 2, 2**31):
        clock = advanced(clock, jnp.uint32(ticks), 1)
        assert float(clock.read(1)) == np.inf
    once = advanced(Clock(jnp.int32(7), jnp.int32(0)), jnp.uint32(2**31 - 9), 1)
    assert int(once.seconds) == 2**31 - 2 and float(advanced(once, jnp.uint32(2), 1).read(1)) == np.inf


@pytest.mark.full
def test_a_client_who_is_never_done():
    """Rounds of ten seconds and five days, in ticks of a second, and one client who takes 68 years: in Python integers.
    Catches a clock that is lost in the middle of a round, before the deadline puts it back."""
    spent = [np.where(np.arange(N) == 2, 715_827_840, 1)] * 3
    clocked = sampling.with_clock(sampling.full(N), tables(*spent, ticks_per_second=1), overhead_seconds=5 * 86400.0)
    soon = sampling.with_over_selection(sampling.with_deadline(clocked, 10.0), N - 1)
    state = told(soon, WORK._replace(steps=1))
    for k in range(1, 9):
        cohort, state = soon.sample(KEY, state)
        assert float(cohort.metrics["round_seconds"]) == 432_003
        assert float(cohort.metrics["simulated_seconds"]) == 432_003 * k


@pytest.mark.full
def test_rounds_past_the_clock():
    """From an hour before the 68 years on rounds last as long, day and night go on, and the time reads infinity.
    Catches a clock that stands still, and lengths below 0."""
    night = network.daily_window(0.5, num_zones=1)
    day = tables(*[np.full(N, 7000)] * 3, there=night.at, ticks_per_second=1)
    clocked = sampling.with_clock(sampling.full(N), day, idle_seconds=3600.0)
    state = told(clocked, WORK._replace(steps=1))._replace(clock=Clock(jnp.int32(2**31 - 3600), jnp.int32(0)))

    def one(state, _):
        cohort, after = clocked.sample(KEY, state)
        names = ("interrupted", "round_seconds", "simulated_seconds")
        return after, (cohort.invited.any(), *(cohort.metrics[name] for name in names))

    invited, left, lasts, times = jax.device_get(jax.lax.scan(one, state, jnp.arange(400))[1])
    np.testing.assert_array_equal(lasts[left == 0], np.where(invited, 21_000, 3600)[left == 0])
    assert np.isinf(times[1:]).all() and (lasts[left > 0] > 0).all() and (left > 0).sum() < 100
    assert (np.diff(invited.astype(int)) != 0).sum() > 50
    later = tables(
        *[np.full(N, 7000)] * 3, there=lambda ids, seconds: jnp.full(ids.shape, seconds < 0), ticks_per_second=1
    )
    clocked = sampling.with_clock(sampling.full(N), later)  # past the 68 years: also 68 years on, in one round
    cohort, _ = clocked.sample(
        KEY, told(clocked, WORK._replace(steps=1))._replace(clock=Clock(jnp.int32(-9), jnp.int32(0)))
    )
    assert cohort.reported.all()


def test_energy_and_utilisation():
    """Closed forms of one cohort. Catches waste that counts who reports, and clients that are busy while they wait."""
    clocked = sampling.with_clock(sampling.full(N), tables())
    cohort, _ = clocked.sample(KEY, told(clocked))
    np.testing.assert_array_equal(cohort.timing.spent.total, TOTAL)
    cohort = cohort._replace(reported=jnp.arange(N) > 2)
    energy = np.array([DOWN, 5 * STEP, UP]).T @ np.array(WATTS)
    found = spending_metrics(cohort)
    assert float(found["joules"]) == pytest.approx(energy.sum()) and spending_metrics(cohort.timed(spent=None)) == {}
    assert float(found["wasted_joules"]) == pytest.approx(energy[:3].sum())
    assert float(found["utilisation"]) == pytest.approx(TOTAL.sum() / (N * TOTAL.max()))
    nobody = jax.tree.map(jnp.zeros_like, cohort._replace(metrics={}))
    assert {float(x) for x in spending_metrics(nobody).values()} == {0.0}


@pytest.mark.full
def test_utilisation_of_a_run():
    """Poisson cohorts of a run: client-seconds at work over client-seconds until rounds closed. Catches a mean over
    rounds of one client and of many, and overhead that counts as time of clients."""
    clocked = sampling.with_clock(sampling.poisson(p.NUM_CLIENTS, 0.2), everywhere(), overhead_seconds=100.0)
    _, history = run(KEY, recipe(clocked), jnp.array(p.START), p.ragged(), 8)
    records, busy, had = history.records, 0.0, 0.0
    for record in records:
        time = record["round_seconds"] - 100 if record["clients_invited"] else 0.0
        busy, had = (
            busy + record["utilisation"] * time * record["clients_invited"],
            had + time * record["clients_invited"],
        )
        assert record["client_seconds"] == pytest.approx(time * record["clients_invited"], rel=1e-4)
    assert history.summary["utilisation"] == pytest.approx(busy / had, rel=1e-4)
    assert abs(np.mean([r["utilisation"] for r in records]) - busy / had) > 0.01


def test_energy_of_what_was_done():
    """Cut at every tick: parts by parts, against NumPy. Catches energy by the whole time, or of parts not begun; and a
    message that was not begun and counts as sent."""
    devices, price = tables(), price_of(WORK)
    everyone = jnp.ones(N, bool)
    clocked = sampling.with_clock(sampling.full(N), devices)
    cohort, _ = clocked.sample(KEY, told(clocked))
    stop = jax.jit(jax.vmap(lambda at: cut_cohort(devices, KEY, cohort, price, at, name="late")))
    ends = np.unique(np.concatenate([np.arange(0, 60), DOWN + 5 * STEP, DOWN + 5 * STEP + 1, TOTAL, TOTAL - 1]))
    found = stop(jnp.asarray(ends, jnp.int32))
    done = np.minimum(DOWN, ends[:, None])
    computed = np.minimum(5 * STEP, ends[:, None] - done)
    sent = np.minimum(UP, ends[:, None] - done - computed)
    for name, expected in (("down", done), ("compute", computed), ("up", sent)):
        np.testing.assert_array_equal(getattr(found.timing.spent, name), expected)
    energy = np.stack([done, computed, sent], -1) @ np.array(WATTS)
    np.testing.assert_allclose(found.timing.spent.joules, energy, rtol=1e-5, atol=1e-2)
    np.testing.assert_array_equal(found.reported, ends[:, None] >= TOTAL)
    np.testing.assert_array_equal(found.timing.sent, sent > 0)
    assert bool(everyone.all())


@pytest.mark.full
def test_energy_of_latency():
    """One second of latency each way and of download, training and message, at 2 W of radio: cut at any time, the radio
    has used 2 W for as long as it was on. Catches latency that counts in one direction alone."""
    speeds = dict.fromkeys(("speed", "bandwidth_down", "bandwidth_up"), network.constant(1.0))
    devices = network.heterogeneous(1, **speeds, latency=1.0, radio_watts=2.0)
    clocked = sampling.with_clock(sampling.full(1), devices)
    work = Work(1, 1, 1, 1.0)
    cohort, _ = clocked.sample(KEY, told(clocked, work))
    for tick, joules in ((500, 1.0), (2000, 4.0), (3000, 4.0), (4000, 6.0), (4999, 7.998)):
        found = cut_cohort(devices, KEY, cohort, price_of(work), jnp.int32(tick), name="late")
        assert float(found.timing.spent.joules[0]) == pytest.approx(joules, rel=1e-4), tick


def test_steps_are_those_that_clients_take():
    """Catches shares of steps rounded otherwise than by clients, numbers beyond the plan, sizes of other clients."""
    sizes = np.array([3, 7, 10, 20])
    work = Work(1, 1, lambda n: 2 * -(-n // 5), 4.0, 10.0, None, lambda: sizes)
    price = price_of(work)
    ids = jnp.array([3, 0, 2, 1])
    cohort = Cohort(ids, ids >= 0, ids >= 0)
    assert price.num_steps(cohort).tolist() == [8, 2, 4, 4]
    assert price.num_steps(cohort._replace(work=jnp.array([0.3, 0.3, 1.0, 0.01]))).tolist() == [3, 1, 4, 1]
    few = cohort._replace(work=jnp.array([3, 3, 9, 1]))
    assert price.num_steps(few).tolist() == [3, 2, 4, 1]
    assert price.loads(few)[-1].flops.tolist() == [24.0, 14.0, 34.0, 4.0]
    with pytest.raises(ValueError, match="examples: expected the clients' numbers"):
        price_of(work._replace(examples=None))
    made = recipe(sampling.with_clock(sampling.full(p.NUM_CLIENTS), everywhere()), num_steps=None, num_epochs=2)
    state = made.init(KEY, jnp.array(p.START), p.ragged())
    np.testing.assert_array_equal(state.sampler.price.steps, 2 * -(-p.SIZES // 2))


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: sampling.with_deadline(x, 1.5, late="partial")])
def test_scales_are_a_heavier_model(wrap):
    """Against a model of 4 times the operations and 8 times the bytes, to the bit, and energy by hand.

    Catches a scale of one direction, of the first step alone, of a wrapper that prices again, a log without scales.
    """
    devices = everywhere(N, compute_watts=network.constant(2.0), joules_per_byte=network.constant(0.5))
    scaled = wrap(sampling.with_clock(sampling.full(N), devices, flops_scale=4.0, bytes_scale=8))
    plain = wrap(sampling.with_clock(sampling.full(N), devices))
    heavy = WORK._replace(flops=4.0, step_flops=4.0, bytes_up=8 * WORK.bytes_up, bytes_down=8 * WORK.bytes_down)
    (one, after), (other, then) = scaled.sample(KEY, told(scaled)), plain.sample(KEY, told(plain, heavy))
    assert {name: float(one.metrics.pop(name)) for name in ("flops_scale", "bytes_scale")} == {
        "flops_scale": 4.0,
        "bytes_scale": 8.0,
    }
    assert p.digest((one, after)) == p.digest((other, then))
    light, _ = plain.sample(KEY, told(plain))
    assert (np.asarray(light.timing.spent.total) < np.asarray(one.timing.spent.total)).any()
    stated = {x.name for x in scaled.metrics} - {x.name for x in plain.metrics}
    assert stated == {"flops_scale", "bytes_scale"}


@pytest.mark.full
def test_scales_change_no_number_learnt():
    """A run's model and bytes. Catches a scale that reaches the clients, or the bytes of the log."""
    samplers = [sampling.with_clock(sampling.full(p.NUM_CLIENTS), everywhere(), flops_scale=x) for x in (1.0, 1e6)]
    (state, history), (heavy, other) = (run(KEY, recipe(x), jnp.array(p.START), p.ragged(), 2) for x in samplers)
    assert p.digest(state.server) == p.digest(heavy.server)
    assert history.summary["uplink_bytes"] == other.summary["uplink_bytes"]
    assert "flops_scale" not in history.summary and other.summary["flops_scale"] == 1e6
    assert other.summary["simulated_seconds"] > 1e3 * history.summary["simulated_seconds"]


@pytest.mark.full
def test_a_pass_over_all_examples():
    """Mime's clients take a gradient of all their examples, and then steps of two. Catches a pass over padded rows that
    costs a client with one example what it costs the largest, and partial work that makes it shorter."""
    clocked = sampling.with_clock(sampling.full(p.NUM_CLIENTS), everywhere())
    made = algorithms.mime(p.linear_loss, clocked, optax.sgd(0.1), weighting="uniform", **RUN)
    price = made.init(KEY, jnp.array(p.START), p.ragged()).sampler.price
    once = recipe(clocked, num_steps=1, batch_size=None).init(KEY, jnp.array(p.START), p.ragged()).sampler.price
    np.testing.assert_allclose(np.diff(price.before.flops), np.diff(once.first), rtol=0.2)
    assert np.ptp(price.before.flops) > 0 == np.ptp(price.step)
    cohort = Cohort(jnp.arange(3), jnp.ones(3, bool), jnp.ones(3, bool), work=jnp.ones(3, jnp.int32))
    both = sum(load.flops for load in price.loads(cohort))
    np.testing.assert_array_equal(both, (price.first + price.before.flops)[:3])


def night(ids, seconds):
    """Even clients are there in even hours, odd ones in odd hours; client 0 never."""
    return ((ids + seconds // 3600) % 2 == 0) & (ids > 0)


def test_who_is_there():
    """Catches who is asked for at another time than the round's, an empty slot that costs something, a round that
    nobody is invited to and that lasts no time."""
    clocked = sampling.with_clock(sampling.full(N), tables(there=night), num_invited=8, idle_seconds=1800.0)
    state, sample = told(clocked), jax.jit(clocked.sample)
    assert clocked.num_slots == 8 == clocked.design.num_slots
    for hour, expected in ((0, [2, 4, 6, 8, 10]), (1, [1, 3, 5, 7, 9, 11]), (4, [2, 4, 6, 8, 10])):
        cohort, _ = sample(KEY, state._replace(clock=Clock(jnp.int32(3600 * hour), jnp.int32(0))))
        cohort = jax.device_get(cohort)
        assert cohort.ids[cohort.invited].tolist() == expected == cohort.ids[cohort.reported].tolist()
        assert int(cohort.metrics["unavailable"]) == N - len(expected)
        assert int(cohort.metrics["unfilled"]) == 8 - len(expected)
        spent = cohort.timing.spent
        assert spent.total[~cohort.invited].sum() == 0 == spent.joules[~cohort.invited].sum()
    nobody = sampling.with_clock(sampling.full(N), tables(there=lambda ids, seconds: ids < 0), idle_seconds=1800.0)
    cohort, state = drawn(nobody, told(nobody))
    assert not cohort.invited.any() and [int(x) for x in state.clock] == [1800, 0]


@pytest.mark.full
def test_inclusion_given_availability():
    """2 x 10^5 cohorts of 4 of 12 candidates from 24 clients, of whom those of id 0 to 9 are there: each of them is
    invited with the same chance, m over their number where all are candidates; chi-square above 1e-4.

    Catches places that go to the first ids. Rejects a client that is 5 % more likely.
    """
    there = 10
    devices = tables(*[np.ones(24)] * 3, there=lambda ids, seconds: ids < there)
    for candidates in (12, 24):
        clocked = sampling.with_clock(sampling.uniform(24, candidates), devices, num_invited=4)
        state, keys = told(clocked), jax.random.split(jax.random.key(5), 200_000)
        cohort = jax.jit(jax.vmap(lambda key, c=clocked, s=state: c.sample(key, s)[0]))(keys)
        counts = np.bincount(np.asarray(cohort.ids)[np.asarray(cohort.invited)], minlength=24)
        assert counts[there:].sum() == 0
        rate = counts.sum() / there / len(keys)
        fair = counts[:there] * (1 - 1 / there) / (1 - rate)  # drawn without replacement: less spread
        assert stats.chisquare(fair).pvalue > 1e-4 > stats.chisquare(np.append(fair[:-1], 1.05 * fair[-1])).pvalue
        if candidates == 24:
            assert counts.sum() == 4 * len(keys)  # everybody is a candidate: all places are filled


def test_who_leaves():
    """Catches a client that is gone when its message would arrive and reports, that leaves later than it is looked for,
    or that was to leave after its message had arrived."""
    leaves = np.full(N, 10**6)
    leaves[[2, 5]] = 1, 2  # seconds
    times = {"down": np.full(N, 1), "step": np.full(N, 500), "up": np.full(N, 100)}
    devices = tables(**times, there=lambda ids, seconds: seconds < jnp.asarray(leaves)[ids])
    clocked = sampling.with_clock(sampling.full(N), devices, checks=5)
    cohort, state = drawn(clocked, told(clocked))  # 2601 ticks
    assert np.flatnonzero(~np.asarray(cohort.reported)).tolist() == [2, 5]
    assert cohort.timing.spent.total[[2, 5, 0]].tolist() == [1001, 2001, 2601]
    assert int(cohort.metrics["interrupted"]) == 2 and not cohort.timing.sent[2] and int(state.clock.seconds) == 2
    begun = told(clocked)._replace(clock=Clock(jnp.int32(0), jnp.int32(600)))  # everything is 600 ticks later
    cohort, _ = drawn(clocked, begun)
    assert cohort.timing.spent.total[[2, 5]].tolist() == [501, 1501]
    times = {"down": np.full(N, 1), "step": np.full(N, 380), "up": np.full(N, 200)}  # done at 1901, arrived at 2101
    ready = sampling.with_clock(sampling.full(N), tables(**times, there=devices.availability.at))
    cohort, _ = drawn(ready, told(ready))
    assert np.flatnonzero(~np.asarray(cohort.reported)).tolist() == [2, 5] and cohort.timing.spent.total[5] == 2100
    quick = sampling.with_clock(sampling.full(N), devices)
    cohort, _ = drawn(quick, told(quick, WORK._replace(steps=1)))
    assert bool(cohort.reported.all()) and int(cohort.metrics["interrupted"]) == 0


@pytest.mark.full
def test_hazard_is_that_of_the_time():
    """40,000 clients, memoryless with a mean of 2 s, of 1 to 5 s of computing; five standard errors.

    Catches leaving by the time of the whole round or by share of work, and energy or time after a client has left.
    """
    size = 40_000
    compute = 1000 * (1 + np.arange(size) % 5)
    devices = tables(np.full(size, 700), compute, np.full(size, 900))
    risky = sampling.with_hazard(sampling.with_clock(sampling.full(size), devices), network.memoryless(2.0))
    cohort, _ = jax.jit(risky.sample)(KEY, told(risky, WORK._replace(steps=1)))
    for seconds in range(1, 6):
        stays = np.asarray(cohort.reported)[compute == 1000 * seconds]
        assert abs(stays.mean() - np.exp(-seconds / 2)) < 5 * np.sqrt(0.25 / stays.size)
    left = ~np.asarray(cohort.reported)
    total = np.asarray(cohort.timing.spent.total)
    assert (
        (total[left] < 700 + compute[left]).all()
        and (total[left] >= 700).all()
        and (cohort.timing.spent.up[left] == 0).all()
    )
    assert (total[~left] == 1600 + compute[~left]).all() and int(cohort.metrics["interrupted"]) == left.sum()


@pytest.mark.full
def test_the_slowest_of_exponential_times():
    """40,000 rounds of 10 clients, 1 s on average: the last arrives after H_10, the third after H_10 - H_7; within 1 %.

    Catches rounds that end with another client's message. Rejects H_9, 3.5 % off.
    """

    def spend(key, ids, load):
        drawn = jax.vmap(lambda id: jax.random.exponential(client_key(key, id)))(ids)
        ticks = jnp.ceil(1000 * drawn).astype(jnp.int32)
        return Spent(jnp.zeros_like(ids), ticks, jnp.zeros_like(ids), drawn)

    every = sampling.with_clock(sampling.full(10), Devices(10, spend))
    keys = jax.random.split(jax.random.key(8), 40_000)
    for sampler, k in ((every, 10), (sampling.with_over_selection(every, 3), 3)):
        state = told(sampler)
        found = jax.jit(jax.vmap(lambda key, s=sampler, x=state: s.sample(key, x)[0].metrics["round_seconds"]))(keys)
        assert float(found.mean()) == pytest.approx(theory.expected_order_statistic(k, 10) + 0.0005, rel=0.01)


def test_wrong_input():
    """Catches devices of another population, two clocks, and what changes work or arrivals behind a clock's back."""
    clocked, years = sampling.with_clock(sampling.uniform(N, 4), tables()), tables(ticks_per_second=1)
    for wrong, told_ in (
        (lambda: sampling.with_clock(clocked, tables()), "one without a clock, for with_clock"),
        (lambda: sampling.with_clock(sampling.full(5), tables()), "devices: expected those of the sampler's 5 clients"),
        (lambda: sampling.with_clock(sampling.full(N), tables(), overhead_seconds=-1.0), "overhead_seconds"),
        (lambda: sampling.with_clock(sampling.full(N), tables(), idle_seconds=0.0), "idle_seconds"),
        (lambda: sampling.with_clock(sampling.full(N), years, overhead_seconds=2**21), "overhead_seconds: expected"),
        (lambda: sampling.with_clock(sampling.full(N), tables(ticks_per_second=10**7)), "devices.ticks_per_second"),
        (lambda: sampling.oort(np.ones(N), 2, devices=tables(ticks_per_second=0)), "devices.ticks_per_second"),
        (lambda: sampling.oort(np.ones(5), 2, devices=tables()), "devices: expected those of the weights' 5 clients"),
        (lambda: sampling.with_clock(sampling.full(N), tables(), checks=0), "checks"),
        (lambda: sampling.with_clock(sampling.uniform(N, 4), tables(), num_invited=5), "num_invited"),
        (lambda: sampling.with_clock(sampling.full(N), tables(), flops_scale=0.0), "flops_scale: expected a number in"),
        (lambda: sampling.with_clock(sampling.full(N), tables(), bytes_scale=float("nan")), "bytes_scale"),
        (lambda: sampling.with_stragglers(clocked, 0.5), "one without a clock, for with_stragglers"),
        (lambda: sampling.with_local_steps(clocked, [1]), "one without a clock, for with_local_steps"),
        (lambda: sampling.with_over_invitation(clocked, 2), "one without a clock, for with_over_invitation"),
        (lambda: sampling.with_membership(clocked, [1]), "one without a clock"),
        (lambda: sampling.with_deadline(sampling.full(N), 1.0), "one with a clock, for with_deadline"),
    ):
        with pytest.raises(ValueError, match=told_):
            wrong()
    with pytest.raises(TypeError, match="devices"):
        sampling.with_clock(sampling.full(N), None)


def test_designs_are_refused_by_name():
    """Availability, and every wrapper of a clock. Catches an inclusion probability that ignores time."""
    away = sampling.with_clock(sampling.uniform(N, 4), tables(there=night))
    for sampler in (
        away,
        sampling.with_deadline(sampling.with_clock(sampling.uniform(N, 4), tables()), 1.0),
        sampling.with_over_selection(sampling.with_clock(sampling.uniform(N, 4), tables()), 2),
        sampling.with_hazard(sampling.with_clock(sampling.uniform(N, 4), tables()), network.memoryless(1.0)),
    ):
        assert sampler.design.equal_chances and sampler.design.response_rate is None
        with pytest.raises(ValueError, match="response: expected 'random'"):
            aggregation.horvitz_thompson(sampler.design, 1.0)


def test_a_sampler_of_a_users_own_with_devices():
    """Faults: an `assert`, StopIteration, or an error about None, where devices were stated and no clock was made, or
    where cohorts lost their times."""
    with_devices = sampling.uniform(N, 4)._replace(devices=tables())
    with refused("sampler", rule="whose state has a clock", hint="with_clock"):
        jax.eval_shape(sampling.with_deadline(with_devices, 1.0).sample, KEY, with_devices.init())
    clocked = sampling.with_clock(sampling.uniform(N, 4), tables())
    forgetful = clocked.then(lambda key, cohort: cohort._replace(timing=Timing()))
    for wrap in (
        lambda sampler: sampling.with_deadline(sampler, 1.0),
        lambda sampler: sampling.with_deadline(sampler, 1.0, late="partial"),
        lambda sampler: sampling.with_over_selection(sampler, 2),
        lambda sampler: sampling.with_radio_budget(sampler, budget_bytes=9.0),
        lambda sampler: sampling.with_hazard(sampler, network.memoryless(1.0)),
    ):
        with refused("sampler", rule="cohorts that state their times"):
            jax.eval_shape(wrap(forgetful).sample, KEY, told(forgetful))
