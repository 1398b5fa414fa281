"""What personal algorithms are in their limits, and what never leaves a client."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, sampling, transform
from fedjax_sim.round.costs import message_spec
from tests.algorithms.personal import problem as p

SGD = optax.sgd(p.RATE)
SOME = sampling.uniform(p.NUM_CLIENTS, 3)
BATCHES = p.OPTIONS | {"batch_size": 2}


def fedavg(**options):
    return algorithms.fedavg(p.loss_fn, SOME, SGD, **(BATCHES | options))


def params_of(algorithm, rounds=p.ROUNDS):
    state, _ = p.trained(algorithm, rounds)
    return p.vector(algorithm.params(state))


def test_dittos_shared_model_is_fedavgs():
    """Catches minibatches of the own model that displace those of the shared one."""
    ditto = algorithms.ditto(p.loss_fn, SOME, SGD, coefficient=0.7, **BATCHES)
    np.testing.assert_array_equal(params_of(ditto), params_of(fedavg()))


def test_ditto_without_a_pull_is_local_training():
    """Catches anything of others that reaches a client's own model: other clients' rows change nothing."""
    ditto = algorithms.ditto(p.loss_fn, sampling.full(p.NUM_CLIENTS), SGD, coefficient=0.0, **BATCHES)
    changed = [{name: (x + 1 if i else x) for name, x in client.items()} for i, client in enumerate(p.rows())]
    from fedjax_sim.population import from_clients

    models = [p.own_models(ditto, p.trained(ditto, people=people)[0]) for people in (None, from_clients(changed))]
    np.testing.assert_array_equal(models[0][0], models[1][0])
    assert np.abs(models[0][1:] - models[1][1:]).max() > 1e-3


@pytest.mark.parametrize("name", ["apfl", "ifca", "fedrep", "fedper"])
def test_without_anything_personal_it_is_fedavg(name):
    """Catches a share of 0, one cluster, or an empty own part that still changes the shared model."""
    make = {
        "apfl": lambda: algorithms.apfl(p.loss_fn, SOME, SGD, share=0.0, **BATCHES),
        "ifca": lambda: algorithms.ifca(p.loss_fn, SOME, SGD, num_clusters=1, **BATCHES),
        "fedrep": lambda: algorithms.fedrep(p.loss_fn, SOME, SGD, own=[], **BATCHES),
        "fedper": lambda: algorithms.fedper(p.loss_fn, SOME, SGD, own=[], **BATCHES),
    }[name]
    np.testing.assert_allclose(params_of(make()), params_of(fedavg()), rtol=2e-6)


@pytest.mark.parametrize("name", ["fedper", "fedrep", "fedbabu"])
def test_own_parts_stay(name):
    """Catches a leaf of the clients' part in a message, in the bytes of either direction, or at the server."""
    algorithm = getattr(algorithms, name)(p.loss_fn, SOME, SGD, **p.OPTIONS)
    people = p.population()
    state = algorithm.init(jax.random.key(0), p.start(), people)
    star = algorithm.parts
    message = message_spec(star, star.server.broadcast(state.server), people)
    assert jax.tree.structure(message) == jax.tree.structure({"body": {"w": 0}})
    state, info = p.trained(algorithm)
    assert info["uplink_bytes"].total() == 3 * 8 and info["downlink_bytes"].total() == 3 * 8
    np.testing.assert_array_equal(algorithm.params(state)["output"]["b"], p.start()["output"]["b"])
    own = p.own_models(algorithm, state)[:, p.OUTPUT]
    assert (own != p.START[p.OUTPUT].astype(np.float32)).any() == (name != "fedbabu")


def test_transforms_are_of_the_shared_part():
    """Catches a quantised broadcast that counts, or rounds, the clients' part."""
    quantised = transform.quantize(8)
    algorithm = algorithms.fedper(p.loss_fn, SOME, SGD, transform=quantised, downlink=quantised, **p.OPTIONS)
    plain = algorithms.fedper(p.loss_fn, SOME, SGD, **p.OPTIONS)
    _, info = p.trained(algorithm)
    _, expected = p.trained(plain)
    assert info["downlink_bytes"].total() < expected["downlink_bytes"].total()
    own, _ = jax.tree.flatten(algorithm.init(jax.random.key(0), p.start(), p.population()).clients)
    assert any(np.allclose(x, p.START[2]) for x in map(np.asarray, own))


def test_ifca_counts_one_model_up_and_all_down():
    algorithm = algorithms.ifca(p.loss_fn, SOME, SGD, num_clusters=4, **p.OPTIONS)
    _, info = p.trained(algorithm)
    assert info["uplink_bytes"].total() == 3 * (12 + 1) and info["downlink_bytes"].total() == 3 * 4 * 12


def test_wrong_parts_are_named():
    for own, words in ((["outptu"], "Did you mean"), (["body", "output"], "own: expected paths that leave a part")):
        algorithm = algorithms.fedper(p.loss_fn, SOME, SGD, own=own, **p.OPTIONS)
        with pytest.raises(ValueError, match=words):
            algorithm.init(jax.random.key(0), p.start(), p.population())


def test_a_client_without_rows_learns_nothing():
    """Catches a client whose own model moves, or counts as trained, without a single row."""
    from fedjax_sim.population import from_clients

    rows = p.rows()
    rows[2] = {name: x[:0] for name, x in rows[2].items()}
    for make in (algorithms.ditto, algorithms.apfl, algorithms.fedper, algorithms.pfedme):
        algorithm = make(p.loss_fn, sampling.full(p.NUM_CLIENTS), SGD, **p.OPTIONS)
        state, _ = p.trained(algorithm, people=from_clients(rows))
        ids = jnp.arange(p.NUM_CLIENTS)
        assert np.asarray(algorithm.evaluated.has_trained(state, ids)).tolist() == [True, True, False, True, True]
