"""The picture of one round shows the round that the algorithm makes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, network, run, sampling, transform
from fedjax_sim.instruments import timeline, timeline_of_round
from tests.laws import problems as p
from tests.refusals import refused

KEY = jax.random.key(3)


def made(sampler, **options):
    return algorithms.fedavg(p.linear_loss, sampler, optax.sgd(0.1), num_steps=2, mesh=None, **options)


@pytest.mark.full
def test_it_is_the_round():
    """The third round of a run, against its info. Catches another key or state, and times of other clients."""
    speeds = {"speed": network.lognormal(500.0, 1.0), "bandwidth_down": network.constant(100.0)}
    there = network.bernoulli(0.7, slot_seconds=1)
    devices = network.heterogeneous(p.NUM_CLIENTS, **speeds, bandwidth_up=network.constant(10.0), availability=there)
    sampler = sampling.with_clock(sampling.full(p.NUM_CLIENTS), devices, num_invited=14)
    algorithm = made(sampling.with_distinct_clients(sampling.with_deadline(sampler, 2.2)))
    state, step = algorithm.init(KEY, jnp.array(p.START), p.ragged()), jax.jit(algorithm.step)
    for t in range(2):
        state, _ = step(jax.random.fold_in(KEY, t), state, p.ragged())
    key, before = jax.random.fold_in(KEY, 2), state.sampler.sampler.clock
    shown, few = (timeline(algorithm.parts, key, state.sampler, most=most) for most in (60, 5))
    info = step(key, state, p.ragged())[1]
    assert shown["begins"] == pytest.approx(float(before.seconds + before.ticks / 1000), rel=1e-5)
    assert shown["lasts"] == pytest.approx(float(info["round_seconds"]))
    assert shown["invited"] == int(info["clients_invited"]) == len(shown["clients"])
    assert shown["reported"] == int(info["clients_reported"]) > 0
    ends = [client["end"] for client in shown["clients"]]
    assert ends.count("reported") == shown["reported"]
    assert ends.count("cut off") == int(info["late"]) > 0 and ends.count("left") == int(info["interrupted"]) > 0
    parts = np.array([[client[name] for name in ("download", "training", "sending")] for client in shown["clients"]])
    totals = parts.sum(1)
    assert (np.diff(totals) > -1e-9).all() and totals[-1] == pytest.approx(shown["lasts"]) and len(few["clients"]) == 5
    assert [few["clients"][0], few["clients"][-1]] == [shown["clients"][0], shown["clients"][-1]]
    whole = np.array(ends) == "reported"
    np.testing.assert_allclose(parts[whole, 2], 1.2)  # 12 bytes at 10 bytes/s


@pytest.mark.full
def test_clients_who_drop_out():
    """Reports that are lost whenever the round ends. Catches them shown as clients who left, or who were cut off."""
    devices = network.heterogeneous(
        p.NUM_CLIENTS, speed=network.lognormal(500.0, 1.0), bandwidth_down=100.0, bandwidth_up=10.0
    )
    dropping = sampling.with_dropout(sampling.full(p.NUM_CLIENTS), 0.4)
    clocked = sampling.with_clock(dropping, devices)
    for sampler in (clocked, sampling.with_deadline(clocked, 2.2)):
        algorithm = made(sampler)
        state = algorithm.init(KEY, jnp.array(p.START), p.ragged())
        ends = [client["end"] for client in timeline(algorithm.parts, KEY, state.sampler)["clients"]]
        info = jax.jit(algorithm.step)(KEY, state, p.ragged())[1]
        assert ends.count("silent") == int(info["dropped"]) > 0
        assert ends.count("cut off") == int(info.get("late", 0)) and ("late" in info) == ("cut off" in ends)
        assert ends.count("left") == 0


def test_without_a_clock():
    """Catches a picture of a round that takes no time."""
    with pytest.raises(ValueError, match="a sampler with a clock"):
        timeline(made(sampling.full(p.NUM_CLIENTS)).parts, KEY, ())


@pytest.mark.full
@pytest.mark.parametrize("learns", [False, True])
def test_any_round(learns):
    """Rounds of a run, against its log; of a sampler that learns from losses, too.

    Catches the key, the clock or what a sampler has learnt of another round, and one that counts from 0.
    """
    devices = network.heterogeneous(
        p.NUM_CLIENTS, speed=network.lognormal(500.0, 1.0), bandwidth_down=100.0, bandwidth_up=10.0, jitter=0.3
    )
    plain = sampling.uniform(p.NUM_CLIENTS, 8)
    plain = sampling.power_of_choice(plain, 4) if learns else sampling.with_stragglers(plain, 0.3)
    clocked = sampling.with_clock(plain, devices, overhead_seconds=0.5)
    algorithm = made(sampling.with_deadline(clocked, 2.2), weighting="uniform")
    given = KEY, algorithm, jnp.array(p.START), p.ragged()
    records = run(*given, 6)[1].records
    seen = [timeline_of_round(*given, t) for t in (1, 2, 6)]
    assert len({shown["begins"] for shown in seen}) == 3
    for t, shown in zip((1, 2, 6), seen, strict=True):
        record = next(x for x in records if x["round"] == t)
        assert (
            np.float32(shown["lasts"]) == np.float32(record["round_seconds"])
            and shown["reported"] == record["clients_reported"]
        )
        assert shown["invited"] == record["clients_invited"] == len(shown["clients"])
        assert shown["begins"] + shown["lasts"] == pytest.approx(record["simulated_seconds"], rel=1e-6)
        assert [x["end"] for x in shown["clients"]].count("cut off") == record["late"]
    with pytest.raises(ValueError, match="round: expected an integer"):
        timeline_of_round(*given, 0)


def test_rounds_that_are_not_shown():
    """Catches a round that takes no time, and one of a private run, whose noise hides who takes part."""
    rest = jnp.array(p.START), p.ragged(), 1
    with pytest.raises(ValueError, match="a sampler with a clock"):
        timeline_of_round(KEY, made(sampling.full(p.NUM_CLIENTS)), *rest)
    noise = transform.gaussian_mechanism(1.0, 1.0)
    sampler = sampling.with_clock(sampling.uniform(p.NUM_CLIENTS, 4), network.cross_device(p.NUM_CLIENTS))
    with refused("algorithm", value="noise in transform", rule="without noise"):
        private = made(sampler)
        timeline_of_round(KEY, private._replace(parts=private.parts._replace(transform=noise)), *rest)
