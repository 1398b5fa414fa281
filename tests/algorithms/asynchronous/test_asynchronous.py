"""Buffered asynchronous learning: against an event loop in NumPy, against synchronous rounds, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import InvalidType, aggregation, algorithms, client, network, population, sampling, server, transform
from fedjax_sim.algorithms.asynchronous.in_flight import Traffic
from fedjax_sim.instruments import variance_budget
from fedjax_sim.privacy import mechanism_of
from fedjax_sim.prng import stream
from fedjax_sim.round.round import observe
from fedjax_sim.running.log import as_record, totals_of
from fedjax_sim.server import staleness
from fedjax_sim.types import Availability, ClientData, ClientFacts, ClientUpdate, Devices, Report, Spent
from tests.algorithms.asynchronous import test_arrivals as events
from tests.laws import cases, problems as p
from tests.laws.laws import check_equal_bits
from tests.refusals import refused

RATE, STEPS = 0.3, 12
SIZE = 24
CURVATURES = np.linspace(0.5, 2.0, SIZE)
CENTERS = np.sin(np.arange(SIZE) * 1.7) * 3


def clients():
    return population.quadratic_population(CURVATURES, CENTERS)


def local(w, id):
    """Two steps of gradient descent on (h / 2) (w - c)^2."""
    start = w
    for _ in range(2):
        w = w - RATE * CURVATURES[id] * (w - CENTERS[id])
    return w - start


def quadratic(make, devices=Ellipsis, **options):
    devices = events.devices(SIZE) if devices is Ellipsis else devices
    return make(
        population.quadratic_loss, devices, optax.sgd(RATE), population_size=SIZE, num_steps=2, mesh=None, **options
    )


def run(made, start, data, steps=STEPS):
    """(models after each step, infos, the last state)."""
    state, step, models, infos = made.init(events.KEY, start, data), jax.jit(made.step), [], []
    for t in range(steps):
        state, info = step(events.keyed(t), state, data)
        models.append(jax.device_get(made.params(state)))
        infos.append(jax.device_get(info))
    return models, infos, state


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", ["asynchronous", "fedasync", "fedat", "fedbuff"])
def test_a_state_may_be_donated(name):
    """One made outside of `jit` too. Catches two numbers of a state that are one array, which JAX refuses."""
    made, data = cases.CASES["algorithms"][name](), p.ragged()
    state = made.init(events.KEY, jnp.array(p.START), data)
    jax.jit(lambda state, data: jax.tree.map(jnp.copy, (state, data)), donate_argnums=0)(state, data)


def arrivals(loop, t):
    """What the loop of `test_flights` says of a step of the algorithm."""
    return loop.step(stream(events.keyed(t), "arrivals"))


@pytest.mark.full
@pytest.mark.parametrize("refill", ["other", "same"])
def test_fedbuff_is_the_event_loop(refill):
    """Catches a client that trains from another version, another factor, a version that overwrites one in use."""
    made = quadratic(
        algorithms.fedbuff,
        concurrency=9,
        buffer_size=4,
        max_staleness=20,
        refill=refill,
        server_optimizer=optax.sgd(0.7, momentum=0.4),
    )
    found, infos, _ = run(made, {"w": jnp.zeros(1)}, clients())
    devices = events.devices(SIZE)
    traffic = Traffic(devices, concurrency=9, block=4, buffer_size=4, max_staleness=20, refill=refill)
    loop = events.Loop(traffic)
    versions, speed, gaps, worked = [0.0], 0.0, [], []
    for t in range(STEPS):
        rows, stopped = arrivals(loop, t)
        worked += [row[0] for row in rows]
        assert not stopped
        mean = np.mean([local(versions[base], id) / np.sqrt(1 + gap) for id, base, gap, _ in rows])
        speed = 0.4 * speed + mean
        versions.append(versions[-1] + 0.7 * speed)
        np.testing.assert_allclose(found[t]["w"], versions[-1], rtol=2e-5, atol=1e-6)
        gaps = [gap for _, _, gap, _ in rows]
        np.testing.assert_allclose(infos[t]["staleness"], np.mean(gaps), rtol=1e-6)
        np.testing.assert_allclose(infos[t]["delay_seconds"], np.mean([x[3] for x in rows]) / 10, rtol=1e-6)
        assert infos[t]["staleness_counts"].tolist() == np.bincount(gaps, minlength=21).tolist()
        np.testing.assert_allclose(infos[t]["simulated_seconds"], loop.now / 10, rtol=1e-6)
    joules = events.ticks(np.array([*worked, *loop.places])).sum()  # of who arrived, and who is in flight
    assert sum(info["joules"] for info in infos) == joules
    assert infos[-1]["downlink_bytes"].total() == 16 == infos[-1]["uplink_bytes"].total()
    assert infos[0]["clients_invited"] == 13


def ragged(devices, **options):
    """FedBuff with minibatches, which draw."""
    return algorithms.fedbuff(
        p.linear_loss,
        devices,
        optax.sgd(p.RATE),
        population_size=devices.population_size,
        num_steps=3,
        batch_size=2,
        plan=p.PLAN,
        mesh=None,
        **options,
    )


def equally_fast(size) -> Devices:
    def spend(key, ids, load):
        nothing = jnp.zeros_like(ids)
        return Spent(nothing, nothing + 5, nothing, nothing.astype(jnp.float32))

    return Devices(size, spend, ticks_per_second=10)


@pytest.mark.full
@pytest.mark.optimised
def test_a_full_buffer_is_synchronous():
    """Everybody in flight, K = C, the same clients again: FedAvg, bit for bit, however unequal the delays. Delays are
    counted apart: catches a wait in the buffer that counts as staleness, and a key that depends on the order."""
    size, start = p.NUM_CLIENTS, jnp.array(p.START)
    options = {"concurrency": size, "buffer_size": size, "refill": "same", "max_staleness": 0}
    plain = algorithms.fedavg(
        p.linear_loss,
        sampling.full(size),
        optax.sgd(p.RATE),
        aggregator=aggregation.mean(weighting="uniform"),
        num_steps=3,
        batch_size=2,
        weighting="uniform",
        plan=p.PLAN,
        mesh=None,
    )
    expected, infos, _ = run(plain, start, p.ragged(), 3)
    for devices, waits in ((events.devices(size), True), (equally_fast(size), False)):
        models, found, _ = run(ragged(devices, **options), start, p.ragged(), 3)
        check_equal_bits(expected, models, "models")
        check_equal_bits([x["local_loss"] for x in infos], [x["local_loss"] for x in found], "losses")
        assert all(x["staleness"] == 0 and (x["delay_seconds"] > 0) == waits for x in found)
        assert all((x["utilisation"] == 1) == (not waits) for x in found)


@pytest.mark.optimised
@pytest.mark.full
def test_one_client_is_sequential():
    """One client in flight is a round of one client after the other, bit for bit."""
    alone = population.generated(1, p._read, jax.tree.map(lambda x: x[2:3], p.ragged().parameters))
    work = {"num_steps": 3, "batch_size": 2, "plan": p.PLAN, "mesh": None}
    plain = algorithms.fedavg(p.linear_loss, sampling.full(1), optax.sgd(p.RATE), weighting="uniform", **work)
    start = jnp.array(p.START)
    expected, _, _ = run(plain, start, alone, 4)
    for made in (
        ragged(events.devices(1), concurrency=1, buffer_size=1, refill="same"),
        algorithms.fedasync(
            p.linear_loss,
            events.devices(1),
            optax.sgd(p.RATE),
            population_size=1,
            concurrency=1,
            mixing_rate=1.0,
            refill="same",
            **work,
        ),
    ):
        models, infos, _ = run(made, start, alone, 4)
        check_equal_bits(expected, models, "models")
        assert all(x["staleness"] == 0 for x in infos)


def test_what_reads_the_parts_refuses():
    """Nobody knows the law of who arrives. Catches an epsilon by sampling, a variance formula, a replay of a round,
    weights by examples on top of speed, shares of noise that count on more messages than a buffer has, and a
    hint about a sampler where there is none."""
    devices, data, start = events.devices(p.NUM_CLIENTS), p.ragged(), jnp.array(p.START)
    options = {"concurrency": 9, "buffer_size": 4}
    for noise, rule in (
        (transform.gaussian_mechanism(1.0, 1.0), aggregation.fixed_mean(4.0)),
        (transform.skellam_mechanism(1.0, 1.0, 4, granularity=0.1), aggregation.modular_sum(4.0)),
        (transform.local_gaussian(1.0, 1.0), aggregation.fixed_mean(4.0)),
    ):
        made = ragged(devices, transform=noise, aggregator=rule, **options)
        with refused("scheme", value="unknown_without_replacement", hint="arrives first"):
            mechanism_of(made, dimension=3)
    with pytest.raises(ValueError, match="sampler: expected one of"):
        variance_budget(ragged(devices, **options), start, data, num_clients=4)
    with pytest.raises(ValueError, match="arrivals of an asynchronous"):
        made.parts.sampler.sample(events.KEY, ())
    with pytest.raises(ValueError, match="algorithm: expected one that can replay"):
        observe(made, events.KEY, None, data)
    with refused("aggregator", rule="no weights"):
        ragged(devices, weighting="examples", aggregator=aggregation.mean(), **options)
    with refused("aggregator", rule="bounded amount"):
        ragged(devices, transform=transform.gaussian_mechanism(1.0, 1.0), **options)


@pytest.mark.full
@pytest.mark.parametrize("make", cases.rows(["fedbuff", "fedasync", "fedat"], ["fedasync"]))
def test_everybody_who_is_sent_a_model_is_accounted_for(make):
    """Models sent = updates that arrived + clients who left + clients stopped + clients still at work, of devices that
    come and go and with a hazard. Catches work that ends nowhere, or twice."""
    rule = Availability(lambda ids, seconds: (ids + seconds // 2) % 5 != 0)
    some = Devices(SIZE, events.devices(SIZE).spend, rule, ticks_per_second=10)
    options = {"num_tiers": 3, "clients_per_tier": 3} if make == "fedat" else {"concurrency": 8}
    options |= {"buffer_size": 4} if make == "fedbuff" else {"arrivals_per_step": 2} if make == "fedasync" else {}
    made = quadratic(getattr(algorithms, make), some, hazard=network.memoryless(1.5), **options)
    _, infos, state = run(made, {"w": jnp.zeros(1)}, clients(), 60)
    total = {name: sum(float(info[name]) for info in infos) for name in ("clients_invited", "arrivals", "interrupted")}
    at_work = total["clients_invited"] - total["arrivals"] - total["interrupted"]
    if make == "fedat":
        assert at_work == int(state.rounds.there.sum() + state.rounds.lost.sum())
    else:
        assert at_work - sum(int(info["stopped_clients"]) for info in infos) == 8 - int(infos[-1]["empty_places"])
    assert total["interrupted"] > 10 and total["arrivals"] > 20


@pytest.mark.full
def test_coded_bytes_are_of_the_same_messages():
    """Catches messages on their way when their client left, which are sent, and not sent under an entropy code."""

    def uploading(key, ids, load):
        spent = events.devices(SIZE).spend(key, ids, load)
        return spent._replace(compute=spent.up, up=spent.compute)

    rule = Availability(lambda ids, seconds: (ids + seconds // 2) % 5 != 0)
    some = Devices(SIZE, uploading, rule, ticks_per_second=10)
    made = quadratic(algorithms.fedbuff, some, concurrency=8, buffer_size=4, transform=transform.top_k(0.4))
    _, infos, _ = run(made, {"w": jnp.zeros(5)}, clients(), 40)
    sent, coded = ([int(info[name].number) for info in infos] for name in ("uplink_bytes", "uplink_coded_bytes"))
    assert sent == coded and sum(int(info["wasted_bytes"].number) for info in infos) > 0


@pytest.mark.full
def test_summary_of_a_run():
    """Against all single arrivals, of steps with 1 to 4 of them. Catches a mean over steps, a share of the time that a
    short step decides, and the last step's largest staleness."""
    options = {"concurrency": 9, "arrivals_per_step": 4, "max_staleness": 200, "mixing_rate": 0.1}
    made = quadratic(algorithms.fedasync, **options)
    records = [as_record(t, info) for t, info in enumerate(run(made, {"w": jnp.zeros(1)}, clients(), 16)[1])]
    devices = events.devices(SIZE)
    traffic = Traffic(devices, concurrency=9, block=4, buffer_size=1, max_staleness=200, refill="other")
    loop, gaps, waits = events.Loop(traffic), [], []
    for t in range(16):
        rows, _ = arrivals(loop, t)
        gaps += [gap for _, _, gap, _ in rows]
        waits += [wait / 10 for _, _, _, wait in rows]
    found = totals_of(records, made.metrics)
    assert found["arrivals"] == len(gaps) < 64
    assert found["staleness"] == pytest.approx(np.mean(gaps)) and found["largest_staleness"] == max(gaps)
    assert found["delay_seconds"] == pytest.approx(np.mean(waits), abs=1e-6)
    busy = sum(r["utilisation"] * r["round_seconds"] for r in records)
    assert found["utilisation"] == pytest.approx(busy / found["simulated_seconds"], rel=1e-5)


