"""FedProto against NumPy, its limit, and what its messages hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, models, population, sampling
from tests.algorithms.personal import problem as p
from tests.refusals import refused

CLASSES, SIZE = 4, 3  # nobody holds class 3
LABELS = ([0, 0, 1, 0], [1, 2], [2, 2, 1, 2, 1, 2, 2], [0], [1, 0, 2, 1, 0])
PULL = 0.3


def rows():
    return [{"x": client["x"], "y": np.array(y, np.int32)} for client, y in zip(p.rows(), LABELS, strict=True)]


def network():
    """Two matrices: the embedding is x A, and the outputs are x A B."""

    def matrix(name, shape):
        return models.layer(name, lambda key: jax.random.normal(key, shape), lambda w, x: x @ w)

    return models.sequential([matrix("body", (2, SIZE)), matrix("head", (SIZE, CLASSES))])


def squares(outputs, y):
    return {"loss": jnp.square(outputs - jax.nn.one_hot(y, CLASSES)).sum(1) / 2}


def proto(sampler=None, **options):
    sampler = sampling.full(p.NUM_CLIENTS) if sampler is None else sampler
    options = p.OPTIONS | {"coefficient": PULL} | options
    return algorithms.fedproto(network(), squares, sampler, optax.sgd(p.RATE), input_shape=(2,), **options)


def trained(algorithm, clients=None, rounds=p.ROUNDS):
    people = population.from_clients(rows() if clients is None else clients)
    params, _ = network().init(jax.random.key(3))
    state, step, info = algorithm.init(jax.random.key(0), params, people), jax.jit(algorithm.step), None
    for round in range(rounds):
        state, info = step(jax.random.key(round), state, people)
    return state, info, params


def oracle(params, pull):
    """(bodies, heads, prototypes): each client's two matrices, and the mean embedding of each class."""
    own = [[np.asarray(params[name], np.float64) for name in ("body", "head")] for _ in LABELS]
    prototypes, known = np.zeros((CLASSES, SIZE)), np.zeros(CLASSES, bool)
    for _ in range(p.ROUNDS):
        sums, counts = np.zeros((CLASSES, SIZE)), np.zeros(CLASSES)
        for model, client in zip(own, rows(), strict=True):
            x, y = client["x"].astype(np.float64), client["y"]
            for _ in range(p.STEPS):
                body, head = model
                error = (x @ body @ head - np.eye(CLASSES)[y]) / len(y)
                distance = known[y][:, None] * (x @ body - prototypes[y]) / len(y)
                model[0] = body - p.RATE * x.T @ (error @ head.T + 2 * pull * distance)
                model[1] = head - p.RATE * (x @ body).T @ error
            for row, label in zip(x @ model[0], y, strict=True):
                sums[label] += row
                counts[label] += 1
        known |= counts > 0
        prototypes = sums / np.maximum(counts, 1)[:, None]
    return own, prototypes, known


def test_matches_numpy():
    """Catches a pull of the wrong sign or size, towards the prototype of another class or of none, prototypes at the
    model before training, and a mean over clients that ignores their numbers of rows."""
    algorithm = proto()
    state, info, params = trained(algorithm)
    own, prototypes, known = oracle(params, PULL)
    found = algorithm.evaluated.personal(state, jnp.arange(p.NUM_CLIENTS))
    for i, (body, head) in enumerate(own):
        np.testing.assert_allclose(found["body"][i], body, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(found["head"][i], head, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(state.server.prototypes, prototypes, rtol=2e-4, atol=2e-5)
    assert np.asarray(state.server.known).tolist() == known.tolist() == [True, True, True, False]
    np.testing.assert_array_equal(algorithm.params(state)["body"], params["body"])
    assert info["update_norm"] == 0 and info["local_prototype_distance"] > 0
    assert info["uplink_bytes"].total() == p.NUM_CLIENTS * 4 * (CLASSES * SIZE + CLASSES)
    assert info["downlink_bytes"].total() == p.NUM_CLIENTS * (4 * CLASSES * SIZE + CLASSES)


@pytest.mark.full
def test_without_a_pull_it_is_local_training():
    """Catches anything of others that reaches a client: other clients' rows change nothing."""
    changed = [{"x": x["x"] + (i > 0), "y": x["y"]} for i, x in enumerate(rows())]
    models = []
    for clients in (rows(), changed):
        algorithm = proto(coefficient=0.0, batch_size=2)
        state, *_ = trained(algorithm, clients)
        models.append(algorithm.evaluated.personal(state, jnp.arange(p.NUM_CLIENTS))["body"])
    np.testing.assert_array_equal(models[0][0], models[1][0])
    assert np.abs(models[0][1:] - models[1][1:]).max() > 1e-3


@pytest.mark.full
def test_bytes_are_of_prototypes():
    """Catches a model in either direction."""
    _, info, _ = trained(proto(), rounds=1)
    assert info["uplink_bytes"].total() == p.NUM_CLIENTS * 4 * (CLASSES * SIZE + CLASSES)
    assert info["downlink_bytes"].total() == p.NUM_CLIENTS * (4 * CLASSES * SIZE + CLASSES)


@pytest.mark.full
def test_classes_of_the_absent_keep_their_prototype():
    """Catches a class that is forgotten, or becomes zero, in a round without its holders."""
    algorithm = proto(sampling.cyclic(p.NUM_CLIENTS, 1))
    people = population.from_clients(rows())
    state, step = (
        algorithm.init(jax.random.key(0), network().init(jax.random.key(3))[0], people),
        jax.jit(algorithm.step),
    )
    seen = []
    for round in range(2):  # client 0 holds classes 0 and 1, client 1 holds 1 and 2
        state, _ = step(jax.random.key(round), state, people)
        seen.append(np.asarray(state.server.prototypes))
    assert np.asarray(state.server.known).tolist() == [True, True, True, False]
    np.testing.assert_array_equal(seen[0][0], seen[1][0])
    assert np.abs(seen[0][1] - seen[1][1]).max() > 1e-3 and not seen[1][3].any()


def test_what_is_refused():
    short = models.sequential([models.layer("only", lambda key: jnp.ones((2, CLASSES)), lambda w, x: x @ w)])
    make = lambda model, **more: algorithms.fedproto(  # noqa: E731
        model, squares, sampling.full(5), optax.sgd(0.1), input_shape=(2,), num_steps=1, **more
    )
    with refused("model", rule="before the last"):
        make(short)
    with pytest.raises(ValueError, match="embedding: expected layers among"):
        make(network(), embedding="head")
    with pytest.raises(ValueError, match="model: expected one with layers"):
        make(models.from_fn(lambda key: jnp.ones(2), lambda w, x: x))
    floats = population.from_clients([{"x": x["x"], "y": x["y"].astype(np.float32)} for x in rows()])
    with refused("examples['y']", rule="integer classes"):
        make(network()).init(jax.random.key(0), network().init(jax.random.key(0))[0], floats)
