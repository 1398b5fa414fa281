"""Computes on pytrees: arithmetic that `optax.tree` lacks, and facts about leaves."""

from __future__ import annotations

import collections
import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fedjax_sim import validate
from fedjax_sim.types import Array, PyTree

MAX_GROUPED_LEAF = 1 << 11  # the most numbers of a leaf that is grouped with others


def varying(tree: PyTree, by: Array) -> PyTree:
    """Returns the same values, marked as varying under `vmap` wherever the number `by` varies.

    Nothing of the mark is left in the compiled program. A loop whose carry starts equal for all lanes is traced again
    and again under `vmap`, until no more of the carry turns out to differ; loops inside of loops multiply that.
    """
    # XLA removes a choice between equal values; `vmap` does not look at them.
    return jax.tree.map(lambda x: jnp.where(by == by, x, x), tree)


def spec(tree: PyTree) -> PyTree:
    """Returns shapes and dtypes of a pytree's leaves, without their values."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def joined_metrics(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Puts the metrics of several parts into one dict; a name of more than one part gets the part's name before it.

    Args:
      parts: the metrics of each part, by the part's name.

    Raises: ValueError if names are still the same.

    Guarantees: no metric hides another (tests/laws/test_facts.py::test_no_metric_hides_another).

    >>> joined_metrics({"client": {"loss": 1.0, "clipped": 0.5}, "transform": {"clipped": 0.25}})
    {'loss': 1.0, 'client_clipped': 0.5, 'transform_clipped': 0.25}
    """
    # How many parts use each name.
    users = collections.Counter(name for metrics in parts.values() for name in metrics)
    joined: dict[str, Any] = {}
    for part, metrics in parts.items():
        for name, value in metrics.items():
            name = f"{part}_{name}" if users[name] > 1 else name
            if name in joined:
                validate.fail("metrics", "names that no other part uses", name, "Rename it in the loss or the part.")
            joined[name] = value
    return joined