def parts(work, rule, step, **options):
    """`asynchronous` of other clients."""
    return algorithms.asynchronous(
        events.devices(SIZE), work, rule, step, population_size=SIZE, concurrency=9, buffer_size=4, mesh=None, **options
    )


def corrected(**options):
    """SCAFFOLD's clients and server."""
    work = client.scaffold(population.quadratic_loss, RATE, client.work(num_steps=2, weighting="uniform"))
    rule = aggregation.by_part({"params": aggregation.mean(), "control": aggregation.keep_old(float(SIZE))})
    return parts(work, rule, server.control_variates(server.optimizer(optax.sgd(1.0))), **options)


def test_updates_that_cannot_be_discounted():
    """Catches half of a control variate's update beside a client's whole one, a share of a model that is averaged as a
    model, a share of a direction times a share of its steps, and integers whose share is zero."""
    plain = client.local_sgd(population.quadratic_loss, optax.sgd(RATE), client.work(num_steps=2))
    uniform = client.work(num_steps=2, weighting="uniform")
    tilted = client.dynamic(population.quadratic_loss, optax.sgd(RATE), 1.0, uniform)
    mean, step = aggregation.mean(weighting="uniform"), server.optimizer(optax.sgd(1.0))
    start, known = {"w": jnp.zeros(1)}, {"staleness": staleness.constant()}
    for make in (
        corrected,
        lambda **own: parts(tilted, mean, step, **own),
        lambda **own: parts(client.send_model(plain), mean, server.replacement(), **own),
        lambda **own: parts(client.normalized(plain), mean, server.rescaled(step), **own),
    ):
        for made in (make(**known), make(max_staleness=0)):
            jax.eval_shape(lambda made=made: made.init(events.KEY, start, clients()))
        with refused("client", value="another", rule="scalable"):
            make().init(events.KEY, start, clients())

    def apply(key, broadcast, state, data):
        return Report({"w": jnp.full(1, 3, jnp.int16)}, jnp.float32(1), {}), state

    counts = ClientUpdate(lambda params: (), apply, ClientFacts(uniform_weights=True, scalable=True))
    with refused("update['w']", value="int16", kind=InvalidType):
        parts(counts, mean, step).init(events.KEY, {"w": jnp.zeros(1, jnp.int16)}, clients())


