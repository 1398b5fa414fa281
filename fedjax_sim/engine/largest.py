"""Finds the largest number of an array, in an order that the target's compiler computes fast."""

from __future__ import annotations

from functools import reduce

import jax.numpy as jnp

from fedjax_sim.engine.platform import target
from fedjax_sim.types import Array

__all__ = ["largest"]

PARTS = 8  # of an array that are compared at once
SHORT = 64  # numbers; a shorter array is compared as a whole


def largest(x: Array) -> Array:
    """Returns [] the largest of an array's numbers, or NaN if there is one.

    XLA:CPU vectorises no maximum over the last axis, but it vectorises comparisons of two arrays. On a CPU the larger
    numbers of eight parts are therefore taken until few are left. A GPU reduces a whole array with many threads. There
    the parts, each read by a single thread, took a fifth of the kernels' time of an MLP's round. NaN is looked for
    apart: under `vmap` over many arrays, XLA:CPU's maximum drops it.

    Args:
      x: numbers of any shape, at least one.

    Guarantees:
      The result is right wherever the largest number is, and NaN wherever a NaN is, for sizes from 1 to 100,003
      (tests/engine/test_largest.py::test_largest_of_an_array).
      No NaN is lost under `vmap` over many arrays (::test_no_nan_of_many_arrays_is_lost), nor on accelerators
      (tests/accelerator/test_accelerator.py::test_no_nan_is_lost).

    >>> float(largest(jnp.array([[1.0, 3.0], [-5.0, 2.0]])))
    3.0
    """
    x = x.reshape(-1)
    while x.size > SHORT and target() == "cpu":
        size = -(-x.size // PARTS)
        # The last part overlaps the one before.
        starts = [min(i * size, x.size - size) for i in range(PARTS)]
        x = reduce(jnp.maximum, [x[start : start + size] for start in starts])
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.max()
    return jnp.where(jnp.isnan(x).any(), jnp.nan, x.max())
