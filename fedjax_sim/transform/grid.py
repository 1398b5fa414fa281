"""Grids of evenly spaced levels, which the uniform quantisers share.

Levels have a scale for each leaf, for each block of numbers or for the whole update. A number, in units of the distance
between levels, is rounded to one of the two levels around it: at random with the number as the mean, or to the nearest.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, prng, tree
from fedjax_sim.transform.chain import check_floats, stateless
from fedjax_sim.types import AnyArray, Array, Mean, PyTree, UpdateTransform, Wire

Leaf = TypeVar("Leaf", bound=AnyArray)
SCALE_BITS = 32
SMALLEST, LARGEST = 1e-30, 2.0**125  # of a scale: smaller scales count as 1e-30, larger scales as not finite
MARGIN = 2.0**-19  # the part of the range that is left free, so that no quotient is rounded past the last level
SNAP = 2.0**-21  # a quotient at most this far from a level, relative to its size, counts as on it


@dataclasses.dataclass(frozen=True)
class RotatableError:
    """The squared error of a compressor that knows a bound on it after a random rotation, for `rotated`."""

    squared_error: Callable  # (update) -> E |output - update|^2 over the key
    after_rotation: Callable  # (|z|^2, size of z) -> a bound on E |output - z|^2 for a rotated vector z

    def __call__(self, update: PyTree) -> Array | float:
        """Returns the error without a rotation, as `UpdateTransform.squared_error` has it."""
        return self.squared_error(update)


class Grid(NamedTuple):
    """Levels (k + offset) * unit, of magnitude at most top * unit, and the rule that sets the unit.

    In the methods, `xp` is the library to compute with, NumPy or jax.numpy.
    """

    top: float  # the largest level, in units
    offset: float = 0.0  # 0: zero is a level; 0.5: levels are on both sides of zero
    fixed: Array | float | None = None  # the range, if all clients share it; None = the range follows the numbers
    scope: str = "leaf"  # what shares a scale: a "leaf", the whole "vector", or a "block" of a leaf
    block_size: int | None = None  # the numbers of a block
    by_norm: bool = False  # the range is the norm; otherwise the largest magnitude
    nearest: bool = False  # round to the nearest level; otherwise at random

    def grouped(self, xp: ModuleType, x: Leaf) -> Leaf:
        """Returns the leaf as it is, or, for blocks, as rows of a block each, padded with zeros."""
        if self.block_size is None:
            return x
        padded = xp.pad(x.reshape(-1), (0, -x.size % self.block_size))
        return padded.reshape(-1, self.block_size)

    def units(self, xp: ModuleType, groups: Sequence[AnyArray]) -> Sequence[Array | float]:
        """Returns the distance between levels for each group of numbers, from `grouped`.

        Args:
          xp: NumPy or jax.numpy.
          groups: the numbers of each leaf; for blocks [blocks, block size].
        """
        if self.fixed is not None:
            return [self.fixed / self.top] * len(groups)
        shares_one_scale = self.scope == "vector" and len(groups) > 1
        axis = -1 if self.scope == "block" else None
        scales = [largest_magnitude_along(xp, x, axis) for x in groups]
        if shares_one_scale:
            scales = [functools.reduce(xp.maximum, scales)] * len(groups)
        if self.by_norm:
            # Numbers are divided by the largest magnitude first, so that squares neither overflow nor vanish.
            peaks = [xp.maximum(scale, SMALLEST) for scale in scales]
            squares = [sum_along(xp, xp.square(x / peak), axis) for x, peak in zip(groups, peaks, strict=True)]
            squares = [sum(squares)] * len(groups) if shares_one_scale else squares
            scales = [peak * xp.sqrt(square) for peak, square in zip(peaks, squares, strict=True)]
        # A scale that is too large or not finite becomes NaN, and so does the message, which the engine drops.
        bounded_scales = (xp.where(scale < LARGEST, xp.maximum(scale, SMALLEST), xp.nan) for scale in scales)
        return [scale / (self.top * (1 - MARGIN)) for scale in bounded_scales]

    def sizes(self, leaf_sizes: list[int]) -> list[int]:
        """Returns how many numbers share each of a message's scales."""
        if self.scope == "vector":
            return [sum(leaf_sizes)]
        if self.block_size is None:
            return [n for n in leaf_sizes if n]
        return [min(self.block_size, n - start) for n in leaf_sizes for start in range(0, n, self.block_size)]

    def steps(self, key: Array, x: Array, unit: Array | float) -> Array:
        """Rounds numbers to float integers k, which stand for the levels (k + offset) * unit."""
        if self.fixed is None:
            position = x * (1 / unit) - self.offset if self.offset else x * (1 / unit)
        else:
            position = jnp.clip(x, -self.fixed, self.fixed) * (1 / unit) - self.offset
            # A number that is a level up to rounding counts as this level, so that the two ends of the range are never
            # rounded past the last level.
            nearest = jnp.round(position)
            is_level = jnp.abs(position - nearest) <= SNAP * (jnp.abs(position) + self.offset)
            position = jnp.where(is_level, nearest, position)
        return jnp.round(position) if self.nearest else prng.stochastic_round(key, position)

    def squared_error(self, update: PyTree) -> Array | float:
        """Computes E |output - update|^2 over the key, exactly; float64 NumPy leaves give float64.

        Args:
          update: leaves of JAX or of NumPy.
        """
        leaves, xp = leaves_of(update)
        groups = [self.grouped(xp, x) for x in leaves]
        total = 0.0
        for leaf, x, unit in zip(leaves, groups, self.units(xp, groups), strict=True):
            inside = x if self.fixed is None else xp.clip(x, -self.fixed, self.fixed)
            position = inside / unit - self.offset
            fraction = position - xp.floor(position)
            if self.nearest:
                error = xp.square((xp.round(position) + self.offset) * unit - x)
            else:
                error = fraction * (1 - fraction) * unit**2 + xp.square(x - inside)
            total += error.reshape(-1)[: leaf.size].sum()  # without the padding of blocks
        return total

    def rotated_error(self, squared_norm: Array, size: int) -> Array:
        """Bounds E |output - z|^2 for a rotated vector z = H D x, with random signs D and a Hadamard matrix H.

        Each z_i has a sub-Gaussian tail of variance proxy v = |z|^2 / size. So E max over n of z_i^2 is at most
        2 v (ln(2 n) + 1), and clipping at s costs at most 4 v exp(-s^2 / 2v) for each number.

        Args:
          squared_norm: |x|^2.
          size: the numbers of z.
        """
        xp = leaves_of(squared_norm)[1]
        if self.by_norm:
            n = min(self.block_size or size, size)
            s = self.top * (1 - MARGIN)
            return squared_norm * min(n / s**2, math.sqrt(n) / s)
        if self.fixed is None:
            n = min(self.block_size or size, size)
            return squared_norm * 2 * (math.log(2 * n) + 1) / (2 * self.top * (1 - MARGIN)) ** 2
        clipping_error = 4 * squared_norm * xp.exp(-(self.fixed**2) * size / xp.maximum(2 * squared_norm, SMALLEST))
        return size * (self.fixed / self.top) ** 2 / 4 + clipping_error


