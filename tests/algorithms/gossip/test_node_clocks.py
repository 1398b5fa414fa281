"""Simulated time under global and local barriers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, network, population
from fedjax_sim.algorithms.gossip import node_clocks
from fedjax_sim.types import Clock, Devices, Load, Spent
from tests.algorithms.gossip import problems as g
from tests.refusals import refused

FAST, SLOW = 1_700, 3 * 715_827_840  # ticks; the slow one in one round nearly fills an int32


def devices(slow=None, seen=None):
    """Every node takes FAST ticks, a slow one SLOW."""

    def spend(key, ids, load):
        if seen is not None:
            seen.append(load)
        lasts = jnp.full(ids.shape, FAST, jnp.int32)
        lasts = lasts if slow is None else jnp.where(ids == slow, SLOW, lasts)
        return Spent(lasts // 3, lasts - 2 * (lasts // 3), lasts // 3, jnp.zeros(ids.shape))

    return Devices(g.N, spend)


def dpsgd(**options):
    return algorithms.dpsgd(population.quadratic_loss, g.RING, optax.sgd(g.RATE), num_steps=1, mesh=None, **options)


def ticks(state):
    return [1000 * int(s) + int(t) for s, t in zip(state.clock.seconds, state.clock.ticks, strict=True)]


def test_a_delay_spreads_one_hop_a_round():
    """K12: t_i <- max over i and its neighbours + its duration, in Python integers past 2^31. Nodes further from the
    slow one than the number of rounds do not feel it. Catches a wait for all, and ticks that wrap."""
    made = dpsgd(devices=devices(slow=3), barrier="local")
    data = g.clients()
    state, step = made.init(g.KEY, g.START, data), jax.jit(made.step)
    exact = [0] * g.N
    for k in range(1, 7):
        state, info = step(jax.random.fold_in(g.KEY, k), state, data)
        waited = [max(exact[(i + hop) % g.N] for hop in (-1, 0, 1)) for i in range(g.N)]
        exact = [t + (SLOW if i == 3 else FAST) for i, t in enumerate(waited)]
        assert ticks(state) == exact
        felt = [t > k * FAST for t in exact]
        assert felt == [min(abs(i - 3), g.N - abs(i - 3)) < k for i in range(g.N)]
        np.testing.assert_allclose(info["simulated_seconds"], max(exact) / 1000, rtol=1e-6)
        np.testing.assert_allclose(info["first_seconds"], min(exact) / 1000, rtol=1e-6)
    assert max(exact) > 2**33


def test_no_barrier_without_time():
    """Catches an option that changes nothing, without a word."""
    with refused("barrier", value="local"):
        dpsgd(barrier="local")


@pytest.mark.full
def test_a_global_barrier():
    """Everybody waits for the slowest. Catches a wait for neighbours."""
    state, _ = g.run(dpsgd(devices=devices(slow=3)), 3)
    assert ticks(state) == [2 * SLOW + (SLOW if i == 3 else FAST) for i in range(g.N)]


@pytest.mark.full
def test_who_is_down_does_not_wait():
    """In Python integers, with nodes that fail. Catches one that is down and whose clock runs, or whom others await;
    and a global round that begins before the last one is over, because its slowest node is down in this one."""
    mixing = network.with_node_failures(network.with_link_failures(g.RING, 0.2), 0.4)
    for barrier in ("local", "global"):
        made = algorithms.dpsgd(
            population.quadratic_loss,
            mixing,
            optax.sgd(0.1),
            num_steps=1,
            mesh=None,
            devices=devices(2),
            barrier=barrier,
        )
        state, infos = g.run(made, 6)
        exact = [0] * g.N
        for matrix, up in zip(*g.weights(mixing, 6), strict=True):
            if barrier == "local":
                waited = [max(exact[j] for j in range(g.N) if matrix[i, j] > 0 or i == j) for i in range(g.N)]
            else:
                waited = [max(exact)] * g.N
            lasts = [SLOW if i == 2 else FAST for i in range(g.N)]
            exact = [waited[i] + lasts[i] if up[i] else exact[i] for i in range(g.N)]
        assert ticks(state) == exact
        assert not up.all() and min(exact) < min(t for t, there in zip(exact, up, strict=True) if there)
        first = min(t for t, there in zip(exact, up, strict=True) if there)
        np.testing.assert_allclose(infos[-1]["first_seconds"], first / 1000, rtol=1e-6)
        np.testing.assert_allclose(infos[-1]["simulated_seconds"], max(exact) / 1000, rtol=1e-6)


@pytest.mark.full
def test_time_changes_no_number():
    """Bit for bit. Catches a clock that draws from a stream of the round, or waits that reorder sums."""
    models = []
    for options in ({}, {"devices": devices(3)}, {"devices": devices(3), "barrier": "local"}):
        made = dpsgd(**options)
        state, infos = g.run(made, 4)
        models.append((g.models(made, state), infos[-1]["consensus_distance"]))
    for x, away in models[1:]:
        assert (x == models[0][0]).all() and away == models[0][1]


def test_what_a_round_asks():
    """Bytes go with the neighbours that are there: the hub of a star sends and hears most. Catches a node's bytes that
    are everybody's; and work of a round that is not there."""
    seen = []
    graph = network.metropolis(network.star(g.N))
    made = algorithms.dpsgd(
        population.quadratic_loss, graph, optax.sgd(0.1), num_steps=2, mesh=None, devices=devices(seen=seen)
    )
    jax.eval_shape(made.step, g.KEY, made.init(g.KEY, g.START, g.clients()), g.clients())
    assert isinstance(seen[0], Load)
    links = graph.links(None, 0, graph.tables)
    from fedjax_sim.types import Work

    load = node_clocks.asked_of(Work(4, 4, 2, 10.0, 5.0), jnp.ones(g.N, jnp.int32), links, 4)
    assert load.bytes_up.tolist() == load.bytes_down.tolist() == [28.0] + [4.0] * 7
    assert load.flops.tolist() == [15.0] * g.N
    arrows = network.push(network.from_edges(g.N, [(0, i) for i in range(1, g.N)], directed=True))
    load = node_clocks.asked_of(
        Work(4, 4, 2, 10.0, 5.0), jnp.ones(g.N, jnp.int32), arrows.links(None, 0, arrows.tables), 4
    )
    assert load.bytes_up.tolist() == [28.0] + [0.0] * 7 and load.bytes_down.tolist() == [0.0] + [4.0] * 7
    assert Clock(jnp.int32([2]), jnp.int32([500])).read(1000).tolist() == [2.5]


