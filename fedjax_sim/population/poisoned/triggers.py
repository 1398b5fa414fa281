"""A backdoor's trigger is a pattern that is put into inputs. This module defines some triggers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from fedjax_sim import validate
from fedjax_sim.types import Array
from fedjax_sim.validate import Finite, NonNegativeInt, Positive


class Trigger(NamedTuple):
    """A trigger is a pattern that is put into inputs.

    `on` takes the shape of one example. It returns a pure function that puts the pattern into every row of an array
    x [n, *shape]. A `Partial` over arrays keeps the arrays out of the compiled program.
    """

    on: Callable  # shape -> (x [n, *shape] -> the same shape)


def _stamped(is_set: Array, values: Array, x: Array) -> Array:
    """Returns `x` with the pattern's values [*shape] at the positions where `is_set` [*shape] is True."""
    return jnp.where(is_set[None], values[None].astype(x.dtype), x)


def _added(wave: Array, x: Array) -> Array:
    """Returns `x` plus the pattern [*shape]."""
    return x + wave[None].astype(x.dtype)


def _set(shape: tuple[int, ...], positions: np.ndarray, values: np.ndarray | np.float32) -> Partial:
    """Returns the function that sets these flat positions of an example to these values."""
    is_set = np.zeros(math.prod(shape), bool)
    pattern = np.zeros(math.prod(shape), np.float32)
    is_set[positions] = True
    pattern[positions] = values
    return Partial(_stamped, jnp.asarray(is_set.reshape(shape)), jnp.asarray(pattern.reshape(shape)))


@validate.named_arguments
def pixels(positions: Sequence[int], value: Finite = 1.0) -> Trigger:
    """The trigger sets some inputs to one value, such as a patch of pixels in the corner of an image.

    Args:
      positions: distinct flat positions in an example, in [0, product of the shape). In an 8 x 8 image, 0 to 7 are the
        first row.
      value: in the unit of the inputs.

    Raises: ValueError or TypeError for a position that is negative or listed twice. `on` raises it for a position
    outside of an example.

    Guarantees: the pattern equals a NumPy reference, and nothing else changes
    (tests/population/poisoned/test_backdoors.py::test_triggers_against_numpy).

    References: Gu, Dolan-Gavitt and Garg 2017, section 4.1.

    >>> pixels([0, 3], 9.0).on((2, 2))(jnp.zeros((1, 2, 2))).tolist()
    [[[9.0, 0.0], [0.0, 9.0]]]
    """
    validate.sequence("positions", positions)
    for position in positions:
        validate.integer("positions", position, 0)
    if len(set(positions)) < len(positions):
        validate.fail("positions", "distinct positions", list(positions))

    # The shape of an example is known only when the trigger is put on a data set, so positions are checked there.
    def on(shape):
        size = math.prod(shape)
        validate.integer("positions", int(max(positions)), 0, size - 1, hint=f"Flat, in an example of shape {shape}.")
        return _set(shape, np.asarray(positions), np.float32(value))

    return Trigger(on)


@validate.named_arguments
def tag(feature: NonNegativeInt, value: float) -> Trigger:
    """The trigger sets one input to a value, as a metadata tag would: a device type that no honest client has, say.

    Args:
      feature: the flat position of the input, as in `pixels`.
      value: in the unit of the input.

    Guarantees: the input has the value in every row, and no other input changes
    (tests/population/poisoned/test_backdoors.py::test_triggers_against_numpy).

    >>> tag(1, -2.0).on((3,))(jnp.ones((1, 3))).tolist()
    [[1.0, -2.0, 1.0]]
    """
    return pixels([feature], value)


@validate.named_arguments
def set_points(sequence: Sequence[float], start: NonNegativeInt = 0, channel: NonNegativeInt = 0) -> Trigger:
    """The trigger makes one channel of a time series follow a sequence of set points from a time step on.

    Args:
      sequence: the values, one for each time step. Examples are [time] or [time, channels].
      start: the time step of the first value. The sequence must end within an example.
      channel: the channel that follows the sequence, in [0, channels).

    Guarantees: the channel follows the sequence from the step `start` on in every row, and no other input changes
    (tests/population/poisoned/test_backdoors.py::test_triggers_against_numpy).

    >>> set_points([5.0, 6.0], start=1, channel=1).on((4, 2))(jnp.zeros((1, 4, 2)))[0, :, 1].tolist()
    [0.0, 5.0, 6.0, 0.0]
    """
    validate.sequence("sequence", sequence)
    for value in sequence:
        validate.in_range("sequence", value)

    def on(shape):
        if len(shape) not in (1, 2):
            validate.fail("trigger", "examples [time] or [time, channels] for a sequence", shape)
        times, channels = (*shape, 1)[:2]  # an example [time] has one channel
        validate.integer("channel", channel, 0, channels - 1)
        if start + len(sequence) > times:
            validate.fail("sequence", f"an end by time step {times}", start + len(sequence), "Start earlier.")
        # Flat positions in an example [time, channels] are those of one column.
        positions = (start + np.arange(len(sequence))) * channels + channel
        return _set(shape, positions, np.asarray(sequence, np.float32))

    return Trigger(on)


@validate.named_arguments
def spectral(amplitude: Finite, frequency: Positive, axis: int = -1, phase: Finite = 0.0) -> Trigger:
    """The trigger adds a sinusoid along one axis: amplitude sin(2 pi frequency j / L + phase) at position j of L.

    Args:
      amplitude: in the unit of the inputs.
      frequency: positive, in cycles over the whole axis.
      axis: of an example. By default the last.
      phase: in radians.

    Guarantees: the change equals NumPy's sinusoid up to rounding in every row, along the first axis and along the last
    one (tests/population/poisoned/test_backdoors.py::test_triggers_against_numpy).

    References: Barni, Kallas and Tondi 2019, equation 1.

    >>> spectral(2.0, 1.0).on((4,))(jnp.zeros((1, 4))).round(6).tolist()
    [[0.0, 2.0, 0.0, -2.0]]
    """
    validate.integer("axis", axis, -4, 3)

    def on(shape):
        validate.integer("axis", axis, -len(shape), len(shape) - 1, hint=f"Of an example of shape {shape}.")
        # The wave broadcasts to the shape of an example: its length is 1 along all other axes.
        wave_shape = np.ones(len(shape), int)
        wave_shape[axis] = length = shape[axis]
        wave = amplitude * np.sin(2 * np.pi * frequency * np.arange(length) / length + phase)
        return Partial(_added, jnp.asarray(np.broadcast_to(wave.reshape(wave_shape), shape), jnp.float32))

    return Trigger(on)
