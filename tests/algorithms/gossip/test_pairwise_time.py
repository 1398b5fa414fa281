"""Simulated time of meetings: every model that is sent takes time, energy and a place on the channel, at both ends."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, network, population, sampling
from fedjax_sim.algorithms.gossip.pairwise import meetings
from fedjax_sim.prng import stream
from tests.refusals import refused

N, COHORT, WIDTH = 12, 8, 1000  # a model of 4,000 bytes
KEY = jax.random.key(3)
GRAPH = network.from_edges(
    N, [(0, i) for i in range(1, N - 1)] + [(1, 2), (3, 4)], connected=False
)  # a hub, and 11 alone
PARTNERS = {"neighbours": jnp.array(GRAPH.neighbours()[0]), "degrees": jnp.array(GRAPH.in_degrees, jnp.int32)}
RATE_DOWN, RATE_UP, WATTS = np.where(np.arange(N) % 3 == 0, 500.0, 4000.0), np.linspace(1000, 3000, N), 2.0


def loss(params, examples, key):
    return (params["w"] ** 2).sum() * jnp.ones(examples["x"].shape[0])


def people():
    return population.stored({"x": np.ones((N, 1), np.float32)}, np.arange(N + 1))


def phones(down=RATE_DOWN, up=RATE_UP, latency=0.0, speed=1e9, watts=0.0):
    def profile(ids):
        same = {name: jnp.full(ids.shape, x, jnp.float32) for name, x in (("speed", speed), ("latency", latency))}
        rates = {"bandwidth_down": jnp.float32(down)[ids], "bandwidth_up": jnp.float32(up)[ids]}
        none = dict.fromkeys(("joules_per_flop", "joules_per_byte", "compute_watts"), jnp.zeros(ids.shape))
        return network.Profile(**same, **rates, **none, radio_watts=jnp.full(ids.shape, watts, jnp.float32))

    return network.of_profiles(N, profile)


def gossip(sampler, graph=GRAPH):
    return algorithms.pairwise_gossip(loss, sampler, optax.sgd(0.1), graph, num_steps=1, mesh=None)


def rounds(made, count):
    """(key, info on the host) of each round, all from the first models: no number of it follows from these."""
    data = people()
    state = made.init(KEY, {"w": jnp.zeros(WIDTH)}, data)
    step = jax.jit(lambda key: {name: x for name, x in made.step(key, state, data)[1].items() if name != "local_loss"})
    for t in range(count):
        key = jax.random.fold_in(KEY, t)
        yield key, {name: x.total() if hasattr(x, "total") else np.asarray(x) for name, x in step(key).items()}


def met(key, cohort=COHORT):
    """(ids, partners) of a round, by the sampler without a clock."""
    ids = sampling.uniform(N, cohort).sample(stream(key, "sampling"), ())[0].ids
    return np.asarray(ids), np.asarray(meetings(key, ids, PARTNERS)[0])


def test_a_meeting_takes_two_models():
    """4,000 bytes each way at 1,000 bytes/s, one meeting of two nodes: 8 s and a tick of work. Fault: the four bytes
    that stand for a message."""
    same = np.full(N, 1000.0)
    made = gossip(sampling.with_clock(sampling.uniform(N, 1), phones(same, same)), network.ring(N))
    ((_, info),) = rounds(made, 1)
    assert info["round_seconds"] == pytest.approx(8.001) and info["uplink_bytes"] == 8000


@pytest.mark.full
def test_each_meeting_is_paid_for_at_both_ends():
    """Six rounds around a hub, against NumPy: a round lasts as long as the busiest node, woken or only met; joules are
    those of every model at both ends. Faults: a node met by several that pays once, a partner who pays nothing, latency
    that several messages share, and a node without neighbours that sends."""
    latency = 0.25
    clocked = sampling.with_clock(sampling.uniform(N, COHORT), phones(latency=latency, watts=WATTS))
    down, up = (np.ceil(1000 * (latency + 4000 / rate) - 1e-6) for rate in (RATE_DOWN, RATE_UP))
    seen = set()
    for key, info in rounds(gossip(clocked), 6):
        ids, partners = met(key)
        meets = partners != ids
        times = np.bincount(ids[meets], minlength=N) + np.bincount(partners[meets], minlength=N)
        seen |= {times.max(), int(times[11])} | {"asleep" for j in partners if j not in ids}
        busy = times * (down + up) + np.isin(np.arange(N), ids)  # a tick of work
        assert info["round_seconds"] * 1000 == pytest.approx(busy.max(), abs=0.01)
        seconds = (times * (2 * latency + 4000 / RATE_DOWN + 4000 / RATE_UP)).sum()
        assert info["joules"] == pytest.approx(WATTS * seconds, rel=1e-5) and info["wasted_joules"] == 0
        slots = np.maximum(busy[ids], (times * (down + up))[partners] * meets)
        assert info["utilisation"] == pytest.approx(slots.sum() / (COHORT * busy.max()), rel=1e-5)
        assert info["uplink_bytes"] == 8000 * info["edges"] == 8000 * meets.sum()
    assert max(x for x in seen if x != "asleep") > 3 and 0 in seen and "asleep" in seen


@pytest.mark.full
@pytest.mark.parametrize("budget", [pytest.param(100.0, marks=pytest.mark.full), 24_000.0])
def test_no_more_is_sent_than_the_radio_budget(budget):
    """Both models of a meeting are on the channel. Fault: 24,000 bytes through a budget of 100."""
    clocked = sampling.with_clock(sampling.uniform(N, COHORT), phones())
    for key, info in rounds(gossip(sampling.with_radio_budget(clocked, budget_bytes=budget)), 3):
        meets = (np.not_equal(*met(key))).sum()
        assert info["uplink_bytes"] == 8000 * min(budget // 8000, meets) and info["no_radio"] == meets - info["edges"]


@pytest.mark.full
def test_airtime_is_that_of_both_models():
    """Fault: airtime of one end, or of all meetings of a node in each of them."""
    clocked = sampling.with_clock(sampling.uniform(N, COHORT), phones())
    up = np.ceil(4000 / RATE_UP * 1000 - 1e-6)
    for key, info in rounds(gossip(sampling.with_radio_budget(clocked, airtime_seconds=12.0, order="id")), 4):
        ids, partners = met(key)
        order = np.argsort(ids)
        cost = np.where(partners != ids, up[ids] + up[partners], 0)[order]
        fits = np.cumsum(cost) <= 12_000
        assert info["edges"] == (fits & (cost > 0)).sum() < COHORT - 1


@pytest.mark.full
def test_late_meetings():
    """A deadline that some meetings miss: what was on its way counts as sent, and as wasted. Fault: bytes of meetings
    that were cut off in no number."""
    clocked = sampling.with_clock(sampling.uniform(N, COHORT), phones())
    (_, info), *_ = rounds(gossip(sampling.with_deadline(clocked, 12.0)), 1)
    assert info["round_seconds"] == 12 and 0 < info["late"] and info["clients_reported"] == COHORT - info["late"]
    assert 0 < info["wasted_bytes"] == info["uplink_bytes"] - 8000 * info["edges"]


@pytest.mark.full
def test_who_leaves_at_work_pays_for_no_meeting():
    """A hazard that strikes while all nodes train. Fault: models that are received, and paid for, from nobody."""
    clocked = sampling.with_clock(sampling.uniform(N, COHORT), phones(watts=WATTS, speed=1.0))
    (_, info), *_ = rounds(gossip(sampling.with_hazard(clocked, network.memoryless(1e-3))), 1)
    assert info["interrupted"] == COHORT and info["edges"] == info["uplink_bytes"] == info["wasted_bytes"] == 0
    assert info["joules"] == info["wasted_joules"] == 0 and info["round_seconds"] < 1


@pytest.mark.full
def test_who_has_no_place_on_the_channel_pays_for_no_meeting():
    clocked = sampling.with_clock(sampling.uniform(N, COHORT), phones(watts=WATTS))
    _, info = next(rounds(gossip(sampling.with_radio_budget(clocked, budget_bytes=100.0)), 1))
    assert info["no_radio"] > 0 and info["joules"] == info["wasted_joules"] == 0


def test_what_is_refused():
    """Catches partners that are met although they are away, and batteries that others' energy empties."""
    away = phones()._replace(availability=network.bernoulli(0.5))
    with refused("sampler", rule="always there"):
        gossip(sampling.with_clock(sampling.uniform(N, COHORT), away))
    clocked = sampling.with_clock(sampling.uniform(N, COHORT), phones(watts=WATTS))
    with pytest.raises(ValueError, match="sampler: expected one without batteries"):
        next(rounds(gossip(sampling.with_battery(clocked, 5.0)), 1))
