"""Laws of simulated time, over all algorithms whose rounds take any: it follows from the work, and from the bytes."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import adversary, aggregation, algorithms, network, sampling, server, transform
from tests.laws import cases, problems as p

KEY = jax.random.key(0)
SIZES = np.full(p.NUM_CLIENTS, p.ROWS)
AS_STEPS = {"num_steps": 2 * p.ROWS // p.BATCH, "batch_size": p.BATCH}
AS_EPOCHS = {"num_epochs": 2, "batch_size": p.BATCH}
DOWN, UP = 125.0, 500.0  # bytes a second: a byte takes whole ticks
OTHERS = ("vertical", "split_client", "split_learning", "splitfed", "split_gnn", "hierarchical_split_gnn")
OTHERS += ("heterofl", "hierarchical_gossip")  # no clock prices their rounds


def over_edges(devices, **options):
    """Two of five edges make two rounds each, of three of their five clients; `devices`: (number) -> Devices."""
    cloud = sampling.with_clock(sampling.uniform(5, 2), devices(5))
    options |= {"edge_rounds": 2, "group_size": 5, "edge_sampler": sampling.uniform(5, 3)}
    options |= {"edge_devices": devices(p.NUM_CLIENTS)}
    made = algorithms.hierarchical_fedavg(p.linear_loss, cloud, optax.sgd(p.RATE), **options, **cases.WORK, **cases.RUN)
    return cases._over_groups(made)


def federation(devices):
    """`federated` from its parts, with a transform that sends less."""
    step, half = server.optimizer(optax.sgd(1.0)), transform.top_k(count=1)
    return algorithms.federated(cases.SAMPLER, cases._local(), aggregation.mean(), step, half, **cases.RUN)


def gossip(make, *options, mixing=lambda: network.metropolis(network.ring(p.NUM_CLIENTS)), **more):
    """Every node has as many neighbours."""
    return lambda devices: make(p.linear_loss, mixing(), *options, **more, **cases.RUN, devices=devices(p.NUM_CLIENTS))


def trained(make, **more):
    return lambda devices: gossip(make, optax.sgd(p.RATE), **more, **cases.WORK)(devices)


def of_everyone(make):
    """All clients take part in every round."""

    def made(devices):
        everyone = sampling.with_clock(sampling.full(p.NUM_CLIENTS), devices(p.NUM_CLIENTS))
        return make(p.linear_loss, everyone, optax.sgd(p.RATE), **cases.WORK, **cases.RUN)

    return made


OWN = {
    "as_client_update": lambda devices: over_edges(devices, edge_transform=transform.top_k(count=1)),
    "choco": trained(algorithms.choco, transform=transform.top_k(count=2)),
    "clipped_gossip": trained(
        algorithms.clipped_gossip, num_byzantine=1, attack=adversary.alie(), who=adversary.clients([3])
    ),
    "consensus": trained(algorithms.consensus),
    "dgd": gossip(algorithms.dgd, learning_rate=0.05),
    "dpsgd": trained(algorithms.dpsgd),
    "federated": federation,
    "gradient_tracking": gossip(algorithms.gradient_tracking, learning_rate=0.02),
    "hierarchical_fedavg": over_edges,
    "push_sum": trained(algorithms.push_sum, mixing=lambda: network.push(network.exponential(p.NUM_CLIENTS))),
}
OWN |= {name: of_everyone(getattr(algorithms, name)) for name in ("agnostic", "clustered_by_updates")}
SILENT = ("local",)  # nothing is sent, so no message takes time
FAMILIES = ("dpsgd", "fedbuff", "hierarchical_fedavg", "pairwise_gossip")
TIMED = cases.rows([name for name in sorted(cases.CASES["algorithms"]) if name not in OTHERS], FAMILIES)


def first_round(monkeypatch, name, devices, work):
    """Info of a row's first round on these devices, on the host: times, bytes and counts."""
    with monkeypatch.context() as patch:
        patch.setattr(cases, "WORK", work)
        patch.setattr(cases, "SAMPLER", sampling.with_clock(cases.SAMPLER, devices(p.NUM_CLIENTS)))
        patch.setattr(cases, "_devices", lambda: devices(p.NUM_CLIENTS))
        made = OWN[name](devices) if name in OWN else cases.CASES["algorithms"][name]()
    people = p.ragged(sizes=SIZES)
    wanted = ("seconds", "joules", "bytes", "clients_invited", "arrivals", "saturated_clients")

    def told(state, people):  # nobody trains for that: the compiler drops what no number needs
        info = made.step(KEY, state, people)[1]
        return {key: x for key, x in info.items() if key.endswith(wanted)}

    found = jax.jit(told)(made.init(KEY, jnp.array(p.START), people), people)
    return {key: x.total() if hasattr(x, "total") else float(x) for key, x in found.items()}


def with_local_work(name):
    options = inspect.signature(getattr(algorithms, name)).parameters
    return "num_epochs" in options or name == "as_client_update"


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
    assert (up > 0) == (name not in SILENT) and info.get("wasted_bytes", 0) == 0
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
    if name in ("heterofl", "vertical", "splitfed", "split_learning"):
        with monkeypatch.context() as patch:
            clocked = sampling.with_clock(cases.SAMPLER, network.cross_silo(p.NUM_CLIENTS))
            patch.setattr(cases, "SAMPLER", clocked)
            with pytest.raises(ValueError, match="sampler: expected"):
                cases.CASES["algorithms"][name]()


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", TIMED)
def test_who_is_too_slow_for_the_clock_is_counted(name, monkeypatch):
    """Phones whose messages take nine days, which a clock of milliseconds does not count: Info counts all who work, and
    nobody where the clock counts seconds. Fault: simulated time that is wrong, and nobody is told."""

    def phones(ticks_per_second):
        links = {"bandwidth_down": 1e9, "bandwidth_up": 1 / (9 * 24 * 3600), "ticks_per_second": ticks_per_second}
        return lambda number: network.heterogeneous(number, speed=1e30, **links)

    num_saturated = first_round(monkeypatch, name, phones(1000), AS_STEPS)["saturated_clients"]
    assert (num_saturated > 0) == (name not in SILENT)
    assert first_round(monkeypatch, name, phones(1), AS_STEPS)["saturated_clients"] == 0
