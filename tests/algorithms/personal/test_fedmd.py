"""FedMD against NumPy, clients that agree, and what is sent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, client, models, population, sampling, transform
from fedjax_sim.types import ClientData
from tests.algorithms.personal import problem as p
from tests.refusals import refused

CLASSES, RATE, STEPS, TEMPERATURE = 3, 0.2, 2, 2.0
MODEL = models.from_fn(lambda key: jax.random.normal(key, (2, CLASSES)), lambda w, x: x @ w)
PUBLIC = np.random.default_rng(4).normal(size=(6, 2)).astype(np.float32)
MASK = np.arange(6) < 5


def rows():
    labels = np.random.default_rng(2)
    return [{"x": x["x"], "y": labels.integers(0, CLASSES, len(x["y"])).astype(np.int32)} for x in p.rows()]


def distilled(sampler=None, **options):
    public = ClientData({"x": jnp.where(MASK[:, None], PUBLIC, jnp.nan)}, jnp.array(MASK))
    return algorithms.fedmd(
        MODEL, models.supervised(MODEL, models.softmax_cross_entropy), sampler or sampling.full(p.NUM_CLIENTS),
        public=public, distill_steps=STEPS, temperature=TEMPERATURE,
        **{"optimizer": optax.sgd(p.RATE), "distill_optimizer": optax.sgd(RATE)} | p.OPTIONS | options,
    )  # fmt: skip


def trained(algorithm, clients, rounds=p.ROUNDS):
    people, params = population.from_clients(clients), MODEL.init(jax.random.key(3))[0]
    state, step, info = algorithm.init(jax.random.key(0), params, people), jax.jit(algorithm.step), None
    for round in range(rounds):
        state, info = step(jax.random.key(round), state, people)
    return state, info, np.asarray(params, np.float64)


def softmax(z):
    return np.exp(z) / np.exp(z).sum(1, keepdims=True)


def oracle(start, clients, imitates=True, decay=(1.0, 1.0)):
    x, own, consensus = np.float64(PUBLIC[MASK]), [start] * len(clients), None
    for round in range(p.ROUNDS):
        own_rate, imitation_rate = p.RATE * decay[0] ** round, RATE * decay[1] ** round
        for i, data in enumerate(clients):
            w = own[i]
            for _ in range(STEPS if imitates and consensus is not None else 0):
                error = softmax(x @ w / TEMPERATURE) - softmax(consensus / TEMPERATURE)
                w = w - imitation_rate * TEMPERATURE * x.T @ error / len(x)
            for _ in range(p.STEPS):
                error = softmax(data["x"] @ w) - np.eye(CLASSES)[data["y"]]
                w = w - own_rate * data["x"].T @ error / len(data["y"])
            own[i] = w
        consensus = np.mean([x @ w for w in own], 0)
    return own, consensus


def test_matches_numpy():
    """Catches a consensus from before the training, imitation after it, padding that teaches, and a mean by rows."""
    algorithm = distilled()
    state, info, start = trained(algorithm, rows())
    own, consensus = oracle(start, rows())
    found = algorithm.evaluated.personal(state, jnp.arange(p.NUM_CLIENTS))
    np.testing.assert_allclose(found, own, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(state.server.logits[MASK], consensus, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(algorithm.params(state), start, rtol=1e-6)
    assert info["uplink_bytes"].total() == info["downlink_bytes"].total() == p.NUM_CLIENTS * 4 * 6 * CLASSES
    assert info["update_norm"] == 0 and np.abs(np.array(own) - oracle(start, rows(), imitates=False)[0]).max() > 0.01


@pytest.mark.default_rows("distill_optimizer")
@pytest.mark.parametrize("name, decay", [("distill_optimizer", (1.0, 0.5)), ("optimizer", (0.5, 1.0))])
def test_a_rate_may_fall_over_rounds(name, decay):
    """Catches clients who are not told the round, in the imitation or where its rate alone falls."""
    rate = RATE if name == "distill_optimizer" else p.RATE
    falling = client.over_rounds(optax.sgd, optax.exponential_decay(rate, 1, 0.5))
    algorithm = distilled(**{name: falling})
    state, _, start = trained(algorithm, rows())
    own, _ = oracle(start, rows(), decay=decay)
    found = algorithm.evaluated.personal(state, jnp.arange(p.NUM_CLIENTS))
    np.testing.assert_allclose(found, own, rtol=2e-4, atol=2e-5)
    assert np.abs(np.array(own) - oracle(start, rows())[0]).max() > 0.01


@pytest.mark.full
def test_equal_clients_teach_each_other_nothing():
    """Catches logits of another model than the one that is kept, and a temperature on one side alone."""
    clients = [rows()[2]] * 3
    algorithm = distilled(sampling.full(3))
    state, _, start = trained(algorithm, clients)
    alone = oracle(start, clients, imitates=False)[0]
    np.testing.assert_allclose(algorithm.evaluated.personal(state, jnp.arange(3)), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_bytes_are_of_logits():
    _, info, _ = trained(distilled(), rows(), rounds=1)
    assert info["uplink_bytes"].total() == info["downlink_bytes"].total() == p.NUM_CLIENTS * 4 * 6 * CLASSES


@pytest.mark.full
def test_logits_are_messages():
    """A robust rule and a compressor are of the logits. Catches one that is accepted and not applied."""
    state, _, _ = trained(distilled(aggregator=aggregation.median()), rows())
    plain, _, _ = trained(distilled(), rows())
    coarse, info, _ = trained(distilled(transform=transform.quantize(4)), rows())
    assert np.abs(state.server.logits - plain.server.logits).max() > 1e-3
    assert np.abs(coarse.server.logits - plain.server.logits).max() > 1e-3
    assert info["uplink_bytes"].total() < p.NUM_CLIENTS * 4 * 6 * CLASSES
    with refused("transform", rule="sends numbers"):
        distilled(transform=transform.quantize(4, range=1.0, integers=True))