@pytest.mark.full
def test_control_variates_without_a_discount():
    """Whatever the delays, c is the mean of all clients' c_i. Catches the state of another arrival."""
    made = corrected(staleness=staleness.constant())
    _, infos, state = run(made, {"w": jnp.zeros(1)}, clients())
    assert max(info["largest_staleness"] for info in infos) > 0
    own = np.asarray(state.federation.clients["w"])
    assert np.ptp(own) > 0
    np.testing.assert_allclose(state.federation.server.control["w"], own.mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "factors, words",
    [
        (lambda gaps: jnp.where(gaps > 3, jnp.nan, 1.0), r"staleness\(4\): expected a factor in \(0, 1\], got nan"),
        (lambda gaps: 1.0 - gaps / 4, r"staleness\(4\): expected a factor"),
        (lambda gaps: 1.0 + gaps, r"staleness\(1\): expected a factor"),
        (lambda gaps: 0.5, "staleness: expected a float for each of 101 gaps"),
        (lambda gaps: 1 + 0 * gaps, "staleness: expected a float for each"),
    ],
)
def test_factors_out_of_range(factors, words):
    """Catches factors that make NaN, turn an update round, or lengthen it."""
    for make in (algorithms.fedbuff, algorithms.fedasync):
        with pytest.raises((TypeError, ValueError), match=words):
            quadratic(make, concurrency=12, staleness=factors, max_staleness=100)


