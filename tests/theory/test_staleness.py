"""Stale updates: limits and errors against numbers by hand, NumPy's recursion and the simulator."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.linalg import solve_discrete_lyapunov

from fedjax_sim import algorithms, population, theory
from fedjax_sim.server.staleness import constant
from fedjax_sim.types import Devices, Spent
from tests.refusals import refused

LIMITS = {0: 2, 1: 1, 2: 0.618034, 3: 0.445042, 5: 0.284630, 10: 0.149460, 20: 0.0766055}


def test_limits():
    """Catches a delay that is one off, and a root that is not the largest."""
    for delay, limit in LIMITS.items():
        assert abs(2 * theory.delayed_step_limit(delay, curvature=2.0) - limit) <= 5e-7  # six decimals
        exact = theory.delayed_step_limit(delay)
        radii = [theory.delayed_contraction([[0.1, 0], [0, 1.0]], delay, step_size=c * exact) for c in (0.99, 1, 1.01)]
        assert radii[0] < 1 < radii[2] and abs(radii[1] - 1) < 1e-9
    assert theory.delayed_contraction(3.0, 0, step_size=0.1) == pytest.approx(0.7)


@pytest.mark.parametrize("delay", [0, 1, 2, 10])
def test_floor_solves_lyapunov(delay):
    """P = A P A^T + B of the companion matrix, near the limit too. Catches a phase that is one lag off."""
    for share in (0.1, 0.5, 0.99):
        step, expected = share * theory.delayed_step_limit(delay, curvature=3.0), 0.0
        for curvature in (0.5, 3.0):
            companion = np.eye(delay + 1, k=-1)
            companion[0, 0] += 1
            companion[0, delay] -= step * curvature
            source = np.zeros_like(companion)
            source[0, 0] = (step * 0.7) ** 2
            expected += solve_discrete_lyapunov(companion, source)[0, 0]
        floor = theory.delayed_floor(np.diag([0.5, 3.0]), delay, step_size=step, noise=0.7)
        assert floor == pytest.approx(expected, rel=1e-7)


def test_no_floor_beyond_the_limit():
    """Catches a finite number for what diverges, or for a direction without curvature."""
    limit = theory.delayed_step_limit(3)
    for wrong in (limit, 1.01 * limit, float("nan")):
        with pytest.raises(ValueError, match="step_size: expected"):
            theory.delayed_floor(1.0, 3, step_size=wrong)
    with refused("hessian", rule="positive definite"):
        theory.delayed_floor(np.diag([0.0, 1.0]), 0, step_size=0.1)


def test_errors_of_stale_gradients():
    """Catches a bound by another eigenvalue; equality along the steepest direction."""
    hessian = np.diag([1.0, 10.0])
    error, bound = theory.stale_gradient_error(hessian, [0.5, 1.0])
    assert (round(error, 4), round(bound, 4)) == (10.0125, 11.1803)
    along = theory.stale_gradient_error(hessian, [0.0, -2.0])
    assert along.error == along.bound == 20.0
    rng = np.random.default_rng(0)
    for _ in range(50):
        root = rng.normal(size=(4, 4))
        error, bound = theory.stale_gradient_error(root @ root.T, rng.normal(size=4))
        assert error <= bound * (1 + 1e-12)


def equal_delays(size) -> Devices:
    def spend(key, ids, load):
        took = jnp.full_like(ids, 7)
        return Spent(took, took, took, took.astype(jnp.float32))

    return Devices(size, spend)


@pytest.mark.full  # a simulation beside its closed forms
@pytest.mark.parametrize("delay", [1, 3])
def test_simulated_rounds_have_the_limit(delay):
    """`delay` + 1 clients in flight whose delays are equal: all gradients are so stale. Converges at 0.99 of the limit
    and diverges at 1.01. Catches staleness that is counted but not simulated."""
    size, curvature, rounds = delay + 1, 2.0, 3000
    data = population.quadratic_population([curvature] * size, [0.0] * size)

    def final(rate):
        made = algorithms.fedbuff(
            population.quadratic_loss,
            equal_delays(size),
            optax.sgd(1.0),
            population_size=size,
            concurrency=size,
            buffer_size=1,
            refill="same",
            staleness=constant(),
            server_optimizer=optax.sgd(rate),
            num_steps=1,
            mesh=None,
        )
        state = made.init(jax.random.key(0), {"w": jnp.ones(1)}, data)
        keys = jax.random.split(jax.random.key(1), rounds)
        state, info = jax.lax.scan(lambda state, key: made.step(key, state, data), state, keys)
        return jnp.abs(made.params(state)["w"][0]), info["staleness"]

    limit = theory.delayed_step_limit(delay, curvature=curvature)
    ends, gaps = jax.jit(jax.vmap(final))(jnp.array([0.99 * limit, 1.01 * limit]))
    radii = [theory.delayed_contraction(curvature, delay, step_size=c * limit) for c in (0.99, 1.01)]
    assert (np.asarray(gaps)[:, delay:] == delay).all()
    assert ends[0] < 10 * radii[0] ** rounds + 1e-30 < 0.1 and ends[1] > 0.1 * radii[1] ** rounds > 10
