"""Distance correlation against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.spatial.distance import cdist

from fedjax_sim import models

distance_correlation = jax.jit(models.distance_correlation)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(30, 4)).astype(np.float32)
Z = np.stack([X[:, 0] ** 2, RNG.normal(size=30)], 1).astype(np.float32)


def by_numpy(x, z):
    def centred(y):
        d = cdist(y.astype(np.float64), y.astype(np.float64))
        return d - d.mean(0) - d.mean(1, keepdims=True) + d.mean()

    a, b = centred(x), centred(z)
    return np.sqrt((a * b).mean() / np.sqrt((a * a).mean() * (b * b).mean()))


def test_against_numpy():
    """Catches squared distances, a lost centring, and a root too few."""
    np.testing.assert_allclose(distance_correlation(X, Z), by_numpy(X, Z), rtol=1e-5)
    q = np.linalg.qr(RNG.normal(size=(4, 4)))[0]
    np.testing.assert_allclose(distance_correlation(X, 3 * X @ q + 1), 1.0, rtol=1e-5)


def test_weights():
    """Catches padding that counts, in value or in slope."""
    padded = [np.concatenate([y, np.full((5, y.shape[1]), 1e3, np.float32)]) for y in (X, Z)]
    weights = jnp.arange(35) < 30
    weighted = jax.jit(jax.value_and_grad(lambda z: models.distance_correlation(padded[0], z, weights)))
    value, slope = map(np.asarray, weighted(padded[1]))
    np.testing.assert_allclose(value, by_numpy(X, Z), rtol=1e-5)
    assert (slope[30:] == 0).all() and np.isfinite(slope).all() and (slope[:30] != 0).any()
    alike = jax.jit(jax.grad(lambda z: models.distance_correlation(X, z)))(np.zeros((30, 2), np.float32))
    assert (np.asarray(alike) == 0).all()
    assert distance_correlation(X, Z, jnp.zeros(30)) == 0


def test_range():
    """Of a view and itself, at any scale. Catches a product that overflows, and rounding above 1."""
    for scale in (1e-3, 1.0, 1e12):
        found = np.array([distance_correlation(scale * X[i:], scale * X[i:]) for i in range(8)])
        assert (found <= 1).all() and (found > 0.9999).all()


def test_not_finite():
    """Catches a view that says nothing (0) because its numbers are lost, and padding that makes it so."""
    for x, z in ((X * np.nan, Z), (X, jnp.where(np.arange(30)[:, None] == 3, np.inf, Z))):
        assert jnp.isnan(distance_correlation(jnp.asarray(x), z))
    padded = np.concatenate([X, np.full((5, X.shape[1]), np.nan, np.float32)])
    weights = (np.arange(35) < 30).astype(np.float32)
    np.testing.assert_allclose(distance_correlation(padded, padded[:, :2], weights), by_numpy(X, X[:, :2]), rtol=1e-5)
