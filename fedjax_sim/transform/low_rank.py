"""`low_rank` sends matrices as products of two thin matrices."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import tree, validate
from fedjax_sim.prng import fold_in
from fedjax_sim.transform.chain import Whole, check_floats, stateless
from fedjax_sim.types import Array, PyTree, UpdateTransform
from fedjax_sim.validate import PositiveInt


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns (rows, columns) of a leaf as a matrix: all axes but the last are rows, as in a convolution's kernel."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def _bits_of_factors(shape: tuple[int, ...], dtype, rank: int) -> int:
    """Computes the bits of a leaf's two factors, at least 32 for each number."""
    return 8 * rank * sum(_sides(shape)) * tree.at_least_float32(dtype).itemsize


def _is_factored(shape: tuple[int, ...], dtype, rank: int) -> bool:
    """Whether the two factors cost less than the leaf itself."""
    return _bits_of_factors(shape, dtype, rank) < 8 * math.prod(shape) * jnp.dtype(dtype).itemsize


@validate.named_arguments
def low_rank(rank: PositiveInt = 2, *, num_iterations: PositiveInt = 1) -> UpdateTransform:
    """Sends each matrix M [rows, columns] as two factors, P [rows, r] and M^T P [columns, r] (PowerSGD's compressor).

    P is an orthonormal basis, computed by power iterations from r random columns. The columns are drawn from the
    client's key in every round, while the paper starts from those of the last round; so no memory is needed.
    `error_feedback(low_rank(...))` adds the paper's memory of what was left out.

    A leaf of more than two axes is a matrix with the last axis as its columns. Vectors, and matrices whose factors
    would be no smaller, are sent as they are.

    Args:
      rank: r >= 1.
      num_iterations: power iterations, at least 1; more iterations come closer to the r largest singular values.

    Returns: a transform; its wire counts r (rows + columns) numbers of 32 bits (64 for float64) for a factored leaf. A
    later member of a chain sees the product, not the factors, so it cannot make the factors smaller. If it sends only
    some of the product's numbers, the wire counts these numbers as plain floats, or the factors, whichever is less
    (`chain.Whole`).

    Raises: ValueError or TypeError for numbers out of range.

    Guarantees:
      - matrices of rank at most r are sent exactly up to rounding, and with many iterations the error is that of the
        truncated singular value decomposition (tests/transform/test_low_rank.py::test_best_approximation)
      - it is a projection: the message is no longer than M, with error at most |M|^2 (test_projection)
      - bits are counted exactly (test_wire)

    References: Vogels, Karimireddy and Jaggi 2019 (PowerSGD), algorithm 1, without the averaging inside it.

    >>> import jax, jax.numpy as jnp
    >>> matrix = jnp.outer(jnp.arange(1.0, 9.0), jnp.arange(1.0, 7.0))
    >>> message = low_rank(1).on_client(jax.random.key(0), matrix, (), ())[0]
    >>> bool(jnp.abs(message - matrix).max() < 1e-4)
    True
    """

    def approximation(key: Array, x: Array) -> Array:
        if not _is_factored(x.shape, x.dtype, rank):
            return x
        matrix = x.reshape(_sides(x.shape)).astype(tree.at_least_float32(x.dtype))
        # Scaled to a largest magnitude of 1, so that products neither overflow nor vanish.
        peak = jnp.maximum(jnp.abs(matrix).max(), 2.0**-126)
        matrix = matrix * (1 / peak)
        basis = jax.random.normal(key, (matrix.shape[1], rank), matrix.dtype)
        with jax.default_matmul_precision("highest"):
            left_factor = jnp.linalg.qr(matrix @ basis)[0]
            for _ in range(num_iterations - 1):
                left_factor = jnp.linalg.qr(matrix @ (matrix.T @ left_factor))[0]
            product = left_factor @ (matrix.T @ left_factor).T
        return (product * peak).reshape(x.shape).astype(x.dtype)

    def message(key, update):
        check_floats(update)
        leaves, structure = jax.tree.flatten(update)
        keys = fold_in(key, jnp.arange(len(leaves)))
        return structure.unflatten([approximation(k, x) for k, x in zip(keys, leaves, strict=True)])

    def error_bound(update: PyTree):
        total = 0.0
        for x in jax.tree.leaves(update):
            if _is_factored(jnp.shape(x), x.dtype, rank):
                wide = x.astype(tree.at_least_float32(x.dtype))
                total = total + (np if isinstance(x, np.ndarray) else jnp).sum(wide * wide)
        return total

    def wire(update_spec, sent):
        leaves = jax.tree.leaves(update_spec)
        bits = sum(min(_bits_of_factors(x.shape, x.dtype, rank), 8 * tree.num_bytes(x)) for x in leaves)
        return Whole(tree.num_values(update_spec), bits, sent.side_bits)

    return stateless(message, wire=wire, squared_error=error_bound)
