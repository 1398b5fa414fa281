"""The presets have the numbers that their docstrings state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import network
from fedjax_sim.types import Load
from tests.refusals import refused

KEY, IDS = jax.random.key(0), jnp.arange(20_000)


def test_cross_silo():
    """Ten organisations, always there: one round's times by hand, within their jitter. Catches a unit."""
    silos = network.cross_silo(10)
    spent = jax.jit(silos.spend)(KEY, jnp.arange(10), Load(*map(jnp.float32, (1e15, 1.25e9, 1.25e9))))
    assert silos.availability is None and silos.population_size == 10
    assert 60_000 < np.median(spent.compute) < 160_000 and 8_000 < spent.down.min() < spent.up.max() < 12_500
    np.testing.assert_allclose(spent.joules, spent.compute / 2, rtol=1e-3)
    with refused("population_size", value=1001, rule="[2, 1000]", hint="cross_device"):
        network.cross_silo(1001)


def test_cross_device():
    """Medians of 20,000 phones within 3 %, and four times as many at the best hour as at the worst."""
    phones = network.cross_device(2**31 - 1)
    spent = jax.jit(phones.spend)(KEY, IDS, Load(*map(jnp.float32, (5e10, 55e6 / 8, 18.9e6 / 8))))
    medians = [np.median(x) for x in (spent.compute, spent.down, spent.up)]
    np.testing.assert_allclose(medians, [10_000, 1050, 1050], rtol=0.03)
    assert np.percentile(spent.compute, 95) > 10 * np.percentile(spent.compute, 5)
    at = jax.jit(phones.availability.at)
    there = np.stack([at(IDS, jnp.int32(hour * 3600)) for hour in range(24)]).mean(1)
    assert there.mean() == pytest.approx(0.1, abs=0.005) and there.max() / there.min() == pytest.approx(4, rel=0.15)
    far = jax.jit(phones.spend)(KEY, jnp.array([2**31 - 2]), Load(*map(jnp.float32, (5e10, 1e6, 1e6))))
    assert (far.total > 0).all()
