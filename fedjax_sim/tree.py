"""Pytree arithmetic that `optax.tree` lacks."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from fedjax_sim.types import Array, PyTree

__all__ = [
    "all_finite",
    "hidden_zero",
    "num_bytes",
    "num_values",
    "pinned",
    "settled",
    "spec",
    "subtract",
    "take",
    "where",
    "zeros_like",
]


@jax.custom_jvp
def pinned(tree: PyTree, zero: Array) -> PyTree:
    """The same values, rounded here and nowhere else.

    Compilers fuse a product into the addition that follows, or turn a division into a product, and whether they do
    depends on the rest of the program: on the number of devices, for one. XLA:CPU drops `optimization_barrier` before
    it fuses, so each float passes through its bits instead.

    Args:
      zero: int32, 0 at run time but not provably so, such as a counter's minimum with 0; broadcast to each leaf.
    """

    def leaf(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        bits = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}[x.dtype.itemsize]
        return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, bits) ^ zero.astype(bits), x.dtype)

    return jax.tree.map(leaf, tree)


@pinned.defjvp
def _(primals, tangents):
    return pinned(*primals), tangents[0]  # the bits that it passes through have no derivative, the values have


def hidden_zero(tree: PyTree) -> Array:
    """[] int32, 0, and not provably so: of the first number there is, the least of 0 and its bits without sign.

    Guarantees: 0 for every value of every dtype (tests/test_tree.py::test_hidden_zero_is_zero).
    """
    x = next((x.reshape(-1)[0] for x in jax.tree.leaves(tree) if x.size), jnp.zeros((), jnp.int32))
    if x.dtype == bool:
        x = x.astype(jnp.int32)
    else:
        integer = jnp.dtype(f"int{8 * x.dtype.itemsize}")
        x = jax.lax.bitcast_convert_type(x, integer) & jnp.iinfo(integer).max
    return jnp.minimum(x, 0).astype(jnp.int32)


@jax.custom_jvp
def settled(tree: PyTree, zero: Array) -> PyTree:
    """The same values, computed here once: what uses them neither recomputes them nor changes their rounding.

    XLA:CPU computes a value anew in each fusion that reads it, and drops `optimization_barrier` before it fuses; a loop
    that never turns is a wall. Elsewhere such a loop would wait for the host, so the values are `pinned`.

    Args:
      zero: [] int32 as for `pinned`; not batched under vmap.
    """
    if jax.default_backend() != "cpu":
        return pinned(tree, zero)

    def other(x):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return ~x if x.dtype == bool else -x

    def never(carry):
        turns, values = carry
        return turns + 1, jax.tree.map(other, values)

    return jax.lax.while_loop(lambda carry: carry[0] < zero, never, (jnp.zeros((), jnp.int32), tree))[1]


@settled.defjvp
def _(primals, tangents):
    return settled(*primals), tangents[0]


def spec(tree: PyTree) -> PyTree:
    """Shapes and dtypes of a pytree's leaves, without their values."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def num_bytes(tree: PyTree) -> int:
    """Bytes held by a pytree of arrays or specs."""
    return sum(math.prod(jnp.shape(x)) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def num_values(tree: PyTree) -> int:
    """Numbers in a pytree of arrays or specs."""
    return sum(math.prod(jnp.shape(x)) for x in jax.tree.leaves(tree))


def subtract(a: PyTree, b: PyTree) -> PyTree:
    """a - b, leaf by leaf."""
    return jax.tree.map(jnp.subtract, a, b)


def take(tree: PyTree, ids: Array) -> PyTree:
    """Rows `ids` of every leaf [N, ...]; ids must be in range (JAX clamps silently)."""
    return jax.tree.map(lambda x: x[ids], tree)


def where(condition: Array, a: PyTree, b: PyTree) -> PyTree:
    """`a` where `condition`, else `b`; the condition has the leaves' leading axes, or none."""

    def pick(x, y):
        x = jnp.asarray(x)
        return jnp.where(condition.reshape(condition.shape + (1,) * (x.ndim - condition.ndim)), x, y)

    return jax.tree.map(pick, a, b)


def zeros_like(tree: PyTree) -> PyTree:
    """Zeros of the same shapes and dtypes."""
    return jax.tree.map(jnp.zeros_like, tree)


def all_finite(tree: PyTree) -> Array:
    """[] bool: no NaN and no infinity in any leaf."""
    checks = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
    return jnp.stack(checks).all() if checks else jnp.asarray(True)
