"""MOON against NumPy, its limits, and what its clients keep."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, models, population, sampling
from fedjax_sim.algorithms.server.moon import _cosines
from tests.algorithms.personal import problem as p
from tests.laws import laws
from tests.refusals import refused

SIZE, OUTPUTS, ROUNDS, COHORT = 3, 2, 4, 3
COEFFICIENT, TEMPERATURE = 0.7, 0.5
SGD = optax.sgd(p.RATE)


def network():
    """Two matrices: the embedding is x A, and the outputs are x A B."""

    def matrix(name, shape):
        return models.layer(name, lambda key: jax.random.normal(key, shape), lambda w, x: x @ w)

    return models.sequential([matrix("body", (2, SIZE)), matrix("head", (SIZE, OUTPUTS))])


def squares(outputs, y):
    return {"loss": jnp.square(outputs - y).sum(1) / 2}


def rows():
    return [{"x": client["x"], "y": np.stack([client["y"], -client["y"]], 1)} for client in p.rows()]


def moon(*arguments, **options):
    return algorithms.moon(network(), squares, *arguments, **options)


def fedavg(*arguments, **options):
    return algorithms.fedavg(models.supervised(network(), squares), *arguments, **options)


def trained(make, rounds=ROUNDS, **options):
    """(algorithm, state, [info], the start) after rounds of clients 0 to 2, 3, 4 and 0, 1 to 3, and so on."""
    algorithm = make(sampling.cyclic(p.NUM_CLIENTS, COHORT), SGD, **p.OPTIONS | options)
    people = population.from_clients(rows())
    params, _ = network().init(jax.random.key(3))
    state, step, infos = algorithm.init(jax.random.key(0), params, people), jax.jit(algorithm.step), []
    for round in range(rounds):
        state, info = step(jax.random.key(round), state, people)
        infos.append(info)
    return algorithm, state, infos, params


def cosine(a, b):
    """(cosines of rows, their derivatives by a)."""
    length = [np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b)]
    value = (a * b).sum(1, keepdims=True) / (length[0] * length[1])
    return value, b / (length[0] * length[1]) - value * a / length[0] ** 2


def oracle(params):
    """The body and the head after all rounds."""
    shared = [np.asarray(params[name], np.float64) for name in ("body", "head")]
    last = {}
    for round in range(ROUNDS):
        total, weight = [0, 0], 0
        for i in [(round * COHORT + k) % p.NUM_CLIENTS for k in range(COHORT)]:
            x, y = (rows()[i][name].astype(np.float64) for name in ("x", "y"))
            body, head = shared
            previous = last.get(i, shared)[0]
            for _ in range(p.STEPS):
                own = x @ body
                to_received, slope = cosine(own, x @ shared[0])
                to_previous, other_slope = cosine(own, x @ previous)
                chance = 1 / (1 + np.exp((to_received - to_previous) / TEMPERATURE))
                pull = COEFFICIENT * chance * (other_slope - slope) / TEMPERATURE
                error = own @ head - y
                body, head = (
                    body - p.RATE * x.T @ (error @ head.T + pull) / len(x),
                    head - p.RATE * own.T @ error / len(x),
                )
            last[i] = [body, head]
            total = [t + len(x) * w for t, w in zip(total, last[i], strict=True)]
            weight += len(x)
        shared = [t / weight for t in total]
    return shared


def test_matches_numpy():
    """Some clients first take part in the second round, and others a second time. Catches the start for a client's last
    model, the last model of another client, a contrast of the wrong sign, and a temperature that multiplies."""
    algorithm, state, infos, params = trained(moon, coefficient=COEFFICIENT, temperature=TEMPERATURE)
    for name, expected in zip(("body", "head"), oracle(params), strict=True):
        np.testing.assert_allclose(algorithm.params(state)[name], expected, rtol=2e-4, atol=2e-5)
    assert infos[0]["local_contrast"] < np.log(2) + 1e-3 and infos[-1]["local_contrast"] > 0
    size = 4 * (2 * SIZE + SIZE * OUTPUTS)
    assert infos[0]["uplink_bytes"].total() == infos[0]["downlink_bytes"].total() == COHORT * size


@pytest.mark.full
@pytest.mark.optimised
def test_zero_is_fedavg():
    """Bit for bit, on minibatches. Catches another order of keys, and a state that nobody needs."""
    found = [trained(make, batch_size=2, **more) for make, more in ((moon, {"coefficient": 0.0}), (fedavg, {}))]
    laws.check_equal_bits(found[0][1], found[1][1], "coefficient 0")


@pytest.mark.full
def test_the_first_round_is_fedavgs():
    """With any coefficient. Catches a last model of zeros, or of other numbers."""
    one, other = (trained(make, 1, **more) for make, more in ((moon, {"coefficient": 50.0}), (fedavg, {})))
    for a, b in zip(*(jax.tree.leaves(x[0].params(x[1])) for x in (one, other)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert abs(float(one[2][0]["local_contrast"]) - np.log(2)) < 1e-5


@pytest.mark.full
def test_who_was_absent_keeps_its_last_model():
    """Catches a state that moves with the federation, and one of a client without rows."""
    _, state, *_ = trained(moon, 1)
    assert np.asarray(state.clients.is_known).tolist() == [True] * COHORT + [False] * (p.NUM_CLIENTS - COHORT)
    people = population.from_clients(
        [rows()[0], {"x": np.zeros((0, 2), np.float32), "y": np.zeros((0, 2), np.float32)}]
    )
    made = moon(sampling.full(2), SGD, num_steps=2)
    state = made.init(jax.random.key(0), network().init(jax.random.key(3))[0], people)
    assert np.asarray(jax.jit(made.step)(jax.random.key(0), state, people)[0].clients.is_known).tolist() == [
        True,
        False,
    ]


def test_cosines():
    """Catches a derivative that is no number at an embedding of zeros."""
    a, b = jnp.array([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]]), jnp.array([[4.0, 3.0], [1.0, 2.0], [0.0, 5.0]])
    np.testing.assert_allclose(_cosines(a, b), [0.96, 0, 0], rtol=1e-6)
    assert np.isfinite(jax.grad(lambda a: _cosines(a, b).sum())(a)).all()


def test_what_is_refused():
    short = models.sequential([models.layer("only", lambda key: jnp.ones((2, 2)), lambda w, x: x @ w)])
    with refused("model", rule="before the last"):
        algorithms.moon(short, squares, sampling.full(5), SGD, num_steps=1)
    with refused("sampler", rule="replacement"):
        made = moon(sampling.with_replacement(5, 2), SGD, num_steps=1)
        made.init(jax.random.key(0), network().init(jax.random.key(3))[0], population.from_clients(rows()))
    with refused("temperature", rule="> 0"):
        moon(sampling.full(5), SGD, num_steps=1, temperature=0.0)
