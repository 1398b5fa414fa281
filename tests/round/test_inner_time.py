"""Simulated time of rounds inside of edges: of the devices that are drawn there, by their own ids."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, engine, network, population, sampling, server
from fedjax_sim.algorithms import as_client_update, federated
from fedjax_sim.instruments.timeline import timeline_of_round
from fedjax_sim.prng import stream
from fedjax_sim.round import invite
from fedjax_sim.types import Devices, Spent
from tests.laws import problems as p
from tests.refusals import refused

KEY, START = jax.random.key(5), jnp.array(p.START)
GROUPS = np.random.default_rng(3).choice(4, p.NUM_CLIENTS, p=[0.1, 0.2, 0.3, 0.4])
SIZE = int(np.bincount(GROUPS).max())
STEP = server.optimizer(optax.sgd(1.0))
_rng = np.random.default_rng(8)
DOWN, WORK, UP = (_rng.integers(1, most, p.NUM_CLIENTS) for most in (40, 400, 300))  # ticks; WORK of each local step
LINK = np.array([[3, 5], [7, 2], [40, 1], [11, 60]])  # ticks of an edge's link to the cloud, down and up


def tables(down, step, up, joules) -> Devices:
    """Devices of clients with these ticks and joules, which a load without bytes or operations does not take."""
    down, step, up, joules = (jnp.asarray(x, jnp.int32) for x in (down, step, up, joules))

    def spend(key, ids, load):
        compute = step[ids] * (load.flops > 0)
        ticks = jnp.where(load.bytes_down > 0, down[ids], 0), compute, jnp.where(load.bytes_up > 0, up[ids], 0)
        return Spent(*ticks, jnp.where(load.bytes_up > 0, joules[ids], 0).astype(jnp.float32))

    return Devices(len(down), spend)


DEVICES = tables(DOWN, WORK, UP, p.SIZES)  # a device spends a joule for each of its examples
LINKS = tables(LINK[:, 0], [9000] * 4, LINK[:, 1], [0] * 4)


def edges(sampler, **options):
    local = {"num_steps": 2, "plan": p.PLAN, "mesh": None} | options
    return algorithms.fedavg(p.linear_loss, sampler, optax.sgd(p.RATE), **local).parts


def cloud(sampler, star, rounds, devices=DEVICES, **options):
    work = as_client_update(star, rounds, devices=devices, **options)
    return federated(sampler, work, aggregation.mean(), STEP, mesh=None)


TIMES = ("round_seconds", "joules", "utilisation", "late")


def rounds_of(made, people, count, names=TIMES):
    """(key, some of its info on the host) of each round, all from the first model: time follows from none."""
    state = jax.jit(made.init)(KEY, START, people)
    step = jax.jit(lambda key: {name: x for name, x in made.step(key, state, people)[1].items() if name in names})
    for t in range(count):
        key = jax.random.fold_in(KEY, t)
        yield key, jax.device_get(step(key))


def client_key(key, id):
    data = engine.client_keys(stream(key, "client"), jnp.array([id], jnp.int32))[0]
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))


@pytest.mark.full
@pytest.mark.default_rows(1)
@pytest.mark.parametrize(
    "inside", [sampling.poisson(SIZE, 0.4), pytest.param(sampling.full(SIZE), marks=pytest.mark.full)]
)
def test_rounds_inside_by_hand(inside):
    """Three rounds of three of four ragged edges that make two rounds each, against NumPy: link, twice the slowest of
    who is drawn, link. Joules, one for each example of who takes part, are those of the weights that are reported.

    Faults: devices by their place in the group; a cohort that is not the one that trains; empty places; a mean over
    devices; one round for two.
    """
    people, kappa = population.grouped(p.ragged(), GROUPS), 2
    made = cloud(sampling.with_clock(sampling.uniform(4, 3), LINKS), edges(inside), kappa)
    for key, info in rounds_of(made, people, 3, (*TIMES, "total_weight")):
        drawn = sampling.uniform(4, 3).sample(stream(key, "sampling"), ())[0].ids
        lasts, joules, nobody = [], 0, 0
        for edge in np.asarray(drawn):
            members, ticks = np.flatnonzero(GROUPS == edge), int(LINK[edge].sum())
            for t in range(kappa):
                round_key = stream(jax.random.fold_in(stream(client_key(key, edge), "inside"), t), "sampling")
                cohort = inside.sample(round_key, ())[0]
                places = np.asarray(cohort.ids)[np.asarray(cohort.invited)]
                who = members[places[places < len(members)]]
                ticks += (DOWN + WORK + UP)[who].max(initial=0)
                joules += p.SIZES[who].sum()
                nobody += len(who) == 0
            lasts.append(ticks)
        assert info["round_seconds"] * 1000 == pytest.approx(max(lasts), abs=0.01)
        assert info["utilisation"] == pytest.approx(sum(lasts) / (3 * max(lasts)), rel=1e-5)
        assert info["joules"] == joules and (nobody or info["joules"] == kappa * info["total_weight"])


def three_levels(inside, links):
    """(regions that make three rounds of edges that make two, the people under them)."""
    inner = as_client_update(edges(inside), 2, devices=DEVICES)
    middle = federated(sampling.full(2), inner, aggregation.mean(), STEP, mesh=None).parts
    made = cloud(sampling.with_clock(sampling.full(2), links), middle, 3, LINKS, name="region")
    return made, population.grouped(population.grouped(p.ragged(), GROUPS), [0, 1, 0, 1])


@pytest.mark.full
def test_cohorts_of_three_levels():
    """Joules are those of the weights that are reported. Fault: keys of another level, so cohorts that do not train."""
    made, people = three_levels(sampling.poisson(SIZE, 0.5), tables([1] * 2, [1] * 2, [1] * 2, [0] * 2))
    for _, info in rounds_of(made, people, 3, ("joules", "total_weight")):
        assert info["joules"] == pytest.approx(6 * info["total_weight"], rel=1e-6)


@pytest.mark.full
def test_three_levels():
    """Regions of edges of devices, all of whom take part: each level waits for the slowest of its group, in each of its
    rounds. Faults: a level whose own links are free, or whose rounds count once."""
    device, edge, region = DOWN + WORK + UP, LINK.sum(1), np.array([8, 30])
    ((_, info),) = rounds_of(*three_levels(sampling.full(SIZE), tables([4, 10], [9000] * 2, [4, 20], [1, 1])), 1)
    of_edge = np.array([edge[e] + 2 * device[GROUPS == e].max() for e in range(4)])
    expected = [region[r] + 3 * of_edge[r::2].max() for r in range(2)]
    assert info["round_seconds"] * 1000 == pytest.approx(max(expected), abs=0.01)
    assert info["joules"] == 2 + 6 * p.SIZES.sum()


@pytest.mark.full
def test_as_long_as_flat_rounds():
    """One edge of everybody is a flat federation: kappa of its rounds take kappa times as long, for work given in steps
    and in epochs, and for a heavier model. Faults: a loop of unknown length that counts once, devices one after the
    other, no messages inside.
    """
    everyone, sizes = np.zeros(p.NUM_CLIENTS, int), np.full(p.NUM_CLIENTS, p.ROWS)
    speeds = {"speed": network.lognormal(100.0, 1.0), "bandwidth_down": 100.0, "bandwidth_up": 30.0, "jitter": 0.0}
    phones = network.heterogeneous(p.NUM_CLIENTS, **speeds, compute_watts=2.0, joules_per_byte=0.5)
    free, scales = tables([0], [0], [0], [0]), {"flops_scale": 3.0, "bytes_scale": 2.0}
    flat = sampling.with_clock(sampling.full(p.NUM_CLIENTS), phones, **scales)
    people, kappa, found = p.ragged(sizes=sizes), 4, []
    above = sampling.with_clock(sampling.full(1), free, **scales)
    for work in ({"num_steps": 6}, {"num_steps": None, "num_epochs": 2}):
        star = edges(sampling.full(p.NUM_CLIENTS), batch_size=2, **work)
        whole = cloud(above, star, kappa, phones), population.grouped(people, everyone)
        plain = federated(flat, star.client, aggregation.mean(), STEP, mesh=None), people
        cohorts = [invite(x.parts, KEY, x.init(KEY, START, y))[0] for x, y in (whole, plain)]
        one, all_of_them = (jax.device_get(x.timing.spent) for x in cohorts)
        assert one.compute[0] == kappa * all_of_them.total.max() > 0 and one.down[0] == one.up[0] == 0
        assert one.joules[0] == pytest.approx(kappa * all_of_them.joules.sum(), rel=1e-5)
        found.append(one.compute[0])
    assert found[0] == found[1]


@pytest.mark.full
def test_a_timeline_of_edges():
    """Catches a replay that draws other cohorts inside, or none."""
    people = population.grouped(p.ragged(), GROUPS)
    made = cloud(sampling.with_clock(sampling.full(4), LINKS), edges(sampling.poisson(SIZE, 0.4)), 2)
    *_, (_, info) = rounds_of(made, people, 2)
    found = timeline_of_round(KEY, made, START, people, 2)
    assert found["lasts"] == pytest.approx(info["round_seconds"]) and found["invited"] == 4
    spent = [client["download"] + client["training"] + client["sending"] for client in found["clients"]]
    assert max(spent) == pytest.approx(info["round_seconds"])
    assert sum(spent) / 4 / max(spent) == pytest.approx(info["utilisation"], rel=1e-5)


def test_an_edge_too_slow_inside():
    """A deadline between the edges' times: who is late inside is late. Fault: a deadline that sees links alone."""
    people = population.grouped(p.ragged(), GROUPS)
    lasts = np.array([LINK[e].sum() + (DOWN + WORK + UP)[GROUPS == e].max() for e in range(4)])
    ends = float(np.sort(lasts)[1:3].mean()) / 1000
    timed = sampling.with_deadline(sampling.with_clock(sampling.full(4), LINKS), ends)
    ((_, info),) = rounds_of(cloud(timed, edges(sampling.full(SIZE)), 1), people, 1)
    assert info["late"] == (lasts > 1000 * ends).sum() and info["round_seconds"] < ends + 0.001


