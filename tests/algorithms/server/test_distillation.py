"""Federated and centralised: training from a server's model, and the distillation of the clients' ensemble."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, client, models, population, sampling, server, transform
from fedjax_sim.types import ClientData
from tests.laws import laws, problems as p
from tests.refusals import refused

KEY = jax.random.key(2)
RNG = np.random.default_rng(4)
X, Y = RNG.normal(size=(12, 3)).astype(np.float32), RNG.integers(0, 2, 12)
PUBLIC = ClientData({"x": jnp.array(RNG.normal(size=(5, 3)), jnp.float32)}, jnp.arange(5) < 4)
MODEL = models.from_fn(lambda key: jnp.zeros((3, 2)), lambda params, x: x @ params)
LOSS = models.supervised(MODEL, models.softmax_cross_entropy)
OFFSETS = [0, 2, 7, 12]


def feddf(**options):
    known = {"optimizer": optax.sgd(0.4), "distill_optimizer": optax.sgd(0.5), "distill_steps": 3}
    known |= {"num_steps": 2, "temperature": 2.0, "mesh": None}
    return algorithms.feddf(MODEL, LOSS, sampling.full(3), public=PUBLIC, **known | options)


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def one_round(start, rows, weights, factor=4.0):
    """NumPy's FedDF with temperature 2: (the mean of the models, the student); the divergence is times the factor."""
    local = []
    for a, b in rows:
        w = start.copy()
        for _ in range(2):
            w -= 0.4 * X[a:b].T @ (softmax(X[a:b] @ w) - np.eye(2)[Y[a:b]]) / (b - a)
        local.append(w)
    x = np.float64(PUBLIC.examples["x"])[:4]
    teacher = softmax(np.mean([x @ w for w in local], axis=0) / 2)
    mean = np.average(local, axis=0, weights=weights)
    w = mean.copy()
    for _ in range(3):
        w -= 0.5 * factor * x.T @ (softmax(x @ w / 2) - teacher) / 2 / 4
    return mean, w


def test_feddf():
    """Two rounds. Faults: a teacher weighed by examples, models of the round before, padding among the public examples,
    steps towards the mean's own logits."""
    people, start = population.stored({"x": X, "y": Y}, OFFSETS), jnp.array(RNG.normal(size=(3, 2)), jnp.float32)
    made = feddf()
    state, step, w = made.init(KEY, start, people), jax.jit(made.step), np.float64(start)
    for t in range(2):
        state, _ = step(jax.random.fold_in(KEY, t), state, people)
        mean, w = one_round(w, [(0, 2), (2, 7), (7, 12)], [2, 5, 5])
    np.testing.assert_allclose(made.params(state), w, rtol=1e-4, atol=1e-5)
    assert np.abs(mean - w).max() > 1e-3


@pytest.mark.full
def test_who_is_not_there_teaches_nothing():
    """One round with a client without examples. Fault: its model, which is the server's, among the teachers."""
    start, made = jnp.array(RNG.normal(size=(3, 2)), jnp.float32), feddf()
    fewer = population.stored({"x": X, "y": Y}, [0, 0, 7, 12])
    state, _ = jax.jit(made.step)(KEY, made.init(KEY, start, fewer), fewer)
    np.testing.assert_allclose(
        made.params(state), one_round(np.float64(start), [(0, 7), (7, 12)], [7, 5])[1], rtol=1e-4, atol=1e-5
    )


@pytest.mark.full
def test_the_divergence_alone():
    """One round without the factor T^2, with which gradients would be four times as large."""
    people, start = population.stored({"x": X, "y": Y}, OFFSETS), jnp.array(RNG.normal(size=(3, 2)), jnp.float32)
    made = feddf(squared_temperature=False)
    state, _ = jax.jit(made.step)(KEY, made.init(KEY, start, people), people)
    rows = np.float64(start), [(0, 2), (2, 7), (7, 12)], [2, 5, 5]
    np.testing.assert_allclose(made.params(state), one_round(*rows, factor=1.0)[1], rtol=1e-4, atol=1e-5)
    assert np.abs(one_round(*rows)[1] - made.params(state)).max() > 1e-2


def test_a_servers_rate_may_not_fall_over_rounds():
    """Fault: an error of the first round that names the clients' optimizer, whose rate may fall."""
    falling = client.over_rounds(optax.sgd, optax.linear_schedule(0.1, 0.0, 4))
    with refused("distill_optimizer", rule="does not fall over rounds"):
        feddf(distill_optimizer=falling)
    feddf(optimizer=falling)
    with refused("optimizer", rule="does not fall over rounds"):
        feddf(optimizer=falling, distill_optimizer=None)
    work = client.local_sgd(LOSS, falling, client.work(num_steps=1))
    plain = algorithms.fedavg(LOSS, sampling.full(3), falling, num_steps=1, mesh=None)
    with refused("work", rule="does not fall over rounds"):
        algorithms.pretrained(plain, work, PUBLIC)


