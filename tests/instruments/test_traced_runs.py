"""Runs with traced settings are the runs that `run` makes, in one program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, population, run, sampling
from fedjax_sim.instruments.traced_runs import stacked, traced_runs

SIZE = 6


def make(rate):
    return algorithms.fedavg(
        population.quadratic_loss, sampling.uniform(SIZE, 3), optax.sgd(rate), num_steps=2, mesh=None
    )


def settings(rates, seed=0):
    data = [population.quadratics(num_clients=SIZE, dimension=2, heterogeneity=h, seed=seed) for h in (0.5, 2.0)]
    params = {"w": jnp.array([[1.0, -1.0], [0.5, 0.0]])}
    keys = jnp.stack([jax.random.key(3), jax.random.key(4)])
    arguments = keys, params, stacked([one.train for one in data]), (jnp.asarray(rates),), jnp.zeros((2, 2))
    return data, arguments


def moved(params, target):
    return {"w": params["w"] - target, "first": params["w"][0]}


@pytest.mark.full
def test_runs_are_those_of_run():
    """Fault: a setting that gets another's clients, rate, key, start or number of rounds."""
    data, arguments = settings([0.1, 0.2])
    seen = traced_runs(make, moved)(*arguments, rounds=[[1, 5], [2, 3]])
    assert seen["w"].shape == (2, 2, 2) and seen["first"].dtype == np.float64
    keys, params, _, (rates,), _ = arguments
    for i, looks in enumerate(([1, 5], [2, 3])):
        for j, rounds in enumerate(looks):
            state, _ = run(keys[i], make(rates[i]), {"w": params["w"][i]}, data[i].train, num_rounds=rounds)
            np.testing.assert_allclose(seen["w"][i, j], state.server.params["w"], rtol=2e-6, atol=2e-6)


def test_one_program():
    """Fault: a study that compiles for each value of a number."""
    traces = []

    def counted(rate):
        traces.append(1)
        return make(rate)

    runs = traced_runs(counted, moved)
    for rates, seed in (([0.1, 0.2], 0), ([0.05, 0.4], 1)):
        runs(*settings(rates, seed)[1], rounds=[4])
    assert len(traces) == 1


def test_a_diverged_run_says_so():
    """Fault: infinities that become a study's samples."""
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        traced_runs(make, moved)(*settings([0.1, 1e30])[1], rounds=[40])