def dotted(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested tables by their paths.

    >>> dotted({"run": {"rounds": 3}, "seed": 0})
    {'run.rounds': 3, 'seed': 0}
    """
    values_by_path: dict[str, Any] = {}
    for name, value in table.items():
        path = f"{prefix}{name}"
        values_by_path |= dotted(value, path + ".") if isinstance(value, dict) else {path: value}
    return values_by_path


def sha256_of(tree: PyTree) -> Any:
    """Returns the running SHA-256 of a pytree's arrays: dtypes, shapes, bytes. A gigabyte takes below a second."""
    sha = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        # A typed key has no bytes of its own: its integers count.
        if jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.ascontiguousarray(leaf)
        sha.update(f"{array.dtype} {array.shape}".encode())
        sha.update(array.reshape(-1).view(np.uint8).data)
    return sha


def leaf_groups(leaves: Sequence[Any], dtypes: Sequence[Any]) -> list[list[int]]:
    """Returns the indices of leaves in groups: small leaves of a dtype share one, and each large leaf has its own.

    One operation on a group is then in place of one on each of its leaves. Large leaves are not worth the copy.

    Args:
      leaves: arrays or specs.
      dtypes: of each leaf, by which small leaves are grouped.

    >>> leaf_groups([np.zeros(3), np.zeros((50, 50)), np.zeros(())], ["f", "f", "f"])
    [[0, 2], [1]]
    """
    groups: dict = {}
    for index, (leaf, dtype) in enumerate(zip(leaves, dtypes, strict=True)):
        # A large leaf is a group of its own, named by its index.
        is_small = math.prod(leaf.shape) <= MAX_GROUPED_LEAF
        groups.setdefault(dtype if is_small else index, []).append(index)
    return list(groups.values())


def packed(tree: PyTree) -> list[Array]:
    """Returns the leaves as arrays that hold the same numbers: small ones of a dtype are joined to one flat array.

    >>> [x.shape for x in packed({"bias": jnp.zeros(3), "loss": jnp.zeros(()), "matrix": jnp.zeros((50, 50))})]
    [(4,), (50, 50)]
    """
    leaves = list(map(jnp.asarray, jax.tree.leaves(tree)))
    groups = [[leaves[index] for index in group] for group in leaf_groups(leaves, [x.dtype for x in leaves])]
    return [x[0] if len(x) == 1 else jnp.concatenate([leaf.reshape(-1) for leaf in x]) for x in groups]


def num_bytes(tree: PyTree) -> int:
    """Returns the bytes held by a pytree of arrays or specs."""
    return sum(math.prod(jnp.shape(x)) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def num_values(tree: PyTree) -> int:
    """Returns how many numbers a pytree of arrays or specs holds."""
    return sum(math.prod(jnp.shape(x)) for x in jax.tree.leaves(tree))


def subtract(a: PyTree, b: PyTree) -> PyTree:
    """Returns a - b, leaf by leaf."""
    return jax.tree.map(jnp.subtract, a, b)


def take_rows(tree: PyTree, ids: Array) -> PyTree:
    """Returns rows `ids` of every leaf [N, ...]; an id out of range gives the nearest row, the first for ids below 0.

    Args:
      tree: arrays [N, ...].
      ids: signed integers of any shape; an unsigned one of 2^31 and above counts as below 0.
    """
    return jax.tree.map(lambda x: x.at[ids].get(mode="clip", wrap_negative_indices=False), tree)


def has_equal_rows(tree: PyTree) -> bool:
    """Returns whether two rows of leaves [k, ...] have the same bits in all leaves; False for traced leaves.

    >>> has_equal_rows({"a": jnp.array([1, 1, 1]), "b": jnp.array([1, 2, 3])}), has_equal_rows(jnp.array([1, 2, 1]))
    (False, True)
    """
    leaves = jax.tree.leaves(tree)
    if any(isinstance(x, Tracer) for x in leaves):
        return False
    rows = list(zip(*(np.asarray(x) for x in leaves), strict=True))
    return len({b"".join(x.tobytes() for x in row) for row in rows}) < len(rows)


def where(condition: Array, a: PyTree, b: PyTree) -> PyTree:
    """Returns `a` where `condition`, else `b`, leaf by leaf.

    Args:
      condition: bool with the leaves' leading axes, or none: [m] chooses rows of leaves [m, ...].
      a, b: pytrees of the same structure.
    """

    def pick(x, y):
        # The condition gets axes of length 1 behind its own, so that it broadcasts along the leaf's other axes.
        x = jnp.asarray(x)
        return jnp.where(condition.reshape(condition.shape + (1,) * (x.ndim - condition.ndim)), x, y)

    return jax.tree.map(pick, a, b)


def scaled(tree: PyTree, factor: Array | float) -> PyTree:
    """Returns every leaf times a factor, in the leaf's dtype; the factor has the leaves' leading axes, or none."""
    factor = jnp.asarray(factor)

    def product(x):
        return x * factor.reshape(factor.shape + (1,) * (x.ndim - factor.ndim)).astype(x.dtype)

    return jax.tree.map(product, tree)


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Returns the same values in the dtypes of another tree's leaves."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)


def common_dtype(*numbers: Any) -> Any:
    """Returns the dtype that JAX's standard promotion gives these.

    It is the same under strict promotion (`jax_numpy_dtype_promotion`).

    Args:
      numbers: arrays, or shapes with a dtype.

    >>> common_dtype(jnp.ones(2, jnp.bfloat16), jnp.ones(2))
    dtype('float32')
    """
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*numbers)


def at_least_float32(*dtypes: Any) -> Any:
    """Returns the dtype to which JAX promotes float32 and these dtypes, also if promotion is strict.

    >>> at_least_float32(jnp.bfloat16), at_least_float32(jnp.int32), at_least_float32(np.float64)
    (dtype('float32'), dtype('float32'), dtype('float64'))
    """
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes, np.dtype("float32"))


def widened(tree: PyTree) -> PyTree:
    """Returns floats of at least 32 bits: bfloat16 and float16 become float32, wider leaves and integers stay."""

    def leaf(x):
        return x.astype(at_least_float32(x.dtype)) if jnp.issubdtype(x.dtype, jnp.inexact) else x

    return jax.tree.map(leaf, tree)


def zeros_like(tree: PyTree) -> PyTree:
    """Returns zeros of the same shapes and dtypes."""
    return jax.tree.map(jnp.zeros_like, tree)
