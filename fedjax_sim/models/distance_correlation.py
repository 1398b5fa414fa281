"""Distance correlation measures how strongly two views of the same examples depend on each other, in any form."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim.types import Array
from fedjax_sim.validate import fail

MIN_SQUARED_DISTANCE = 1e-12  # squared distances up to this count as zero, because the root has no derivative at zero


def distance_correlation(x: Array, z: Array, weights: Array | None = None) -> Array:
    """Computes the distance correlation of two views x and z of the same examples.

    It is 0 for independent views of a large sample, and 1 for a view and its copy. Let a_jk = |x_j - x_k| and
    b_jk = |z_j - z_k| be distances, and A and B these matrices centred over rows and columns. Then the result is the
    root of mean(A B) / sqrt(mean(A A) mean(B B)). Distances up to 1e-6 count as 0.

    Args:
      x, z: [n, ...], the same examples in both.
      weights: [n], non-negative. An example of weight 0 is ignored. None means weight 1 for each example.

    Returns: [] float32 in [0, 1]. It is 0 if one of the views is constant, and NaN if an example is not finite.

    Raises: ValueError if x and z have different numbers of examples.

    Guarantees: it agrees with SciPy's distances in float64, and an example of weight 0 changes nothing
    (tests/models/test_distance_correlation.py::test_against_numpy, ::test_weights). It lies in [0, 1] (::test_range).
    It is never 0 if an example is not finite (::test_not_finite).

    References: Szekely, Rizzo and Bakirov 2007, definition 4; Vepakomma, Singh, Gupta and Raskar 2020 (NoPeek).

    >>> import jax
    >>> x, correlation = jnp.array([[0.0], [1.0], [3.0]]), jax.jit(distance_correlation)
    >>> round(float(correlation(x, -2 * x)), 3), float(correlation(x, jnp.ones((3, 1))))
    (1.0, 0.0)
    """
    if x.shape[:1] != z.shape[:1] or not x.shape:
        fail("z", f"{x.shape[:1]} examples, as x", z.shape)
    w = jnp.ones(x.shape[0]) if weights is None else weights
    w = w.astype(jnp.float32) / jnp.maximum(w.sum().astype(jnp.float32), MIN_SQUARED_DISTANCE)
    pair_weights = w[:, None] * w[None]
    is_pair = pair_weights > 0
    a, b = (_centred(_distances(view, is_pair), w) for view in (x, z))
    covariance, a_variance, b_variance = (
        jnp.where(is_pair, pair_weights * first * second, 0).sum() for first, second in ((a, b), (a, a), (b, b))
    )
    # Comparisons with NaN are False. Written as a negation, a NaN counts as varying and reaches the result.
    both_vary = ~((a_variance <= 0) | (b_variance <= 0))
    # The roots divide one after the other, because their product may overflow.
    deviations = (jnp.sqrt(jnp.where(both_vary, variance, 1)) for variance in (a_variance, b_variance))
    ratio = jnp.minimum(covariance / next(deviations) / next(deviations), 1)
    is_positive = both_vary & ~(ratio <= 0)
    # The inner `where` keeps the root, and so its gradient, finite where the outer one does not select it.
    return jnp.where(is_positive, jnp.sqrt(jnp.where(is_positive, ratio, 1)), 0)


def _distances(x: Array, is_pair: Array) -> Array:
    """Returns the Euclidean distances [n, n]. They are zero on the diagonal and where `is_pair` [n, n] is False."""
    rows = x.reshape(x.shape[0], -1).astype(jnp.float32)
    squared_distances = jnp.square(rows[:, None] - rows[None]).sum(-1)
    is_apart = is_pair & ~(squared_distances <= MIN_SQUARED_DISTANCE)
    return jnp.where(is_apart, jnp.sqrt(jnp.where(is_apart, squared_distances, 1)), 0)


def _centred(distances: Array, w: Array) -> Array:
    """Subtracts the weighted means of rows and columns from the distances, with weights w [n] that add up to 1."""
    row_means = distances @ w
    return distances - row_means[:, None] - row_means[None] + w @ row_means