def test_what_is_refused():
    """Catches times that nobody knows, or that are those of others."""
    clocked, star = sampling.with_clock(sampling.full(4), LINKS), edges(sampling.full(SIZE))
    people = population.grouped(p.ragged(), GROUPS)
    with refused("client", rule="clients' devices"):
        cloud(clocked, star, 1, None)
    with refused("client", rule="clients' devices"):
        inner = federated(sampling.full(2), as_client_update(star), aggregation.mean(), STEP, mesh=None).parts
        cloud(clocked, inner, 1, LINKS, name="region")
    with pytest.raises(ValueError, match=r"devices\.ticks_per_second: expected 1000"):
        cloud(clocked, star, 1, DEVICES._replace(ticks_per_second=500))
    with refused("devices", rule="always there"):
        cloud(clocked, star, 1, DEVICES._replace(availability=network.bernoulli(0.5)))
    with refused("devices", value=23, rule="24 clients"):
        cloud(clocked, star, 1, DEVICES._replace(population_size=23)).init(KEY, START, people)
    with pytest.raises(ValueError, match="sampler: expected one without a state"):
        cloud(clocked, edges(sampling.cyclic(SIZE, 2)), 1, keep=True)
    with refused("sampler", rule="limit of reports"):
        cloud(clocked, edges(sampling.with_over_invitation(sampling.full(SIZE), 2)), 1)
    with pytest.raises(ValueError, match="sampler: expected one without batteries"):
        powered = sampling.with_battery(sampling.with_clock(sampling.full(4), network.cross_silo(4)), 10.0)
        made = cloud(powered, star, 1)
        jax.eval_shape(made.step, KEY, made.init(KEY, START, people), people)
    with refused("edge_devices", rule="without a clock"):
        algorithms.hierarchical_fedavg(
            p.linear_loss, sampling.full(4), optax.sgd(0.1), group_size=SIZE, edge_devices=DEVICES, num_steps=1
        )
    with refused("client", rule="no federation"):
        algorithms.asynchronous(
            LINKS, as_client_update(star, devices=DEVICES), aggregation.mean(), STEP, population_size=4, concurrency=2,
            buffer_size=1,
        )  # fmt: skip
    made = cloud(clocked, star, 1)
    state = made.init(KEY, START, people)
    with refused("price.more", rule="rounds inside"):
        clocked.sample(KEY, state.sampler)
