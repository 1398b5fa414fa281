"""FedRoD against NumPy, and its limit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, models, population, sampling
from tests.algorithms.personal import problem as p
from tests.laws import laws
from tests.refusals import refused

CLASSES, SIZE = 4, 3
LABELS = ([0, 0, 1, 0], [1, 2], [2, 2, 1, 2, 1, 2, 3], [0], [1, 0, 2, 1, 0])
SGD = optax.sgd(p.RATE)


def start():
    rng = np.random.default_rng(4)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


SHAPES = {"body": (2, SIZE), "output": (SIZE, CLASSES)}
MODEL = models.from_fn(lambda key: start(), lambda params, x: x @ params["body"] @ params["output"])


def people():
    rows = zip(p.rows(), LABELS, strict=True)
    return population.from_clients([{"x": client["x"], "y": np.array(y, np.int32)} for client, y in rows])


def trained(make, **options):
    algorithm = make(sampling.cyclic(p.NUM_CLIENTS, 4), SGD, **p.OPTIONS | options)
    state, step, info = algorithm.init(jax.random.key(0), start(), people()), jax.jit(algorithm.step), None
    for round in range(p.ROUNDS):
        state, info = step(jax.random.key(round), state, people())
    return algorithm, state, info


def rod(*arguments, **options):
    return algorithms.fedrod(MODEL, *arguments, **options)


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def oracle(exponent):
    """(body, shared head, [own heads]) after all rounds."""
    body, head = (np.asarray(x, np.float64) for x in start().values())
    own = [np.zeros_like(head) for _ in LABELS]
    for round in range(p.ROUNDS):
        cohort = [(4 * round + k) % p.NUM_CLIENTS for k in range(4)]
        ends = []
        for i in cohort:
            x, truth = p.rows()[i]["x"].astype(np.float64), np.eye(CLASSES)[LABELS[i]]
            a, b = body, head
            with np.errstate(divide="ignore"):
                shift = np.where(truth.any(0), exponent * np.log(truth.sum(0)), -np.inf)
            for _ in range(p.STEPS):
                h = x @ a
                generic = (softmax(h @ b + shift) - truth) / len(x)
                personal = (softmax(h @ (b + own[i])) - truth) / len(x)
                own[i] = own[i] - p.RATE * h.T @ personal
                a, b = a - p.RATE * x.T @ generic @ b.T, b - p.RATE * h.T @ generic
            ends.append((a, b))
        weights = [p.SIZES[i] for i in cohort]
        body, head = (np.average([end[k] for end in ends], axis=0, weights=weights) for k in range(2))
    return body, head, own


def test_matches_numpy():
    """Four of five clients in a round. Catches a head of its own that moves the body or the shared head, counts of a
    minibatch, and a head that is lost between rounds."""
    algorithm, state, info = trained(rod)
    body, head, own = oracle(1)
    shared, personal = algorithm.params(state), algorithm.evaluated.personal(state, jnp.arange(p.NUM_CLIENTS))
    np.testing.assert_allclose(shared["body"], body, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(shared["output"], head, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(personal["output"], head + np.stack(own), rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(personal["body"], np.stack([body] * len(own)), rtol=2e-4, atol=2e-5)
    size = 4 * (2 * SIZE + SIZE * CLASSES)
    assert info["uplink_bytes"].total() == info["downlink_bytes"].total() == 4 * size
    assert info["own_loss"] != info["local_loss"]


@pytest.mark.full
@pytest.mark.optimised
def test_shared_model_is_fedavgs():
    """With exponent 0, bit for bit, on minibatches. Catches anything of an own head in the shared model."""

    def average(*arguments, **options):
        return algorithms.fedavg(models.supervised(MODEL, models.softmax_cross_entropy), *arguments, **options)

    one, other = (trained(each, batch_size=2, **more) for each, more in ((rod, {"exponent": 0.0}), (average, {})))
    laws.check_equal_bits(one[0].params(one[1]), other[0].params(other[1]), "exponent 0")


def test_who_never_trained_has_the_shared_model():
    """Catches a head that is drawn."""
    algorithm = rod(sampling.cyclic(p.NUM_CLIENTS, 1), SGD, **p.OPTIONS)
    state = algorithm.init(jax.random.key(0), start(), people())
    state, _ = jax.jit(algorithm.step)(jax.random.key(0), state, people())
    shared, personal = algorithm.params(state), algorithm.evaluated.personal(state, jnp.arange(p.NUM_CLIENTS))
    for i in range(p.NUM_CLIENTS):
        assert np.array_equal(shared["output"], personal["output"][i]) == (i > 0)


def test_what_is_refused():
    with pytest.raises(ValueError, match="head"):
        rod(sampling.full(5), SGD, own=["head"], num_steps=1).init(jax.random.key(0), start(), people())
    floats = population.from_clients(p.rows())
    with refused("examples['y']", rule="integer classes"):
        rod(sampling.full(5), SGD, num_steps=1).init(jax.random.key(0), start(), floats)
