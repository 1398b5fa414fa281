"""FedLC, FedRS and FedNTD against NumPy, and their limits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, models, population, sampling
from fedjax_sim.algorithms.server.label_skew import _not_true_divergence
from fedjax_sim.client.labels import rows_of_classes
from fedjax_sim.types import ClientData
from tests.algorithms.personal import problem as p
from tests.laws import laws
from tests.refusals import refused

CLASSES = 4
LABELS = ([0, 0, 1, 0], [1, 2], [2, 2, 1, 2, 1, 2, 3], [0], [1, 0, 2, 1, 0])
START = np.random.default_rng(5).normal(size=(2, CLASSES)).astype(np.float32)
MODEL = models.from_fn(lambda key: jnp.array(START), lambda w, x: x @ w)
CALIBRATION, SCALE, COEFFICIENT, TEMPERATURE = 0.7, 0.3, 0.8, 2.0
FULL, SGD = sampling.full(p.NUM_CLIENTS), optax.sgd(p.RATE)


def people(labels=LABELS):
    rows = zip(p.rows(), labels, strict=True)
    return population.from_clients([{"x": client["x"], "y": np.array(y, np.int32)} for client, y in rows])


def trained(make, **options):
    """(model, info) after some rounds."""
    algorithm, clients = make(MODEL, FULL, SGD, **p.OPTIONS, **options), people()
    state, step, info = algorithm.init(jax.random.key(0), jnp.array(START), clients), jax.jit(algorithm.step), None
    for round in range(p.ROUNDS):
        state, info = step(jax.random.key(round), state, clients)
    return np.asarray(algorithm.params(state)), info


def softmax(z, is_in=True):
    z = np.where(is_in, z, -np.inf)
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def fedlc(z, teacher, truth):
    """The derivative of the loss by the logits."""
    rows = truth.sum(0)
    margins = np.where(rows > 0, CALIBRATION * np.maximum(rows, 1) ** -0.25, np.inf)
    return softmax(z - margins) - truth


def fedrs(z, teacher, truth):
    scale = np.where(truth.any(0), 1, SCALE)
    return scale * (softmax(scale * z) - truth)


def fedntd(z, teacher, truth):
    others = truth == 0
    pull = softmax(z / TEMPERATURE, others) - softmax(teacher / TEMPERATURE, others)
    return softmax(z) - truth + COEFFICIENT * pull / TEMPERATURE


METHODS = {
    "fedlc": (algorithms.fedlc, {"calibration": CALIBRATION}, fedlc),
    "fedrs": (algorithms.fedrs, {"absent_scale": SCALE}, fedrs),
    "fedntd": (algorithms.fedntd, {"coefficient": COEFFICIENT, "temperature": TEMPERATURE}, fedntd),
}


def oracle(derivative):
    model = START.astype(np.float64)
    for _ in range(p.ROUNDS):
        updates = []
        for client, labels in zip(p.rows(), LABELS, strict=True):
            x, truth, local = client["x"].astype(np.float64), np.eye(CLASSES)[labels], model
            for _ in range(p.STEPS):
                local = local - p.RATE * x.T @ derivative(x @ local, x @ model, truth) / len(x)
            updates.append(local - model)
        model = model + np.average(updates, axis=0, weights=p.SIZES)
    return model


@pytest.mark.default_rows(*METHODS)
@pytest.mark.parametrize("name", METHODS)
def test_matches_numpy(name):
    """Clients of one to three classes. Catches counts of a minibatch or of all clients, a margin of n^(+1/4), an absent
    class that still pulls, and the teacher of another round."""
    make, options, derivative = METHODS[name]
    found, info = trained(make, **options)
    np.testing.assert_allclose(found, oracle(derivative), rtol=2e-4, atol=2e-5)
    assert info["local_task_loss"] != info["local_loss"]


@pytest.mark.full
@pytest.mark.optimised
@pytest.mark.parametrize("name", METHODS)
def test_limits_are_fedavg(name):
    """No calibration, no restriction and no distillation, bit for bit. Catches another order of keys."""
    make = METHODS[name][0]
    off = {"fedlc": {"calibration": 0.0}, "fedrs": {"absent_scale": 1.0}, "fedntd": {"coefficient": 0.0}}[name]

    def average(model, *arguments, **options):
        return algorithms.fedavg(models.supervised(model, models.softmax_cross_entropy), *arguments, **options)

    one, other = (trained(each, batch_size=2, **more) for each, more in ((make, off), (average, {})))
    laws.check_equal_bits(one[0], other[0], name)
    assert one[1].keys() == other[1].keys()


@pytest.mark.full
@pytest.mark.parametrize("name", ["fedlc", "fedrs"])
def test_near_the_limit_it_is_near_fedavg(name):
    """Catches a loss that only a special case turns into FedAvg's. Classes that a client lacks stay out of FedLC's
    loss for every calibration above 0, so all clients have all classes."""
    everything = people([np.arange(len(x["y"])) % 4 for x in p.rows()])
    off, near = {"fedlc": (0.0, 1e-6), "fedrs": (1.0, 1 - 1e-6)}[name]
    (option,) = METHODS[name][1]
    found = []
    for value in (off, near):
        made = METHODS[name][0](MODEL, sampling.with_replacement(5, 1), SGD, num_steps=2, **{option: value})
        state = made.init(jax.random.key(0), jnp.array(START), everything)
        found.append(made.params(jax.jit(made.step)(jax.random.key(4), state, everything)[0]))
    np.testing.assert_allclose(*found, atol=1e-5)


def test_padding_is_of_no_class():
    """Catches zeros of padding rows that count as rows of class 0."""
    data = ClientData({"x": jnp.ones((4, 2)), "y": jnp.array([2, 0, 2, 0])}, jnp.array([True, False, True, False]))
    assert rows_of_classes(MODEL, jnp.array(START), data).tolist() == [0, 0, 2, 0]
    assert rows_of_classes(MODEL, jnp.array(START), data._replace(mask=jnp.zeros(4, bool))).tolist() == [0] * 4


def test_the_received_model_teaches_nothing_new():
    """Divergence and gradient are 0 at equal logits, and elsewhere NumPy's. Catches the true class in a softmax, and
    a divergence the other way round."""
    rng = np.random.default_rng(1)
    z, t = (rng.normal(size=(3, CLASSES)).astype(np.float32) * 3 for _ in range(2))
    y = np.array([1, 3, 0])
    value, gradient = jax.value_and_grad(lambda z: _not_true_divergence(z, jnp.array(t), y).sum())(jnp.array(t))
    np.testing.assert_allclose(value, 0, atol=1e-6)
    np.testing.assert_allclose(gradient, 0, atol=1e-6)
    others = np.eye(CLASSES)[y] == 0
    p_own, q = softmax(z, others), softmax(t, others)
    expected = np.where(others, q * np.log(np.where(others, q / np.where(others, p_own, 1), 1)), 0).sum(1)
    np.testing.assert_allclose(_not_true_divergence(jnp.array(z), jnp.array(t), y), expected, rtol=1e-5)


@pytest.mark.full
def test_a_client_without_rows_says_nothing():
    """Catches 0 times infinity where a client has no row of any class."""
    for make, options, _ in METHODS.values():
        clients = population.from_clients(
            [{"x": np.ones((n, 2), np.float32), "y": np.arange(n, dtype=np.int32) % 2} for n in (3, 0)]
        )
        made = make(MODEL, sampling.full(2), SGD, num_steps=2, nonfinite="error", **options)
        state, _ = jax.jit(made.step)(
            jax.random.key(0), made.init(jax.random.key(0), jnp.array(START), clients), clients
        )
        assert np.isfinite(made.params(state)).all() and not np.array_equal(made.params(state), START)


def test_what_is_refused():
    floats = population.from_clients(p.rows())
    with refused("examples['y']", rule="integer classes"):
        algorithms.fedlc(MODEL, FULL, SGD, num_steps=1).init(jax.random.key(0), jnp.array(START), floats)
    two = models.from_fn(lambda key: jnp.ones((2, 2)), lambda w, x: x @ w)
    with refused("model", rule="3 classes or more"):
        algorithms.fedntd(two, FULL, SGD, num_steps=1).init(jax.random.key(0), jnp.ones((2, 2)), people())
    one = models.from_fn(lambda key: jnp.ones(2), lambda w, x: x @ w)
    with refused("model", rule="2 classes or more"):
        algorithms.fedrs(one, FULL, SGD, num_steps=1).init(jax.random.key(0), jnp.ones(2), people())
    with refused("calibration", rule=">= 0"):
        algorithms.fedlc(MODEL, FULL, SGD, num_steps=1, calibration=-1.0)
    with refused("absent_scale", rule="1"):
        algorithms.fedrs(MODEL, FULL, SGD, num_steps=1, absent_scale=1.5)
