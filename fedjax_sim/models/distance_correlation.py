"""How much two views of the same examples have in common, whatever the shape of the dependence."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim.types import Array
from fedjax_sim.validate import fail

__all__ = ["distance_correlation"]

LEAST = 1e-12  # under roots: a distance of zero has no slope


def distance_correlation(x: Array, z: Array, weights: Array | None = None) -> Array:
    """The distance correlation of two samples: 0 for independent views of a large sample, 1 for a view and its copy.

    With distances a_jk = |x_j - x_k| and b_jk = |z_j - z_k|, those below 1e-6 taken for 0, centred over rows and
    columns, it is the root of mean(A B) / sqrt(mean(A A) mean(B B)).

    Args:
      x, z: [n, ...], the same examples in both.
      weights: [n] non-negative; an example of weight 0 is not there. None = 1 each.

    Returns: [] float32 in [0, 1]; 0 where one of the views is constant; NaN where an example is not finite.

    Raises: ValueError for other numbers of examples.

    Guarantees: SciPy's distances in float64, and an example of weight 0 changes nothing
    (tests/models/test_distance_correlation.py::test_against_numpy, ::test_weights); the range (::test_range); no
    zero for what is not finite (::test_not_finite).

    References: Szekely, Rizzo and Bakirov 2007, definition 4; Vepakomma, Singh, Gupta and Raskar 2020 (NoPeek).

    >>> x = jnp.array([[0.0], [1.0], [3.0]])
    >>> round(float(distance_correlation(x, -2 * x)), 3), float(distance_correlation(x, jnp.ones((3, 1))))
    (1.0, 0.0)
    """
    if x.shape[:1] != z.shape[:1] or not x.shape:
        fail("z", f"{x.shape[:1]} examples, as x", z.shape)
    w = jnp.ones(x.shape[0]) if weights is None else weights
    w = w.astype(jnp.float32) / jnp.maximum(w.sum().astype(jnp.float32), LEAST)
    pairs = w[:, None] * w[None]
    there = pairs > 0
    a, b = (_centred(_distances(y, there), w) for y in (x, z))
    both, first, second = (jnp.where(there, pairs * one * other, 0).sum() for one, other in ((a, b), (a, a), (b, b)))
    spread = ~((first <= 0) | (second <= 0))  # and NaN where an example is not finite
    lengths = (jnp.sqrt(jnp.where(spread, one, 1)) for one in (first, second))  # their product may overflow
    ratio = jnp.minimum(both / next(lengths) / next(lengths), 1)
    positive = spread & ~(ratio <= 0)
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, ratio, 1)), 0)


def _distances(x: Array, there: Array) -> Array:
    """[n, n] Euclidean distances, zero on the diagonal and where an example is not there."""
    rows = x.reshape(x.shape[0], -1).astype(jnp.float32)
    square = jnp.square(rows[:, None] - rows[None]).sum(-1)
    apart = there & ~(square <= LEAST)
    return jnp.where(apart, jnp.sqrt(jnp.where(apart, square, 1)), 0)


def _centred(distances: Array, w: Array) -> Array:
    rows = distances @ w
    return distances - rows[:, None] - rows[None] + w @ rows
