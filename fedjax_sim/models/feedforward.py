"""Linear models, perceptrons and convolutional networks, on plain JAX layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp

from fedjax_sim.models.layers import METHODS, convolution, dense, init_convolution, init_dense, max_pool
from fedjax_sim.models.model import Model
from fedjax_sim.models.sequential import Layer, layer, sequential
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import FromData, NumOutputs, fail, integer, one_of

__all__ = ["cnn", "linear", "logistic", "mlp"]


def _sizes(name: str, values: Sequence[int], *, hint: str = "") -> tuple[int, ...]:
    """A tuple of positive integers."""
    if not isinstance(values, (tuple, list)):
        fail(name, "a tuple of integers", values, hint, TypeError)
    for i, value in enumerate(values):
        integer(f"{name}[{i}]", value, hint=hint)
    return tuple(int(value) for value in values)


def _rows(x: Array, input_shape: tuple[int, ...]) -> Array:
    """x [n, *input_shape] as [n, features]."""
    if x.shape[1:] != input_shape:
        fail(
            "x", f"shape [n, {', '.join(map(str, input_shape))}]", x.shape, "The model was built for this input_shape."
        )
    return x.reshape(x.shape[0], math.prod(input_shape))


def linear(*, input_shape: Annotated[Sequence[int], FromData("input_shape")], num_outputs: NumOutputs) -> Model:
    """The model x W + b: softmax or logistic regression with a cross entropy, least squares with `squared_error`.

    Args:
      input_shape: shape of one example; flattened.
      num_outputs: number of classes, or of regression targets; 1 for a binary logit.

    Returns: a stateless `Model` with parameters {"kernel", "bias"}: d = num_outputs (prod(input_shape) + 1). With these
    losses the objective is convex, so it starts at zero and the key is not used.

    Guarantees: parameter count and zero start (tests/models/test_feedforward.py::test_parameter_counts).

    >>> import jax
    >>> params, _ = linear(input_shape=(28, 28), num_outputs=10).init(jax.random.key(0))
    >>> sum(leaf.size for leaf in params.values())
    7850
    """
    input_shape = _sizes("input_shape", input_shape)
    integer("num_outputs", num_outputs)
    features = math.prod(input_shape)

    def init(key: Array) -> PyTree:
        return {"kernel": jnp.zeros((features, num_outputs)), "bias": jnp.zeros(num_outputs)}

    def apply(params: PyTree, x: Array) -> Array:
        return dense(params, _rows(x, input_shape))

    return sequential([Layer("output", init, apply, ("kernel", "bias"))])


logistic = linear  # softmax regression is the linear model: the loss makes it logistic


def mlp(
    *,
    input_shape: Annotated[Sequence[int], FromData("input_shape")],
    num_outputs: NumOutputs,
    hidden: Sequence[int] = (128,),
) -> Model:
    """Multi-layer perceptron with ReLU: He-normal hidden layers, Glorot-uniform output, zero biases.

    Args:
      input_shape: shape of one example; flattened.
      num_outputs: number of outputs.
      hidden: widths of the hidden layers; empty gives one dense layer.

    Returns: a stateless `Model` with parameters {"hidden_0": {"kernel", "bias"}, ..., "output": {...}}.

    Guarantees: equals the same flax.linen network (tests/models/test_feedforward.py::test_mlp_and_cnn_equal_linen);
    `hidden=(200, 200)` on 784 inputs is the 199,210-parameter 2NN of McMahan et al.
    (tests/models/test_feedforward.py::test_parameter_counts).

    References: McMahan et al. 2017, section 3.

    >>> import jax
    >>> params, _ = mlp(input_shape=(60,), num_outputs=10).init(jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    9098
    """
    input_shape, hidden = _sizes("input_shape", input_shape), _sizes("hidden", hidden)
    integer("num_outputs", num_outputs)

    return sequential(_head(math.prod(input_shape), hidden, num_outputs, lambda x: _rows(x, input_shape)))


def _head(num_inputs: int, hidden: tuple[int, ...], num_outputs: int, rows: Callable) -> list[Layer]:
    """The dense layers of a network; the first one makes rows [n, features] of what it gets."""
    layers, names = [], [*(f"hidden_{i}" for i in range(len(hidden))), "output"]
    for i, (name, width) in enumerate(zip(names, (*hidden, num_outputs), strict=True)):
        relu = name != "output"

        def apply(params, x, first=i == 0, relu=relu):
            x = dense(params, rows(x) if first else x)
            return jax.nn.relu(x) if relu else x

        layers.append(layer(name, partial(init_dense, num_inputs=num_inputs, num_outputs=width, relu=relu), apply))
        num_inputs = width
    return layers


def cnn(
    *,
    input_shape: Annotated[Sequence[int], FromData("input_shape")],
    num_outputs: NumOutputs,
    channels: Sequence[int] = (16, 32),
    kernel_size: int = 3,
    padding: str = "SAME",
    pool_every: int = 1,
    hidden: Sequence[int] = (),
    method: str = "auto",
) -> Model:
    """Convolutional network: a convolution and ReLU for each entry of `channels`, 2 x 2 max pools, then dense layers.

    Args:
      input_shape: (height, width) or (height, width, channels) of one image.
      num_outputs: number of outputs.
      channels: output channels of each convolution.
      kernel_size: side of the square kernels.
      padding: "SAME" keeps height and width, "VALID" takes kernel_size - 1 from them at each convolution.
      pool_every: number of convolutions before each pool; must divide the number of convolutions.
      hidden: widths of the dense hidden layers.
      method: how convolutions are computed: "auto", "im2col" or "native"; see `layers.convolution`.

    Returns: a stateless `Model` with parameters {"conv_0", ..., "hidden_0", ..., "output"}, He-normal before ReLU.

    Guarantees: equals the same flax.linen network (tests/models/test_feedforward.py::test_mlp_and_cnn_equal_linen);
    `channels=(32, 64), kernel_size=5, hidden=(512,)` on 28 x 28 and 10 classes is the 1,663,370-parameter network of
    McMahan et al., and `channels=(32, 64), padding="VALID", pool_every=2, hidden=(128,)` on 28 x 28 and 62 classes the
    1,206,590-parameter one of Reddi et al., without its dropout
    (tests/models/test_feedforward.py::test_parameter_counts).

    References: McMahan et al. 2017, section 3; Reddi et al. 2021, appendix (EMNIST).

    >>> import jax
    >>> params, _ = cnn(input_shape=(8, 8), num_outputs=10).init(jax.random.key(0))
    >>> sorted(params)
    ['conv_0', 'conv_1', 'output']
    """
    hint = "Give the image shape (height, width) or (height, width, channels), e.g. (8, 8) for 64 flat pixels."
    shape = _sizes("input_shape", input_shape, hint=hint)
    if len(shape) not in (2, 3):
        fail("input_shape", "the shape of an image", shape, hint)
    channels, hidden = _sizes("channels", channels), _sizes("hidden", hidden)
    integer("num_outputs", num_outputs)
    integer("kernel_size", kernel_size)
    integer("pool_every", pool_every)
    one_of("padding", padding, ("SAME", "VALID"))
    one_of("method", method, METHODS)
    if len(channels) % pool_every:
        fail("pool_every", f"a divisor of the {len(channels)} convolutions", pool_every)
    height, width = shape[:2]
    for i in range(len(channels)):
        lost = kernel_size - 1 if padding == "VALID" else 0
        height, width = ((side - lost) >> ((i + 1) % pool_every == 0) for side in (height, width))
        if min(height, width) < 1:
            fail("channels", f"few enough convolutions and 2 x 2 pools for {shape[0]} x {shape[1]} pixels", channels)
    depth = shape[2] if len(shape) == 3 else 1

    layers, before = [], depth
    for i, after in enumerate(channels):

        def apply(params, x, i=i):
            if i == 0:
                x = _rows(x, shape).reshape(x.shape[0], *shape[:2], depth)
            x = convolution(params, x, padding=padding, method=method)
            # Pooling first gives the same numbers, and leaves a quarter of the ReLU's work.
            return jax.nn.relu(max_pool(x) if (i + 1) % pool_every == 0 else x)

        init = partial(init_convolution, kernel_size=kernel_size, num_inputs=before, num_outputs=after)
        layers.append(layer(f"conv_{i}", init, apply))
        before = after
    rows = (lambda x: x.reshape(x.shape[0], -1)) if channels else partial(_rows, input_shape=shape)
    return sequential(layers + _head(height * width * before, hidden, num_outputs, rows))
