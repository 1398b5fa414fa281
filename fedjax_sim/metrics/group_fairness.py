"""Whether a model treats groups of rows alike, by a sensitive column such as an age class.

Fairness over clients is in `metrics.fairness`. These functions take scores, labels and the group of each row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.metrics.scored_rows import labelled_rows, unless
from fedjax_sim.types import Array


def accuracy_by_group(
    outputs: Array, targets: Array, groups: Array, *, num_groups: int, mask: Array | None = None
) -> Array:
    """Computes the share of right predictions in each group of rows.

    Args:
      outputs: [n, C] logits; [n] or [n, 1] logits of label 1 of a binary model.
      targets: [n] labels in [0, C).
      groups: [n] of any dtype, the group of each row: 0, ..., G - 1.
      num_groups: G >= 1.
      mask: [n] bool, which rows are real; None: all of them.

    Returns: [G] in [0, 1]; NaN for a group without rows. All are NaN if a real row's output is not finite, and if its
      label or its group is none.

    Raises: ValueError for other shapes, and for more than 2^24 rows.

    Guarantees: equals NumPy (tests/metrics/test_group_fairness.py::test_against_numpy).

    >>> import jax.numpy as jnp
    >>> logits, labels, groups = jnp.array([1.0, -1.0, 1.0]), jnp.array([1, 1, 1]), jnp.array([0, 0, 1])
    >>> accuracy_by_group(logits, labels, groups, num_groups=2).tolist()
    [0.5, 1.0]
    """
    counts, are_wrong = _counts(outputs, targets, groups, num_groups, mask, is_binary=False)
    return unless(are_wrong, counts.right / counts.rows)


def demographic_parity_difference(
    outputs: Array, targets: Array, groups: Array, *, num_groups: int, mask: Array | None = None
) -> Array:
    """Computes max_g P(f = 1 | g) - min_g P(f = 1 | g): how much more often one group is taken for label 1.

    Args:
      outputs: [n, 2] logits; [n] or [n, 1] logits of label 1, which is predicted above 0.
      targets: [n] labels 0 and 1, which are not used but checked.
      groups, num_groups, mask: as in `accuracy_by_group`.

    Returns: [] in [0, 1], over the groups that have rows. NaN without any, and as in `accuracy_by_group`.

    Raises: ValueError for other shapes, for more than two classes, and for more than 2^24 rows.

    Guarantees: equals NumPy (tests/metrics/test_group_fairness.py::test_against_numpy).

    References: Dwork et al., Fairness through awareness, 2012 (statistical parity).

    >>> import jax.numpy as jnp
    >>> logits, labels, groups = jnp.array([1.0, -1.0, 1.0]), jnp.array([1, 1, 1]), jnp.array([0, 0, 1])
    >>> demographic_parity_difference(logits, labels, groups, num_groups=2).item()
    0.5
    """
    counts, are_wrong = _counts(outputs, targets, groups, num_groups, mask, is_binary=True)
    return unless(are_wrong, _difference(counts.taken.sum(1), counts.rows))


def equal_opportunity_difference(
    outputs: Array, targets: Array, groups: Array, *, num_groups: int, mask: Array | None = None
) -> Array:
    """Computes max_g P(f = 1 | y = 1, g) - min_g P(f = 1 | y = 1, g): the difference of true positive rates.

    Args:
      outputs, targets, groups, num_groups, mask: as in `demographic_parity_difference`.

    Returns: [] in [0, 1], over the groups that have rows of label 1. NaN without any, and as in `accuracy_by_group`.

    Raises: ValueError for other shapes, for more than two classes, and for more than 2^24 rows.

    Guarantees: equals NumPy (tests/metrics/test_group_fairness.py::test_against_numpy).

    References: Hardt et al., Equality of opportunity in supervised learning, NeurIPS 2016, definition 2.2.

    >>> import jax.numpy as jnp
    >>> logits, labels, groups = jnp.array([1.0, 1.0, 1.0]), jnp.array([1, 0, 1]), jnp.array([0, 0, 1])
    >>> equal_opportunity_difference(logits, labels, groups, num_groups=2).item()
    0.0
    """
    counts, are_wrong = _counts(outputs, targets, groups, num_groups, mask, is_binary=True)
    return unless(are_wrong, _difference(counts.taken[:, 1], counts.of_label[:, 1]))


def equalized_odds_difference(
    outputs: Array, targets: Array, groups: Array, *, num_groups: int, mask: Array | None = None
) -> Array:
    """Computes the larger one of the differences of true positive rates and of false positive rates over groups.

    max over y of max_g P(f = 1 | y, g) - min_g P(f = 1 | y, g).

    Args:
      outputs, targets, groups, num_groups, mask: as in `demographic_parity_difference`.

    Returns: [] in [0, 1], over the groups that have rows of the label. NaN if a label has no row, and as in
      `accuracy_by_group`.

    Raises: ValueError for other shapes, for more than two classes, and for more than 2^24 rows.

    Guarantees: equals NumPy (tests/metrics/test_group_fairness.py::test_against_numpy).

    References: Hardt et al., Equality of opportunity in supervised learning, NeurIPS 2016, definition 2.1.

    >>> import jax.numpy as jnp
    >>> logits, labels, groups = jnp.array([1.0, -1.0, 1.0, 1.0]), jnp.array([1, 0, 1, 0]), jnp.array([0, 0, 1, 1])
    >>> equalized_odds_difference(logits, labels, groups, num_groups=2).item()
    1.0
    """
    counts, are_wrong = _counts(outputs, targets, groups, num_groups, mask, is_binary=True)
    differences = [_difference(counts.taken[:, label], counts.of_label[:, label]) for label in (0, 1)]
    return unless(are_wrong, jnp.maximum(*differences))


class _Counts(NamedTuple):
    """Numbers of real rows in each of G groups."""

    rows: Array  # [G] int32
    right: Array  # [G] int32, rows that are taken for their class
    of_label: Array  # [G, C] int32, rows by label
    taken: Array  # [G, C] int32, rows by label that are taken for class 1


def _counts(
    outputs: Array, targets: Array, groups: Array, num_groups: int, mask: Array | None, *, is_binary: bool
) -> tuple[_Counts, Array]:
    """Counts rows by group, and says whether a real row is wrong: [] bool.

    Args:
      outputs, targets, groups, num_groups, mask: as in `accuracy_by_group`.
      is_binary: whether there must be two classes.
    """
    rows = labelled_rows(outputs, targets, mask)
    validate.integer("num_groups", num_groups)
    num_classes = rows.logits.shape[1]
    if is_binary and num_classes != 2:
        validate.fail("outputs", "logits of two classes", outputs.shape, "accuracy_by_group takes more.")
    if groups.shape != rows.labels.shape:
        validate.fail("groups", f"a group for each of {len(rows.labels):,} rows", groups.shape)
    group = groups.astype(jnp.int32)
    is_group = (group == groups) & (group >= 0) & (group < num_groups)
    prediction = rows.logits.argmax(axis=1)
    cell = jnp.where(is_group, group, 0) * num_classes + rows.labels

    def count(which: Array) -> Array:
        counts = jnp.zeros(num_groups * num_classes, jnp.int32).at[cell].add((rows.mask & which).astype(jnp.int32))
        return counts.reshape(num_groups, num_classes)

    of_label = count(jnp.ones_like(rows.mask))
    right = count(prediction == rows.labels).sum(axis=1)
    are_wrong = ~rows.are_valid | (rows.mask & ~is_group).any()
    return _Counts(of_label.sum(axis=1), right, of_label, count(prediction == 1)), are_wrong


def _difference(taken: Array, rows: Array) -> Array:
    """Returns the largest difference of the shares taken / rows over the groups that have rows; NaN without any."""
    share = taken / jnp.maximum(rows, 1)
    has_rows = rows > 0
    highest = jnp.where(has_rows, share, -jnp.inf).max()
    lowest = jnp.where(has_rows, share, jnp.inf).min()
    return unless(~has_rows.any(), highest - lowest)
