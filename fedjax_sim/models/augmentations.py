"""The augmentations that a config can name: random changes of an input that keep what its label means.

`models.supervised` applies them to the examples of every local step, and never to those of an evaluation. From Python
any function of one example can be used: `Augmentation(apply)`.

Images are [height, width, channels], or [height, width] of one channel. Their values are as the data hold them: zero is
black only where data are not standardised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.prng import below, fold_in, normal, stream
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import NonNegative, PositiveInt, Share, fail, function, named_arguments

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601: what red, green and blue add to the gray of a pixel


class Augmentation(NamedTuple):
    """An augmentation changes the input of one example at random.

    Fields:
      apply: (key, x) -> x', of one example; shapes and dtypes of x' are those of x.
    """

    apply: Callable


def augmented(augmentations: Sequence[Augmentation], key: Array, x: PyTree) -> PyTree:
    """Applies augmentations, one after the other, to each example of a batch.

    Example i draws from its place in the batch, so its draws depend on the client, the round and the local step, and
    not on the size of the batch, the padding, the cohort or the devices.

    Args:
      augmentations: in their order; what one draws does not depend on those behind it.
      key: of a client's local step.
      x: inputs of the examples, leaves [n, ...].

    Returns: a pytree like `x`.

    Raises: ValueError for an augmentation that returns other shapes or dtypes than it takes.

    Guarantees: an example's draws are those of a batch of this example alone at its place
    (tests/models/test_augmentations.py::test_draws_depend_on_the_place_alone), and a round has the same bits for any
    number of lanes and chunks (::test_a_round_does_not_depend_on_lanes).

    >>> flipped = augmented([horizontal_flip(probability=1.0)], jax.random.key(0), jnp.arange(3.0).reshape(1, 1, 3, 1))
    >>> flipped.ravel().tolist()
    [2.0, 1.0, 0.0]
    """
    num_examples = jax.tree.leaves(x)[0].shape[0]
    keys = fold_in(stream(key, "augmentation"), jnp.arange(num_examples))

    def of_example(key: Array, x: PyTree) -> PyTree:
        for place, augmentation in enumerate(augmentations):
            x = _checked(augmentation.apply(fold_in(key, place), x), x, place)
        return x

    return jax.vmap(of_example)(keys, x)


def _checked(changed: PyTree, x: PyTree, place: int) -> PyTree:
    """Returns a changed example; refuses one with other shapes or dtypes than the example had.

    Args:
      changed: what an augmentation returned.
      x: what it was given.
      place: of the augmentation among all.
    """
    specs = [jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), tree) for tree in (changed, x)]
    if specs[0] != specs[1]:
        hint = "A model has one input shape: crop after padding, and cast what you draw."
        fail(f"augmentations[{place}]", f"an example like the one it was given, {specs[1]}", specs[0], hint)
    return changed


@named_arguments
def random_crop(*, padding: PositiveInt) -> Augmentation:
    """Makes the augmentation that pads an image with zeros on every side, and cuts its size out at a random place.

    All (2 p + 1)^2 places are equally likely.

    Args:
      padding: p, pixels on each side.

    Raises: ValueError when it is applied to an example that is no image.

    Guarantees: the result is a window of the padded image, and all windows are as frequent
    (tests/models/test_augmentations.py::test_windows_are_uniform).

    References: He et al. 2016, section 4.2 (4 pixels on CIFAR-10).

    >>> random_crop(padding=1).apply(jax.random.key(0), jnp.ones((2, 2, 1))).shape
    (2, 2, 1)
    """

    def apply(key: Array, x: Array) -> Array:
        _check_image("random_crop", x)
        top, left = below(key, 2 * padding + 1, (2,))
        channels = jnp.ndim(x) - 2  # axes of channels: none or one
        padded = jnp.pad(x, 2 * [(padding, padding)] + channels * [(0, 0)])
        return jax.lax.dynamic_slice(padded, (top, left, *channels * [jnp.int32(0)]), x.shape)

    return Augmentation(apply)


@named_arguments
def horizontal_flip(*, probability: Share = 0.5) -> Augmentation:
    """Makes the augmentation that mirrors an image, left to right, with some probability.

    It changes what digits and letters mean.

    Args:
      probability: in [0, 1].

    Raises: ValueError when it is applied to an example that is no image.

    Guarantees: an image is mirrored or stays, as often as asked
    (tests/models/test_augmentations.py::test_flips_are_as_frequent_as_asked).

    >>> horizontal_flip(probability=1.0).apply(jax.random.key(0), jnp.arange(2).reshape(1, 2, 1)).ravel().tolist()
    [1, 0]
    """

    def apply(key: Array, x: Array) -> Array:
        _check_image("horizontal_flip", x)
        return jnp.where(jax.random.uniform(key) < probability, x[:, ::-1], x)

    return Augmentation(apply)


@named_arguments
def cutout(*, size: PositiveInt) -> Augmentation:
    """Makes the augmentation that sets a square of an image to zero.

    The middle of the square is a random pixel, all equally likely, so that it may reach beyond the border.

    Args:
      size: s, pixels of a side; rows from r - floor(s / 2) on, s of them, around the middle r, and columns likewise.

    Raises: ValueError when it is applied to an example that is no image.

    Guarantees: what is set to zero is the square cut at the border, and all middles are as frequent
    (tests/models/test_augmentations.py::test_squares_are_cut_at_the_border).

    References: DeVries and Taylor 2017.

    >>> int(cutout(size=1).apply(jax.random.key(0), jnp.ones((2, 2, 1))).sum())
    3
    """

    def apply(key: Array, x: Array) -> Array:
        _check_image("cutout", x)
        inside = []
        for place, length in enumerate(x.shape[:2]):
            first = below(fold_in(key, place), length) - size // 2
            pixels = jnp.arange(length)
            inside.append((pixels >= first) & (pixels < first + size))
        rows, columns = inside
        square = (rows[:, None] & columns[None, :]).reshape(*x.shape[:2], *(1,) * (jnp.ndim(x) - 2))
        return jnp.where(square, jnp.zeros_like(x), x)

    return Augmentation(apply)


@named_arguments
def color_jitter(
    *, brightness: NonNegative = 0.0, contrast: NonNegative = 0.0, saturation: NonNegative = 0.0
) -> Augmentation:
    """Makes the augmentation that changes brightness, then contrast, then saturation of an image.

    Each has a factor f, uniform in [max(0, 1 - strength), 1 + strength]:

        brightness  f x
        contrast    f x + (1 - f) mean of the image's gray
        saturation  f x + (1 - f) gray of each pixel

    An image with one channel is gray itself. Values are not cut to a range.

    Args:
      brightness: strength, >= 0; 0 leaves brightness as it is.
      contrast: likewise.
      saturation: likewise; only for three channels: red, green and blue.

    Raises: ValueError if all strengths are 0, and when it is applied to an example that is no image of floats with one
    or three channels.

    Guarantees: the result is that of the formulas in NumPy for factors in their range
    (tests/models/test_augmentations.py::test_colours_follow_their_formulas).

    >>> gray = jnp.full((2, 2, 3), 0.5)  # has no contrast and no saturation to change
    >>> color_jitter(contrast=0.5, saturation=0.5).apply(jax.random.key(0), gray).ravel()[:2].round(4).tolist()
    [0.5, 0.5]
    """
    strengths = {"brightness": brightness, "contrast": contrast, "saturation": saturation}
    if not any(strengths.values()):
        fail("brightness, contrast, saturation", "a strength above 0", tuple(strengths.values()))

    def apply(key: Array, x: Array) -> Array:
        _check_image("color_jitter", x, floating=True)
        num_channels = _num_channels(x)
        if num_channels not in (1, 3) or (saturation and num_channels != 3):
            expected = "three channels, which have a saturation" if saturation else "one or three channels"
            fail("color_jitter", f"images with {expected}", x.shape)

        def factor(name: str) -> Array:
            strength = strengths[name]
            return jax.random.uniform(stream(key, name), (), x.dtype, max(0.0, 1 - strength), 1 + strength)

        if brightness:
            x = factor("brightness") * x
        if contrast:
            x = _blend(factor("contrast"), x, _gray(x).mean())
        if saturation:
            x = _blend(factor("saturation"), x, _gray(x))
        return x

    return Augmentation(apply)


def _blend(factor: Array, x: Array, other: Array) -> Array:
    """Returns factor x + (1 - factor) other."""
    return factor * x + (1 - factor) * other


def _num_channels(x: Array) -> int:
    """Returns the number of channels of an image."""
    return 1 if jnp.ndim(x) == 2 else x.shape[2]


def _gray(x: Array) -> Array:
    """Returns the gray of an image with one or three channels: the image itself, or [height, width, 1]."""
    if _num_channels(x) == 1:
        return x
    red, green, blue = (share * x[:, :, i : i + 1] for i, share in enumerate(LUMA))
    return red + green + blue


@named_arguments
def jitter(*, std: NonNegative) -> Augmentation:
    """Makes the augmentation that adds independent normal noise to every number of an example, as for sensor series.

    Args:
      std: standard deviation, in the units of the data.

    Raises: ValueError when it is applied to an example that holds no floats.

    Guarantees: the noise has mean 0 and the standard deviation asked
    (tests/models/test_augmentations.py::test_noise_has_its_moments).

    References: Um et al. 2017 (jittering).

    >>> jitter(std=0.0).apply(jax.random.key(0), jnp.ones(2)).tolist()
    [1.0, 1.0]
    """

    def apply(key: Array, x: Array) -> Array:
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            fail("jitter", "examples of floating-point numbers", jnp.result_type(x))
        return x + std * normal(key, x.shape, x.dtype)

    return Augmentation(apply)


def _check_image(name: str, x: Array, *, floating: bool = False) -> None:
    """Raises an error unless an example is one image.

    Args:
      name: of the augmentation.
      x: the example.
      floating: True: its values must be floating-point numbers.
    """
    if jnp.ndim(x) not in (2, 3):
        fail(name, "images [height, width] or [height, width, channels]", list(jnp.shape(x)))
    if floating and not jnp.issubdtype(x.dtype, jnp.floating):
        fail(name, "images of floating-point numbers", x.dtype)


def check_augmentations(augmentations: Sequence[Augmentation]) -> tuple[Augmentation, ...]:
    """Returns augmentations as a tuple; raises a TypeError for what is none."""
    for place, augmentation in enumerate(augmentations):
        if not isinstance(augmentation, Augmentation):
            hint = "Wrap a function of one example: Augmentation(lambda key, x: ...)."
            fail(f"augmentations[{place}]", "an Augmentation", augmentation, hint, TypeError)
        function(f"augmentations[{place}].apply", augmentation.apply, "key, x")
    return tuple(augmentations)
