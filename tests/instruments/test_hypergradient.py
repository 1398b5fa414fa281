"""Derivatives through rounds, against differences of `run` itself and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import InvalidType, aggregation, algorithms, engine, population, sampling, transform
from fedjax_sim.instruments.hypergradient import hypergradient
from fedjax_sim.population import quadratic_loss
from tests.refusals import refused

DATA = population.quadratics(num_clients=6, dimension=3, heterogeneity=1.0, seed=2)
START, KEY, ROUNDS = {"w": jnp.full(3, 2.0)}, jax.random.key(1), 8
VALUES = {"rate": 0.15, "coefficient": 0.4, "server_rate": 0.9}


def make(rate, coefficient=0.3, server_rate=1.0, member=None):
    from fedjax_sim import client, server
    from fedjax_sim.algorithms import federated

    work = client.proximal(quadratic_loss, optax.sgd(rate), coefficient, client.work(num_steps=3))
    step = server.optimizer(optax.sgd(server_rate, momentum=0.3))
    return federated(sampling.uniform(6, 3), work, aggregation.fixed_mean(3.0), step, member)


def loss(params):
    return quadratic_loss(params, DATA.test)["loss"].mean()


@pytest.mark.full
@pytest.mark.parametrize("private", [pytest.param(False, marks=pytest.mark.full), True])
def test_finite_differences(private):
    """Fault: a derivative that exact sums, barriers or the server's memory cut off; another trajectory."""

    def made(**values):
        return make(**values, member=transform.gaussian_mechanism(0.8, 0.1) if private else None)

    @jax.jit
    def ended(values):
        """After rounds of KEY itself: `run` binds a private run's key to its program, and would draw other noise."""
        algorithm = made(**values)
        keys = jax.vmap(lambda i: jax.random.fold_in(KEY, i))(jnp.arange(ROUNDS))
        start = algorithm.init(KEY, START, DATA.train)
        state, _ = jax.lax.scan(lambda state, key: (algorithm.step(key, state, DATA.train)[0], None), start, keys)
        return loss(algorithm.params(state))

    value, slopes = hypergradient(KEY, made, VALUES, START, DATA.train, num_rounds=ROUNDS, loss=loss)
    np.testing.assert_allclose(value, ended.__wrapped__(VALUES), rtol=1e-5)  # of plain numbers, as users have them
    for name in VALUES:
        step = 1e-3
        ends = [float(ended(VALUES | {name: value})) for value in (VALUES[name] + step, VALUES[name] - step)]
        difference = (ends[0] - ends[1]) / (2 * step)
        assert abs(difference) > 1e-3
        np.testing.assert_allclose(slopes[name], difference, rtol=2e-2, atol=2e-4)


def test_by_hand():
    """Fault: a factor. w_T = (1 - rate h)^T w_0, so d w_T / d rate = -T h (1 - rate h)^(T-1) w_0."""
    clients = population.quadratic_population([2.0], [0.0])

    def made(rate):
        return algorithms.fedavg(quadratic_loss, sampling.full(1), optax.sgd(rate), num_steps=1)

    start = {"w": jnp.full(1, 3.0)}
    run = {"num_rounds": 5, "loss": lambda params: params["w"][0]}
    value, slopes = hypergradient(KEY, made, {"rate": 0.1}, start, clients, **run)
    np.testing.assert_allclose(value, 0.8**5 * 3, rtol=1e-5)
    np.testing.assert_allclose(slopes["rate"], -5 * 2 * 0.8**4 * 3, rtol=1e-5)


def test_a_derivative_outside_is_an_error():
    """Fault: jax.grad of a round that gives zero in silence."""

    def ends(rate):
        with engine.one_device():
            made = make(rate)
            state = made.init(KEY, START, DATA.train)
            return loss(made.params(made.step(KEY, state, DATA.train)[0]))

    for differentiate in (jax.grad(ends), lambda x: jax.jvp(ends, (x,), (jnp.ones_like(x),))):
        with refused("derivative", rule="exact sum", kind=InvalidType):
            jax.jit(differentiate)(0.1)


@pytest.mark.parametrize(
    "values, member, words",
    [
        ({}, None, "values: expected"),
        ({"rate": float("nan")}, None, "values"),
        ({"rate": 0.1}, transform.quantize(8), "transform: expected one that sends unrounded"),
    ],
)
def test_refusals(values, member, words):
    """Fault: the derivative of a rounded number, which is zero; a run before its values are checked."""
    with pytest.raises((TypeError, ValueError), match=words):
        hypergradient(KEY, lambda **v: make(**v, member=member), values, START, DATA.train, num_rounds=1, loss=loss)


def test_a_diverging_trajectory_is_told():
    """Fault: NaN returned as a derivative."""

    def made(rate):
        return algorithms.fedavg(quadratic_loss, sampling.full(6), optax.sgd(rate), num_steps=1)

    with pytest.raises(FloatingPointError, match="diverges"):
        hypergradient(KEY, made, {"rate": 90.0}, START, DATA.train, num_rounds=40, loss=loss)
