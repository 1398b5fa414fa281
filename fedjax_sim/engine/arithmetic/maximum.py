"""The largest number of an array."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from fedjax_sim.types import Array

__all__ = ["largest"]

PARTS = 8  # of a vector that are compared at once
SHORT = 64


def largest(x: Array) -> Array:
    """[] the largest of an array's numbers; NaN if there is one.

    The same as `x.max()`, in an order that XLA:CPU vectorises: the larger numbers of eight parts, until few are left.
    NaN is looked for among these: under `vmap` over many arrays XLA:CPU's maximum drops it.

    Guarantees: tests/engine/arithmetic/test_maximum.py::test_largest_of_an_array; NaN of each of many arrays
    (::test_no_nan_of_many_arrays_is_lost).

    >>> import jax.numpy as jnp
    >>> float(largest(jnp.array([[1.0, 3.0], [-5.0, 2.0]])))
    3.0
    """
    x = x.reshape(-1)
    while x.size > SHORT:
        size = -(-x.size // PARTS)  # the last part overlaps the one before
        starts = [min(i * size, x.size - size) for i in range(PARTS)]
        x = functools.reduce(jnp.maximum, [x[start : start + size] for start in starts])
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.max()
    return jnp.where(jnp.isnan(x).any(), jnp.nan, x.max())
