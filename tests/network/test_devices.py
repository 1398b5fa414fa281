"""Times and energies of clients: by hand, by law, and where numbers end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from fedjax_sim import algorithms, network, population, sampling
from fedjax_sim.network.devices import whole_ticks
from fedjax_sim.types import Availability, Devices, Load, Spent

KEY, IDS = jax.random.key(0), jnp.arange(20_000)
LOAD = Load(jnp.float32(2e9), jnp.float32(1e6), jnp.float32(3e5))
SPREAD = {
    "speed": network.lognormal(1e9, 1.0),
    "bandwidth_down": network.pareto(1e5, 2.0),
    "bandwidth_up": network.uniform(1e4, 1e5),
    "latency": network.tiers([0.5, 0.5], [0.02, 0.3]),
}


def made(**options):
    return network.heterogeneous(len(IDS), **{**SPREAD, **options})


def test_what_is_spent():
    """By hand where clients are alike; a client's own numbers whatever its slot. Catches bytes of the other way."""
    options = {"speed": 1e9, "bandwidth_down": 1e6, "bandwidth_up": 1e5, "latency": 0.25, "joules_per_flop": 1e-9}
    options |= {"joules_per_byte": 1e-6, "compute_watts": 3.0, "radio_watts": 2.0, "ticks_per_second": 100}
    alike = network.heterogeneous(7, **options)
    spent = jax.jit(alike.spend)(KEY, jnp.arange(2), Load(jnp.array([2e9, 0.0]), 1e6, 3e5))
    np.testing.assert_array_equal(spent.compute, [200, 0])
    np.testing.assert_array_equal(spent.down, [125, 125])
    np.testing.assert_array_equal(spent.up, [325, 325])
    np.testing.assert_allclose(spent.joules, [2 + 1.3 + 6 + 9, 1.3 + 9], rtol=1e-6)
    np.testing.assert_array_equal(spent.total, [650, 450])
    assert [x.dtype for x in spent] == [jnp.int32] * 3 + [jnp.float32]
    spend = jax.jit(made(jitter=0.3).spend)
    everyone, some = spend(KEY, IDS, LOAD), jnp.array([19_999, 5, 5, 0])
    for all_of_it, part in zip(everyone, spend(KEY, some, LOAD), strict=True):
        np.testing.assert_array_equal(all_of_it[some], part)


def test_numbers_are_stable_and_have_the_law():
    """Catches speeds drawn anew in each round, or of another law: KS wrong once in 10^4 seeds."""
    spend = jax.jit(made(ticks_per_second=1_000_000, latency=None).spend)
    spent, again = spend(KEY, IDS, LOAD), spend(jax.random.key(1), IDS, LOAD)
    for one, other in zip(spent, again, strict=True):
        np.testing.assert_array_equal(one, other)
    speed = 2e9 / (np.asarray(spent.compute, np.float64) / 1e6)
    assert stats.kstest(speed, stats.lognorm(1.0, scale=1e9).cdf).pvalue > 1e-4
    other = jax.jit(made(seed=1).spend)(KEY, IDS, LOAD)
    assert (other.compute != spent.compute).mean() > 0.99


def test_numbers_of_a_client_are_independent():
    """Rank correlations below 5 sigma. Catches one draw for speed and bandwidth."""
    spent = jax.jit(made(latency=None).spend)(KEY, IDS, LOAD)
    for a, b in ((spent.compute, spent.up), (spent.compute, spent.down), (spent.down, spent.up)):
        assert abs(stats.spearmanr(a, b).statistic) * np.sqrt(len(IDS)) < 5


def test_jitter():
    """Lognormal about each client's own time, fresh in each round, one for both ways: KS wrong once in 10^4 seeds."""
    options = {"speed": 1e6, "bandwidth_down": 1e3, "bandwidth_up": 1e3, "jitter": 0.5}
    spend = jax.jit(network.heterogeneous(len(IDS), **options).spend)
    spent, again = spend(KEY, IDS, LOAD), spend(jax.random.key(1), IDS, LOAD)
    for ticks, median in ((spent.compute, 2e6), (spent.down, 1e6), (spent.up, 3e5)):
        assert stats.kstest(np.log(np.asarray(ticks) / median), stats.norm(0, 0.5).cdf).pvalue > 1e-4
    assert (spent.compute != again.compute).mean() > 0.99
    np.testing.assert_allclose(spent.up * 10 / 3, spent.down, rtol=1e-4)
    assert abs(stats.spearmanr(spent.compute, spent.up).statistic) * np.sqrt(len(IDS)) < 5


def test_energy_grows_with_the_work():
    """Catches energy that ignores local steps or bytes. K10."""
    powered = made(joules_per_flop=1e-9, joules_per_byte=1e-6, compute_watts=network.uniform(1.0, 2.0), radio_watts=1.0)
    spend = jax.jit(powered.spend)
    joules = [spend(KEY, IDS[:99], Load(*map(np.float32, load))).joules
              for load in ((1e9, 1e6, 1e6), (2e9, 1e6, 1e6), (2e9, 2e6, 1e6), (2e9, 2e6, 2e6))]  # fmt: skip
    assert (np.diff(joules, axis=0) > 0).all()
    assert (jax.jit(made().spend)(KEY, IDS, LOAD).joules == 0).all()


