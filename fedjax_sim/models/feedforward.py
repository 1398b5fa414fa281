"""This module builds linear models, multi-layer perceptrons and convolutional networks from plain JAX layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp

from fedjax_sim.models.layers import CONVOLUTION_METHODS, convolution, dense, init_convolution, init_dense, max_pool
from fedjax_sim.models.model import Model
from fedjax_sim.models.sequential import Layer, layer, sequential
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import FromData, NumOutputs, fail, integer, one_of


def _sizes(name: str, values: Sequence[int], *, hint: str = "") -> tuple[int, ...]:
    """Returns `values` as a tuple of positive integers, after checks."""
    if not isinstance(values, (tuple, list)):
        fail(name, "a tuple of integers", values, hint, TypeError)
    for i, value in enumerate(values):
        integer(f"{name}[{i}]", value, hint=hint)
    return tuple(int(value) for value in values)


def _rows(x: Array, input_shape: tuple[int, ...]) -> Array:
    """Flattens x [n, *input_shape] to [n, features]."""
    if x.shape[1:] != input_shape:
        fail(
            "x", f"shape [n, {', '.join(map(str, input_shape))}]", x.shape, "The model was built for this input_shape."
        )
    return x.reshape(x.shape[0], math.prod(input_shape))


def linear(*, input_shape: Annotated[Sequence[int], FromData("input_shape")], num_outputs: NumOutputs) -> Model:
    """Builds the linear model x W + b.

    With a cross entropy it is softmax or logistic regression, with `squared_error` it is least squares.

    Args:
      input_shape: shape of one example, which is flattened.
      num_outputs: number of classes or of regression targets. 1 for a binary logit.

    Returns: a stateless `Model` with parameters {"kernel", "bias"}, num_outputs (prod(input_shape) + 1) numbers in all.
    With these losses the objective is convex. So the parameters start at zero, and `init` does not use the key.

    Guarantees: the number of parameters, and the start at zero
    (tests/models/test_feedforward.py::test_parameter_counts).

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


logistic = linear  # logistic regression is the linear model with a cross entropy as its loss


def mlp(
    *,
    input_shape: Annotated[Sequence[int], FromData("input_shape")],
    num_outputs: NumOutputs,
    hidden: Sequence[int] = (128,),
) -> Model:
    """Builds a multi-layer perceptron with ReLU.

    Hidden layers start He-normal, the output layer Glorot-uniform, and biases at zero.

    Args:
      input_shape: shape of one example, which is flattened.
      num_outputs: number of outputs.
      hidden: widths of the hidden layers. An empty tuple gives a single dense layer.

    Returns: a stateless `Model` with parameters {"hidden_0": {"kernel", "bias"}, ..., "output": {...}}.

    Guarantees: equals the same flax.linen network (tests/models/test_feedforward.py::test_mlp_and_cnn_equal_linen).
    With `hidden=(200, 200)` and 784 inputs it is the 2NN of McMahan et al. with 199,210 parameters
    (tests/models/test_feedforward.py::test_parameter_counts).

    References: McMahan et al. 2017, section 3.

    >>> import jax
    >>> params, _ = mlp(input_shape=(60,), num_outputs=10).init(jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    9098
    """
    input_shape = _sizes("input_shape", input_shape)
    hidden = _sizes("hidden", hidden)
    integer("num_outputs", num_outputs)

    return sequential(_head(math.prod(input_shape), hidden, num_outputs, lambda x: _rows(x, input_shape)))


def _head(num_inputs: int, hidden: tuple[int, ...], num_outputs: int, rows: Callable) -> list[Layer]:
    """Builds the dense layers of a network: "hidden_0", "hidden_1", ... with a ReLU each, and "output" without one.

    Args:
      num_inputs: the number of features of the first layer's input, once it is flat.
      hidden: the widths of the hidden layers; () for the output layer alone.
      num_outputs: the width of the output layer.
      rows: flattens the first layer's input [n, ...] to [n, num_inputs].
    """
    layers = []
    names = [*(f"hidden_{i}" for i in range(len(hidden))), "output"]
    for i, (name, width) in enumerate(zip(names, (*hidden, num_outputs), strict=True)):
        relu = name != "output"

        # Defaults bind the values of this iteration. A closure would see those of the last one.
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
    """Builds a convolutional network.

    It has a convolution and a ReLU for each entry of `channels`, 2 x 2 max pools between them, and then dense layers.

    Args:
      input_shape: (height, width) or (height, width, channels) of one image.
      num_outputs: number of outputs.
      channels: output channels of each convolution.
      kernel_size: side of the square kernels.
      padding: "SAME" keeps height and width. "VALID" reduces both by kernel_size - 1 at each convolution.
      pool_every: number of convolutions before each pool. It must divide the number of convolutions.
      hidden: widths of the dense hidden layers.
      method: how convolutions are computed, "auto", "im2col" or "native". See `layers.convolution`.

    Returns: a stateless `Model` with parameters {"conv_0", ..., "hidden_0", ..., "output"}, He-normal before ReLU.

    Guarantees: equals the same flax.linen network (tests/models/test_feedforward.py::test_mlp_and_cnn_equal_linen).
    Two published networks for images of 28 x 28 pixels have their published numbers of parameters
    (tests/models/test_feedforward.py::test_parameter_counts):

    - `channels=(32, 64), kernel_size=5, hidden=(512,)` with 10 classes is the network of McMahan et al., 1,663,370;
    - `channels=(32, 64), padding="VALID", pool_every=2, hidden=(128,)` with 62 classes is the network of Reddi et al.
      without its dropout, 1,206,590.

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
    channels = _sizes("channels", channels)
    hidden = _sizes("hidden", hidden)
    integer("num_outputs", num_outputs)
    integer("kernel_size", kernel_size)
    integer("pool_every", pool_every)
    one_of("padding", padding, ("SAME", "VALID"))
    one_of("method", method, CONVOLUTION_METHODS)
    if len(channels) % pool_every:
        fail("pool_every", f"a divisor of the {len(channels)} convolutions", pool_every)
    # The size of the images after all convolutions and pools is needed for the first dense layer.
    height, width = shape[:2]
    for i in range(len(channels)):
        lost_pixels = kernel_size - 1 if padding == "VALID" else 0
        is_pooled = (i + 1) % pool_every == 0
        height, width = ((side - lost_pixels) >> is_pooled for side in (height, width))  # >> 1 halves, >> 0 keeps
        if min(height, width) < 1:
            fail("channels", f"few enough convolutions and 2 x 2 pools for {shape[0]} x {shape[1]} pixels", channels)
    depth = shape[2] if len(shape) == 3 else 1

    layers = []
    num_inputs = depth
    for i, num_channels in enumerate(channels):

        def apply(params, x, i=i):
            # The first layer adds the axis of channels to images [n, height, width].
            if i == 0:
                x = _rows(x, shape).reshape(x.shape[0], *shape[:2], depth)
            x = convolution(params, x, padding=padding, method=method)
            # Pooling first gives the same numbers, and leaves a quarter of the ReLU's work.
            return jax.nn.relu(max_pool(x) if (i + 1) % pool_every == 0 else x)

        init = partial(init_convolution, kernel_size=kernel_size, num_inputs=num_inputs, num_outputs=num_channels)
        layers.append(layer(f"conv_{i}", init, apply))
        num_inputs = num_channels
    rows = (lambda x: x.reshape(x.shape[0], -1)) if channels else partial(_rows, input_shape=shape)
    return sequential(layers + _head(height * width * num_inputs, hidden, num_outputs, rows))
