"""Matrices as products of two thin ones."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import tree, validate
from fedjax_sim.transform.chain import Whole, check_floats, stateless
from fedjax_sim.types import Array, PyTree, UpdateTransform
from fedjax_sim.validate import PositiveInt

__all__ = ["low_rank"]


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a leaf as a matrix: all axes but the last are rows, as in a convolution's kernel."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def _factors(shape: tuple[int, ...], dtype, rank: int) -> int:
    """Bits of a leaf's two factors, at least 32 a number."""
    return 8 * rank * sum(_sides(shape)) * tree.at_least_float32(dtype).itemsize


def _factored(shape: tuple[int, ...], dtype, rank: int) -> bool:
    """Whether the two factors cost less than the leaf itself."""
    return _factors(shape, dtype, rank) < 8 * math.prod(shape) * jnp.dtype(dtype).itemsize


@validate.named_arguments
def low_rank(rank: PositiveInt = 2, *, num_iterations: PositiveInt = 1) -> UpdateTransform:
    """PowerSGD's compressor for one client: a matrix M [rows, columns] travels as P [rows, r] and M^T P [columns, r].

    P is an orthonormal basis of what power iterations make of r random columns. These are drawn from the client's key
    in every round, where the paper starts from the last round's, so no memory is needed;
    `error_feedback(low_rank(...))` adds the paper's memory of what was left out. A leaf of more than two axes is a
    matrix with the last axis as its columns; vectors, and matrices whose factors would be no smaller, are sent as they
    are.

    Args:
      rank: r >= 1.
      num_iterations: power iterations >= 1; more come closer to the r largest singular values.

    Returns: a transform; its wire counts r (rows + columns) numbers of 32 bits (64 for float64) for a factored leaf. A
    later member of a chain sees the product, not the factors, so it cannot make them smaller: numbers that it picks
    from the product cost plain floats, or as much as the factors (`chain.Whole`). Quantise before, not after.

    Raises: ValueError, TypeError for numbers out of range.

    Guarantees: matrices of rank at most r come through up to rounding, and with many iterations the error is that of
    the truncated singular value decomposition (tests/transform/test_low_rank.py::test_best_approximation); a
    projection: no longer than M, with error at most |M|^2 (test_projection); exact bits (test_wire).

    References: Vogels, Karimireddy and Jaggi 2019 (PowerSGD), algorithm 1, without the averaging inside it.

    >>> import jax, jax.numpy as jnp
    >>> matrix = jnp.outer(jnp.arange(1.0, 9.0), jnp.arange(1.0, 7.0))
    >>> message = low_rank(1).on_client(jax.random.key(0), matrix, (), ())[0]
    >>> bool(jnp.abs(message - matrix).max() < 1e-4)
    True
    """

    def leaf(key: Array, x: Array) -> Array:
        if not _factored(x.shape, x.dtype, rank):
            return x
        matrix = x.reshape(_sides(x.shape)).astype(tree.at_least_float32(x.dtype))
        size = jnp.maximum(jnp.abs(matrix).max(), 2.0**-126)
        matrix = matrix * (1 / size)
        basis = jax.random.normal(key, (matrix.shape[1], rank), matrix.dtype)
        with jax.default_matmul_precision("highest"):
            for _ in range(num_iterations):
                left = jnp.linalg.qr(matrix @ basis)[0]
                basis = matrix.T @ left
            product = left @ basis.T
        return (product * size).reshape(x.shape).astype(x.dtype)

    def message(key, update):
        check_floats(update)
        leaves, structure = jax.tree.flatten(update)
        return structure.unflatten([leaf(jax.random.fold_in(key, i), x) for i, x in enumerate(leaves)])

    def error(update: PyTree):
        total = 0.0
        for x in jax.tree.leaves(update):
            if _factored(jnp.shape(x), x.dtype, rank):
                wide = x.astype(tree.at_least_float32(x.dtype))
                total = total + (np if isinstance(x, np.ndarray) else jnp).sum(wide * wide)
        return total

    def wire(update_spec, sent):
        bits = sum(min(_factors(x.shape, x.dtype, rank), 8 * tree.num_bytes(x)) for x in jax.tree.leaves(update_spec))
        return Whole(tree.num_values(update_spec), bits, sent.side_bits)

    return stateless(message, wire=wire, squared_error=error)
