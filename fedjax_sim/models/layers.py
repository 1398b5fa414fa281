"""Layers that stay fast when every client has its own weights, as functions over plain dicts.

Under `vmap` over clients each of them becomes batched matmuls and element-wise work: XLA:CPU runs a convolution
inside a loop 50 times slower than the same layer as slices + concat + matmul. Inputs are cast to the dtype of the
parameters, without scaling. Weights that feed a ReLU start He-normal, others Glorot-uniform; biases at zero.

References: Glorot and Bengio 2010; He et al. 2015; Chellapilla, Puri and Simard 2006 (im2col).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.types import Array
from fedjax_sim.validate import fail, integer, one_of

__all__ = [
    "convolution",
    "dense",
    "embedding",
    "gru_layer",
    "init_convolution",
    "init_dense",
    "init_embedding",
    "init_gru",
    "init_lstm",
    "lstm_layer",
    "max_pool",
]

Params = dict[str, Array]


def _kernel(key: Array, shape: tuple[int, ...], relu: bool) -> Array:
    initialize = jax.nn.initializers.he_normal() if relu else jax.nn.initializers.glorot_uniform()
    return initialize(key, shape)


def _add(x: Array, bias: Array) -> Array:
    return x + bias.reshape((1,) * (x.ndim - 1) + (-1,))


def init_dense(key: Array, num_inputs: int, num_outputs: int, *, relu: bool = False) -> Params:
    """{"kernel": [num_inputs, num_outputs], "bias": [num_outputs]}; He-normal if `relu`, else Glorot-uniform."""
    return {"kernel": _kernel(key, (num_inputs, num_outputs), relu), "bias": jnp.zeros(num_outputs)}


def dense(params: Params, x: Array) -> Array:
    """x W + b over the last axis of x [..., num_inputs].

    Guarantees: equals flax.linen.Dense (tests/models/test_layers.py::test_dense_equals_linen).

    >>> import jax.numpy as jnp
    >>> dense({"kernel": jnp.ones((2, 1)), "bias": jnp.ones(1)}, jnp.ones((1, 2))).tolist()
    [[3.0]]
    """
    return _add(x.astype(params["kernel"].dtype) @ params["kernel"], params["bias"])


def init_convolution(key: Array, kernel_size: int, num_inputs: int, num_outputs: int, *, relu: bool = True) -> Params:
    """{"kernel": [k, k, num_inputs, num_outputs], "bias": [num_outputs]}."""
    shape = (kernel_size, kernel_size, num_inputs, num_outputs)
    return {"kernel": _kernel(key, shape, relu), "bias": jnp.zeros(num_outputs)}


def convolution(params: Params, x: Array, *, stride: int = 1, padding: str = "SAME", method: str = "im2col") -> Array:
    """Two-dimensional convolution of x [n, height, width, channels].

    Args:
      params: {"kernel": [kh, kw, in, out], "bias": [out]}.
      x: images, channels last.
      stride: step in both directions, >= 1.
      padding: "SAME" or "VALID".
      method: "im2col" (slices + concat + matmul: holds kh * kw copies of the input) or "native" (XLA's own).

    Returns: [n, height', width', out].

    Guarantees: both methods agree with flax.linen.Conv in value and gradient
    (tests/models/test_layers.py::test_convolution_equals_linen).

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((3, 3, 1, 1)), "bias": jnp.zeros(1)}
    >>> convolution(params, jnp.ones((1, 2, 2, 1))).ravel().tolist()
    [4.0, 4.0, 4.0, 4.0]
    """
    one_of("padding", padding, ("SAME", "VALID"))
    one_of("method", method, ("im2col", "native"))
    integer("stride", stride)
    kernel = params["kernel"]
    x = x.astype(kernel.dtype)
    if x.ndim != 4 or x.shape[3] != kernel.shape[2]:
        fail("x", f"images [n, height, width, {kernel.shape[2]}]", x.shape)
    if method == "native":
        layout = ("NHWC", "HWIO", "NHWC")
        out = jax.lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=layout)
        return _add(out, params["bias"])
    kh, kw, num_inputs, num_outputs = kernel.shape
    rows, columns = jax.lax.padtype_to_pads(x.shape[1:3], (kh, kw), (stride, stride), padding)
    x = jnp.pad(x, ((0, 0), rows, columns, (0, 0)))
    n, height, width = x.shape[0], (x.shape[1] - kh) // stride + 1, (x.shape[2] - kw) // stride + 1
    if height < 1 or width < 1:
        fail("x", f"images of at least {kh}x{kw}", x.shape)
    shifts = [(i, j) for i in range(kh) for j in range(kw)]
    reach_h, reach_w = (height - 1) * stride + 1, (width - 1) * stride + 1
    patches = [x[:, i : i + reach_h : stride, j : j + reach_w : stride] for i, j in shifts]
    columns = jnp.concatenate(patches, axis=3).reshape(n * height * width, kh * kw * num_inputs)
    out = columns @ kernel.reshape(kh * kw * num_inputs, num_outputs)
    return _add(out.reshape(n, height, width, num_outputs), params["bias"])


def max_pool(x: Array, *, size: int = 2) -> Array:
    """Largest value of each size x size window of x [n, height, width, channels]; a rest at the border is cut off.

    Guarantees: equals flax.linen.max_pool (tests/models/test_layers.py::test_max_pool_equals_linen); where several
    entries are largest, they share the gradient equally.

    >>> import jax.numpy as jnp
    >>> max_pool(jnp.arange(9.0).reshape(1, 3, 3, 1)).tolist()
    [[[[4.0]]]]
    """
    integer("size", size)
    n, height, width, channels = x.shape
    h, w = height // size, width // size
    if h < 1 or w < 1:
        fail("x", f"images of at least {size}x{size}", x.shape)
    return x[:, : h * size, : w * size].reshape(n, h, size, w, size, channels).max(axis=(2, 4))


def init_embedding(key: Array, vocabulary: int, features: int) -> Params:
    """{"table": [vocabulary, features]}, normal with variance 1 / features."""
    return {"table": jax.random.normal(key, (vocabulary, features)) / jnp.sqrt(features)}


def embedding(params: Params, tokens: Array) -> Array:
    """Rows of the table for integer tokens [...]; token -1 (padding) gives zeros, any other outside it gives NaN.

    Guarantees: padding reads and trains no row, unknown tokens are never clamped to one
    (tests/models/test_layers.py::test_embedding_padding_and_unknown_tokens).

    >>> import jax.numpy as jnp
    >>> embedding({"table": jnp.array([[1.0], [2.0]])}, jnp.array([1, -1])).tolist()
    [[2.0], [0.0]]
    """
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        fail("tokens", "integers", tokens.dtype, "Cast them: x.astype('int32').", TypeError)
    table, tokens = params["table"], tokens.astype(jnp.int32)[..., None]
    rows = table[jnp.clip(tokens[..., 0], 0, table.shape[0] - 1)]
    outside = jnp.where((tokens < -1) | (tokens >= table.shape[0]), jnp.nan, 0).astype(table.dtype)
    return jnp.where((tokens < 0) | (tokens >= table.shape[0]), outside, rows)


def _gates(key: Array, num_inputs: int, hidden: int, num_gates: int) -> Array:
    """Kernels of all gates side by side, each Glorot-uniform by its own fans."""
    limit = (6 / (num_inputs + hidden)) ** 0.5
    return jax.random.uniform(key, (num_inputs, num_gates * hidden), minval=-limit, maxval=limit)


def init_gru(key: Array, num_inputs: int, hidden: int) -> Params:
    """Gates in the order reset, update, candidate; 3 hidden (num_inputs + hidden + 1) + hidden parameters."""
    inputs, recurrent = jax.random.split(key)
    return {
        "kernel": _gates(inputs, num_inputs, hidden, 3),
        "recurrent": _gates(recurrent, hidden, hidden, 3),
        "bias": jnp.zeros(3 * hidden),
        "recurrent_bias": jnp.zeros(hidden),  # of the candidate, inside the reset gate
    }


def gru_layer(params: Params, x: Array) -> Array:
    """Gated recurrent unit over x [n, L, num_inputs], from a zero state; returns the states [n, L, hidden].

    h' = (1 - z) tanh(W_c x + b_c + r (U_c h + d_c)) + z h, with one fused matmul a step; W x is taken before the scan.

    Guarantees: equals flax.linen.GRUCell (tests/models/test_layers.py::test_recurrent_layers_equal_linen).

    References: Cho et al. 2014; the reset gate after the matmul as in cuDNN.
    """

    def step(h: Array, gates: Array) -> tuple[Array, Array]:
        reset, update, candidate = jnp.split(gates, 3, axis=1)
        reset_h, update_h, candidate_h = jnp.split(h @ params["recurrent"], 3, axis=1)
        reset, update = jax.nn.sigmoid(reset + reset_h), jax.nn.sigmoid(update + update_h)
        candidate = jnp.tanh(candidate + reset * _add(candidate_h, params["recurrent_bias"]))
        h = (1 - update) * candidate + update * h
        return h, h

    gates = jnp.swapaxes(dense(params, x), 0, 1)
    start = jnp.zeros_like(gates, shape=(x.shape[0], params["recurrent"].shape[0]))
    return jnp.swapaxes(jax.lax.scan(step, start, gates)[1], 0, 1)


def init_lstm(key: Array, num_inputs: int, hidden: int) -> Params:
    """Gates in the order input, forget, cell, output; 4 hidden (num_inputs + hidden + 1) parameters; forget bias 1."""
    inputs, recurrent = jax.random.split(key)
    return {
        "kernel": _gates(inputs, num_inputs, hidden, 4),
        "recurrent": _gates(recurrent, hidden, hidden, 4),
        "bias": jnp.zeros(4 * hidden).at[hidden : 2 * hidden].set(1.0),
    }


def lstm_layer(params: Params, x: Array) -> Array:
    """Long short-term memory over x [n, L, num_inputs], from a zero state; returns the states [n, L, hidden].

    Guarantees: equals flax.linen.OptimizedLSTMCell (tests/models/test_layers.py::test_recurrent_layers_equal_linen).

    References: Hochreiter and Schmidhuber 1997; forget bias 1: Jozefowicz et al. 2015.
    """

    def step(carry: tuple[Array, Array], gates: Array) -> tuple[tuple[Array, Array], Array]:
        h, c = carry
        i, f, g, o = jnp.split(gates + h @ params["recurrent"], 4, axis=1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    gates = jnp.swapaxes(dense(params, x), 0, 1)
    start = jnp.zeros_like(gates, shape=(x.shape[0], params["recurrent"].shape[0]))
    return jnp.swapaxes(jax.lax.scan(step, (start, start), gates)[1], 0, 1)
