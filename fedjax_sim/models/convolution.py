"""Two lowerings of a convolution; `layers.convolution` chooses between them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.types import Array

__all__ = ["im2col", "native"]

Pads = tuple[tuple[int, int], tuple[int, int]]


def native(x: Array, kernel: Array, stride: int, pads: Pads) -> Array:
    """XLA's convolution of x [n, height, width, in] with kernel [kh, kw, in, out]; grouped under `vmap`."""
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), pads, dimension_numbers=layout)


def im2col(x: Array, kernel: Array, stride: int, pads: Pads) -> Array:
    """A convolution as one matmul: the kh * kw * in inputs of each output pixel, from slices and one concatenation,
    times the kernel.

    Its gradient is written by hand and has reverse mode only. For `jax.jvp`, and Hessian-vector products by it, use
    `native`.
    """
    kh, kw, num_inputs, num_outputs = kernel.shape
    x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    rows, columns = x.shape[1] - kh + 1, x.shape[2] - kw + 1
    shifts = [(i, j) for i in range(kh) for j in range(kw)]
    seen = jnp.concatenate([x[:, i : i + rows : stride, j : j + columns : stride] for i, j in shifts], axis=3)
    out = _product(seen.reshape(x.shape[0], -1, kh * kw * num_inputs), kernel.reshape(-1, num_outputs))
    return out.reshape(*seen.shape[:3], num_outputs)


@jax.custom_vjp
def _product(columns: Array, kernel: Array) -> Array:
    """columns [n, pixels, k] @ kernel [k, out], whose gradient with respect to the kernel is (g^T columns)^T.

    XLA:CPU computes columns^T g, with the tall matrix transposed, at half the speed of (g^T columns)^T. It would
    rewrite this form into that one, if the sum over images did not stand between the product and the transposition.
    """
    n, pixels, k = columns.shape
    return (columns.reshape(n * pixels, k) @ kernel).reshape(n, pixels, -1)


def _forward(columns: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(columns, kernel), (columns, kernel)


def _backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    columns, kernel = saved
    by_columns = (g.reshape(-1, g.shape[2]) @ kernel.T).reshape(columns.shape)
    return by_columns, jnp.einsum("npo,npk->nok", g, columns).sum(0).T


_product.defvjp(_forward, _backward)
