"""This module computes a convolution in two ways, by XLA or as a matmul. `layers.convolution` chooses between them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.types import Array

__all__ = ["im2col", "native"]

Pads = tuple[tuple[int, int], tuple[int, int]]


def native(x: Array, kernel: Array, stride: int, pads: Pads) -> Array:
    """Computes the convolution of x [n, height, width, in] with a kernel [kh, kw, in, out] by XLA.

    If kernels are vmapped, it becomes a grouped convolution.
    """
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), pads, dimension_numbers=layout)


def im2col(x: Array, kernel: Array, stride: int, pads: Pads) -> Array:
    """Computes the same convolution as one matmul.

    The kh * kw * in inputs of each output pixel are gathered by slices and one concatenation, and multiplied by the
    kernel. The gradient is written by hand and has reverse mode only. For `jax.jvp`, and Hessian-vector products that
    use it, take `native`.
    """
    kh, kw, num_inputs, num_outputs = kernel.shape
    x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    num_rows = x.shape[1] - kh + 1
    num_columns = x.shape[2] - kw + 1
    # The order of the shifts is that of the kernel's first two axes, so that a reshape of the kernel fits.
    shifts = [(i, j) for i in range(kh) for j in range(kw)]
    slices = [x[:, i : i + num_rows : stride, j : j + num_columns : stride] for i, j in shifts]
    windows = jnp.concatenate(slices, axis=3)
    out = _product(windows.reshape(x.shape[0], -1, kh * kw * num_inputs), kernel.reshape(-1, num_outputs))
    return out.reshape(*windows.shape[:3], num_outputs)


@jax.custom_vjp
def _product(columns: Array, kernel: Array) -> Array:
    """Computes columns [n, pixels, k] @ kernel [k, out], with the kernel's gradient in the form (g^T columns)^T.

    XLA:CPU computes columns^T g, which transposes the tall matrix, at half the speed of (g^T columns)^T. The compiler
    would rewrite the fast form to the slow one, if the sum over images did not stand between product and transposition.
    """
    n, pixels, k = columns.shape
    return (columns.reshape(n * pixels, k) @ kernel).reshape(n, pixels, -1)


def _forward(columns: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    """Returns the product, and the values that the backward pass reads."""
    return _product(columns, kernel), (columns, kernel)


def _backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    """Returns the gradients of columns and kernel, from the gradient g [n, pixels, out] of the product."""
    columns, kernel = saved
    columns_gradient = (g.reshape(-1, g.shape[2]) @ kernel.T).reshape(columns.shape)
    kernel_gradient = jnp.einsum("npo,npk->nok", g, columns).sum(0).T
    return columns_gradient, kernel_gradient


_product.defvjp(_forward, _backward)
