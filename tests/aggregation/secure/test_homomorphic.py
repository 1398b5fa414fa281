"""Encrypted sums: the modelled error and bytes are TenSEAL's."""

from __future__ import annotations

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from fedjax_sim import adversary, aggregation, algorithms, sampling, server, transform
from fedjax_sim.aggregation import homomorphic_mean
from fedjax_sim.aggregation.secure.homomorphic import ciphertext_bytes, homomorphic_std, run_homomorphic_sum
from fedjax_sim.round import observe
from fedjax_sim.types import Received
from tests.laws import problems as p
from tests.refusals import refused

RNG = np.random.default_rng(0)
KEY = jax.random.key(1)
SETTINGS = [(4096, 30, 20), (4096, 54, 30), (8192, 60, 40)]


def real():
    return pytest.importorskip("tenseal", reason="the extra `homomorphic` is not installed")


def aggregate(made, messages, weights, key=KEY):
    @jax.jit
    def run(messages, weights):
        slots = jnp.arange(len(weights), dtype=jnp.int32)
        spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), messages)
        carry = made.accumulate(key, None, made.init(spec, len(weights)), Received(messages, weights, slots, slots))
        return made.finalize(key, None, carry)

    return run(jax.tree.map(jnp.asarray, messages), jnp.asarray(weights, jnp.float32))


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_sum_is_right(setting):
    """Within the bound, over two ciphertexts and a part of a third. Catches one that is lost or out of order."""
    real()
    degree, modulus_bits, scale_bits = setting
    messages = RNG.normal(size=(5, degree + 7))
    found = run_homomorphic_sum(messages, degree=degree, modulus_bits=modulus_bits, scale_bits=scale_bits)
    np.testing.assert_array_equal(found.error, found.sum - messages.sum(0))
    assert 0 < np.abs(found.error).max() < found.bound < 30 * found.std and found.sum.shape == (degree + 7,)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("degree, scale_bits", [(4096, 20), (8192, 40)])
