"""The studies' smallest problem: its updates have their closed form; rows side by side are the single algorithms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import sampling, transform
from fedjax_sim.study.findings import measured, rows_of
from fedjax_sim.study.problems import Vectors, side_by_side

CLIENTS = Vectors(np.random.default_rng(0).normal(size=(6, 3)) + 2)
START = {"w": jnp.array([0.5, -1.0, 0.0])}


def test_updates():
    """Fault: a gradient of |w - u|^2, a mean over the population's size, a step size that the update lacks."""
    algorithm = CLIENTS.algorithm(step_size=0.25)
    state = algorithm.init(jax.random.key(0), START, CLIENTS.population)
    moved = algorithm.params(algorithm.step(jax.random.key(1), state, CLIENTS.population)[0])["w"]
    start = np.array([0.5, -1.0, 0.0])
    np.testing.assert_allclose(moved, start + 0.25 * (CLIENTS.mean - start), rtol=1e-6)


@pytest.mark.full
def test_side_by_side():
    """Fault: rows that share their noise, numbers that stay those of the first row, states mixed up, counts of one."""

    def make(clip_norm, multiplier):
        mechanism = transform.gaussian_mechanism(clip_norm, multiplier)
        return CLIENTS.algorithm(mechanism, sampler=sampling.uniform(6, 4), step_size=0.5)

    values = {"clip_norm": [0.5, 2.0, 2.0], "multiplier": [1.0, 0.5, 0.5]}
    both, key = side_by_side(make, values), jax.random.key(7)
    state = both.init(key, START, CLIENTS.population)
    for t in range(2):
        state, info = both.step(jax.random.fold_in(key, t), state, CLIENTS.population)
    rows = both.params(state)["w"]
    assert rows.shape == (3, 3) and not np.array_equal(rows[1], rows[2]) and int(info["dropped_clients"]) == 0
    for i in (0, 2):
        alone = make(*(float(values[name][i]) for name in values))
        state = alone.init(key, START, CLIENTS.population)
        for t in range(2):
            state, _ = alone.step(jax.random.fold_in(jax.random.fold_in(key, t), i), state, CLIENTS.population)
        np.testing.assert_allclose(rows[i], alone.params(state)["w"], rtol=2e-5)


def test_rows_share_their_intervals():
    """Fault: intervals of a figure that are narrower than those of the table."""
    samples = np.random.default_rng(0).normal(size=50)
    found = [measured({"part": part}, "x", samples) for part in ("a", "b", "b")]
    (first,), alone = rows_of(found, part="a"), rows_of(found[:1])[0]
    assert len(rows_of(found, part="b", quantity="x")) == 2 and rows_of(found, part="c") == []
    assert first["high"] - first["low"] > 1.1 * (alone["high"] - alone["low"])
