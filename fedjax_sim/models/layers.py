"""This module has layers, as functions over plain dicts, that stay fast if every client has weights of its own.

Under `vmap` over clients each layer becomes batched matmuls and element-wise operations. Inputs are cast to the dtype
of the parameters, without scaling. Weights before a ReLU are initialised He-normal, other weights
Glorot-uniform, and biases at zero.

References: Glorot and Bengio 2010; He et al. 2015; Chellapilla, Puri and Simard 2006 (im2col).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import tree
from fedjax_sim.models.convolution import Geometry, convolve, im2col, xla_convolution
from fedjax_sim.types import Array
from fedjax_sim.validate import fail, integer, one_of

CONVOLUTIONS = {"auto": convolve, "im2col": im2col, "native": xla_convolution}
CONVOLUTION_METHODS = tuple(CONVOLUTIONS)

Params = dict[str, Array]


def _kernel(key: Array, shape: tuple[int, ...], relu: bool) -> Array:
    """Draws the weights of a layer, which feeds a ReLU or not."""
    initialize = jax.nn.initializers.he_normal() if relu else jax.nn.initializers.glorot_uniform()
    return initialize(key, shape)


def _add(x: Array, bias: Array) -> Array:
    """Adds a bias over the last axis. Its rank is made equal to that of x, so that JAX promotes no ranks."""
    return x + bias.reshape((1,) * (x.ndim - 1) + (-1,))


@jax.custom_vjp
def _add_to_pixels(x: Array, bias: Array) -> Array:
    """Adds a bias over the last axis. The bias has its gradient from a product with ones.

    In a round the sum over all pixels would have a fixed order, which took a tenth of the time of a CNN's round. A
    matrix product has an order already.
    """
    return _add(x, bias)


def _bias_gradient(bias: Array, g: Array) -> tuple[Array, Array]:
    """Returns the gradients of x and of the bias, from the gradient g [..., channels] of their sum."""
    rows = g.reshape(-1, g.shape[-1])
    sums = jnp.matmul(jnp.ones(rows.shape[:1], g.dtype), rows, preferred_element_type=tree.at_least_float32(g.dtype))
    return g, sums.astype(bias.dtype)


_add_to_pixels.defvjp(lambda x, bias: (_add(x, bias), bias), _bias_gradient)


def init_dense(key: Array, num_inputs: int, num_outputs: int, *, relu: bool = False) -> Params:
    """Draws the parameters of `dense`: {"kernel": [num_inputs, num_outputs], "bias": [num_outputs]}.

    The kernel is He-normal if `relu`, and Glorot-uniform otherwise.
    """
    return {"kernel": _kernel(key, (num_inputs, num_outputs), relu), "bias": jnp.zeros(num_outputs)}


def dense(params: Params, x: Array) -> Array:
    """Computes x W + b over the last axis of x [..., num_inputs].

    Guarantees: equals flax.linen.Dense (tests/models/test_layers.py::test_dense_equals_linen).

    >>> import jax.numpy as jnp
    >>> dense({"kernel": jnp.ones((2, 1)), "bias": jnp.ones(1)}, jnp.ones((1, 2))).tolist()
    [[3.0]]
    """
    return _add(x.astype(params["kernel"].dtype) @ params["kernel"], params["bias"])


def init_convolution(
    key: Array, kernel_size: int, num_inputs: int, num_outputs: int, *, relu: bool = True, bias: bool = True
) -> Params:
    """Draws the parameters of `convolution`: {"kernel": [k, k, num_inputs, num_outputs], "bias": [num_outputs]}.

    The kernel is He-normal if `relu`, and Glorot-uniform otherwise. Without `bias` there is no such entry.
    """
    shape = (kernel_size, kernel_size, num_inputs, num_outputs)
    kernel = {"kernel": _kernel(key, shape, relu)}
    return kernel | {"bias": jnp.zeros(num_outputs)} if bias else kernel


def convolution(params: Params, x: Array, *, stride: int = 1, padding: str = "SAME", method: str = "auto") -> Array:
    """Computes the two-dimensional convolution of x [n, height, width, channels].

    Args:
      params: {"kernel": [kh, kw, in, out], "bias": [out]}; without the entry "bias", none is added.
      x: images, with the channels last.
      stride: step in both directions, >= 1.
      padding: "SAME" or "VALID".
      method: how the convolution is computed.
        "im2col": slices, concatenation and matmul. It holds kh * kw copies of the input.
        "native": the convolution of XLA, with the gradients that JAX derives. They are slow in a loop on a CPU. If
        clients are vmapped, it becomes a grouped convolution.
        "auto": the convolution of XLA with gradients that are fast in a loop on a CPU, and im2col if clients are
        vmapped or the input has fewer than 32 channels. It was not measured on accelerators.

    Returns: [n, height', width', out].

    Guarantees: all methods agree with flax.linen.Conv in value and gradient
    (tests/models/test_layers.py::test_convolution_equals_linen). "auto" and "im2col" have second derivatives
    (::test_second_derivatives), and refuse `jax.jvp` (tests/models/test_convolution.py).

    >>> import jax, jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((3, 3, 1, 1)), "bias": jnp.zeros(1)}
    >>> jax.jit(convolution)(params, jnp.ones((1, 2, 2, 1))).ravel().tolist()
    [4.0, 4.0, 4.0, 4.0]
    """
    one_of("padding", padding, ("SAME", "VALID"))
    one_of("method", method, CONVOLUTION_METHODS)
    integer("stride", stride)
    kernel = params["kernel"]
    x = x.astype(kernel.dtype)
    if x.ndim != 4 or x.shape[3] != kernel.shape[2]:
        fail("x", f"images [n, height, width, {kernel.shape[2]}]", x.shape)
    kh, kw = kernel.shape[:2]
    if padding == "VALID" and (x.shape[1] < kh or x.shape[2] < kw):
        fail("x", f"images of at least {kh}x{kw}", x.shape)
    pads = tuple(jax.lax.padtype_to_pads(x.shape[1:3], (kh, kw), (stride, stride), padding))
    geometry = Geometry(
        image=x.shape[1:3],
        kernel=(kh, kw),
        strides=(stride, stride),
        pads=pads,
        image_dilation=(1, 1),
        kernel_dilation=(1, 1),
    )
    out = CONVOLUTIONS[method](x, kernel, geometry)
    return _add_to_pixels(out, params["bias"]) if "bias" in params else out


def max_pool(x: Array, *, size: int = 2) -> Array:
    """Takes the largest value of each size x size window of x [n, height, width, channels].

    Rows and columns at the end that do not fill a window are left out.

    Args:
      x: [n, height, width, channels].
      size: in [1, min(height, width)].

    Guarantees: equals flax.linen.max_pool (tests/models/test_layers.py::test_max_pool_equals_linen). If several entries
    of a window are largest, they share the gradient equally.

    >>> import jax.numpy as jnp
    >>> max_pool(jnp.arange(9.0).reshape(1, 3, 3, 1)).tolist()
    [[[[4.0]]]]
    """
    integer("size", size)
    n, height, width, channels = x.shape
    h, w = height // size, width // size
    if h < 1 or w < 1:
        fail("x", f"images of at least {size}x{size}", x.shape)
    # Windows become axes of their own, so that the maximum is an ordinary reduction over them.
    windows = x[:, : h * size, : w * size].reshape((n, h, size, w, size, channels))
    return windows.max(axis=(2, 4))


def init_embedding(key: Array, vocabulary: int, features: int) -> Params:
    """Draws the parameters of `embedding`: {"table": [vocabulary, features]}, normal with variance 1 / features."""
    return {"table": jax.random.normal(key, (vocabulary, features)) / jnp.sqrt(features)}


def embedding(params: Params, tokens: Array) -> Array:
    """Returns the rows of the table for integer tokens [...].

    Token -1, padding, has zeros. Any other token without a row has NaN, since traced code cannot raise an error.

    Args:
      params: {"table": [tokens, features]}.
      tokens: [...] integers.

    Guarantees: padding reads and trains no row, and an unknown token is never clamped to a row
    (tests/models/test_layers.py::test_embedding_padding_and_unknown_tokens).

    >>> import jax.numpy as jnp
    >>> embedding({"table": jnp.array([[1.0], [2.0]])}, jnp.array([1, -1])).tolist()
    [[2.0], [0.0]]
    """
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        fail("tokens", "integers", tokens.dtype, "Cast them: x.astype('int32').", TypeError)
    table = params["table"]
    tokens = tokens.astype(jnp.int32)[..., None]
    # Every token reads some row, and tokens without a row are replaced afterwards. So no gradient reaches that row.
    rows = table[jnp.clip(tokens[..., 0], 0, table.shape[0] - 1)]
    nan_or_zero = jnp.where((tokens < -1) | (tokens >= table.shape[0]), jnp.nan, 0).astype(table.dtype)
    return jnp.where((tokens < 0) | (tokens >= table.shape[0]), nan_or_zero, rows)
