"""This module builds published networks for images by their names: LeNet-5, ResNet-9, -18 and -20, and VGG-11.

Each is a sequence of named layers, so `models.cut` divides it among parties. A paper's batch normalisation is replaced
by a norm that looks at one example only. The norm has a scale and a bias for each channel, as batch normalisation has,
so the numbers of parameters are the papers' own.

References: Hsieh et al. 2020, section 6 (batch normalisation in federated learning).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from fedjax_sim.models.blocks import convolutional, flatten, fully_connected, group_norm
from fedjax_sim.models.layers import convolution, init_convolution, max_pool
from fedjax_sim.models.model import Model
from fedjax_sim.models.sequential import Layer, branches, layer, sequential
from fedjax_sim.types import Array
from fedjax_sim.validate import FromData, NumOutputs, PositiveInt, fail, integer, one_of

LENET_SIDE = 32
NUM_GROUPS = {"layer": 1}  # a layer's norm is one group: all channels at all positions of an example
VGG11 = ((64,), (128,), (256, 256), (512, 512), (512, 512))  # channels of the convolutions before each pool


def lenet5(*, input_shape: Annotated[Sequence[int], FromData("input_shape")], num_outputs: NumOutputs) -> Model:
    """Builds LeNet-5: two 5 x 5 convolutions with tanh and 2 x 2 mean pools, and dense layers of 120 and 84 features.

    As in common use, all maps of the second convolution read all maps of the first, pools have no weights, and the
    output is dense. The paper's has fewer connections, weights of pools, and an output of radial functions.

    Args:
      input_shape: (height, width) or (height, width, channels). Images of fewer than 32 x 32 pixels get a border of
        zeros, to this size, as in the paper. Larger images are refused.
      num_outputs: number of outputs.

    Returns: a stateless `Model` with parameters {"conv_0", "conv_1", "hidden_0", "hidden_1", "output"}.

    Guarantees: equals NumPy (tests/models/test_image.py::test_lenet_equals_numpy); 61,706 parameters with one channel
    and 10 classes (::test_parameter_counts).

    References: LeCun et al. 1998, section II.B.

    >>> params, _ = lenet5(input_shape=(28, 28), num_outputs=10).init(jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    61706
    """
    height, width, channels = _image_shape(input_shape)
    integer("num_outputs", num_outputs)
    if max(height, width) > LENET_SIDE:
        fail("input_shape", f"images of at most {LENET_SIDE} x {LENET_SIDE} pixels", input_shape)
    borders = [((LENET_SIDE - side) // 2, (LENET_SIDE - side + 1) // 2) for side in (height, width)]
    layers = [
        _images((height, width, channels)),
        layer("border", None, lambda x: jnp.pad(x, ((0, 0), *borders, (0, 0)))),
    ]
    for i, (num_inputs, num_channels) in enumerate(((channels, 6), (6, 16))):

        def init(key: Array, num_inputs: int = num_inputs, num_channels: int = num_channels):
            return init_convolution(key, 5, num_inputs, num_channels, relu=False)

        layers.append(layer(f"conv_{i}", init, lambda params, x: jnp.tanh(convolution(params, x, padding="VALID"))))
        layers.append(layer(f"pool_{i}", None, _mean_pool))
    dense = (
        fully_connected("hidden_0", 5 * 5 * 16, 120, activation="tanh"),
        fully_connected("hidden_1", 120, 84, activation="tanh"),
        fully_connected("output", 84, num_outputs, activation="none"),
    )
    return sequential([*layers, flatten(), *dense])


def resnet20(
    *,
    input_shape: Annotated[Sequence[int], FromData("input_shape")],
    num_outputs: NumOutputs,
    norm: Literal["group", "layer", "none"] = "group",
    groups: PositiveInt = 2,
) -> Model:
    """Builds the ResNet of 20 layers for small images: three stages of three blocks with 16, 32 and 64 channels.

    A block is relu(shortcut(x) + body(x)); its body has two 3 x 3 convolutions, each before a norm. The first blocks of
    the last two stages halve height and width. Their shortcuts have no parameters: they take every second pixel, and
    add channels of zeros (option A of the paper). The mean over all pixels feeds a dense layer.

    Args:
      input_shape: (height, width) or (height, width, channels).
      num_outputs: number of outputs.
      norm: after each convolution, with a learned scale and bias for each channel. "group": over the channels of a
        group and all positions of an example. "layer": over all channels and positions of an example. "none": no norm;
        the convolutions have biases then, and a deep network may be hard to train. Batch normalisation is not offered:
        other examples and padding would change an example's result.
      groups: number of groups of "group", a divisor of all numbers of channels. The others do not read it.

    Returns: a stateless `Model`. A cut's paths are "stem", "block_0", "block_0/body/conv_0" and so on.

    Guarantees: 269,722 parameters with 3 channels and 10 classes, the paper's 0.27M with its batch norms' two numbers
    for each channel (tests/models/test_image.py::test_parameter_counts); a stack of blocks equals flax.linen
    (::test_residual_networks_equal_linen); no example depends on another (::test_examples_do_not_mix).

    References: He et al. 2016, section 4.2; Wu and He 2018 (group normalisation).

    >>> params, _ = jax.eval_shape(resnet20(input_shape=(32, 32, 3), num_outputs=10).init, jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    269722
    """
    blocks = [(16, 1)] * 3 + [(32, 2), (32, 1), (32, 1)] + [(64, 2), (64, 1), (64, 1)]
    return _resnet(input_shape, num_outputs, norm, groups, blocks=blocks, shortcut=_padded_shortcut)


def resnet18(
    *,
    input_shape: Annotated[Sequence[int], FromData("input_shape")],
    num_outputs: NumOutputs,
    norm: Literal["group", "layer", "none"] = "group",
    groups: PositiveInt = 2,
) -> Model:
    """Builds the ResNet of 18 layers for images of about 32 x 32 pixels, as federated studies of CIFAR use it.

    It has four stages of two blocks with 64, 128, 256 and 512 channels. The first convolution is 3 x 3 with stride 1,
    and no pool follows it. Where a block changes the shape, its shortcut is a 1 x 1 convolution and a norm.

    Args:
      input_shape, num_outputs, norm, groups: as in `resnet20`. Two groups are those of Reddi et al.

    Returns: a stateless `Model`, with paths as in `resnet20`.

    Guarantees: 11,173,962 parameters with 3 channels and 10 classes, as with batch norms
    (tests/models/test_image.py::test_parameter_counts); a stack of blocks equals flax.linen
    (::test_residual_networks_equal_linen).

    References: He et al. 2016, table 1; Reddi et al. 2021, appendix (CIFAR).

    >>> params, _ = jax.eval_shape(resnet18(input_shape=(32, 32, 3), num_outputs=10).init, jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    11173962
    """
    blocks = [(64, 1)] * 2 + [(128, 2), (128, 1)] + [(256, 2), (256, 1)] + [(512, 2), (512, 1)]
    return _resnet(input_shape, num_outputs, norm, groups, blocks=blocks, shortcut=_projected_shortcut)


def resnet9(
    *,
    input_shape: Annotated[Sequence[int], FromData("input_shape")],
    num_outputs: NumOutputs,
    norm: Literal["group", "layer", "none"] = "group",
    groups: PositiveInt = 2,
) -> Model:
    """Builds the ResNet of 9 layers that trains fast: convolutions of 64, 128, 256 and 512 channels, and two blocks.

    Each convolution is 3 x 3, before a norm and a ReLU. A 2 x 2 max pool follows the last three. The convolutions of
    128 and of 512 channels are followed by a block x + f(x), where f has two more. The largest value over all pixels
    feeds a dense layer.

    Args:
      input_shape, num_outputs, norm, groups: as in `resnet20`; at least 8 x 8 pixels.

    Returns: a stateless `Model` with layers "stem", "stage_0", "block_0", "stage_1", "stage_2", "block_2" and "output".

    Guarantees: 6,573,130 parameters with 3 channels and 10 classes: the published network's with its batch norms and a
    bias of the output, which that one lacks (tests/models/test_image.py::test_parameter_counts).

    References: Page 2018, "How to train your ResNet"; Coleman et al. 2017 (DAWNBench).

    >>> params, _ = jax.eval_shape(resnet9(input_shape=(32, 32, 3), num_outputs=10).init, jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    6573130
    """
    shape, norm_layers = _image_shape(input_shape, pools=3), _norms(norm, groups)
    integer("num_outputs", num_outputs)
    layers = [_images(shape), *_convolved("stem", shape[2], 64, norm_layers)]
    num_inputs = 64
    for i, num_channels in enumerate((128, 256, 512)):
        layers += [
            *_convolved(f"stage_{i}", num_inputs, num_channels, norm_layers),
            layer(f"pool_{i}", None, max_pool),
        ]
        if num_channels != 256:
            body = [
                *_convolved("conv_0", num_channels, num_channels, norm_layers),
                *_convolved("conv_1", num_channels, num_channels, norm_layers),
            ]
            layers.append(branches(f"block_{i}", {"shortcut": (), "body": body}, sum))
        num_inputs = num_channels
    largest = layer("pool", None, lambda x: x.max(axis=(1, 2)))
    return sequential([*layers, largest, fully_connected("output", 512, num_outputs, activation="none")])


def vgg11(
    *,
    input_shape: Annotated[Sequence[int], FromData("input_shape")],
    num_outputs: NumOutputs,
    norm: Literal["group", "layer", "none"] = "none",
    groups: PositiveInt = 2,
) -> Model:
    """Builds the VGG of 11 layers for images of 32 x 32 pixels: eight 3 x 3 convolutions, five pools, dense layers.

    As usual for such images, one dense layer takes the place of the paper's three (configuration A), the first two of
    which have 4096 features.

    Args:
      input_shape: (height, width) or (height, width, channels), at least 32 x 32 pixels.
      num_outputs: number of outputs.
      norm, groups: as in `resnet20`; the paper's network has no norm. Convolutions have biases with a norm, too.

    Returns: a stateless `Model` with parameters {"conv_0", ..., "conv_7", "output"}, and those of norms.

    Guarantees: 9,225,610 parameters with 3 channels and 10 classes, and 9,231,114 with norms, which equal the
    published numbers of this variant without and with batch norms (tests/models/test_image.py::test_parameter_counts).

    References: Simonyan and Zisserman 2015, table 1.

    >>> params, _ = jax.eval_shape(vgg11(input_shape=(32, 32, 3), num_outputs=10).init, jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    9225610
    """
    shape, norm_layers = _image_shape(input_shape, pools=len(VGG11)), _norms(norm, groups)
    integer("num_outputs", num_outputs)
    layers, num_inputs = [_images(shape)], shape[2]
    count = 0
    for i, stage in enumerate(VGG11):
        for num_channels in stage:
            layers += _convolved(f"conv_{count}", num_inputs, num_channels, norm_layers, bias=True)
            num_inputs, count = num_channels, count + 1
        layers.append(layer(f"pool_{i}", None, max_pool))
    features = (shape[0] >> len(VGG11)) * (shape[1] >> len(VGG11)) * num_inputs
    return sequential([*layers, flatten(), fully_connected("output", features, num_outputs, activation="none")])


# ---- parts


def _image_shape(input_shape: Sequence[int], *, pools: int = 0) -> tuple[int, int, int]:
    """Returns (height, width, channels) of images, after checks; `pools` is how often both sides are halved."""
    hint = "Give the image shape (height, width) or (height, width, channels), e.g. (8, 8) for 64 flat pixels."
    if not isinstance(input_shape, (tuple, list)) or len(input_shape) not in (2, 3):
        fail("input_shape", "the shape of an image", input_shape, hint)
    for i, size in enumerate(input_shape):
        integer(f"input_shape[{i}]", size, hint=hint)
    if min(input_shape[:2]) < 2**pools:
        fail("input_shape", f"at least {2**pools} x {2**pools} pixels for {pools} pools", input_shape)
    height, width, channels = (*input_shape, 1)[:3]
    return height, width, channels


def _images(shape: tuple[int, int, int]) -> Layer:
    """Makes the first layer, which checks images, and adds the axis of channels to [n, height, width]."""

    def apply(x: Array) -> Array:
        if x.shape[1:] != shape and not (shape[2] == 1 and x.shape[1:] == shape[:2]):
            fail("x", f"shape [n, {', '.join(map(str, shape))}]", x.shape, "The model was built for this input_shape.")
        return x.reshape(x.shape[0], *shape)

    return layer("images", None, apply)


def _mean_pool(x: Array) -> Array:
    """Takes the mean of each 2 x 2 window of x [n, height, width, channels] with even sides."""
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).mean(axis=(2, 4))


def _norms(norm: str, groups: int) -> Callable[[str, int], list[Layer]]:
    """Returns (name, number of channels) -> the layers of a norm, one or none; a further norm has its place here."""
    one_of("norm", norm, ("group", "layer", "none"))
    integer("groups", groups)
    if norm == "none":
        return lambda name, num_channels: []
    return lambda name, num_channels: [group_norm(name, num_channels, groups=NUM_GROUPS.get(norm, groups))]


def _convolved(
    name: str,
    num_inputs: int,
    num_outputs: int,
    norm_layers: Callable[[str, int], list[Layer]],
    *,
    size: int = 3,
    stride: int = 1,
    activation: str = "relu",
    bias: bool = False,
) -> list[Layer]:
    """Makes a convolution, a norm, and an activation.

    Args:
      name: of the convolution; the norm has the name with "_norm", the activation after a norm that with "_active".
      num_inputs, num_outputs: numbers of channels.
      norm_layers: makes the norm (`_norms`).
      size: side of the kernels.
      stride: in both directions. Borders are those of "SAME": with stride 2 and even sides, zeros stand behind only.
      activation: "relu" or "none".
      bias: whether the convolution has a bias before a norm, too. Without a norm it always has one.
    """
    norm = norm_layers(f"{name}_norm", num_outputs)
    convolved = convolutional(
        name,
        num_inputs,
        num_outputs,
        kernel_size=size,
        stride=stride,
        activation="none" if norm else activation,
        bias=bias or not norm,
    )
    active = [layer(f"{name}_active", None, jax.nn.relu)] if norm and activation == "relu" else []
    return [convolved, *norm, *active]


def _padded_shortcut(
    num_inputs: int, num_outputs: int, stride: int, norm_layers: Callable[[str, int], list[Layer]]
) -> list[Layer]:
    """Makes the shortcut of He et al.'s option A: every stride-th pixel, with channels of zeros on both sides."""
    if stride == 1 and num_inputs == num_outputs:
        return []
    more = num_outputs - num_inputs
    widths = ((0, 0), (0, 0), (0, 0), (more // 2, more - more // 2))
    return [layer("padded", None, lambda x: jnp.pad(x[:, ::stride, ::stride], widths))]


def _projected_shortcut(
    num_inputs: int, num_outputs: int, stride: int, norm_layers: Callable[[str, int], list[Layer]]
) -> list[Layer]:
    """Makes the shortcut of He et al.'s option B: a 1 x 1 convolution and a norm, where the shape changes."""
    if stride == 1 and num_inputs == num_outputs:
        return []
    return _convolved("projected", num_inputs, num_outputs, norm_layers, size=1, stride=stride, activation="none")


def _resnet(
    input_shape: Sequence[int],
    num_outputs: int,
    norm: str,
    groups: int,
    *,
    blocks: Sequence[tuple[int, int]],
    shortcut: Callable[..., list[Layer]],
) -> Model:
    """Builds a stem, blocks of two convolutions each, a mean over all pixels, and a dense layer.

    Args:
      input_shape, num_outputs, norm, groups: as in `resnet20`.
      blocks: (number of channels, stride of the first convolution) of each block. The stem has as many channels as the
        first block.
      shortcut: (channels before, channels after, stride, maker of norms) -> the layers of a block's shortcut.
    """
    shape, norm_layers = _image_shape(input_shape), _norms(norm, groups)
    integer("num_outputs", num_outputs)
    num_inputs = blocks[0][0]
    layers = [_images(shape), *_convolved("stem", shape[2], num_inputs, norm_layers)]
    for i, (num_channels, stride) in enumerate(blocks):
        body = [
            *_convolved("conv_0", num_inputs, num_channels, norm_layers, stride=stride),
            *_convolved("conv_1", num_channels, num_channels, norm_layers, activation="none"),
        ]
        parts = {"shortcut": shortcut(num_inputs, num_channels, stride, norm_layers), "body": body}
        layers.append(branches(f"block_{i}", parts, lambda outs: jax.nn.relu(sum(outs))))
        num_inputs = num_channels
    mean = layer("pool", None, lambda x: x.mean(axis=(1, 2)))
    return sequential([*layers, mean, fully_connected("output", num_inputs, num_outputs, activation="none")])
