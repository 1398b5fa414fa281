"""Metrics of the order in which a model puts rows: the area under the ROC curve, and average precision.

Rows are sorted once for each class. Counts of rows are int32, and products of counts are never formed in float32: they
pass 2^24 with a few thousand rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.metrics.scored_rows import (
    LabelledRows,
    labelled_rows,
    over_classes,
    precise_sum,
    sum_of_integers,
    unless,
)
from fedjax_sim.types import Array


def roc_auc_score(outputs: Array, targets: Array, mask: Array | None = None) -> Array:
    """Computes the area under the ROC curve: how often a row of a class has a higher score than a row of none.

    With P rows of the class and N others,
      AUC = 1/(P N) sum_{i of the class} (#{others below s_i} + 1/2 #{others that equal s_i}).
    A binary model's score is its logit of label 1. Of C > 2 classes each is set against the rest by its log odds
    log p_c - log(1 - p_c), with p = softmax(z), and AUC is the mean over the classes that have one.

    Args:
      outputs: [n, C] logits; [n] or [n, 1] logits of label 1 of a binary model, or any scores.
      targets: [n] labels in [0, C).
      mask: [n] bool, which rows are real; None: all of them.

    Returns: [] in [0, 1]. NaN if all real rows are of one class, if a real row's output is not finite, and if its label
      is no class.

    Raises: ValueError for other shapes, and for more than 2^24 rows.

    Guarantees: equals scikit-learn to 1e-6, with ties, padding and classes
    (tests/metrics/test_scores.py::test_against_scikit_learn), and integer counts of 10^6 rows
    (::test_ranks_of_a_million_rows).

    References: Hanley and McNeil, The meaning and use of the area under a ROC curve, Radiology 1982. Provost and
      Domingos, Well-trained PETs, 2000 (one class against the rest).

    >>> import jax, jax.numpy as jnp
    >>> jax.jit(roc_auc_score)(jnp.array([0.1, 0.4, 0.4, 0.8]), jnp.array([0, 0, 1, 1])).item()
    0.875
    """
    return _one_against_the_rest(labelled_rows(outputs, targets, mask), _area)


def average_precision_score(outputs: Array, targets: Array, mask: Array | None = None) -> Array:
    """Computes average precision, the sum of precision over steps of recall.

    With the precision P_k and the recall R_k of all rows whose score is at least the k-th largest distinct one,
      AP = sum_k (R_k - R_{k-1}) P_k.
    Of C > 2 classes it is the mean over the classes of which there are rows, each against the rest.

    Args:
      outputs, targets, mask: as in `roc_auc_score`.

    Returns: [] in [0, 1]. NaN where `roc_auc_score` is NaN.

    Raises: ValueError for other shapes, and for more than 2^24 rows.

    Guarantees: equals scikit-learn to 1e-6, with ties, padding and classes
    (tests/metrics/test_scores.py::test_against_scikit_learn).

    >>> import jax.numpy as jnp
    >>> round(average_precision_score(jnp.array([0.1, 0.4, 0.35, 0.8]), jnp.array([0, 0, 1, 1])).item(), 4)
    0.8333
    """
    return _one_against_the_rest(labelled_rows(outputs, targets, mask), _precision)


class _Sorted(NamedTuple):
    """Rows from the lowest score up."""

    positive: Array  # [n] bool: a real row of the class
    negative: Array  # [n] bool: another real row
    starts: Array  # [n] bool: the first row of its score
    ends: Array  # [n] bool: the last row of its score


def _one_against_the_rest(rows: LabelledRows, measure: Callable[[_Sorted], Array]) -> Array:
    """Returns the mean of a measure over classes; of two classes the second one's alone; NaN for wrong rows.

    Args:
      rows: of C classes.
      measure: of one class, [], where the class has rows and other classes have rows too.
    """
    num_classes = rows.logits.shape[1]

    def of_class(c: Array) -> Array:
        is_class = rows.labels == c
        others = jnp.where(jnp.arange(num_classes)[None] == c, -jnp.inf, rows.logits)
        # The probability itself rounds to 1 for clear rows, which would tie them.
        log_odds = jnp.take(rows.logits, c, axis=1) - jax.nn.logsumexp(others, axis=1)
        positive, negative = rows.mask & is_class, rows.mask & ~is_class
        code = jnp.where(positive, 2, jnp.where(negative, 1, 0)).astype(jnp.int32)
        scores, code = jax.lax.sort((log_odds, code), num_keys=1, is_stable=False)
        differs = scores[1:] != scores[:-1]
        end = jnp.ones(1, bool)
        in_order = _Sorted(
            code == 2, code == 1, jnp.concatenate([end, differs])[: len(code)], jnp.concatenate([differs, end])
        )
        return unless(~(positive.any() & negative.any()), measure(in_order))

    if not rows.logits.shape[0]:
        return jnp.full((), jnp.nan, rows.logits.dtype)
    value = of_class(jnp.int32(1)) if num_classes == 2 else over_classes(of_class, num_classes)
    return unless(~rows.are_valid, value)


def _area(rows: _Sorted) -> Array:
    """Returns the area under the ROC curve of rows in order."""
    up_to_here = jnp.cumsum(rows.negative.astype(jnp.int32))
    below = _at_start(up_to_here - rows.negative, rows.starts)
    # Counts do not fall from row to row, so the least of those at later ends is that of the next end.
    up_to_end = jax.lax.cummin(jnp.where(rows.ends, up_to_here, jnp.iinfo(jnp.int32).max), reverse=True)
    # An equal score counts as half below: this is twice the number, at most 2^25.
    doubled = jnp.where(rows.positive, below + up_to_end, 0).astype(jnp.uint32)
    num_positive = rows.positive.sum(dtype=jnp.int32).astype(jnp.float32)
    return sum_of_integers(doubled) / num_positive / (2.0 * up_to_here[-1])


def _precision(rows: _Sorted) -> Array:
    """Returns the average precision of rows in order."""
    real = (rows.positive | rows.negative).astype(jnp.int32)
    positive = rows.positive.astype(jnp.int32)
    # Of all rows, those at or above a score are the ones that are not before its first row.
    num_positive = positive.sum() - _at_start(jnp.cumsum(positive) - positive, rows.starts)
    num_rows = real.sum() - _at_start(jnp.cumsum(real) - real, rows.starts)
    precision = jnp.where(rows.positive, num_positive / jnp.maximum(num_rows, 1), 0.0)
    return precise_sum(precision) / positive.sum()


def _at_start(count: Array, starts: Array) -> Array:
    """Returns, for each row, the count at the first row of its score; counts do not fall from row to row."""
    return jax.lax.cummax(jnp.where(starts, count, 0))
