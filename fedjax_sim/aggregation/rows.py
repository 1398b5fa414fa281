"""Norms and means over rows, for rules that see every message (`aggregation.gather`): sums of one order in any
program.

A round runs inside of `engine.steady`, which gives a rule's own products, quotients and sums over axes one rounding on
any number of devices. Its limit: sums over more than 2^24 numbers (clients times coordinates) are left to the compiler.
The functions here have no such limit, so that a rule needs nothing but them and arithmetic. A geometric median, by
Weiszfeld's iteration (tests/aggregation/robust/test_geometric_median.py), is

    def closer(_, point):
        apart = jax.tree.map(lambda x, y: x - y[None], updates, point)
        distances = jnp.sqrt(rows.squared_norms(apart))
        return rows.weighted_mean(updates, weights / jnp.maximum(distances, 1e-6))

    return jax.lax.fori_loop(0, 100, closer, rows.weighted_mean(updates, weights))
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree
from fedjax_sim.types import Array, PyTree

__all__ = ["squared_norms", "weighted_mean"]


def squared_norms(updates: PyTree, source: PyTree | engine.HiddenZero | None = None) -> Array:
    """[m] float32: |u_i|^2 of each row, over all leaves.

    Args:
      updates: leaves [m, ...] of numbers; computed with in float32.
      source: of the barrier behind the squares, see `engine.arithmetic.barrier`; the updates by default.

    Returns: infinity where a square is past the range of float32 (numbers from about 1.8e19 on).

    Guarantees: the bits of NumPy's float32 squares, added by halves (`engine.pairwise_sum`), leaf after leaf, in any
    program (tests/aggregation/test_rows.py::test_bits_are_those_of_numpy).

    >>> import jax.numpy as jnp
    >>> squared_norms({"a": jnp.array([[3.0, 4.0], [0.0, 1.0]]), "b": jnp.array([2.0, 0.0])}).tolist()
    [29.0, 1.0]
    """
    zero = engine.hidden_zero(updates if source is None else source)
    total = jnp.float32(0)
    for x in jax.tree.leaves(updates):
        numbers = x.reshape(x.shape[0], -1).astype(jnp.float32)
        total = total + engine.pairwise_sum(engine.rounded_here(numbers * numbers, zero), (1,))
    return total


def weighted_mean(updates: PyTree, weights: Array) -> PyTree:
    """sum_i w_i u_i / sum_i w_i over the rows, leaf by leaf; zeros where no weight is positive.

    Args:
      updates: leaves [m, ...], finite also where the weight is 0.
      weights: [m], 0 or positive.

    Returns: leaves [...] of floats, float32 at least.

    Guarantees: the bits of NumPy's products, added by halves, and of its quotient, in any program
    (tests/aggregation/test_rows.py::test_bits_are_those_of_numpy); rows of weight 0 behind the others change none of
    them (::test_rows_without_a_weight).

    >>> import jax.numpy as jnp
    >>> weighted_mean(jnp.array([[1.0], [4.0], [9.0]]), jnp.array([1.0, 2.0, 0.0])).tolist()
    [3.0]
    """
    zero, weights = (
        engine.hidden_zero((weights, updates)),
        weights.astype(tree.at_least_float32(weights.dtype)),
    )
    total = engine.pairwise_sum(weights, (0,))
    divisor = jnp.where(total > 0, total, 1)

    def mean(x):
        numbers = x.reshape(x.shape[0], -1).astype(tree.at_least_float32(x.dtype))
        products = engine.rounded_here(numbers * weights.astype(numbers.dtype)[:, None], zero)
        quotient = engine.divide(engine.pairwise_sum(products, (0,)), divisor.astype(numbers.dtype))
        return quotient.reshape(x.shape[1:])

    return jax.tree.map(mean, updates)
