"""Pytree arithmetic that `optax.tree` lacks."""

from __future__ import annotations

import collections
import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.types import Array, PyTree

__all__ = [
    "all_finite",
    "dotted",
    "hashed",
    "hidden_zero",
    "joined",
    "num_bytes",
    "num_values",
    "pinned",
    "pinning",
    "settled",
    "spec",
    "subtract",
    "take",
    "unsigned_zeros",
    "varying",
    "where",
    "zeros_like",
]


def pinned(tree: PyTree, zero: Array) -> PyTree:
    """The same values, rounded here and nowhere else.

    Compilers fuse a product into the addition that follows, or turn a division into a product, and whether they do
    depends on the rest of the program: on the number of devices, for one. XLA:CPU drops `optimization_barrier` before
    it fuses, so -0.0 is added to each float: a product that is fused into that addition is rounded all the same. Floats
    of 16 bits, whose sums are taken, and may be kept, in more, pass through their bits instead.

    Args:
      zero: int32 such as `hidden_zero` reads off, 0 at run time but not provably so; broadcast to each leaf.

    Guarantees: tests/engine/test_rounding.py::test_products_are_not_fused.
    """

    return pinning(zero)(tree)


def pinning(zero: Array) -> Callable[[PyTree], PyTree]:
    """`pinned` with this zero, for many values: what it adds to them is made once."""

    @functools.cache
    def minus_zero(dtype):
        bits = {4: jnp.int32, 8: jnp.int64}[dtype.itemsize]
        return jax.lax.bitcast_convert_type(zero.astype(bits) ^ jnp.iinfo(bits).min, dtype)

    @functools.cache
    def minus_zeros(dtype, shape):
        return jnp.broadcast_to(minus_zero(dtype), shape)

    def leaf(x):
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize == 1:
            return x  # floats of 8 bits are stored, and computed with as wider ones
        if x.dtype.itemsize == 2:
            return _through_bits(x, zero)
        return jax.lax.add(x, minus_zeros(x.dtype, x.shape))

    return lambda tree: jax.tree.map(leaf, tree)


@jax.custom_jvp
def _through_bits(x: Array, zero: Array) -> Array:
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.int16) ^ zero.astype(jnp.int16), x.dtype)


@_through_bits.defjvp
def _(primals, tangents):
    return _through_bits(*primals), tangents[0]  # bits have no derivative, the values have


def hidden_zero(tree: PyTree) -> Array:
    """[] int32, 0, and not provably so: read off the first numbers of the first leaves.

    With n their bits, one over the other, bits 0 and 2 of n^2 are never both set, for an odd square is 1 modulo 8. No
    compiler is known to see that, while each sees that the least of 0 and a number without sign is 0. It does see it of
    an n that it knows, such as a loop's counter: one leaf at least should come from outside of the program.

    Guarantees: 0 for every value of every dtype (tests/test_tree.py::test_hidden_zero_is_zero); products that are
    pinned with it are rounded before they are added (tests/engine/test_rounding.py::test_products_are_not_fused).
    """
    return _zero([x for x in jax.tree.leaves(tree) if x.size][:3])


@functools.partial(jax.jit, inline=True)  # traced once for all rounds of these shapes
def _zero(leaves: list[Array]) -> Array:
    bits = jnp.zeros((), jnp.uint32)
    for x in leaves:
        first, unsigned = x.reshape(-1)[0], jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        first = first if x.dtype == bool else jax.lax.bitcast_convert_type(first, unsigned)
        bits ^= first.astype(jnp.uint32)
    square = bits * bits
    return ((square >> 2) & square & 1).astype(jnp.int32)


def unsigned_zeros(tree: PyTree) -> PyTree:
    """The same numbers, each zero without its sign, which a compiler may turn: of x + 0, or of a sum of products.

    >>> import jax.numpy as jnp
    >>> unsigned_zeros(jnp.array([-0.0, 1.0])).tolist()
    [0.0, 1.0]
    """

    def leaf(x):
        x = jnp.asarray(x)
        return jnp.where(x == 0, jnp.zeros_like(x), x) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(leaf, tree)


def varying(tree: PyTree, by: Array) -> PyTree:
    """The same values, of which `vmap` sees at once that they differ where `by`, a number, does; nothing of it is left
    in the compiled program.

    A loop whose carry starts equal for all is traced again and again under `vmap`, until no more of the carry turns out
    to differ; loops inside of loops multiply that.
    """
    return jax.tree.map(lambda x: jnp.where(by == by, x, x), tree)


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


def joined(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The metrics of several parts in one dict; a name that more than one part uses gets the part's name before it.

    Raises: ValueError where names are still the same.

    Guarantees: no metric hides another (tests/laws/test_facts.py::test_no_metric_hides_another).

    >>> joined({"client": {"loss": 1.0, "clipped": 0.5}, "transform": {"clipped": 0.25}})
    {'loss': 1.0, 'client_clipped': 0.5, 'transform_clipped': 0.25}
    """
    users = collections.Counter(name for metrics in parts.values() for name in metrics)
    whole: dict[str, Any] = {}
    for part, metrics in parts.items():
        for name, value in metrics.items():
            name = f"{part}_{name}" if users[name] > 1 else name
            if name in whole:
                validate.fail("metrics", "names that no other part uses", name, "Rename it in the loss or the part.")
            whole[name] = value
    return whole


def dotted(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested tables by their paths.

    >>> dotted({"run": {"rounds": 3}, "seed": 0})
    {'run.rounds': 3, 'seed': 0}
    """
    found: dict[str, Any] = {}
    for name, value in table.items():
        path = f"{prefix}{name}"
        found |= dotted(value, path + ".") if isinstance(value, dict) else {path: value}
    return found


def hashed(tree: PyTree) -> Any:
    """The running SHA-256 of a pytree's arrays: dtypes, shapes, bytes. Less than a second for each gigabyte."""
    sha = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.ascontiguousarray(leaf)
        sha.update(f"{array.dtype} {array.shape}".encode())
        sha.update(array.reshape(-1).view(np.uint8))
    return sha


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
