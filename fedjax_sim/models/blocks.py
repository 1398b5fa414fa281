"""Layers with names for `models.sequential`: dense, convolutional, normalised, residual, and with two branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from fedjax_sim.models.layers import convolution, dense, init_convolution, init_dense
from fedjax_sim.models.sequential import Layer, branches, layer
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import fail, integer, one_of, positive

__all__ = ["convolutional", "flatten", "fully_connected", "group_norm", "layer_norm", "residual", "two_branch"]

ACTIVATIONS: dict[str, Callable] = {"none": lambda x: x, "relu": jax.nn.relu, "tanh": jnp.tanh}
JOINS: dict[str, Callable] = {"add": sum, "concatenate": lambda outs: jnp.concatenate(outs, axis=-1)}


def fully_connected(name: str, num_inputs: int, num_outputs: int, *, activation: str = "relu") -> Layer:
    """x W + b and an activation ("relu", "tanh" or "none"), over the last axis of [..., num_inputs].

    >>> sorted(fully_connected("first", 10, 20).init(jax.random.key(0))["first"])
    ['bias', 'kernel']
    """
    integer("num_inputs", num_inputs)
    integer("num_outputs", num_outputs)
    one_of("activation", activation, ACTIVATIONS)
    relu = activation == "relu"
    return layer(
        name,
        lambda key: init_dense(key, num_inputs, num_outputs, relu=relu),
        lambda params, x: ACTIVATIONS[activation](dense(params, x)),
    )


def convolutional(
    name: str, num_inputs: int, num_outputs: int, *, kernel_size: int = 3, stride: int = 1, activation: str = "relu"
) -> Layer:
    """A convolution of [n, height, width, num_inputs] that keeps its size at stride 1, and an activation."""
    integer("num_inputs", num_inputs)
    integer("num_outputs", num_outputs)
    integer("kernel_size", kernel_size)
    integer("stride", stride)
    one_of("activation", activation, ACTIVATIONS)
    return layer(
        name,
        lambda key: init_convolution(key, kernel_size, num_inputs, num_outputs),
        lambda params, x: ACTIVATIONS[activation](convolution(params, x, stride=stride)),
    )


def flatten(name: str = "flatten") -> Layer:
    """[n, ...] as [n, features]."""
    return layer(name, None, lambda x: x.reshape(x.shape[0], -1))


def _normalised(x: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    centred = x - x.mean(axis=axes, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(axis=axes, keepdims=True) + epsilon)


def _affine(num_features: int) -> Callable:
    return lambda key: {"scale": jnp.ones(num_features), "bias": jnp.zeros(num_features)}


def _scaled(params: PyTree, x: Array) -> Array:
    scale, bias = (params[name].reshape((1,) * (x.ndim - 1) + (-1,)) for name in ("scale", "bias"))
    return x * scale + bias


def layer_norm(name: str, num_features: int, *, epsilon: float = 1e-6) -> Layer:
    """Each example's last axis [..., num_features] at mean 0 and variance 1, then a scale and a bias for each feature.

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
    """Each example's positions and each of so many groups of features at mean 0 and variance 1, then scale and bias.

    Unlike batch normalisation it keeps no statistics and looks at no other example, so clients with few or unlike
    examples train the same model, and padding changes nothing.

    Args:
      num_features: of the last axis of [n, ..., num_features].
      groups: a divisor of it.

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
        parts = x.reshape(x.shape[0], -1, groups, num_features // groups)
        return _scaled(params, _normalised(parts, (1, 3), epsilon).reshape(x.shape))

    return layer(name, _affine(num_features), apply)


def residual(name: str, layers: Sequence[Layer]) -> Layer:
    """x + f(x), f being the layers; f may be another party's (`models.cut` with the path "name/body").

    References: He et al. 2016, section 3.1.

    >>> block = residual("block", [layer("half", None, lambda x: x / 2)])
    >>> [name for name, _ in block.branches]
    ['shortcut', 'body']
    """
    return branches(name, {"shortcut": (), "body": layers}, sum)


def two_branch(name: str, left: Sequence[Layer], right: Sequence[Layer], *, join: str = "concatenate") -> Layer:
    """Two branches of one input, whose outputs are added or concatenated along the last axis ("add", "concatenate")."""
    one_of("join", join, JOINS)
    return branches(name, {"left": left, "right": right}, JOINS[join])