def leaves_of(update: PyTree) -> tuple[list[np.ndarray] | list[Array], ModuleType]:
    """Returns (leaves, the library to compute with), NumPy or jax.numpy.

    NumPy leaves are computed with in NumPy, since JAX would round float64 to float32.

    Guarantees: the squared error of eight NumPy numbers equals a value by hand within 1e-9
    (tests/transform/test_quantize.py::test_error_of_fixed_numbers).
    """
    leaves = jax.tree.leaves(update)
    if all(isinstance(x, np.ndarray | np.generic | float | int) for x in leaves):
        return [np.asarray(x) for x in leaves], np
    return [jnp.asarray(x).astype(jnp.float32) for x in leaves], jnp


def largest_magnitude_along(xp: ModuleType, x: AnyArray, axis: int | None = None) -> AnyArray:
    """Returns the largest magnitude of all numbers (axis None) or along an axis; 0 of no numbers.

    Guarantees: the messages of `quantize`, whose scales are these magnitudes, stay finite and keep their shapes, for
    updates of scale 0, 1e-38 and 1e18 with empty leaves and scalars
    (tests/transform/test_quantize.py::test_extreme_and_odd_updates).
    """
    return _folded(xp, xp.maximum, xp.abs(x), axis).max(axis, initial=0, keepdims=axis is not None)


