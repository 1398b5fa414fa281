"""FedMGDA+ against NumPy and an exact optimum, its limit, and that no client loses."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, sampling, transform
from fedjax_sim.algorithms.server.fedmgda import least_mixture
from tests.algorithms.personal import problem as p
from tests.refusals import refused

SGD, FULL = optax.sgd(p.RATE), sampling.full(p.NUM_CLIENTS)
solve = jax.jit(least_mixture, static_argnums=3)


def exact(products, epsilon):
    """The optimum by trial: every entry is at its lower bound, at its upper one, or free."""
    n = len(products)
    low, high = max(1 / n - epsilon, 0), min(1 / n + epsilon, 1)
    least, best = np.inf, None
    for places in itertools.product("lhf", repeat=n):
        places = np.array(places)
        fixed, free = np.where(places == "l", low, high), places == "f"
        point = np.where(free, 0.0, fixed)
        if free.any():  # derivatives are equal on free entries, and the sum is 1
            k = free.sum()
            system = np.block([[2 * products[np.ix_(free, free)], -np.ones((k, 1))], [np.ones((1, k)), 0]])
            right = np.r_[-2 * products[free] @ point, 1 - point.sum()]
            point[free] = np.linalg.lstsq(system, right, rcond=None)[0][:k]
        is_inside = abs(point.sum() - 1) < 1e-9 and (point >= low - 1e-9).all() and (point <= high + 1e-9).all()
        if is_inside and point @ products @ point < least:
            least, best = point @ products @ point, point
    return best, least


@pytest.mark.full
@pytest.mark.default_rows(1)
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gap_bounds_the_distance_to_the_optimum(epsilon, seed):
    """Five directions among seven rows: the weights are the exact ones; after a few steps only, the gap is at least
    what is missing. Catches a bound of another sign, and rows of the absent that get a weight."""
    rng = np.random.default_rng(seed)
    u = rng.normal(size=(7, 4)) + 0.5
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    members = np.array([0, 2, 3, 5, 6])
    arrived = np.isin(np.arange(7), members)
    best, least = exact((u @ u.T)[np.ix_(members, members)], epsilon)
    for steps in (0, 2, 300):
        weights, gap = solve(jnp.array(u @ u.T, jnp.float32), jnp.array(arrived), epsilon, steps)
        found = np.float64(weights)
        missing = found @ u @ u.T @ found - least
        assert -2e-6 < missing < gap + 2e-6 and not found[~arrived].any() and abs(found.sum() - 1) < 1e-5
    assert gap < 1e-5
    np.testing.assert_allclose(found[members] @ u[members], best @ u[members], atol=3e-3)


@pytest.mark.full
def test_a_large_cohort_converges():
    """100 directions of 20 dimensions that point to one side: the default number of steps leaves little."""
    u = np.random.default_rng(3).normal(size=(100, 20)) + 0.3
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    weights, gap = solve(jnp.array(u @ u.T, jnp.float32), jnp.ones(100, bool), 1.0, 500)
    length = np.square(np.float64(weights) @ u).sum()
    assert gap < 0.02 * length


def directions(model):
    updates = []
    for client in p.rows():
        local = model
        for _ in range(p.STEPS):
            local = local - p.RATE * p.gradient(local, client)
        updates.append((local - model) / np.linalg.norm(local - model))
    return np.array(updates)


def model_after(algorithm, **options):
    state, info = p.trained(algorithm, **options)
    return p.vector(algorithm.params(state)), info


def mgda(epsilon=1.0, rate=0.5, sampler=FULL, **options):
    return algorithms.fedmgda(
        p.loss_fn, sampler, SGD, epsilon=epsilon, server_learning_rate=rate, **p.OPTIONS | options
    )


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("epsilon", [0.05, 1.0])
def test_matches_numpy(epsilon):
    """Catches updates that are not normalised, a mean by rows, and a step the other way."""
    model = p.START
    for _ in range(p.ROUNDS):
        u = directions(model)
        model = model + 0.5 * exact(u @ u.T, epsilon)[0] @ u
    found, info = model_after(mgda(epsilon))
    np.testing.assert_allclose(found, model, atol=5e-4)
    assert info["duality_gap"] < 1e-5


@pytest.mark.full
def test_epsilon_zero_is_the_mean_of_directions():
    model = p.START
    for _ in range(p.ROUNDS):
        model = model + 0.5 * directions(model).mean(0)
    found, info = model_after(mgda(0.0))
    np.testing.assert_allclose(found, model, rtol=1e-5)
    assert info["duality_gap"] < 1e-6


@pytest.mark.full
def test_nobody_loses():
    """From points where the mean of updates raises some client's loss, a short step of FedMGDA raises none's."""
    rng = np.random.default_rng(0)
    raised = 0
    for _ in range(6):
        start = rng.normal(size=3)
        u = np.array([-p.gradient(start, client) for client in p.rows()])
        u /= np.linalg.norm(u, axis=1, keepdims=True)
        weights, _ = solve(jnp.array(u @ u.T, jnp.float32), jnp.ones(5, bool), 1.0, 300)
        step = np.float64(weights) @ u
        assert (u @ step > np.square(step).sum() - 1e-4).all()
        raised += (u @ u.mean(0) < 0).any()
    assert raised > 0


@pytest.mark.full
def test_messages_may_be_compressed_and_privately_summed_ones_may_not():
    found, _ = model_after(mgda(transform=transform.quantize(8)))
    exact_model, _ = model_after(mgda())
    assert 0 < np.abs(found - exact_model).max() < 0.2
    with refused("aggregator", rule="bounded amount"):
        mgda(transform=transform.gaussian_mechanism(1.0, 1.0))
    with refused("transform", rule="sends numbers"):
        mgda(transform=transform.quantize(8, range=1.0, integers=True))
