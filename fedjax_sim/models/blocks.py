"""This module has named layers for `models.sequential`: dense, convolutional, normalised, residual, two-branch.

Norms look at one example only. Statistics of a batch would let padding and other examples change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from fedjax_sim.models.layers import convolution, dense, init_convolution, init_dense
from fedjax_sim.models.sequential import Layer, branches, layer
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import fail, integer, one_of, positive

ACTIVATIONS: dict[str, Callable] = {"none": lambda x: x, "relu": jax.nn.relu, "tanh": jnp.tanh}
JOINS: dict[str, Callable] = {"add": sum, "concatenate": lambda outs: jnp.concatenate(outs, axis=-1)}


def fully_connected(name: str, num_inputs: int, num_outputs: int, *, activation: str = "relu") -> Layer:
    """Makes a dense layer, x W + b over the last axis of x [..., num_inputs], with an activation.

    Args:
      name: of the layer.
      num_inputs, num_outputs: sizes of the last axis before and after the layer.
      activation: "relu", "tanh" or "none".

    >>> sorted(fully_connected("first", 10, 20).init(jax.random.key(0))["first"])
    ['bias', 'kernel']
    """
    integer("num_inputs", num_inputs)
    integer("num_outputs", num_outputs)
    one_of("activation", activation, ACTIVATIONS)
    # Only a ReLU halves the variance of its input, which the He-normal initialisation makes up for.
    relu = activation == "relu"
    return layer(
        name,
        lambda key: init_dense(key, num_inputs, num_outputs, relu=relu),
        lambda params, x: ACTIVATIONS[activation](dense(params, x)),
    )


def convolutional(
    name: str,
    num_inputs: int,
    num_outputs: int,
    *,
    kernel_size: int = 3,
    stride: int = 1,
    activation: str = "relu",
    bias: bool = True,
) -> Layer:
    """Makes a convolutional layer for images [n, height, width, num_inputs], with an activation.

    Args:
      name: of the layer.
      num_inputs, num_outputs: numbers of channels.
      kernel_size: side of the square kernels.
      stride: step in both directions. With stride 1 the layer keeps height and width.
      activation: "relu", "tanh" or "none".
      bias: whether a bias for each channel is added.
    """
    integer("num_inputs", num_inputs)
    integer("num_outputs", num_outputs)
    integer("kernel_size", kernel_size)
    integer("stride", stride)
    one_of("activation", activation, ACTIVATIONS)
    return layer(
        name,
        lambda key: init_convolution(key, kernel_size, num_inputs, num_outputs, bias=bias),
        lambda params, x: ACTIVATIONS[activation](convolution(params, x, stride=stride)),
    )


def flatten(name: str = "flatten") -> Layer:
    """Makes a layer that flattens [n, ...] to [n, features]."""
    return layer(name, None, lambda x: x.reshape(x.shape[0], -1))


def _normalised(x: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    """Shifts and scales x to mean 0 and variance 1 over these axes."""
    centred = x - x.mean(axis=axes, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(axis=axes, keepdims=True) + epsilon)


def _affine(num_features: int) -> Callable:
    """Returns the `init` of scale and bias, which leave x as it is at the start."""
    return lambda key: {"scale": jnp.ones(num_features), "bias": jnp.zeros(num_features)}


def _scaled(params: PyTree, x: Array) -> Array:
    """Applies scale and bias to the last axis of x."""
    scale, bias = (params[name].reshape((1,) * (x.ndim - 1) + (-1,)) for name in ("scale", "bias"))
    return x * scale + bias


def layer_norm(name: str, num_features: int, *, epsilon: float = 1e-6) -> Layer:
    """Makes a layer that normalises the last axis of x [..., num_features] to mean 0 and variance 1.

    A learned scale and bias for each feature follow.

    Args:
      name: of the layer.
      num_features: size of the last axis.
      epsilon: > 0, added to the variance.

    Guarantees: equals flax.linen.LayerNorm (tests/models/test_blocks.py::test_norms_equal_linen), and no example
    depends on another (::test_norms_look_at_one_example).

    References: Ba, Kiros and Hinton 2016, section 3.
    """
    integer("num_features", num_features)
    positive("epsilon", epsilon)

    def apply(params: PyTree, x: Array) -> Array:
        return _scaled(params, _normalised(x, (-1,), epsilon))

    return layer(name, _affine(num_features), apply)


def group_norm(name: str, num_features: int, *, groups: int = 8, epsilon: float = 1e-6) -> Layer:
    """Makes a layer that normalises groups of features of each example to mean 0 and variance 1.

    Means and variances are taken over all positions of an example and all features of a group. A learned scale and bias
    for each feature follow. Unlike batch normalisation, the layer keeps no statistics and looks at no other example. So
    clients with few or different examples train the same model, and padding changes nothing.

    Args:
      name: of the layer.
      num_features: size of the last axis of x [n, ..., num_features].
      groups: number of groups, a divisor of num_features.
      epsilon: > 0, added to the variance.

    Guarantees: equals flax.linen.GroupNorm (tests/models/test_blocks.py::test_norms_equal_linen), and no example
    depends on another (::test_norms_look_at_one_example).

    References: Wu and He 2018, section 3; Hsieh et al. 2020, section 6, for federated data.
    """
    integer("num_features", num_features)
    integer("groups", groups)
    positive("epsilon", epsilon)
    if num_features % groups:
        fail("groups", f"a divisor of the {num_features} features", groups)

    def apply(params: PyTree, x: Array) -> Array:
        # [n, positions, groups, features of a group], so that statistics run over axes 1 and 3.
        grouped = x.reshape(x.shape[0], -1, groups, num_features // groups)
        return _scaled(params, _normalised(grouped, (1, 3), epsilon).reshape(x.shape))

    return layer(name, _affine(num_features), apply)


def residual(name: str, layers: Sequence[Layer]) -> Layer:
    """Makes a layer that computes x + f(x), where f is a sequence of layers.

    f may belong to another party: in `models.cut` its path is "name/body".

    References: He et al. 2016, section 3.1.

    >>> block = residual("block", [layer("half", None, lambda x: x / 2)])
    >>> [name for name, _ in block.branches]
    ['shortcut', 'body']
    """
    return branches(name, {"shortcut": (), "body": layers}, sum)


def two_branch(name: str, left: Sequence[Layer], right: Sequence[Layer], *, join: str = "concatenate") -> Layer:
    """Makes a layer of two branches with a common input.

    Args:
      name: of the layer.
      left, right: the layers of each branch.
      join: how the branches' outputs are combined, "add" or "concatenate" (along the last axis).
    """
    one_of("join", join, JOINS)
    return branches(name, {"left": left, "right": right}, JOINS[join])