def sum_along(xp: ModuleType, x: AnyArray, axis: int | None = None) -> AnyArray:
    """Returns the sum of all numbers (axis None) or along an axis.

    Guarantees: the squared error that `scaled_sign` computes with these sums equals NumPy's formula within 1e-5
    (tests/transform/test_sign.py::test_sign_contracts_as_declared).
    """
    return _folded(xp, xp.add, x, axis).sum(axis, keepdims=axis is not None)


def _folded(xp: ModuleType, op, x: AnyArray, axis: int | None) -> AnyArray:
    """Combines the halves of x by `op` until 64 numbers are left.

    These are vector operations; XLA:CPU would reduce the numbers one by one.
    """
    if axis is not None:
        return x
    x = x.reshape(-1)
    while 64 < x.size <= 1 << 14:
        half = -(-x.size // 2)
        x = op(x[:half], xp.pad(x[half:], (0, 2 * half - x.size)))
    return x


def leafwise(fn, key: Array, update: PyTree) -> PyTree:
    """Makes the message of an update from a function of its leaves.

    The numbers of a message are float32, or have a wider leaf's dtype. In bfloat16 they would be rounded away from the
    levels, and lose their mean.

    Args:
      fn: (keys, float32 leaves) -> leaves of the message, with a key for each leaf.
      key: of the client.
      update: leaves of floats.

    Guarantees: messages keep their mean in every dtype (tests/laws/test_facts.py::test_unbiased_in_every_dtype), and
    their bits on any number of devices (tests/transform/test_quantize.py::test_devices_change_no_bit).
    """
    check_floats(update)
    leaves, structure = jax.tree.flatten(update)
    keys = prng.fold_in(key, jnp.arange(len(leaves)))
    sent = fn(keys, [x.astype(jnp.float32) for x in leaves])
    wide = [tree.at_least_float32(x.dtype) for x in leaves]
    kept = [y.astype(d) if jnp.issubdtype(y.dtype, jnp.floating) else y for y, d in zip(sent, wide, strict=True)]
    return structure.unflatten(kept)


def with_clipped_share(transform: UpdateTransform, limit: Array | float) -> UpdateTransform:
    """Adds the metric `clipped_share` to a transform: the share of numbers beyond +-limit.

    The metric is NaN for an update that is not finite.

    Args:
      transform: of updates; its own metrics are dropped.
      limit: > 0.

    Guarantees: numbers are counted exactly over a cohort, and a number on the limit is not beyond it
    (tests/transform/test_quantize.py::test_clipped_share); the count of an update that is not finite is NaN
    (::test_nonfinite_updates_are_seen).
    """

    def on_client(key, update, state, memory):
        message, memory, _ = transform.on_client(key, update, state, memory)
        leaves = leaves_of(update)[0]
        num_clipped = sum(sum_along(jnp, (jnp.abs(x) > limit).astype(jnp.float32)) for x in leaves)
        num_clipped = jnp.where(engine.all_finite(leaves), num_clipped, jnp.nan)
        return message, memory, {"clipped_share": Mean(num_clipped, jnp.float32(tree.num_values(leaves)))}

    def on_server(key, cohort, aggregate, state, measured, sensitivity):  # noqa: PLR0917 - called by position
        aggregate, state, _ = transform.on_server(key, cohort, aggregate, state, {}, sensitivity)
        share = measured["clipped_share"]
        return aggregate, state, {"clipped_share": share.total / jnp.maximum(share.weight, 1)}

    return transform._replace(on_client=on_client, on_server=on_server)


def quantizer(grid: Grid, wire, *, integers: bool = False) -> UpdateTransform:
    """Makes the transform that rounds updates to the levels of a grid.

    Args:
      grid: the levels.
      wire: as `UpdateTransform` has it.
      integers: True: messages are int32, which the server multiplies by the unit; this needs a fixed range. False:
        messages are the levels.

    Guarantees:
      - messages have the mean and the error that the transform states
        (tests/transform/test_quantize.py::test_mean_and_error_match_the_declared_ones)
      - integers decode to the same message (::test_integers_decode_to_the_message)
    """

    def message(keys, leaves):
        groups = [grid.grouped(jnp, x) for x in leaves]
        sent = []
        for key, leaf, x, unit in zip(keys, leaves, groups, grid.units(jnp, groups), strict=True):
            k = grid.steps(key, x, unit)
            if integers:
                # No integer is NaN; `clipped_share` then tells that the update was not finite.
                k = jnp.where(jnp.isfinite(x), k, 0).astype(jnp.int32)
                numbers = 2 * k + 1 if grid.offset else k  # in half units, k + 1/2 is odd
            else:
                numbers = (k + grid.offset) * unit if grid.offset else k * unit
                # A fixed range would clip an infinity to a finite level.
                numbers = numbers if grid.fixed is None else jnp.where(jnp.isfinite(x), numbers, jnp.nan)
            sent.append(numbers.reshape(-1)[: leaf.size].reshape(leaf.shape) if grid.scope == "block" else numbers)
        return sent

    largest_integer = round(2 * grid.top) if grid.offset else round(grid.top)
    transform = stateless(
        lambda key, update: leafwise(message, key, update),
        wire=wire,
        unbiased=grid.fixed is None and not grid.nearest,
        squared_error=RotatableError(grid.squared_error, grid.rotated_error),
        exact_error=True,
        integer_range=(-largest_integer, largest_integer) if integers else None,
    )
    if integers:
        assert grid.fixed is not None, "integers need a fixed range"
        unit = grid.fixed / largest_integer

        def decode(key, cohort, aggregate, state, measured, sensitivity):  # noqa: PLR0917 - called by position
            return jax.tree.map(lambda x: x.astype(jnp.float32) * unit, aggregate), state, {}

        transform = transform._replace(on_server=decode)
    return transform if grid.fixed is None else with_clipped_share(transform, grid.fixed)


def grid_wire(grid: Grid, bits: int, coded=None):
    """Makes the wire of a grid: `bits` for each number, and the scales.

    If zero is a level, zeros stay zeros, so only the numbers that come in are sent. Otherwise all numbers are sent.

    Args:
      grid: the levels.
      bits: of a number.
      coded: (numbers, numbers that share each scale, side bits) -> bits under an entropy code; None = no code.

    Returns: (update_spec, Wire of the incoming update) -> Wire.

    Guarantees: a message costs its bits for each number and 32 bits for each scale, exactly
    (tests/transform/test_quantize.py::test_wire_bits).
    """

    def wire(update_spec: PyTree, wire_in: Wire) -> Wire:
        leaf_sizes = [math.prod(x.shape) for x in jax.tree.leaves(update_spec)]
        sizes = grid.sizes(leaf_sizes)
        values, side_bits = (sum(leaf_sizes), 0) if grid.offset else (wire_in.values, wire_in.side_bits)
        side_bits += 0 if grid.fixed is not None else SCALE_BITS * len(sizes)
        return Wire(values, bits * values, side_bits, None if coded is None else coded(values, sizes, side_bits))

    return wire