@pytest.mark.full
def test_what_feedback_keeps():
    """Clients that send two numbers of six, of whom those whose model is old are stopped: what the model moved by and
    what they keep add up to the updates of those who arrived, exactly.

    Catches a memory written by who was stopped, and a residual that a step loses or counts twice."""
    own = jnp.array(np.random.default_rng(0).integers(-8, 9, (SIZE, 6)), jnp.float32)
    data = population.generated(SIZE, lambda own, id: ClientData(own[id][None], jnp.ones(1, bool)), own)

    def apply(key, broadcast, arrived, data):
        return Report(data.examples[0], jnp.float32(1), {}), arrived + 1

    work = ClientUpdate(lambda params: jnp.int32(0), apply, ClientFacts(scalable=True))
    rule, step = aggregation.fixed_mean(4.0), server.optimizer(optax.sgd(1.0))
    feedback = transform.error_feedback(transform.top_k(count=2))
    made = parts(work, rule, step, transform=feedback, staleness=staleness.constant(), max_staleness=1)
    _, infos, state = run(made, jnp.zeros(6), data, 40)
    arrived, kept, moved = map(
        np.asarray, (state.federation.clients, state.federation.memory.numbers, made.params(state))
    )
    assert sum(int(info["stopped_clients"]) for info in infos) > 10 and np.abs(kept).max() > 1
    assert arrived.sum() == sum(int(info["clients_reported"]) for info in infos)
    np.testing.assert_array_equal(4 * moved + kept.sum(0), arrived @ np.asarray(own))


