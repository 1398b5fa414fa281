"""FlexLoRA against NumPy: the mean of the clients' products, cut to the rank."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import InvalidType, algorithms, population, sampling, transform, tree
from fedjax_sim.algorithms.server.flexlora import nearest_product
from tests.refusals import refused

KEY, RATE, STEPS, ROUNDS = jax.random.key(0), 0.05, 2, 3
SIZES = (4, 9, 6, 2)
RNG = np.random.default_rng(3)
CLIENTS = [
    {"x": RNG.normal(size=(n, 5)).astype(np.float32), "y": 3 * RNG.normal(size=(n, 4)).astype(np.float32)}
    for n in SIZES
]
PEOPLE = population.from_clients(CLIENTS)


def start(rank):
    draw = np.random.default_rng(7).normal
    factors = {"a": draw(size=(5, rank)) / 2, "b": draw(size=(rank, 4)) / 2}
    return {"layer": {name: x.astype(np.float32) for name, x in factors.items()}, "bias": np.zeros(4, np.float32)}


def loss_fn(params, examples, key):
    outputs = (examples["x"] @ params["layer"]["a"]) @ params["layer"]["b"] + params["bias"][None]
    return jnp.square(outputs - examples["y"]).sum(1) / 2


def local(a, b, bias, client):
    for _ in range(STEPS):
        error = (client["x"] @ a @ b + bias - client["y"]) / len(client["y"])
        slope = client["x"].T @ error
        a, b, bias = a - RATE * slope @ b.T, b - RATE * a.T @ slope, bias - RATE * error.sum(0)
    return a, b, bias


def oracle(rank, rounds=ROUNDS):
    """(product, bias, share of the mean product that the last cut left out)."""
    a, b, bias = (np.float64(x) for x in (*start(rank)["layer"].values(), start(rank)["bias"]))
    for _ in range(rounds):
        ends = [local(a, b, bias, client) for client in CLIENTS]
        mean = np.average([a @ b for a, b, _ in ends], axis=0, weights=SIZES)
        bias = np.average([bias for _, _, bias in ends], axis=0, weights=SIZES)
        left, values, right = np.linalg.svd(mean, full_matrices=False)
        a, b = left[:, :rank], values[:rank, None] * right[:rank]
    return a @ b, bias, np.sqrt((values[rank:] ** 2).sum() / (values**2).sum())


def trained(rank, rounds=ROUNDS, make=algorithms.flexlora, **options):
    algorithm = make(loss_fn, sampling.full(4), optax.sgd(RATE), num_steps=STEPS, **options)
    state, step, info = algorithm.init(KEY, start(rank), PEOPLE), jax.jit(algorithm.step), None
    for round in range(rounds):
        state, info = step(jax.random.key(round), state, PEOPLE)
    return algorithm.params(state), info


def product(params):
    return np.float64(params["layer"]["a"]) @ np.float64(params["layer"]["b"])


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("rank", [2, 4])
def test_matches_numpy(rank):
    """Catches a product of means, a mean that is not by rows, factors of the round before, and a bias that stays."""
    params, info = trained(rank)
    expected, bias, error = oracle(rank)
    np.testing.assert_allclose(product(params), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(params["bias"], bias, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(info["product_error"], error, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(params["layer"]["a"].T @ params["layer"]["a"], np.eye(rank), atol=1e-5)
    assert (error > 1e-3) == (rank < 4)


@pytest.mark.full
def test_it_is_not_the_product_of_means():
    """After one round, beside FedAvg: how far each is from the mean of the products, as a share of it."""
    expected, _, _ = oracle(4, rounds=1)
    away = [
        np.linalg.norm(product(trained(4, 1, make)[0]) - expected) / np.linalg.norm(expected)
        for make in (algorithms.flexlora, algorithms.fedavg)
    ]
    assert away[0] < 1e-5 and away[1] > 0.01


@pytest.mark.default_rows(1)
@pytest.mark.parametrize(("messages", "rank", "sides"), [(3, 2, (7, 5)), (1, 3, (4, 9)), (6, 2, (5, 8))])
def test_the_nearest_product(messages, rank, sides):
    """Fewer and more factors than the sides have numbers, and a message without weight. The error is that of the
    truncated decomposition of NumPy, which is the smallest (Eckart and Young)."""
    rng = np.random.default_rng(messages)
    a, b = rng.normal(size=(messages, sides[0], rank)), rng.normal(size=(messages, rank, sides[1]))
    shares = rng.dirichlet(np.ones(messages))
    shares[-1] *= messages == 1
    mean = np.einsum("m,mir,mrj->ij", shares, a, b)
    found, values = nearest_product(*(jnp.float32(x) for x in (a, b, shares)))
    expected = np.linalg.svd(mean, compute_uv=False)
    np.testing.assert_allclose(values[: len(expected)], expected[: len(values)], rtol=1e-4, atol=1e-5)
    error = np.linalg.norm(np.float64(found["a"]) @ np.float64(found["b"]) - mean)
    np.testing.assert_allclose(error, np.sqrt((expected[rank:] ** 2).sum()), rtol=1e-4, atol=1e-5)


def test_bytes_are_of_factors():
    params, info = trained(2, rounds=1)
    assert info["uplink_bytes"].total() == info["downlink_bytes"].total() == 4 * tree.num_bytes(params)


@pytest.mark.full
def test_without_a_message_adapters_stay():
    """A round in which nobody reports. Catches the factors of a decomposition of zeros."""
    sampler = sampling.with_dropout(sampling.full(4), 0.9999)
    algorithm = algorithms.flexlora(loss_fn, sampler, optax.sgd(RATE), num_steps=STEPS)
    state, info = jax.jit(algorithm.step)(KEY, algorithm.init(KEY, start(2), PEOPLE), PEOPLE)
    assert info["clients_reported"] == 0
    for found, expected in zip(jax.tree.leaves(algorithm.params(state)), jax.tree.leaves(start(2)), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_what_is_refused():
    """Parameters without a pair, noise that needs a bound, and the options that it does not have."""

    def linear(params, examples, key):
        return jnp.square(examples["x"] @ params["w"] - examples["y"]).sum(1)

    algorithm = algorithms.flexlora(linear, sampling.full(4), optax.sgd(RATE), num_steps=STEPS)
    with refused("model", rule="factors"):
        algorithm.init(KEY, {"w": jnp.zeros((5, 4))}, PEOPLE)
    with refused("aggregator", rule="bounded amount"):
        algorithms.flexlora(
            loss_fn, sampling.full(4), optax.sgd(RATE), num_steps=1, transform=transform.gaussian_mechanism(1.0, 1.0)
        )
    for name in ("aggregator", "downlink", "server_optimizer"):
        with refused("flexlora", value=name, rule="its arguments", kind=InvalidType):
            algorithms.flexlora(loss_fn, sampling.full(4), optax.sgd(RATE), num_steps=1, **{name: None})
