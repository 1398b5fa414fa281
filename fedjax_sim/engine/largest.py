"""Finds the largest magnitude of an array, in an order that the target's compiler computes fast."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import jax
import jax.numpy as jnp

from fedjax_sim.engine.platform import target
from fedjax_sim.types import Array, PyTree

NUM_PARTS = 8  # of an array that are compared at once
MAX_UNDIVIDED = 160  # numbers; a shorter array is compared as a whole


def magnitude_bits(x: Array) -> Array:
    """Returns the bits of |x| of floats, as signed integers of the same width.

    They order as the magnitudes do, and those of infinity and then NaN are above all others. So no comparison drops a
    NaN, as XLA:CPU's maximum of floats does under `vmap` over many arrays.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))
    return bits & jnp.iinfo(bits.dtype).max  # the mask clears the sign


def largest_integer(x: Array, integer_of: Callable[[Array], Array] = lambda x: x) -> Array:
    """Returns [] the largest of an array of integers, of which there is at least one.

    Args:
      x: integers, or what `integer_of` makes integers of, element by element. On a CPU it is called on the parts of x,
        or XLA:CPU would write the integers of the whole array before it compares them.
      integer_of: maps elements to integers, one by one; by default x is integers already.

    XLA:CPU vectorises no maximum over the last axis, but it vectorises comparisons of two arrays. On a CPU the larger
    numbers of eight parts are therefore taken until few are left. A GPU reduces a whole array with many threads. There
    the parts, each read by a single thread, took a fifth of the kernels' time of an MLP's round.
    """
    x = x.reshape(-1)
    while x.size > MAX_UNDIVIDED and target() == "cpu":
        size = -(-x.size // NUM_PARTS)
        # The last part overlaps the one before.
        starts = [min(i * size, x.size - size) for i in range(NUM_PARTS)]
        x = reduce(jnp.maximum, [integer_of(x[start : start + size]) for start in starts])
        integer_of = lambda x: x  # noqa: E731
    return integer_of(x).max()


def largest_magnitude(x: Array) -> Array:
    """Returns [] the largest magnitude of an array's numbers, in their dtype; of complex numbers, in its real dtype.

    An array with a NaN gives NaN, an empty array gives 0.

    Args:
      x: of any shape; integers too.

    Guarantees:
      The result is right wherever the largest number is, and NaN wherever a NaN is, for sizes from 1 to 100,003
      (tests/engine/test_largest.py::test_largest_of_an_array).
      No NaN is lost under `vmap` over many arrays (::test_no_nan_of_many_arrays_is_lost), nor on accelerators
      (tests/accelerator/test_accelerator.py::test_no_nan_is_lost).

    >>> float(largest_magnitude(jnp.array([[1.0, 3.0], [-5.0, 2.0]])))
    5.0
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.abs(x)
    if not x.size:
        return jnp.zeros((), x.dtype)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return largest_integer(x, jnp.abs)
    return jax.lax.bitcast_convert_type(largest_integer(x, magnitude_bits), x.dtype)


def all_finite(tree: PyTree) -> Array:
    """Returns [] bool: whether no leaf has a NaN or an infinity.

    >>> bool(all_finite({"w": jnp.array([1.0, jnp.inf]), "step": jnp.array(3)}))
    False
    """
    leaves = [x for x in map(jnp.asarray, jax.tree.leaves(tree)) if jnp.issubdtype(x.dtype, jnp.inexact)]
    checks = [largest_magnitude(x) < jnp.inf for x in leaves]
    return jnp.stack(checks).all() if checks else jnp.asarray(True)
