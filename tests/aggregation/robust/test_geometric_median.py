"""A geometric median written by a user, on public names alone: the same bits on any number of devices, in any order."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, client, engine
from fedjax_sim.aggregation import rows
from tests.laws import laws, problems as p

pytestmark = pytest.mark.optimised


def geometric_median(key, updates, weights, ids):
    """Weiszfeld 1937: weighted means whose weights are divided by the distances to the last one."""

    def closer(_, point):
        apart = jax.tree.map(lambda x, y: x - y[None], updates, point)
        distances = jnp.sqrt(rows.squared_norms(apart))
        return rows.weighted_mean(updates, weights / jnp.maximum(distances, 1e-6))

    return jax.lax.fori_loop(0, 100, closer, rows.weighted_mean(updates, weights))


def numpy_median(updates, weights):
    """float64, until nothing moves."""
    updates, weights = np.asarray(updates, np.float64), np.asarray(weights, np.float64)
    point, last = np.average(updates, axis=0, weights=weights), np.inf
    while np.abs(point - last).max() > 1e-13:
        distances = np.maximum(np.linalg.norm(updates - point, axis=1), 1e-12)
        point, last = np.average(updates, axis=0, weights=weights / distances), point
    return point


@pytest.mark.full
def test_matches_numpy():
    """Two rounds of ragged clients. Catches an absent client whose row counts, and a weight that is lost."""
    federation = p.Federation(aggregator=aggregation.gather(geometric_median))
    there = np.arange(p.SLOTS) != 4
    state, w = federation.init(), p.START.astype(np.float64)
    for i in range(2):
        round_key = jax.random.fold_in(jax.random.key(1), i)
        updates = [laws.numpy_local_sgd(w, id, round_key, size=p.SIZES[id]) for id in p.COHORT[there]]
        w = w + numpy_median(updates, p.SIZES[p.COHORT[there]])
        state, _ = federation.run(p.cohort(p.COHORT, reported=there), state=state, keys=[i])
        np.testing.assert_allclose(federation.algorithm.params(state), w, atol=2e-5)


def test_an_outlier_hardly_moves_it():
    """Leaves of several shapes, in NumPy too. Catches leaves that have a median each, one that is a mean, a row without
    a weight that counts, and a weight that is lost."""
    rng = np.random.default_rng(0)
    updates = {"a": rng.normal(size=(9, 2, 3)).astype(np.float32), "b": rng.normal(size=9).astype(np.float32)}
    updates["a"][0] = 1e4
    weights = np.arange(1.0, 10, dtype=np.float32)
    weights[4] = 0
    found = jax.jit(geometric_median)(jax.random.key(0), updates, weights, jnp.arange(9))
    flat = np.concatenate([updates["a"].reshape(9, -1), updates["b"][:, None]], axis=1)
    expected = numpy_median(flat, weights)
    assert np.abs(expected).max() < 2
    np.testing.assert_allclose(np.r_[np.ravel(found["a"]), found["b"]], expected, atol=1e-4)


@pytest.mark.full
def test_same_bits():
    """On 1 and 2 devices, with the cohort as it is, backwards and permuted; a model of two leaves."""
    work = client.local_sgd(p.mlp_loss, optax.sgd(p.RATE), client.work(num_steps=2, batch_size=p.BATCH))
    parts = {"aggregator": aggregation.gather(geometric_median), "client": work}
    one, two = (p.Federation(mesh=engine.device_mesh(n), **parts) for n in (1, 2))
    start, permuted = p.mlp_params(24), np.random.default_rng(0).permutation(p.COHORT)
    expected = p.outcome(*one.run(p.COHORT, params=start))
    for federation, cohort in ((one, p.COHORT[::-1]), (one, permuted), (two, p.COHORT), (two, p.COHORT[::-1])):
        laws.check_equal_bits(expected, p.outcome(*federation.run(cohort, params=start)), "model and metrics")