def test_the_law_of_the_error(degree, scale_bits):
    """Six keys, three slots' worth each: the standard deviation within 5 %, and Laplace by its kurtosis of 6 (a normal
    law has 3; within 1) and by a Kolmogorov-Smirnov test, p > 1e-5; the modelled error is of the same law.

    Slots share a key and are nearly independent of each other. Catches a law for one ciphertext that ignores the key.
    """
    real()
    drawn = []
    for _ in range(6):
        messages = RNG.normal(size=(8, 3 * degree // 2))
        found = run_homomorphic_sum(messages, degree=degree, modulus_bits=scale_bits + 18, scale_bits=scale_bits)
        drawn.append(found.error[: degree // 2] / found.std)
        drawn.append(found.error[degree // 2 :] / found.std)
    measured = np.concatenate(drawn)
    zeros = np.zeros((8, measured.size), np.float32)
    options = {"degree": degree, "modulus_bits": scale_bits + 18, "scale_bits": scale_bits}
    update, metrics = aggregate(homomorphic_mean(2.0, **options), zeros, np.ones(8))
    assert float(metrics["encryption_error"]) == pytest.approx(homomorphic_std(degree, scale_bits, 8) / 2, rel=1e-6)
    modelled = np.asarray(update, np.float64) / float(metrics["encryption_error"])
    for errors in (measured, modelled):
        assert abs(errors.std() - 1) < 0.05 and abs(stats.kurtosis(errors, fisher=False) - 6) < 1
        assert abs(errors.mean()) < 6 / np.sqrt(errors.size)
    assert stats.kstest(modelled, "laplace", (0, 0.5**0.5)).pvalue > 1e-5
    assert stats.ks_2samp(measured[::3] / measured.std(), modelled[::3] / modelled.std()).pvalue > 1e-5


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_bytes(setting):
    """TenSEAL's bytes lie between the entropy of uniform coefficients and what is stated, which is at most one percent
    more than it sends uncompressed. Catches a ciphertext of one polynomial, or one that is half full.
    """
    real()
    degree, modulus_bits, scale_bits = setting
    for size in (1, degree // 2, degree // 2 + 1):
        messages = RNG.normal(size=(2, size))
        found = run_homomorphic_sum(messages, degree=degree, modulus_bits=modulus_bits, scale_bits=scale_bits)
        made = homomorphic_mean(degree=degree, modulus_bits=modulus_bits, scale_bits=scale_bits)
        wire = made.facts.wire(jax.ShapeDtypeStruct((size,), jnp.float32), None, 2)
        assert wire.bits == 8 * ciphertext_bytes(size, degree)
        blocks = 1 + (size > degree // 2)
        assert blocks * 2 * degree * modulus_bits <= 8 * found.bytes_up.min()
        assert max(found.bytes_up.max(), found.bytes_down) <= wire.bits // 8
        if modulus_bits == 60:
            assert found.bytes_up.min() > 0.99 * wire.bits // 8
        assert found.expansion == found.bytes_up.mean() / (4 * size)


@pytest.mark.full
def test_the_mean_plus_its_error():
    """By examples and over a fixed number, leaves of several shapes, an absent client: the plain mean, and an error of
    the stated size that is not the same on two leaves, nor with another key. Catches an error that is scaled twice.
    """
    messages = {"a": RNG.normal(size=(4, 30, 20)).astype(np.float32), "b": RNG.normal(size=(4, 600)).astype(np.float32)}
    weights = np.float32([3, 0, 5, 2])
    options = {"degree": 4096, "modulus_bits": 40, "scale_bits": 20}
    for denominator, plain, divisor in (
        (None, aggregation.mean(), 10.0),
        (7.0, aggregation.fixed_mean(7.0, weighting="examples"), 7.0),
    ):
        made = homomorphic_mean(denominator, **options)
        (found, metrics), (expected, _) = (aggregate(x, messages, weights) for x in (made, plain))
        std = homomorphic_std(4096, 20, 3) / divisor
        assert float(metrics["encryption_error"]) == pytest.approx(std, rel=1e-6)
        errors = {name: np.ravel(found[name] - expected[name]) / std for name in found}
        for error in errors.values():
            assert 0.85 < error.std() < 1.15
        assert abs(np.corrcoef(errors["a"], errors["b"])[0, 1]) < 0.2
        other = aggregate(made, messages, weights, jax.random.key(2))[0]
        assert (np.asarray(other["b"]) != np.asarray(found["b"])).mean() > 0.9
        assert made.facts.sensitivity == plain.facts.sensitivity and not made.facts.homogeneous
    nothing, metrics = aggregate(homomorphic_mean(**options), messages, np.zeros(4))
    assert not nothing["a"].any() and float(metrics["encryption_error"]) == 0


def test_sums_past_the_range():
    """A sum that could wrap makes NaN and is counted; just below it does not. The real scheme refuses it.

    Catches a silent wrap-around.
    """
    made = homomorphic_mean(4.0, degree=4096, modulus_bits=40, scale_bits=30, weighting="uniform")
    for size, wraps in ((63.9, 0), (64.1, 1)):
        messages = np.zeros((4, 5), np.float32)
        messages[:, 2] = -size
        found, metrics = aggregate(made, messages, np.ones(4))
        assert np.isnan(found).all() == bool(wraps) and int(metrics["overflowed_rounds"]) == wraps
    with refused("messages", rule="256"):
        run_homomorphic_sum(messages, degree=4096, modulus_bits=40, scale_bits=30)


@pytest.mark.full
def test_a_federation():
    """FedAvg with uniform weights: near the plain run's model, the same bits on one and two devices; the bytes of
    ciphertexts; the server observes nothing but uniform words. Catches a view of the messages.
    """
    models, options = [], {"degree": 4096, "modulus_bits": 54, "scale_bits": 40}
    for aggregator, mesh in (
        (aggregation.mean(), None),
        (homomorphic_mean(**options), None),
        (homomorphic_mean(**options), "all"),
    ):
        federation = p.Federation(aggregator=aggregator, mesh=mesh)
        state, infos = federation.run(np.arange(p.SLOTS))
        models.append(p.flat(federation.algorithm.params(state)))
    assert models[1].tobytes() == models[2].tobytes()
    np.testing.assert_allclose(models[1], models[0], atol=1e-7)
    assert infos[0]["uplink_bytes"].total() == p.SLOTS * ciphertext_bytes(3, 4096)
    seen = observe(federation.algorithm, KEY, state, p.ragged()).messages
    assert seen.shape == (p.SLOTS, 1, 2, 4096, 2) and seen.dtype == jnp.uint32
    low, high = np.asarray(seen[..., 0]).ravel(), np.asarray(seen[..., 1]).ravel()
    assert high.max() < 2**22
    for cells in (low & 255, high >> 14):
        assert stats.chisquare(np.bincount(cells, minlength=256)).pvalue > 1e-5
    with refused("transform", rule="sends numbers"):
        p.Federation(aggregator=homomorphic_mean(), transform=transform.quantize(8, range=1.0, integers=True))


def test_wrong_options_are_refused(monkeypatch):
    """Catches parameters that are not secure, and messages that are no numbers."""
    for match, call in {
        "degree: expected one of 4096": lambda: homomorphic_mean(degree=2048),
        r"modulus_bits: expected an integer in \[30, 60\], got 61": lambda: homomorphic_mean(modulus_bits=61),
        r"scale_bits: expected an integer in \[10, 57\], got 58": lambda: homomorphic_mean(scale_bits=58),
        "denominator: expected": lambda: homomorphic_mean(0.0),
        "weighting: expected one of": lambda: homomorphic_mean(weighting="loss"),
        "messages: expected finite numbers": lambda: run_homomorphic_sum(np.full((2, 2), np.nan)),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(ImportError, match=r"tenseal: .*fedjax_sim\[homomorphic\]"):
        run_homomorphic_sum(np.ones((2, 2)))


def test_a_server_without_a_key_compresses_nothing():
    """Catches ciphertexts of a model that only who holds the key could have compressed."""
    step = {"optimizer": optax.sgd(0.1), "num_steps": 1, "aggregator": homomorphic_mean()}
    build = partial(algorithms.fedavg, p.linear_loss, sampling.full(4), **step)
    assert build().parts.aggregator.facts.keyless
    told = "downlink: expected None for a server without a key, got 'a compressor'"
    with pytest.raises(ValueError, match=told):
        build(downlink=transform.top_k(0.5))
    parts = build().parts
    compressing = server.downlink(server.optimizer(optax.sgd(1.0)), transform.top_k(0.5))
    with pytest.raises(ValueError, match=told):
        algorithms.federated(parts.sampler, parts.client, homomorphic_mean(), compressing)
    with refused("aggregator", rule="key"):
        algorithms.as_client_update(parts)


def test_an_attack_keeps_what_the_server_cannot_do():
    """Catches attackers around an encrypted mean, after whom its server has a key."""
    for attack in (adversary.sign_flip(), adversary.alie(), adversary.mimic(0), adversary.min_max(), adversary.fang()):
        assert adversary.corrupted(homomorphic_mean(), attack, adversary.clients([0])).facts.keyless, attack
