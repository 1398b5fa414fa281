"""Evenly spaced levels, with a scale for each leaf, block or whole update: shared by the uniform quantisers.

A number, in units of the distance between levels, is rounded to one of the two levels around it: at random, with the
number as its mean, or to the nearest.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, prng, tree
from fedjax_sim.transform.chain import check_floats, stateless
from fedjax_sim.types import Array, Mean, PyTree, UpdateTransform, Wire

__all__ = [
    "Grid",
    "grid_wire",
    "largest_magnitude",
    "leafwise",
    "leaves_of",
    "quantizer",
    "sum_along",
    "with_clipped_share",
]

SCALE_BITS = 32
SMALLEST, LARGEST = 1e-30, 2.0**125  # of a scale: smaller ones count as the first, larger ones as not finite
MARGIN = 2.0**-19  # of the range, left free: rounding then takes no quotient past the last level
SNAP = 2.0**-21  # a quotient at most this far from a level, relative to its size, counts as on it


class Grid(NamedTuple):
    """Levels (k + offset) * unit, of magnitude at most top * unit, and the rule that sets the unit."""

    top: float
    offset: float = 0.0
    fixed: Any = None  # the range, if all clients share one
    scope: str = "leaf"
    block_size: int | None = None
    by_norm: bool = False
    nearest: bool = False

    def grouped(self, xp: ModuleType, x: Array) -> Array:
        """The leaf as it is, or as rows of one block each, padded with zeros."""
        if self.scope != "block":
            return x
        padded = xp.pad(x.reshape(-1), (0, -x.size % self.block_size))
        return padded.reshape(-1, self.block_size)

    def units(self, xp: ModuleType, groups: list[Array]) -> list[Array]:
        """The distance between levels, for each leaf's numbers."""
        if self.fixed is not None:
            return [self.fixed / self.top] * len(groups)
        together = self.scope == "vector" and len(groups) > 1
        axis = -1 if self.scope == "block" else None
        scales = [largest_magnitude(xp, x, axis) for x in groups]
        if together:
            scales = [functools.reduce(xp.maximum, scales)] * len(groups)
        if self.by_norm:  # of numbers divided by the largest: squares neither overflow nor vanish
            peaks = [xp.maximum(scale, SMALLEST) for scale in scales]
            squares = [sum_along(xp, xp.square(x / peak), axis) for x, peak in zip(groups, peaks, strict=True)]
            squares = [sum(squares)] * len(groups) if together else squares
            scales = [peak * xp.sqrt(square) for peak, square in zip(peaks, squares, strict=True)]
        bounded = (xp.where(scale < LARGEST, xp.maximum(scale, SMALLEST), xp.nan) for scale in scales)
        return [scale / (self.top * (1 - MARGIN)) for scale in bounded]

    def sizes(self, leaf_sizes: list[int]) -> list[int]:
        """How many numbers share each of a message's scales."""
        if self.scope == "vector":
            return [sum(leaf_sizes)]
        if self.scope == "leaf":
            return [n for n in leaf_sizes if n]
        return [min(self.block_size, n - start) for n in leaf_sizes for start in range(0, n, self.block_size)]

    def steps(self, key: Array, x: Array, unit: Array) -> Array:
        """Float integers k: the numbers are rounded to the levels (k + offset) * unit."""
        if self.fixed is None:
            y = x * (1 / unit) - self.offset if self.offset else x * (1 / unit)
        else:
            y = jnp.clip(x, -self.fixed, self.fixed) * (1 / unit) - self.offset
            near = jnp.round(y)
            y = jnp.where(jnp.abs(y - near) <= SNAP * (jnp.abs(y) + self.offset), near, y)
        return jnp.round(y) if self.nearest else prng.stochastic_round(key, y)

    def squared_error(self, update: PyTree) -> Array:
        """E |output - update|^2 over the key, exactly; float64 NumPy leaves give float64."""
        leaves, xp = leaves_of(update)
        groups, found = [self.grouped(xp, x) for x in leaves], 0.0
        for leaf, x, unit in zip(leaves, groups, self.units(xp, groups), strict=True):
            inside = x if self.fixed is None else xp.clip(x, -self.fixed, self.fixed)
            y = inside / unit - self.offset
            part = y - xp.floor(y)
            if self.nearest:
                error = xp.square((xp.round(y) + self.offset) * unit - x)
            else:
                error = part * (1 - part) * unit**2 + xp.square(x - inside)
            found += error.reshape(-1)[: leaf.size].sum()
        return found

    def rotated_error(self, squared_norm: Array, size: int) -> Array:
        """A bound on E |output - z|^2 for z = H D x, with random signs D, a Hadamard matrix H and |x|^2 = squared_norm.

        Each z_i has a sub-Gaussian tail of variance proxy v = |z|^2 / size, so E max over n of z_i^2 is at most 2 v
        (ln(2 n) + 1), and clipping at s costs 4 v exp(-s^2 / 2v) a number at most.
        """
        xp = leaves_of(squared_norm)[1]
        if self.by_norm:
            n, s = (min(self.block_size or size, size), self.top * (1 - MARGIN))
            return squared_norm * min(n / s**2, math.sqrt(n) / s)
        if self.fixed is None:
            n = min(self.block_size or size, size)
            return squared_norm * 2 * (math.log(2 * n) + 1) / (2 * self.top * (1 - MARGIN)) ** 2
        clipped = 4 * squared_norm * xp.exp(-(self.fixed**2) * size / xp.maximum(2 * squared_norm, SMALLEST))
        return size * (self.fixed / self.top) ** 2 / 4 + clipped