def test_whole_ticks():
    """Every quotient of bytes and bandwidth that is a whole number of ticks, by a division or by a product.

    Catches a round that lasts a millisecond longer because of a last bit, and times that are cut short.
    """
    ticks, rate = np.arange(1, 40_000, dtype=np.float32), np.float32(3e4)
    size = ticks * 30
    for seconds in (size / rate, size * (1 / rate), np.nextafter(size / rate, np.float32(9e9))):
        np.testing.assert_array_equal(whole_ticks(jnp.asarray(seconds), 1000), ticks)
    np.testing.assert_array_equal(whole_ticks(jnp.asarray((size + 3) / rate), 1000), ticks + 1)


def test_time_ends_where_integers_do():
    """Catches a duration that wraps around into the past: three phases add up in int32, whatever is asked; and the
    energy of 0 W for a time past float32, which is none."""
    slow = network.heterogeneous(3, speed=1e-30, bandwidth_down=1e-30, bandwidth_up=1e-30, jitter=4.0)
    spend = jax.jit(slow.spend)
    for load in (Load(1e30, 1e30, 1e30), Load(jnp.inf, jnp.inf, jnp.inf), Load(jnp.nan, jnp.nan, jnp.nan)):
        spent = spend(KEY, np.arange(3), Load(*map(np.float32, load)))
        assert (spent.total == 3 * 715_827_840).all() and spent.total.dtype == jnp.int32
    still = network.heterogeneous(3, speed=1e-30, bandwidth_down=1e-30, bandwidth_up=1e-30, compute_watts=0.0)
    assert (jax.jit(still.spend)(KEY, np.arange(3), Load(*map(np.float32, [1e30] * 3))).joules == 0).all()
    assert (spend(KEY, np.arange(3), Load(*map(np.float32, (0, 0, 0)))).total == 0).all()


@pytest.mark.parametrize(
    "options, told",
    [
        ({"speed": 0.0}, "speed: expected a distribution above 0"),
        ({"speed": "fast"}, "speed: expected a finite number >= 0"),
        ({"bandwidth_up": network.constant(0.0)}, "bandwidth_up: expected a distribution above 0"),
        ({"latency": -1.0}, "latency: expected a finite number >= 0"),
        ({"jitter": float("nan")}, "jitter: expected a number in"),
        ({"ticks_per_second": 0}, "ticks_per_second: expected an integer in"),
        ({"seed": -1}, "seed: expected an integer in"),
        ({"availability": network.always}, "availability: expected an Availability"),
    ],
)
def test_wrong_input(options, told):
    """Catches devices on which nothing ever arrives."""
    with pytest.raises((ValueError, TypeError), match=told):
        made(**options)


def by(devices, way):
    """Info of a round of two clients, synchronous or not."""
    people, rate = population.quadratic_population([1.0] * 4, [0.0] * 4), optax.sgd(0.1)
    if way == "clock":
        made = algorithms.fedavg(
            population.quadratic_loss, sampling.with_clock(sampling.uniform(4, 2), devices), rate, num_steps=1
        )
    else:
        how = {"population_size": 4, "concurrency": 2, "buffer_size": 2, "num_steps": 1}
        made = algorithms.fedbuff(population.quadratic_loss, devices, rate, **how)
    key = jax.random.key(0)
    return made.step(key, made.init(key, {"w": jnp.zeros(1, jnp.float32)}, people), people)[1]


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("way", ["clock", "buffer"])
@pytest.mark.parametrize(
    "changes, told",
    [
        (
            {"availability": Availability(lambda ids, seconds: seconds > 5)},
            r"at\(ids, seconds\): expected bool of shape",
        ),
        ({"availability": Availability(lambda ids, seconds: ids * 0.5)}, r"at\(ids, seconds\): expected bool of shape"),
        ({"spend": lambda key, ids, load: ids}, r"spend\(key, ids, load\): expected a Spent"),
        ({"spend": lambda key, ids, load: Spent(ids, ids * 0.5, ids, ids * 0.5)}, r"compute: expected int32 of shape"),
        ({"spend": lambda key, ids, load: Spent(ids, ids, ids[:1], ids * 0.5)}, r"up: expected int32 of shape"),
        ({"spend": lambda key, ids, load: Spent(ids, ids, ids, 1.0)}, r"joules: expected floats of shape"),
    ],
)
def test_functions_of_ones_own(changes, told, way):
    """Catches times in seconds that are cut to whole ticks, and one answer that stands for all clients."""
    with pytest.raises(TypeError, match=told):
        by(made()._replace(population_size=4, **changes), way)


@pytest.mark.full
@pytest.mark.default_rows(1)
@pytest.mark.parametrize("way", ["clock", "buffer"])
def test_devices_of_ones_own_in_64_bits(way):
    """Catches joules that are float64 only for JAX counts so."""
    with jax.enable_x64(True):
        ones = lambda ids: jnp.ones(ids.shape, jnp.int32)  # noqa: E731
        spend = lambda key, ids, load: Spent(ones(ids), ones(ids), ones(ids), jnp.ones(ids.shape))  # noqa: E731
        assert by(Devices(4, spend), way)["joules"].dtype == jnp.float32
