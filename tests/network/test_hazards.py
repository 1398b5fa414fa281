"""Clients that leave while they train: what they have done by then."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_sim import network

KEY, IDS = jax.random.key(0), jnp.arange(40_000)


def left(hazard, key=KEY):
    return np.asarray(jax.jit(hazard.leaves_after)(key, IDS), np.float64)


def test_memoryless():
    """Exponential, and memoryless: those who stayed through 50 s leave as if they had just begun. KS, 10^-4.

    Catches a mean that is a rate, and a share above 1.
    """
    hazard = network.memoryless(100.0)
    times = left(hazard)
    assert stats.kstest(times, stats.expon(scale=100).cdf).pvalue > 1e-4
    assert stats.kstest(times[times > 50] - 50, stats.expon(scale=100).cdf).pvalue > 1e-4
    done = np.asarray(hazard.done(KEY, IDS, jnp.float32(80.0)), np.float64)
    np.testing.assert_allclose(done, np.minimum(times / 80, 1), rtol=1e-6)
    assert abs((done == 1).mean() - np.exp(-0.8)) < 5 * 0.5 / np.sqrt(len(IDS))
    assert (hazard.done(KEY, IDS, jnp.zeros(len(IDS))) == 1).all()  # no work is always done


def test_weibull():
    """The law at shapes on both sides of 1; each client may have its own scale. KS, 10^-4."""
    for shape in (0.5, 3.0):
        assert stats.kstest(left(network.weibull(7.0, shape)), stats.weibull_min(shape, scale=7).cdf).pvalue > 1e-4
    unequal = network.weibull(network.tiers([0.5, 0.5], [1.0, 1000.0]), 3.0)
    first, second = left(unequal), left(unequal, jax.random.key(1))
    same = (first > 30) == (second > 30)
    assert same.mean() > 0.999 and 0.45 < (first > 30).mean() < 0.55  # a client keeps its scale


def test_the_shortest_stay():
    """Catches a stay of 0 s, which the law excludes: the tenth power of a small number is below what float32 holds."""
    assert (left(network.weibull(10.0, 0.1)) > 0).all()


def test_a_client_leaves_once():
    """A function of round and client. Catches draws by slot, or the same fate in each round."""
    hazard = network.memoryless(10.0)
    some = jnp.array([7, 39_999, 7])
    np.testing.assert_array_equal(hazard.leaves_after(KEY, some), hazard.leaves_after(KEY, IDS)[some])
    assert (left(hazard) != left(hazard, jax.random.key(1))).mean() > 0.99


@pytest.mark.parametrize("call, told", [
    (lambda: network.memoryless(0.0), "mean_seconds: expected a distribution above 0"),
    (lambda: network.weibull(1.0, 0.0), "shape: expected a number in"),
    (lambda: network.weibull(float("nan"), 1.0), "scale_seconds: expected a finite number"),
])  # fmt: skip
def test_wrong_input(call, told):
    """Catches clients who leave before they begin."""
    with pytest.raises(ValueError, match=told):
        call()
