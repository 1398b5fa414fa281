"""What clients send and receive under aggregators that have more sent than messages and a model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import adversary, aggregation, network, population, sampling, transform
from fedjax_sim.aggregation.secure.cost import secure_sum_cost
from fedjax_sim.aggregation.secure.homomorphic import ciphertext_bytes
from fedjax_sim.aggregation.secure.protocol.protocol import client_down_bytes
from fedjax_sim.algorithms import fedavg, hierarchical_fedavg
from fedjax_sim.round.costs import client_wires, work_of
from tests.laws import problems as p

KEY = jax.random.key(0)
MODEL = jax.ShapeDtypeStruct((10_000,), jnp.float32)
INTEGERS = transform.quantize(8, range=1.0, integers=True)


def zero_loss(params, examples, key):
    return 0 * examples["x"][:, 0] * params.sum()


def made(aggregator, num_clients, change=None):
    work = {"num_steps": 1, "weighting": "uniform", "aggregator": aggregator, "transform": change}
    return fedavg(zero_loss, sampling.uniform(p.NUM_CLIENTS, num_clients), optax.sgd(0.1), **work, mesh=None)


def down(aggregator, num_clients, change=None, model=MODEL):
    """Bytes that a client receives in a round."""
    return -(-client_wires(made(aggregator, num_clients, change).parts, model, p.ragged())[1].bits // 8)


def test_bytes_of_keys_and_shares_come_down():
    """Catches keys and shares of m - 1 others, 64 and 64 bytes each, that nobody counts on their way down."""
    plain = aggregation.modular_sum(10.0, modulus_bits=40)
    model = 4 * MODEL.size
    assert down(plain, 10, INTEGERS) == down(aggregation.mean(), 10) == model
    assert down(aggregation.secure_sum(plain, 6), 10, INTEGERS) == model + 9 * (64 + 64)
    assert down(aggregation.secure_sum(plain, 3, neighbours=4), 10, INTEGERS) == model + 4 * (64 + 64)
    real = aggregation.real_secure_sum(plain, 6)
    assert down(real, 10, INTEGERS) == model + client_down_bytes(10, None)
    secure = aggregation.secure_sum(aggregation.modular_sum(1.0), 501)
    keys = secure.facts.wire_down(MODEL, client_wires(made(plain, 10, INTEGERS).parts, MODEL, p.ragged())[1], 1000)
    assert keys.bits // 8 == 40_000 + 127_872


def test_an_encrypted_mean_comes_down_encrypted():
    """Six silos and a model of 64 numbers: a ciphertext each, not 256 bytes. Catches a broadcast that a server without
    a key could not send, and an attack around the mean that forgets its ciphertexts."""
    model = jax.ShapeDtypeStruct((64,), jnp.float32)
    silos = aggregation.homomorphic_mean()
    assert 6 * down(silos, 6, model=model) == 6 * ciphertext_bytes(64) == 787_584
    alone = adversary.corrupted(silos, adversary.sign_flip(), adversary.clients([0]))
    assert down(alone, 6, model=model) == ciphertext_bytes(64)


def test_clocks_and_samplers_read_both_ways():
    """Seconds of the download are those of all that comes down. Catches a clock that prices the model alone."""
    plain = aggregation.modular_sum(10.0, modulus_bits=40)
    star = made(aggregation.secure_sum(plain, 6), 10, INTEGERS).parts
    work = work_of(star, MODEL, p.ragged())
    assert work.bytes_down == 40_000 + 9 * 128
    slow, fast = network.constant(1e3), network.constant(1e12)
    devices = network.heterogeneous(p.NUM_CLIENTS, speed=fast, bandwidth_down=slow, bandwidth_up=fast)
    clocked = sampling.with_clock(star.sampler, devices)
    cohort, _ = clocked.sample(jax.random.key(0), clocked.tell(clocked.init(), work))
    np.testing.assert_allclose(cohort.timing.spent.down, 1000 * work.bytes_down / 1e3, atol=1)


def run(made, people, rounds=6):
    state = made.init(KEY, jnp.zeros(3), people)
    step = jax.jit(made.step)
    for t in range(rounds):
        state, info = step(jax.random.fold_in(KEY, t), state, people)
        yield {name: x.total() if hasattr(x, "total") else np.asarray(x) for name, x in info.items()}


@pytest.mark.full
def test_keys_of_those_who_are_invited():
    """Poisson cohorts in 17 slots: bytes, both ways, and seconds are those of a cohort of as many. Catches clients who
    pay for the keys of slots that invite nobody."""
    slow, fast = network.constant(1e3), network.constant(1e12)
    devices = network.heterogeneous(p.NUM_CLIENTS, speed=fast, bandwidth_down=slow, bandwidth_up=slow)
    clocked = sampling.with_clock(sampling.poisson(p.NUM_CLIENTS, 0.15), devices)
    work = {"num_steps": 1, "weighting": "uniform", "transform": INTEGERS, "mesh": None}
    secure = aggregation.secure_sum(aggregation.modular_sum(10.0, modulus_bits=40), 1)
    invited = set()
    for info in run(fedavg(zero_loss, clocked, optax.sgd(0.1), aggregator=secure, **work), p.ragged()):
        number = int(info["clients_invited"])
        cost = secure_sum_cost(max(number, 1), 3, 40)
        up, down = -(-cost.client_up_bits // 8), 12 + cost.client_down_bits // 8
        assert (info["uplink_bytes"], info["downlink_bytes"]) == (number * up, number * down)
        seconds = (up + down) / 1e3 if number else 0
        np.testing.assert_allclose(info["round_seconds"], seconds, atol=0.004)
        invited.add(number)
    assert len(invited) > 2


@pytest.mark.full
def test_an_edge_pays_for_its_own_clients():
    """Edges of 1, 9 and 2 clients, each around a complete graph. Catches keys of places that are empty in an edge."""
    groups = np.repeat([0, 1, 2], [1, 9, 2])
    people = population.grouped(population.quadratic_population([1.0] * 12, [0.0] * 12), groups)
    secure = aggregation.secure_sum(aggregation.modular_sum(10.0, modulus_bits=40), 1)
    how = {"edge_aggregator": secure, "edge_transform": INTEGERS, "edge_weighting": "uniform", "weighting": "uniform"}
    made = hierarchical_fedavg(
        population.quadratic_loss, sampling.full(3), optax.sgd(0.1), num_steps=1, group_size=9, mesh=None, **how
    )
    state = made.init(KEY, {"w": jnp.zeros(3)}, people)
    _, info = jax.jit(made.step)(KEY, state, people)
    costs = {number: secure_sum_cost(number, 3, 40) for number in (1, 9, 2)}
    down = sum(number * (12 + cost.client_down_bits // 8) for number, cost in costs.items())
    up = sum(number * -(-cost.client_up_bits // 8) for number, cost in costs.items())
    assert (info["edge_uplink_bytes"].total(), info["edge_downlink_bytes"].total()) == (up, down)