@pytest.mark.full
def test_models_that_agree_teach_nothing():
    """Fault: a student that leaves the mean though all clients' models are that one."""
    people = population.stored({"x": np.tile(X[:4], (3, 1)), "y": np.tile(Y[:4], 3)}, [0, 4, 8, 12])
    start = jnp.array(RNG.normal(size=(3, 2)), jnp.float32)
    plain = algorithms.fedavg(LOSS, sampling.full(3), optax.sgd(0.4), num_steps=2, mesh=None)
    ends = []
    for made in (feddf(), plain):
        state, _ = jax.jit(made.step)(KEY, made.init(KEY, start, people), people)
        ends.append(np.asarray(made.params(state)))
    np.testing.assert_allclose(*ends, atol=1e-6)
    with refused("transform", rule="sends numbers"):
        feddf(transform=transform.quantize(8, range=1.0, integers=True))


@pytest.mark.full
def test_a_part_that_only_the_server_has():
    """Clients fit a slope by a loss of their own, the server an offset on its examples; two rounds. Fault: a client who
    is sent, or counted bytes for, the server's part."""
    own, slope, offset = np.float64([1.0, 2.0]), 0.0, 0.0
    data = ClientData({"x": jnp.ones(2), "y": jnp.array(own, jnp.float32)}, jnp.ones(2, bool))

    def clients_loss(params, examples, key):
        return (params["slope"] - examples["y"]) ** 2 / 2

    def joined_loss(params, examples, key):
        return (params["slope"] * examples["x"] + params["offset"] - examples["y"]) ** 2 / 2

    steps = client.local_sgd(joined_loss, optax.sgd(0.5), client.work(num_steps=1))
    step = server.with_own_part(server.optimizer(optax.sgd(1.0)), steps, data, ["offset"], whole=False)
    work = client.local_sgd(clients_loss, optax.sgd(0.1), client.work(num_steps=1))
    made = algorithms.federated(sampling.full(2), work, aggregation.mean(), step, mesh=None)
    people = population.stored({"y": np.float32([3, 4, 5])}, [0, 1, 3])
    state, one = made.init(KEY, {"slope": jnp.zeros(()), "offset": jnp.zeros(())}, people), jax.jit(made.step)
    for t in range(2):
        state, info = one(jax.random.fold_in(KEY, t), state, people)
        slope -= 0.1 * (slope - 4.0)  # (3 + 2 * 4.5) / 3
        offset -= 0.5 * (slope + offset - own.mean())
    found = made.params(state)
    np.testing.assert_allclose([found["slope"], found["offset"]], [slope, offset], rtol=1e-5)
    assert info["uplink_bytes"].total() == info["downlink_bytes"].total() == 8


@pytest.mark.full
@pytest.mark.optimised
def test_pretrained():
    """Fault: rounds from the model that was given, or with other keys."""
    work = client.local_sgd(p.linear_loss, optax.sgd(0.1), client.work(num_steps=3))
    data = p.ragged().client(jnp.int32(0))
    plain = algorithms.fedavg(
        p.linear_loss, sampling.uniform(24, 5), optax.sgd(p.RATE), num_steps=2, batch_size=2, mesh=None
    )
    made, start = algorithms.pretrained(plain, work, data), jnp.array(p.START)
    data = data._replace(examples=jax.tree.map(lambda x: jnp.nan_to_num(x), data.examples))
    trained = start + work.apply(KEY, start, (), data)[0].update
    step = jax.jit(plain.step)
    found, expected = (x.init(KEY, y, p.ragged()) for x, y in ((made, start), (plain, trained)))
    assert np.abs(np.asarray(plain.params(found)) - start).max() > 0.01
    for t in range(2):
        found, expected = (step(jax.random.fold_in(KEY, t), state, p.ragged())[0] for state in (found, expected))
    laws.check_equal_bits(found, expected, "rounds from the trained model")


@pytest.mark.full
def test_pretraining_that_diverges():
    """Faults: a model of NaN that every round then skips; examples of NaN or infinity that reach the start."""
    people, start = population.stored({"x": X, "y": Y}, OFFSETS), jnp.zeros((3, 2))
    made = algorithms.fedavg(LOSS, sampling.full(3), optax.sgd(0.1), num_steps=1, mesh=None)
    work = client.local_sgd(LOSS, optax.sgd(3e38), client.work(num_steps=50))
    own = ClientData({"x": jnp.array(X), "y": jnp.array(Y)}, jnp.ones(12, bool))
    with pytest.raises(FloatingPointError, match="work: expected training that ends"):
        algorithms.pretrained(made, work, own).init(KEY, start, people)
    for wrong in (np.nan, np.inf, -np.inf):
        spoilt = ClientData({"x": own.examples["x"].at[4, 1].set(wrong), "y": own.examples["y"]}, own.mask)
        with pytest.raises(ValueError, match="data: expected finite examples"):
            algorithms.pretrained(made, work, spoilt)
        hidden = spoilt._replace(mask=jnp.arange(12) != 4)  # padding may hold anything
        algorithms.pretrained(made, work, hidden)
