"""Clients of unequal work: local loops end lane by lane, and a point of a sweep is still the run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, engine, population, sampling
from fedjax_sim.running.loop import run
from fedjax_sim.sweeps import traced_hyperparameters
from fedjax_sim.sweeps.sweep import sweep

WORK = {"mesh": None}
LATE = sampling.with_stragglers(sampling.uniform(5, 4), 0.4)


def people(*sizes):
    rows = np.random.default_rng(0).standard_normal((sum(sizes), 3), np.float32)
    return population.stored({"x": rows[:, :2], "y": rows[:, 2]}, np.cumsum((0, *sizes)))


def squares(params, examples, key):
    return (examples["x"] @ params["w"] - examples["y"]) ** 2


def proximal(rate, mu):
    """Epochs of stragglers, by the client's rate and mu."""
    work = {"num_epochs": 2, "batch_size": 4, "coefficient": mu}
    return algorithms.fedprox(squares, LATE, optax.sgd(rate), **work, **WORK)


def scaffold(rate, mu):
    """Steps, partly done, by SCAFFOLD's own rate and its server's."""
    options = {"num_steps": 3, "weighting": "uniform", "server_learning_rate": mu}
    return algorithms.scaffold(squares, LATE, optax.sgd(rate), **options, **WORK)


@pytest.mark.full  # by default lanes end one by one, below, and points are their runs in tests/sweeps/test_sweep.py
@pytest.mark.optimised
@pytest.mark.parametrize(
    ("make", "clients"),
    [(proximal, people(1, 3, 0, 9, 6)), (scaffold, people(1, 70, 0, 9, 6))],
)  # the second in two classes
def test_ragged_points_are_their_runs(make, clients):
    """Catches a vmapped loop that is replayed as if its lanes ended together, or that does not trace at all."""
    key, params = jax.random.key(5), {"w": jnp.zeros(2)}
    points = [{"rate": 0.03, "mu": 0.3}, {"rate": 0.07, "mu": 0.6}]
    with engine.one_device():
        found = sweep(make, params, clients, 3, grid=points, seeds=[5])
    assert found.num_programs == 1 and found.exact
    record = run(key, make(**points[1]), params, clients, 3)[1].records[-1]
    assert {name: found.rows[1][name] for name in record} == record
    assert found.rows[0]["local_loss"] != record["local_loss"]


def test_lanes_end_one_by_one():
    """Catches a lane that goes on with the longest, a test without its own float, and keys that cannot be chosen."""

    def make(a):
        def one(x, key):
            def turn(carry):
                count, x, key = carry
                return count + 1, x * (1 + a), jax.random.fold_in(key, count)

            count, x, key = jax.lax.while_loop(lambda carry: carry[1] < 9 * a, turn, (0, x, key))
            return count, x, jax.random.key_data(key)

        return jax.vmap(jax.vmap(one))

    values = [0.3, 0.5, 0.7]
    args = jnp.float32([[0.1, 7.0], [0.5, 2.0]]), jax.random.split(jax.random.key(0), (2, 2))
    traces = [traced_hyperparameters.traced_program(make(a), *args)[0] for a in values]
    assert len({one.kind for one in traces}) == 1
    floats = traced_hyperparameters.lifted(traces)
    again = jax.jit(lambda own, *args: traced_hyperparameters.replay(traces[0], own, *args))
    for i, a in enumerate(values):
        found = again([None if column is None else column[i] for column in floats], *args)
        jax.tree.map(np.testing.assert_array_equal, found, jax.jit(make(a))(*args))


def test_what_cannot_be_replayed_stays():
    """Catches a sweep that ends in NotImplementedError for a float inside what no replay opens."""

    def make(a):
        return lambda x: jax.lax.custom_linear_solve(lambda y: a * y, x, lambda mv, b: b / a) * (a + 2)

    traces = [traced_hyperparameters.traced_program(make(a), jnp.ones(2))[0] for a in (0.3, 0.5)]
    assert traces[0].kind != traces[1].kind
    np.testing.assert_array_equal(
        traced_hyperparameters.replay(traces[1], [None] * len(traces[1].floats), jnp.ones(2)), [5.0, 5.0]
    )
