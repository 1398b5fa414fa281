"""Laws of simulated time, over all algorithms whose rounds take any: it follows from the work, and from the bytes."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import algorithms, network, sampling
from tests.laws import cases, problems as p

KEY = jax.random.key(0)
SIZES = np.full(p.NUM_CLIENTS, p.ROWS)
AS_STEPS = {"num_steps": 2 * p.ROWS // p.BATCH, "batch_size": p.BATCH}
AS_EPOCHS = {"num_epochs": 2, "batch_size": p.BATCH}
DOWN, UP = 125.0, 500.0  # bytes a second: a byte takes whole ticks
OTHERS = cases.named("algorithms", lambda row: row.clock != "priced")  # no clock prices their rounds
FAMILIES = ("dpsgd", "fedbuff", "hierarchical_fedavg", "pairwise_gossip")
TIMED = cases.rows(cases.named("algorithms", lambda row: row.clock == "priced"), FAMILIES)


def first_round(monkeypatch, name, devices, work):
    """Info of a row's first round on these devices, on the host: times, bytes and counts."""
    with monkeypatch.context() as patch:
        patch.setattr(cases, "WORK", work)
        patch.setattr(cases, "SAMPLER", sampling.with_clock(cases.SAMPLER, devices(p.NUM_CLIENTS)))
        patch.setattr(cases, "_devices", lambda: devices(p.NUM_CLIENTS))
        row = cases.CASES["algorithms"][name]
        made = row() if row.timed is None else row.timed(devices)
    people = p.ragged(sizes=SIZES)
    wanted = ("seconds", "joules", "bytes", "clients_invited", "arrivals", "saturated_clients")

    def told(state, people):  # nobody trains for that: the compiler drops what no number needs
        info = made.step(KEY, state, people)[1]
        return {key: x for key, x in info.items() if key.endswith(wanted)}

    found = jax.jit(told)(made.init(KEY, jnp.array(p.START), people), people)
    return {key: x.total() if hasattr(x, "total") else float(x) for key, x in found.items()}


def with_local_work(name):
    stated = cases.CASES["algorithms"][name].has_epochs
    return "num_epochs" in inspect.signature(getattr(algorithms, name)).parameters if stated is None else stated


@pytest.mark.default_rows("dpsgd")
@pytest.mark.parametrize("name", [x for x in TIMED if with_local_work(getattr(x, "values", (x,))[0])])
def test_steps_and_epochs_take_as_long(name, monkeypatch):
    """The same local work in minibatch steps and in epochs has the same seconds and joules. Faults: a loop of unknown
    length that counts once, or whose length nobody asks for."""

    def phones(number):
        links = {"bandwidth_down": 100.0, "bandwidth_up": network.lognormal(20.0, 0.5), "joules_per_byte": 0.5}
        return network.heterogeneous(number, speed=network.lognormal(50.0, 1.0), compute_watts=3.0, **links)

    steps, epochs = (first_round(monkeypatch, name, phones, work) for work in (AS_STEPS, AS_EPOCHS))
    assert steps["simulated_seconds"] == epochs["simulated_seconds"] > 0
    assert steps.get("joules") == epochs.get("joules") and steps.get("joules", 1) > 0


@pytest.mark.default_rows("dpsgd")
@pytest.mark.parametrize("name", TIMED)
def test_seconds_are_those_of_the_bytes(name, monkeypatch):
    """Work that takes no time, and a radio of 1 W: its joules are the seconds of all messages of a round without
    losses, which are the bytes that Info counts over the bandwidths, both ways and on all levels. Of nodes that wait
    for each other, who send and receive as much, the round itself is as long.

    Faults: a placeholder's bytes, a way that is free, messages inside of an edge that nobody prices.
    """

    def radios(number):
        links = {"bandwidth_down": DOWN, "bandwidth_up": UP}
        return network.heterogeneous(number, speed=1e30, radio_watts=1.0, ticks_per_second=1_000_000, **links)

    info = first_round(monkeypatch, name, radios, AS_STEPS)
    up, down = (sum(x for key, x in info.items() if key.endswith(f"{way}link_bytes")) for way in ("up", "down"))
    if not any(key.endswith("downlink_bytes") for key in info):
        down = up  # without a server what one node sends another receives
    assert (up > 0) == cases.CASES["algorithms"][name].sends and info.get("wasted_bytes", 0) == 0
    if "joules" not in info:
        assert info["simulated_seconds"] == pytest.approx((up / UP + down / DOWN) / p.NUM_CLIENTS, rel=1e-5)
        return
    if "arrivals" in info:  # joules are those of all work that was begun, whose messages are yet to come
        up *= info["clients_invited"] / info["arrivals"]
    assert info["joules"] == pytest.approx(up / UP + down / DOWN, rel=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_what_takes_no_clock(name, monkeypatch):
    """Catches a row that is passed over although it takes devices."""
    recipe = getattr(algorithms, name)
    assert not {"devices", "edge_devices"} & inspect.signature(recipe).parameters.keys()
    row = cases.CASES["algorithms"][name]
    if row.clock == "refused":
        with monkeypatch.context() as patch:
            clocked = sampling.with_clock(cases.SAMPLER, network.cross_silo(p.NUM_CLIENTS))
            patch.setattr(cases, "SAMPLER", clocked)
            with pytest.raises(ValueError, match="sampler: expected"):
                row()


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", TIMED)
def test_who_is_too_slow_for_the_clock_is_counted(name, monkeypatch):
    """Phones whose messages take nine days, which a clock of milliseconds does not count: Info counts all who work, and
    nobody where the clock counts seconds. Fault: simulated time that is wrong, and nobody is told."""

    def phones(ticks_per_second):
        links = {"bandwidth_down": 1e9, "bandwidth_up": 1 / (9 * 24 * 3600), "ticks_per_second": ticks_per_second}
        return lambda number: network.heterogeneous(number, speed=1e30, **links)

    num_saturated = first_round(monkeypatch, name, phones(1000), AS_STEPS)["saturated_clients"]
    assert (num_saturated > 0) == cases.CASES["algorithms"][name].sends
    assert first_round(monkeypatch, name, phones(1), AS_STEPS)["saturated_clients"] == 0