def leaves_of(update: PyTree) -> tuple[list[Array], ModuleType]:
    """(leaves, the library to compute with): NumPy for NumPy leaves, as JAX would round float64 to float32.

    Guarantees: tests/transform/test_quantize.py::test_error_of_fixed_numbers.
    """
    leaves = jax.tree.leaves(update)
    if all(isinstance(x, np.ndarray | np.generic | float | int) for x in leaves):
        return [np.asarray(x) for x in leaves], np
    return [jnp.asarray(x).astype(jnp.float32) for x in leaves], jnp


def largest_magnitude(xp: ModuleType, x: Array, axis: int | None = None) -> Array:
    """The largest magnitude, of all or of each row; 0 of nothing.

    Guarantees: tests/transform/test_quantize.py::test_extreme_and_odd_updates.
    """
    return _folded(xp, xp.maximum, xp.abs(x), axis).max(axis, initial=0, keepdims=axis is not None)


def sum_along(xp: ModuleType, x: Array, axis: int | None = None) -> Array:
    """The sum of all or of each row.

    Guarantees: tests/transform/test_sign.py::test_sign_contracts_as_declared.
    """
    return _folded(xp, xp.add, x, axis).sum(axis, keepdims=axis is not None)


def _folded(xp: ModuleType, op, x: Array, axis: int | None) -> Array:
    """The halves of x combined by `op` until 64 numbers are left: vector operations, where XLA:CPU would take one by
    one."""
    if axis is not None:
        return x
    x = x.reshape(-1)
    while 64 < x.size <= 1 << 14:
        half = -(-x.size // 2)
        x = op(x[:half], xp.pad(x[half:], (0, 2 * half - x.size)))
    return x


def leafwise(fn, key: Array, update: PyTree) -> PyTree:
    """The message `fn(keys, float32 leaves, zero)` of one update, with a key for each leaf.

    Its numbers are float32, or a wider leaf's dtype: decoded into bfloat16, they would be rounded away from the levels
    and lose their mean. Update and message are computed once (`engine.computed_once`), as both are read more than once.

    Guarantees: messages keep their mean in every dtype (tests/laws/test_facts.py::test_unbiased_in_every_dtype), and
    their bits on any number of devices (tests/transform/test_quantize.py::test_devices_change_no_bit).
    """
    check_floats(update)
    zero = engine.hidden_zero(key)
    leaves, structure = jax.tree.flatten(engine.computed_once(update, zero))
    keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
    sent = fn(keys, [x.astype(jnp.float32) for x in leaves], zero)
    wide = [tree.at_least_float32(x.dtype) for x in leaves]
    kept = [y.astype(d) if jnp.issubdtype(y.dtype, jnp.floating) else y for y, d in zip(sent, wide, strict=True)]
    return engine.computed_once(structure.unflatten(kept), zero)


def with_clipped_share(transform: UpdateTransform, limit: Any) -> UpdateTransform:
    """The same transform, with the share of numbers beyond +-limit as the metric `clipped_share`.

    An update that is not finite makes it NaN.

    Guarantees: tests/transform/test_quantize.py::test_clipped_share, ::test_nonfinite_updates_are_seen.
    """

    def on_client(key, update, state, memory):
        message, memory, _ = transform.on_client(key, update, state, memory)
        leaves = leaves_of(update)[0]
        past = sum(sum_along(jnp, (jnp.abs(x) > limit).astype(jnp.float32)) for x in leaves)
        past = jnp.where(tree.all_finite(leaves), past, jnp.nan)
        return message, memory, {"clipped_share": Mean(past, jnp.float32(tree.num_values(leaves)))}

    def on_server(key, cohort, aggregate, state, measured, sensitivity):
        aggregate, state, _ = transform.on_server(key, cohort, aggregate, state, {}, sensitivity)
        share = measured["clipped_share"]
        return aggregate, state, {"clipped_share": share.total / jnp.maximum(share.weight, 1)}

    return transform._replace(on_client=on_client, on_server=on_server)


def quantizer(grid: Grid, wire, *, integers: bool = False) -> UpdateTransform:
    """The transform that rounds updates to the levels of a grid; its messages are these levels, or integers.

    Guarantees: the mean and the error that it declares
    (tests/transform/test_quantize.py::test_mean_and_error_match_the_declared_ones); integers decode to the same
    message (::test_integers_decode_to_the_message).
    """

    def message(keys, leaves, zero):
        groups = [grid.grouped(jnp, x) for x in leaves]
        sent = []
        for key, leaf, x, unit in zip(keys, leaves, groups, grid.units(jnp, groups), strict=True):
            k = grid.steps(key, x, unit)
            if integers:
                k = jnp.where(jnp.isfinite(x), k, 0).astype(jnp.int32)
                y = 2 * k + 1 if grid.offset else k
            else:
                y = (k + grid.offset) * unit if grid.offset else k * unit
                y = y if grid.fixed is None else jnp.where(jnp.isfinite(x), y, jnp.nan)
            sent.append(y.reshape(-1)[: leaf.size].reshape(leaf.shape) if grid.scope == "block" else y)
        return sent

    error = functools.partial(grid.squared_error)
    error.after_rotation = grid.rotated_error
    most = round(2 * grid.top) if grid.offset else round(grid.top)
    made = stateless(
        lambda key, update: leafwise(message, key, update),
        wire=wire,
        unbiased=grid.fixed is None and not grid.nearest,
        squared_error=error,
        exact_error=True,
        integer_range=(-most, most) if integers else None,
    )
    if integers:
        unit = grid.fixed / most

        def decoded(key, cohort, aggregate, state, measured, sensitivity):
            return jax.tree.map(lambda x: x.astype(jnp.float32) * unit, aggregate), state, {}

        made = made._replace(on_server=decoded)
    return made if grid.fixed is None else with_clipped_share(made, grid.fixed)


def grid_wire(grid: Grid, bits: int, coded=None):
    """The wire of `bits` a number, and of the scales.

    A grid with zero among its levels sends only the numbers that come in, as zeros stay zeros; another sends all.

    Guarantees: tests/transform/test_quantize.py::test_wire_bits.
    """

    def wire(update_spec: PyTree, wire_in: Wire) -> Wire:
        leaf_sizes = [math.prod(x.shape) for x in jax.tree.leaves(update_spec)]
        sizes = grid.sizes(leaf_sizes)
        values, side = (sum(leaf_sizes), 0) if grid.offset else (wire_in.values, wire_in.side_bits)
        side += 0 if grid.fixed is not None else SCALE_BITS * len(sizes)
        return Wire(values, bits * values, side, None if coded is None else coded(values, sizes, side))

    return wire
