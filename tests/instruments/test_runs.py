"""Independent runs and the moments of a population, against `run` and float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, client, population, sampling, server
from fedjax_sim.algorithms import federated
from fedjax_sim.instruments.moments import population_moments
from fedjax_sim.instruments.runs import independent_runs, squared_distance
from fedjax_sim.running.loop import run

SIZE, COHORT, DIMENSION = 12, 5, 3
VALUES = np.random.default_rng(0).normal(1.0, 2.0, (SIZE, DIMENSION)).astype(np.float32)
PARAMS = {"w": jnp.full(DIMENSION, 0.25)}
TARGET = {"w": jnp.arange(3.0)}


def clients():
    return population.indexed({"x": VALUES}, (np.arange(SIZE, dtype=np.int32), np.arange(SIZE + 1)))


def loss(params, examples, key):
    return {"loss": 0.5 * jnp.sum((params["w"][None] - examples["x"]) ** 2, -1)}


WORK = client.local_sgd(loss, optax.sgd(0.5), client.work(num_steps=2, weighting="uniform"))
ALGORITHM = federated(
    sampling.uniform(SIZE, COHORT), WORK, aggregation.mean(), server.optimizer(optax.sgd(1.0)), mesh=None
)


def runs(num_runs, **options):
    options = {"evaluation": squared_distance(TARGET)} | options
    return independent_runs(jax.random.key(3), ALGORITHM, PARAMS, clients(), num_runs, **options)


@pytest.mark.full
@pytest.mark.default_rows(1)
@pytest.mark.parametrize("batch", [1, 3])
def test_runs_are_those_of_run(batch):
    """Fault: a key that ignores the run or the round, a state that one run leaves to the next, a look too late."""
    seen = runs(4, rounds=(1, 3), batch=batch)
    for number in (0, 2):
        key = jax.random.fold_in(jax.random.key(3), number)
        for look, rounds in enumerate((1, 3)):
            ended, _ = run(key, ALGORITHM, PARAMS, clients(), rounds)
            away = np.sum(np.square(ended.server.params["w"] - TARGET["w"]))
            np.testing.assert_allclose(seen["squared_error"][number, look], away, rtol=2e-6)
    assert len(set(seen["squared_error"][:, 1])) == 4 and (seen["clients_reported"] == COHORT).all()


@pytest.mark.full
@pytest.mark.devices
def test_batches_and_devices():
    """Fault: padding runs that count, runs in another order, a device that repeats another's."""
    one, many = (runs(7, batch=batch)["squared_error"] for batch in (1, 3))
    assert one.shape == many.shape == (7,) and len(set(one)) == 7
    np.testing.assert_allclose(one, many, rtol=1e-5)


def test_population_moments():
    """Fault: a variance with divisor N - 1, one that is taken around the pilot's mean, clients left out."""
    moments = population_moments(jax.random.key(0), WORK, PARAMS, clients())
    updates = 0.75 * (VALUES.astype(np.float64) - 0.25)  # 1 - (1 - 0.5)^2 of the way
    np.testing.assert_allclose(moments.mean["w"], updates.mean(0), rtol=1e-5)
    np.testing.assert_allclose(moments.variance, ((updates - updates.mean(0)) ** 2).sum() / SIZE, rtol=1e-5)
    assert moments.size == SIZE


def test_updates_that_are_not_finite_are_told():
    """Fault: a variance of the clients that are left, as if it were the population's."""

    def broken(params, examples, key):
        infinite = jnp.where(examples["x"][:, 0] == VALUES[4, 0], jnp.inf, 1)
        return {"loss": loss(params, examples, key)["loss"] * infinite}

    work = client.local_sgd(broken, optax.sgd(0.5), client.work(num_steps=1, weighting="uniform"))
    with pytest.raises(FloatingPointError, match="not finite"):
        population_moments(jax.random.key(0), work, PARAMS, clients())
    lost = federated(sampling.full(SIZE), work, aggregation.mean(), server.optimizer(optax.sgd(1.0)), mesh=None)
    with pytest.raises(FloatingPointError, match="not finite"):
        independent_runs(jax.random.key(0), lost, PARAMS, clients(), 2, evaluation=squared_distance(TARGET))


@pytest.mark.full
def test_one_number_of_numpy():
    """Fault: a number of rounds that is taken for a list, since it is no `int`."""
    assert runs(2, rounds=np.int64(1))["squared_error"].shape == (2,)


WRONG = [{"rounds": ()}, {"rounds": (3, 1)}, {"rounds": 0}, {"rounds": 2.0}, {"rounds": True}, {"batch": 0}]


@pytest.mark.parametrize("options", WRONG)
def test_wrong_options(options):
    """Fault: looks that are lost in silence."""
    with pytest.raises((TypeError, ValueError), match="expected"):
        runs(2, **options)
