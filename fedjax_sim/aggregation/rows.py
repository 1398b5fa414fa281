"""Norms and weighted means over the rows of a cohort, whose bits are the same in every compiled round.

A rule of `aggregation.gather` is compiled anew for each number of devices. `engine.reproducible` then gives the rule's
own products, quotients and sums over axes one rounding in all these programs. It leaves sums of more than 2^24 numbers
(clients times coordinates) to the compiler. The sums here have no such limit, so a rule needs nothing but these
functions and arithmetic. A geometric median, by Weiszfeld's iteration
(tests/aggregation/robust/test_geometric_median.py), is

    def closer(_, point):
        differences = jax.tree.map(lambda x, y: x - y[None], updates, point)
        distances = jnp.sqrt(rows.squared_norms(differences))
        return rows.weighted_mean(updates, weights / jnp.maximum(distances, 1e-6))

    return jax.lax.fori_loop(0, 100, closer, rows.weighted_mean(updates, weights))
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import tree
from fedjax_sim.engine.arithmetic.rewriter import pairwise_sum
from fedjax_sim.types import Array, PyTree


def squared_norms(updates: PyTree) -> Array:
    """Computes the squared L2 norm of each row, over all leaves: [m] float32.

    Args:
      updates: leaves [m, ...] of numbers, converted to float32.

    Returns: |u_i|^2 of each row i. It is infinity where a square exceeds the range of float32 (numbers from about
    1.8e19 on).

    Guarantees: in `engine.reproducible` the bits are those of NumPy's float32 squares, added by halves, leaf after leaf
    (tests/aggregation/test_rows.py::test_bits_are_those_of_numpy).

    >>> import jax.numpy as jnp
    >>> squared_norms({"a": jnp.array([[3.0, 4.0], [0.0, 1.0]]), "b": jnp.array([2.0, 0.0])}).tolist()
    [29.0, 1.0]
    """
    total = jnp.float32(0)
    for leaf in jax.tree.leaves(updates):
        numbers = leaf.reshape(leaf.shape[0], -1).astype(jnp.float32)
        total = total + pairwise_sum(numbers * numbers, (1,))
    return total


def weighted_mean(updates: PyTree, weights: Array) -> PyTree:
    """Computes sum_i w_i u_i / sum_i w_i over the rows, leaf by leaf.

    Args:
      updates: leaves [m, ...], finite also where the weight is 0.
      weights: [m], 0 or positive.

    Returns: leaves [...] of floats, float32 at least; zeros if no weight is positive.

    Guarantees:
      - in `engine.reproducible` the bits are those of NumPy's products, added by halves, and of NumPy's quotient
        (tests/aggregation/test_rows.py::test_bits_are_those_of_numpy)
      - rows of weight 0 after the other rows change no bit (::test_rows_without_a_weight)

    >>> import jax.numpy as jnp
    >>> weighted_mean(jnp.array([[1.0], [4.0], [9.0]]), jnp.array([1.0, 2.0, 0.0])).tolist()
    [3.0]
    """
    weights = weights.astype(tree.at_least_float32(weights.dtype))
    total = weights.sum(0)
    divisor = jnp.where(total > 0, total, 1)  # without any weight all products are zero, and so is the quotient

    def mean(leaf):
        numbers = leaf.reshape(leaf.shape[0], -1).astype(tree.at_least_float32(leaf.dtype))
        products = numbers * weights.astype(numbers.dtype)[:, None]
        quotient = pairwise_sum(products, (0,)) / divisor.astype(numbers.dtype)
        return quotient.reshape(leaf.shape[1:])

    return jax.tree.map(mean, updates)
