"""What clients send and receive under aggregators that have more sent than messages and a model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import adversary, aggregation, network, sampling, transform
from fedjax_sim.aggregation.homomorphic import ciphertext_bytes
from fedjax_sim.aggregation.secure_protocol import client_down_bytes
from fedjax_sim.algorithms import fedavg
from fedjax_sim.algorithms.costs import wires, work_of
from tests.laws import problems as p

MODEL = jax.ShapeDtypeStruct((10_000,), jnp.float32)
INTEGERS = transform.quantize(8, range=1.0, integers=True)


def zero_loss(params, examples, key):
    return 0 * examples["x"][:, 0] * params.sum()


def made(aggregator, num_clients, change=None):
    work = {"num_steps": 1, "weighting": "uniform", "aggregator": aggregator, "transform": change}
    return fedavg(zero_loss, sampling.uniform(p.NUM_CLIENTS, num_clients), optax.sgd(0.1), **work, mesh=None)


def down(aggregator, num_clients, change=None, model=MODEL):
    """Bytes that a client receives in a round."""
    return -(-wires(made(aggregator, num_clients, change).parts, model, p.ragged())[1].bits // 8)


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
    keys = secure.wire_down(MODEL, wires(made(plain, 10, INTEGERS).parts, MODEL, p.ragged())[1], 1000)
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
    np.testing.assert_allclose(cohort.spent.down, 1000 * work.bytes_down / 1e3, atol=1)
