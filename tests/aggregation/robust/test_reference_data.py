"""Rules that know more than a round's messages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import client
from fedjax_sim.aggregation import fltrust, foolsgold
from fedjax_sim.types import ClientData, Round
from tests.aggregation.robust.problems import adversaries, applied
from tests.laws import problems
from tests.refusals import refused

RNG = np.random.default_rng(0)
M, D = 9, 4
START = {"w": np.array([0.5, -1, 2, 0], np.float32)}
ROWS = RNG.normal(size=(6, D)).astype(np.float32)


def loss(params, examples, key):
    return ((params["w"][None] - examples["x"]) ** 2).sum(1) / 2


def of_server():
    """FLTrust with two steps of rate 0.3 towards the mean of the server's rows; that update in NumPy."""
    work = client.local_sgd(loss, optax.sgd(0.3), client.work(num_steps=2, batch_size=None))
    data = ClientData({"x": jnp.asarray(ROWS)}, jnp.ones(6, bool))
    return fltrust(work, data), data, (1 - 0.7**2) * (ROWS.mean(0, dtype=np.float64) - START["w"])


def round_of(state):
    return Round(None, jax.tree.map(jnp.asarray, START), state)


def test_fltrust():
    """Catches trust in messages against the server's, and lengths that are kept."""
    rule, data, own = of_server()
    x = (own + RNG.normal(size=(M, D)) * np.abs(own).mean()).astype(np.float32)
    x[0], x[1] = -5 * own, 100 * own
    there = np.arange(M) != 3
    lengths = np.linalg.norm(x, axis=1)
    trust = np.maximum(x @ own / (lengths * np.linalg.norm(own)), 0) * there
    expected = (trust * np.linalg.norm(own) / lengths) @ x / trust.sum()
    got, metrics, _ = applied(rule, {"w": x}, there, round=round_of(data))
    np.testing.assert_allclose(got["w"], expected, rtol=1e-4)
    assert trust[0] == 0 and np.isclose(metrics["trusted_share"], (trust > 0).sum() / (M - 1))
    nobody = applied(rule, {"w": np.tile(-own, (M, 1)).astype(np.float32)}, round=round_of(data))[0]
    assert not nobody["w"].any()


@pytest.mark.full
def test_a_majority_of_attackers():
    """Eight of nine. Catches an update longer than the server's, and NaN from messages of 2^99."""
    rule, data, own = of_server()
    for _ in range(40):
        honest = (own + RNG.normal(size=(1, D)) * 0.1).astype(np.float32)
        x = np.concatenate([honest, adversaries(RNG, np.tile(honest, (2, 1)), M - 1).astype(np.float32)])
        got = applied(rule, {"w": x}, round=round_of(data))[0]["w"]
        assert np.linalg.norm(got) <= np.linalg.norm(own) * 1.001


def numpy_foolsgold(sums):
    unit = sums / np.linalg.norm(sums, axis=1, keepdims=True)
    alike = unit @ unit.T
    np.fill_diagonal(alike, 0)  # as in the authors' code: with company unlike itself a client has none
    most = alike.max(1)
    for i in range(len(sums)):
        for j in range(len(sums)):
            if i != j and most[j] > most[i]:
                alike[i, j] *= most[i] / most[j]
    share = np.clip(1 - alike.max(1), 0, 1)
    share = np.minimum(share / share.max(), 0.99)
    with np.errstate(divide="ignore"):
        return np.clip(np.log(share / (1 - share)) + 0.5, 0, 1)


def test_foolsgold():
    """Three rounds of other cohorts, with sybils. Catches sums of another client, absent ones, and no pardon."""
    n = 14
    rule, sums, state = foolsgold(n), np.zeros((n, D)), {"w": jnp.zeros((n, D))}
    aim = RNG.normal(size=D)
    for t in range(3):
        ids, there = RNG.permutation(n)[:M], np.arange(M) != t
        x = RNG.normal(size=(M, D)).astype(np.float32)
        x[ids < 4] = aim + 0.01 * x[ids < 4]
        got, _, state = applied(rule, {"w": x}, there, round=round_of(jax.tree.map(jnp.asarray, state)), ids=ids)
        sums[ids[there]] += x[there]
        share = numpy_foolsgold(sums[ids[there]])
        np.testing.assert_allclose(state["w"], sums, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got["w"], share @ x[there] / share.sum(), rtol=2e-3, atol=2e-4)
        if (ids[there] < 4).sum() > 1:
            assert share[ids[there] < 4].max() < 0.2


def test_a_client_unlike_all_others_counts_in_full():
    """Unit vectors at 180, 40 and -40 degrees: weights (1, 1, 1) by the authors' code.

    Catches a largest cosine below 0, which pardoning turned into a cosine above 1 and a weight of 0.
    """
    angles = np.deg2rad([180.0, 40.0, -40.0])
    x = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    assert numpy_foolsgold(x).tolist() == [1, 1, 1]
    state = {"w": jnp.zeros((3, 2))}
    got, _, _ = applied(foolsgold(3), {"w": x.astype(np.float32)}, round=round_of(state), ids=np.arange(3))
    np.testing.assert_allclose(got["w"], x.mean(0), atol=1e-6)  # (0.177, 0)


def test_a_server_that_is_not_told_the_round():
    """Catches a rate over rounds at FLTrust's server, which ends in words about an algorithm that does train."""
    falling = client.over_rounds(optax.sgd, optax.linear_schedule(0.1, 0.0, 4))
    work = client.local_sgd(problems.linear_loss, falling, client.work(num_steps=1))
    with refused("server_work", rule="rate"):
        fltrust(work, problems.ragged().client(0))


def test_sybils_with_long_messages():
    """Two sybils of 2^90 for one round, then as their aim: their sums stay long, and they count for nothing.

    Catches infinite products, by which two attackers had every round skipped.
    """
    n, rng = 8, np.random.default_rng(1)
    rule, state = foolsgold(n), {"w": jnp.zeros((n, D))}
    for size in (2.0**90, 1.0):
        x = rng.normal(size=(n, D)).astype(np.float32)
        x[:2] = size * np.array([1, -1, 1, 1], np.float32)
        got, _, state = applied(rule, {"w": x}, round=round_of(jax.tree.map(jnp.asarray, state)))
    share = numpy_foolsgold(state["w"].astype(np.float64))
    assert share[:2].tolist() == [0, 0] and np.abs(state["w"][:2]).min() >= 2.0**90
    np.testing.assert_allclose(got["w"], share @ x / share.sum(), rtol=2e-3, atol=2e-4)


@pytest.mark.full
def test_a_client_that_is_drawn_twice_is_no_sybil_of_itself():
    """Sampling with replacement. Catches a client that loses its weight for being like itself."""
    x, state = RNG.normal(size=(5, D)).astype(np.float32), {"w": jnp.zeros((9, D))}
    ids = np.array([3, 3, 0, 5, 7])
    got, _, _ = applied(foolsgold(9), {"w": x}, round=round_of(state), ids=ids)
    beyond = applied(foolsgold(7), {"w": x}, round=round_of({"w": jnp.zeros((7, D))}), ids=ids)[0]
    assert np.isnan(beyond["w"]).all()  # client 7 of 7 has no sum: another one's would stand for it
    sums = np.stack([x[0] + x[1], *x[2:]]).astype(np.float64)
    share = numpy_foolsgold(sums)[[0, 0, 1, 2, 3]]
    assert share[0] > 0
    np.testing.assert_allclose(got["w"], share @ x / share.sum(), rtol=2e-3, atol=2e-4)
