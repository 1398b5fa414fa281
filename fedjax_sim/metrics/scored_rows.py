"""What metrics over all scores and labels share: checks of their arrays, and sums that are precise over many rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.types import Array

MOST_ROWS = 1 << 24  # float32 holds counts of rows exactly up to here, and sums of bytes stay below 2^32
FAN_IN = 8  # addends of one step of a sum


class LabelledRows(NamedTuple):
    """Scores and labels of n rows; what padding holds is replaced."""

    logits: Array  # [n, C] float32, those of padding are 0; a binary model's z is (0, z)
    labels: Array  # [n] int32 in [0, C), those of padding are 0
    mask: Array  # [n] bool, which rows are real
    are_valid: Array  # [] bool: no real row has an output that is not finite, or a label outside of [0, C)


def labelled_rows(outputs: Array, targets: Array, mask: Array | None) -> LabelledRows:
    """Checks outputs of a classifier and labels, and returns them in one form; traceable.

    Args:
      outputs: [n, C] logits of C >= 2 classes; [n] or [n, 1] logits of label 1 of a binary model.
      targets: [n] labels in [0, C), of any dtype; [n] or [n, 1] labels 0 and 1 of a binary model.
      mask: [n] bool, which rows are real; None: all of them.

    Raises: ValueError for other shapes, and for more than 2^24 rows.
    """
    if outputs.ndim not in (1, 2):
        validate.fail("outputs", "logits [n, classes], or [n] of a binary model", outputs.shape)
    is_binary = outputs.ndim == 1 or outputs.shape[1] == 1
    if targets.shape not in [outputs.shape[:1]] + [(len(outputs), 1)] * is_binary:
        validate.fail("targets", f"one label for each of {len(outputs):,} rows", targets.shape)
    mask = _checked_mask(len(outputs), len(outputs), mask)
    logits = outputs.astype(tree.at_least_float32(outputs.dtype))
    labels = targets.reshape(-1).astype(jnp.int32)
    if is_binary:
        logits = logits.reshape(-1)
        logits = jnp.stack([jnp.zeros_like(logits), logits], axis=1)
    in_range = (labels == targets.reshape(-1)) & (labels >= 0) & (labels < logits.shape[1])
    are_valid = ((in_range & jnp.isfinite(logits).all(axis=1)) | ~mask).all()
    logits = jnp.where(mask[:, None] & jnp.isfinite(logits), logits, 0)
    return LabelledRows(logits, jnp.where(mask & in_range, labels, 0), mask, are_valid)


class NumberRows(NamedTuple):
    """Predicted and true numbers of n rows, flat over their coordinates; padding is 0 in both."""

    predictions: Array  # [n k] float32
    targets: Array  # [n k] float32
    mask: Array  # [n k] bool, which numbers are real


def number_rows(outputs: Array, targets: Array, mask: Array | None) -> NumberRows:
    """Checks outputs and targets of a regression, and returns them in one form; traceable.

    Args:
      outputs: [n, ...], or [n, 1] for scalar targets [n].
      targets: the same shape, or [n], of any real dtype.
      mask: [n] bool, which rows are real; None: all of them.

    Raises: ValueError for other shapes, and for more than 2^24 numbers.
    """
    if outputs.ndim == 0 or outputs.shape not in (targets.shape, targets.shape + (1,)):
        validate.fail("targets", f"the outputs' shape {outputs.shape}", targets.shape, "One target for each output.")
    mask = _checked_mask(len(outputs), outputs.size, mask)
    is_real = jnp.broadcast_to(mask.reshape(-1, *[1] * (outputs.ndim - 1)), outputs.shape).reshape(-1)

    def flat(x: Array) -> Array:
        return jnp.where(is_real, x.reshape(-1).astype(tree.at_least_float32(x.dtype)), 0)

    return NumberRows(flat(outputs), flat(targets), is_real)


def _checked_mask(rows: int, size: int, mask: Array | None) -> Array:
    """Returns the mask [rows], by default of real rows, after checking it and that there are at most 2^24 numbers."""
    if size > MOST_ROWS:
        validate.fail("outputs", f"at most {MOST_ROWS:,} of them", size, "float32 cannot count more.")
    if mask is None:
        return jnp.ones(rows, bool)
    if mask.shape != (rows,) or mask.dtype != jnp.bool_:
        validate.fail("mask", f"booleans [{rows}]", f"{mask.dtype} {[*mask.shape]}")
    return mask


def precise_sum(x: Array) -> Array:
    """Sums numbers [n] in groups of eight, then the sums of the groups, and so on.

    The error of n numbers is at most 7 ceil(log_8 n) 2^-24 of the sum of their magnitudes, where adding them one by one
    has up to n 2^-24.

    >>> round(precise_sum(jnp.full(1 << 20, 0.1)).item() / (1 << 20), 7)
    0.1
    """
    while x.shape[0] > 1:
        padding = -x.shape[0] % FAN_IN
        x = jnp.concatenate([x, jnp.zeros(padding, x.dtype)]) if padding else x
        x = x.reshape(FAN_IN, -1).sum(axis=0)
    return x[0] if x.shape[0] else jnp.zeros((), x.dtype)


def sum_of_integers(x: Array) -> Array:
    """Sums integers [n] in [0, 2^32), n <= 2^24, as a float32 with a relative error of at most 2^-22.

    Each of the four bytes of the integers is summed by itself, which is exact below 2^32.

    Args:
      x: [n] uint32.

    >>> sum_of_integers(jnp.full(1000, 2**32 - 1, jnp.uint32)).item() == float(2**32 * 1000)
    True
    """
    total = jnp.float32(0)
    for shift in (0, 8, 16, 24):
        total = total + jnp.sum((x >> shift) & 0xFF, dtype=jnp.uint32).astype(jnp.float32) * 2.0**shift
    return total


def mean_over(x: Array, mask: Array) -> Array:
    """Returns the precise mean of numbers [n] over the real rows; NaN without any."""
    return precise_sum(jnp.where(mask, x, 0)) / mask.sum(dtype=jnp.int32)


def unless(is_wrong: Array, value: Array) -> Array:
    """Returns a value, or NaN in its place where the rows are wrong."""
    return jnp.where(is_wrong, jnp.nan, value)


def over_classes(of_class: Callable[[Array], Array], num_classes: int) -> Array:
    """Computes the mean over those classes 0, ..., C - 1 whose value [] is not NaN; NaN without any; traceable."""
    values = jax.lax.map(of_class, jnp.arange(num_classes, dtype=jnp.int32))
    has_value = ~jnp.isnan(values)
    return jnp.where(has_value, values, 0).sum() / has_value.sum()