@pytest.mark.full
@pytest.mark.default_rows("global")
@pytest.mark.parametrize("barrier", ["global", "local"])
def test_past_the_clock(barrier):
    """A node of 68 years a round, in seconds. Who waited for its second round is past what is counted, for ever, the
    others are in time. Catches clocks that wrap to the past, and waits for the wrong node."""
    made = dpsgd(devices=devices(slow=3)._replace(ticks_per_second=1), barrier=barrier)
    state, step, data = made.init(g.KEY, g.START, g.clients()), jax.jit(made.step), g.clients()
    exact = [0] * g.N
    for k in range(1, 8):
        state, info = step(jax.random.fold_in(g.KEY, k), state, data)
        hops = range(g.N) if barrier == "global" else (-1, 0, 1)
        exact = [max(exact[(i + hop) % g.N] for hop in hops) + (SLOW if i == 3 else FAST) for i in range(g.N)]
        expected = [t if t < 2**31 else np.inf for t in exact]
        np.testing.assert_allclose(state.clock.read(1), expected, rtol=1e-6)
        assert float(info["simulated_seconds"]) == pytest.approx(max(expected))


def test_what_is_refused():
    """Catches devices of other nodes, and clients that come and go where nobody asks."""
    with refused("devices", value=9, rule="8 nodes"):
        dpsgd(devices=devices()._replace(population_size=9))
    with refused("devices.ticks_per_second", rule="[1, 1000000]"):
        dpsgd(devices=devices()._replace(ticks_per_second=10**7))
    with refused("devices", rule="always there"):
        dpsgd(devices=devices()._replace(availability=network.always()))
