"""Training on own rows alone: whose rows a model has seen, with which keys, and that nothing is sent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, engine, network, population, sampling
from fedjax_sim.types import ParamsKind
from tests.algorithms.personal import problem as p

SGD = optax.sgd(p.RATE)
SOME = sampling.uniform(p.NUM_CLIENTS, 3)
ALL = sampling.full(p.NUM_CLIENTS)
BATCHES = p.OPTIONS | {"batch_size": 2}


def test_models_are_of_own_rows():
    """Catches a model that begins anew in a round, that sees other rows, or that trains in a round without its client.

    In NumPy: as many gradient steps on all of a client's rows as it was drawn rounds, times `num_steps`.
    """
    made = algorithms.local(p.loss_fn, SOME, SGD, **p.OPTIONS)
    state, _ = p.trained(made)
    rounds = np.asarray(engine.take(state.clients, jnp.arange(p.NUM_CLIENTS))[0].rounds)
    assert rounds.sum() == 3 * p.ROUNDS and rounds.min() < rounds.max()
    expected = []
    for client, times in zip(p.rows(), rounds, strict=True):
        model = p.START
        for _ in range(times * p.STEPS):
            model = model - p.RATE * p.gradient(model, client)
        expected.append(model)
    np.testing.assert_allclose(p.own_models(made, state), expected, rtol=1e-5)
    np.testing.assert_array_equal(p.vector(made.params(state)), np.float32(p.START))
    np.testing.assert_array_equal(made.evaluated.has_trained(state, jnp.arange(p.NUM_CLIENTS)), rounds > 0)
    assert made.params_kind is ParamsKind.UNTRAINED


@pytest.mark.full
def test_first_round_is_fedavgs_local_work():
    """Catches other keys or minibatches than FedAvg's, so that the difference of the two is not paired."""
    made = algorithms.local(p.loss_fn, ALL, SGD, **BATCHES)
    average = algorithms.fedavg(p.loss_fn, ALL, SGD, **BATCHES)
    people, key = p.population(), jax.random.key(0)
    state, _ = p.trained(made, rounds=1)
    seen = average.observe(key, average.init(jax.random.key(0), p.start(), people), people)
    order = np.argsort(np.asarray(seen.ids))
    updates = p.vector(jax.tree.map(lambda x: np.asarray(x)[order], seen.messages))
    np.testing.assert_allclose(p.own_models(made, state) - np.float32(p.START), updates, rtol=0, atol=1e-7)


@pytest.mark.full
def test_nothing_is_sent():
    """Catches a model whose bytes are counted, and a round that takes the time of a link or a message's latency."""
    found = []
    for rate, latency in ((1e9, 0.0), (1.0, 50.0)):
        link = {"bandwidth_down": rate, "bandwidth_up": rate, "latency": latency, "radio_watts": 5.0}
        devices = network.heterogeneous(p.NUM_CLIENTS, speed=network.lognormal(100.0, 1.0), **link)
        clocked = sampling.with_clock(ALL, devices)
        _, info = p.trained(algorithms.local(p.loss_fn, clocked, SGD, **p.OPTIONS))
        assert info["uplink_bytes"].total() == info["downlink_bytes"].total() == 0
        assert info["update_norm"] == 0 and info["clients_reported"] == p.NUM_CLIENTS
        found.append((float(info["round_seconds"]), float(info["joules"])))
    assert found[0] == found[1] and 0 < found[0][0] < 50


@pytest.mark.full
def test_a_broken_model_is_not_kept():
    """Catches a diverged model that stays in client memory: the client counts as dropped, and keeps what it had."""
    rows = p.rows()
    rows[2]["y"] = np.full_like(rows[2]["y"], 3e38)
    made = algorithms.local(p.loss_fn, ALL, SGD, **p.OPTIONS)
    state, info = p.trained(made, people=population.from_clients(rows))
    own = p.own_models(made, state)
    np.testing.assert_array_equal(own[2], np.float32(p.START))
    assert info["dropped_clients"] == 1 and np.isfinite(own).all() and (own[0] != own[1]).any()


@pytest.mark.parametrize("name", ["transform", "downlink", "aggregator", "weighting"])
def test_what_a_message_would_need_is_refused(name):
    """Catches an option that would change nothing."""
    with pytest.raises(TypeError, match=name):
        algorithms.local(p.loss_fn, ALL, SGD, **p.OPTIONS, **{name: None})