@pytest.mark.full
def test_shares_of_noise_need_a_whole_buffer():
    """Skellam noise in a secure sum of K messages. Catches a sum of fewer that is released, and noise that is scaled
    down with a stale update."""
    size = p.NUM_CLIENTS
    rule = aggregation.secure_sum(aggregation.modular_sum(4.0), 3, min_messages=4)
    noise = transform.skellam_mechanism(1.0, 0.5, 4, granularity=0.01)
    options = {"concurrency": 9, "buffer_size": 4, "transform": noise, "aggregator": rule}
    bad = p.ragged(spoil={3: np.nan, 8: np.nan})
    _, infos, _ = run(ragged(events.devices(size), **options), jnp.array(p.START), bad, 8)
    lost = [int(info["dropped_clients"]) for info in infos]
    assert [int(info["skipped_rounds"]) for info in infos] == [int(x > 0) for x in lost] and 0 < sum(lost) < 8


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"buffer_size": 10}, "buffer_size: expected"),
        ({"concurrency": 0}, "concurrency: expected"),
        ({"concurrency": 22}, "concurrency: expected at most 20"),
        ({"max_staleness": 5000}, "max_staleness: expected"),
        ({"refill": "none"}, "refill: expected"),
        ({"staleness": 0.5}, "staleness: expected"),
        ({"devices": events.devices(7)}, "devices: expected those of the population's 24 clients, got"),
        ({"devices": None}, "devices: expected"),
    ],
)
def test_wrong_options(wrong, words):
    options = {"devices": events.devices(SIZE), "concurrency": 9, "buffer_size": 4} | wrong
    with pytest.raises((TypeError, ValueError), match=words):
        quadratic(algorithms.fedbuff, **options)


def test_wrong_options_of_fedasync():
    for wrong, words in (
        ({"mixing_rate": 1.5}, "mixing_rate: expected"),
        ({"mixing_rate": float("nan")}, "mixing_rate: expected"),
        ({"arrivals_per_step": 10}, "arrivals_per_step: expected"),
        ({"nonfinite": "skip"}, "nonfinite: expected"),
    ):
        with pytest.raises(ValueError, match=words):
            quadratic(algorithms.fedasync, **{"concurrency": 9} | wrong)
