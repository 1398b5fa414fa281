"""What personal algorithms are in their limits, and what never leaves a client."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, client, engine, models, population, sampling, transform
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


@pytest.mark.full
def test_dittos_shared_model_is_fedavgs():
    """Catches minibatches of the own model that displace those of the shared one."""
    ditto = algorithms.ditto(p.loss_fn, SOME, SGD, coefficient=0.7, **BATCHES)
    np.testing.assert_array_equal(params_of(ditto), params_of(fedavg()))


@pytest.mark.full
def test_so_it_is_on_an_mlp_under_adam():
    """The same bits for a model whose gradients are matrix products, and an optimiser with a state."""
    data = population.digits(num_clients=20)
    model = models.mlp(input_shape=data.input_shape, num_outputs=data.num_outputs, hidden=(16,))
    loss_fn = models.supervised(model, models.default_loss(data.task))
    params, _ = model.init(jax.random.key(1))
    found = []
    for make in (algorithms.fedavg, algorithms.ditto):
        made = make(loss_fn, sampling.uniform(20, 6), optax.adam(0.01), num_steps=3, batch_size=8)
        state, step = made.init(jax.random.key(0), params, data.train), jax.jit(made.step)
        for round in range(3):
            state, _ = step(jax.random.key(round), state, data.train)
        found.append(jax.tree.leaves(made.params(state)))
    for x, y in zip(*found, strict=True):
        np.testing.assert_array_equal(x, y)


NAMES = ("apfl", "ditto", "fedbabu", "fedper", "fedrep", "ifca", "per_fedavg", "pfedme", "term")


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_rate_may_fall_over_rounds(name):
    """Catches clients who are not told in which round they are: round 1 trains as with that round's constant rate."""
    rates = [0.2, 0.05]
    falling = client.over_rounds(optax.sgd, lambda round: jnp.array(rates)[round])
    make = getattr(algorithms, name)
    algorithm = make(p.loss_fn, SOME, falling, **BATCHES)
    state, step = algorithm.init(jax.random.key(0), p.start(), p.population()), jax.jit(algorithm.step)
    same = algorithm.init(jax.random.key(0), p.start(), p.population())
    for round, rate in enumerate(rates):
        constant = make(p.loss_fn, SOME, optax.sgd(rate), **BATCHES)
        state, _ = step(jax.random.key(round), state, p.population())
        same, _ = jax.jit(constant.step)(jax.random.key(round), same, p.population())
    np.testing.assert_allclose(p.vector(algorithm.params(state)), p.vector(algorithm.params(same)), rtol=1e-6)


@pytest.mark.full
def test_ditto_without_a_pull_is_local_training():
    """Catches anything of others that reaches a client's own model: other clients' rows change nothing."""
    ditto = algorithms.ditto(p.loss_fn, sampling.full(p.NUM_CLIENTS), SGD, coefficient=0.0, **BATCHES)
    changed = [{name: (x + 1 if i else x) for name, x in client.items()} for i, client in enumerate(p.rows())]
    models = [
        p.own_models(ditto, p.trained(ditto, people=people)[0]) for people in (None, population.from_clients(changed))
    ]
    np.testing.assert_array_equal(models[0][0], models[1][0])
    assert np.abs(models[0][1:] - models[1][1:]).max() > 1e-3


@pytest.mark.full
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


@pytest.mark.default_rows(1)
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


@pytest.mark.full
def test_transforms_are_of_the_shared_part():
    """Catches a quantised broadcast that counts, or rounds, the clients' part."""
    quantised = transform.quantize(8)
    algorithm = algorithms.fedper(p.loss_fn, SOME, SGD, transform=quantised, downlink=quantised, **p.OPTIONS)
    plain = algorithms.fedper(p.loss_fn, SOME, SGD, **p.OPTIONS)
    _, info = p.trained(algorithm)
    _, expected = p.trained(plain)
    assert info["downlink_bytes"].total() < expected["downlink_bytes"].total()
    states = [made.init(jax.random.key(0), p.start(), p.population()) for made in (algorithm, plain)]
    ids = jnp.arange(p.NUM_CLIENTS)
    kept, exact = (np.asarray(engine.take(state.clients, ids)[0].own["output"]["b"]) for state in states)
    np.testing.assert_array_equal(kept, exact)


@pytest.mark.full
def test_ifca_counts_one_model_up_and_all_down():
    algorithm = algorithms.ifca(p.loss_fn, SOME, SGD, num_clusters=4, **p.OPTIONS)
    _, info = p.trained(algorithm)
    assert info["uplink_bytes"].total() == 3 * (12 + 1) and info["downlink_bytes"].total() == 3 * 4 * 12


def test_wrong_parts_are_named():
    for own, words in ((["outptu"], "Did you mean"), (["body", "output"], "own: expected paths that leave a part")):
        algorithm = algorithms.fedper(p.loss_fn, SOME, SGD, own=own, **p.OPTIONS)
        with pytest.raises(ValueError, match=words):
            algorithm.init(jax.random.key(0), p.start(), p.population())


@pytest.mark.full
def test_a_client_without_rows_learns_nothing():
    """Catches a client whose own model moves, or counts as trained, without a single row."""
    rows = p.rows()
    rows[2] = {name: x[:0] for name, x in rows[2].items()}
    for make in (algorithms.ditto, algorithms.apfl, algorithms.fedper, algorithms.pfedme):
        algorithm = make(p.loss_fn, sampling.full(p.NUM_CLIENTS), SGD, **p.OPTIONS)
        state, _ = p.trained(algorithm, people=population.from_clients(rows))
        ids = jnp.arange(p.NUM_CLIENTS)
        assert np.asarray(algorithm.evaluated.has_trained(state, ids)).tolist() == [True, True, False, True, True]
