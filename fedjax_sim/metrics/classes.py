"""Metrics of predicted classes and of their probabilities: confusion matrix, F1, balanced accuracy, calibration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.metrics.scored_rows import LabelledRows, labelled_rows, mean_over, precise_sum, unless
from fedjax_sim.types import Array

AVERAGES = ("macro", "weighted", "micro", "binary")
Average = Literal["macro", "weighted", "micro", "binary"]
WITH_ROWS = "with rows"  # the average of `balanced_accuracy_score`


def confusion_matrix(outputs: Array, targets: Array, mask: Array | None = None) -> Array:
    """Counts rows by their class and by the class that is predicted, the first of the largest logits.

    Args:
      outputs: [n, C] logits; [n] or [n, 1] logits of label 1 of a binary model, which predicts label 1 above 0.
      targets: [n] labels in [0, C).
      mask: [n] bool, which rows are real; None: all of them.

    Returns: [C, C] int32; entry (y, c) is the number of real rows of class y that are taken for class c. Rows with a
      label that is no class, or with an output that is not finite, are left out.

    Raises: ValueError for other shapes, and for more than 2^24 rows.

    Guarantees: equals scikit-learn (tests/metrics/test_scores.py::test_confusion_matrix).

    >>> import jax.numpy as jnp
    >>> confusion_matrix(jnp.array([-1.0, 2.0, 3.0]), jnp.array([0, 0, 1])).tolist()
    [[1, 1], [0, 1]]
    """
    rows = labelled_rows(outputs, targets, mask)
    flat = outputs.reshape(len(outputs), -1)
    is_class = (targets.reshape(-1) == rows.labels) & jnp.isfinite(flat).all(axis=1)
    return _confusion(rows, rows.mask & is_class)


def _confusion(rows: LabelledRows, counted: Array) -> Array:
    """Counts the rows [n] bool that are `counted` by label and prediction: [C, C] int32."""
    num_classes = rows.logits.shape[1]
    cell = rows.labels * num_classes + rows.logits.argmax(axis=1).astype(jnp.int32)
    counts = jnp.zeros(num_classes**2, jnp.int32).at[cell].add(counted.astype(jnp.int32))
    return counts.reshape(num_classes, num_classes)


def precision_score(
    outputs: Array, targets: Array, mask: Array | None = None, *, average: Average | None = "macro"
) -> Array:
    """Computes precision, TP_c / (TP_c + FP_c): of the rows that are taken for class c, the share that is of it.

    Args:
      outputs, targets, mask: as in `confusion_matrix`.
      average: as in `f1_score`.

    Returns: [], or [C] without an average, in [0, 1]. Where class c is never predicted, as `f1_score`.

    Raises: ValueError for other shapes or averages, and for more than 2^24 rows.

    Guarantees: equals scikit-learn to 1e-6 (tests/metrics/test_scores.py::test_against_scikit_learn).

    >>> import jax.numpy as jnp
    >>> precision_score(jnp.array([-1.0, 2.0, 3.0]), jnp.array([0, 0, 1]), average="binary").item()
    0.5
    """
    return _averaged(outputs, targets, mask, average, lambda true, predicted, support: (true, predicted))


def recall_score(
    outputs: Array, targets: Array, mask: Array | None = None, *, average: Average | None = "macro"
) -> Array:
    """Computes recall, TP_c / (TP_c + FN_c): of the rows of class c, the share that is taken for it.

    Args:
      outputs, targets, mask: as in `confusion_matrix`.
      average: as in `f1_score`.

    Returns: [], or [C] without an average, in [0, 1]. Where class c has no row, as `f1_score`.

    Raises: ValueError for other shapes or averages, and for more than 2^24 rows.

    Guarantees: equals scikit-learn to 1e-6 (tests/metrics/test_scores.py::test_against_scikit_learn).

    >>> import jax.numpy as jnp
    >>> recall_score(jnp.array([-1.0, 2.0, 3.0]), jnp.array([0, 0, 1])).item()
    0.75
    """
    return _averaged(outputs, targets, mask, average, lambda true, predicted, support: (true, support))


def f1_score(outputs: Array, targets: Array, mask: Array | None = None, *, average: Average | None = "macro") -> Array:
    """Computes F1, the harmonic mean of precision and recall: F1_c = 2 TP_c / (2 TP_c + FP_c + FN_c).

    Args:
      outputs, targets, mask: as in `confusion_matrix`.
      average: "macro", the mean over classes that a row has or is taken for; "weighted", the mean by the classes'
        numbers of rows; "micro", of the sums of TP, FP and FN over classes, which is the accuracy; "binary", of class 1
        of two. None: no average, but the value of each class.

    Returns: [], or [C] without an average, in [0, 1]. A class whose ratio is 0 / 0 has 0, and with "binary" NaN. NaN
      also without any real row, if a real row's output is not finite, and if its label is no class.

    Raises: ValueError for other shapes or averages, and for more than 2^24 rows.

    Guarantees: equals scikit-learn to 1e-6 (tests/metrics/test_scores.py::test_against_scikit_learn).

    References: van Rijsbergen, Information retrieval, 1979, chapter 7.

    >>> import jax.numpy as jnp
    >>> [round(x, 4) for x in f1_score(jnp.array([-1.0, 2.0, 3.0]), jnp.array([0, 0, 1]), average=None).tolist()]
    [0.6667, 0.6667]
    """
    return _averaged(outputs, targets, mask, average, lambda true, predicted, support: (2 * true, predicted + support))


def _averaged(outputs: Array, targets: Array, mask: Array | None, average: str | None, ratio: Callable) -> Array:
    """Returns an average over classes of a ratio of counts.

    Args:
      outputs, targets, mask: as in `confusion_matrix`.
      average: as in `f1_score`, or `WITH_ROWS`, the mean over classes that have rows.
      ratio: (TP, TP + FP, TP + FN), each [C] or [], -> the numbers (above, below) of the ratio.
    """
    if average not in (None, WITH_ROWS):
        validate.one_of("average", average, AVERAGES)
    rows = labelled_rows(outputs, targets, mask)
    counts = _confusion(rows, rows.mask)
    true, predicted, support = (x.astype(jnp.float32) for x in (jnp.diagonal(counts), counts.sum(0), counts.sum(1)))

    def share(true: Array, predicted: Array, support: Array) -> Array:
        above, below = ratio(true, predicted, support)
        return jnp.where(below > 0, above / jnp.maximum(below, 1), 0)

    values = share(true, predicted, support)
    if average == "binary":
        if len(values) != 2:
            validate.fail("average", '"macro", "weighted" or "micro" of several classes', average)
        values = unless(ratio(true, predicted, support)[1][1] == 0, values[1])
    elif average == "micro":
        values = share(true.sum(), predicted.sum(), support.sum())
    elif average in ("macro", WITH_ROWS):
        is_met = (support if average == WITH_ROWS else predicted + support) > 0
        values = jnp.where(is_met, values, 0).sum() / is_met.sum()
    elif average == "weighted":
        values = (values * (support / support.sum())).sum()
    return unless(~(rows.are_valid & rows.mask.any()), values)


def balanced_accuracy_score(outputs: Array, targets: Array, mask: Array | None = None) -> Array:
    """Computes the mean of the recalls TP_c / (TP_c + FN_c) over the classes that have rows.

    Args:
      outputs, targets, mask: as in `confusion_matrix`.

    Returns: [] in [0, 1]. NaN as `f1_score`.

    Raises: ValueError for other shapes, and for more than 2^24 rows.

    Guarantees: equals scikit-learn to 1e-6 (tests/metrics/test_scores.py::test_against_scikit_learn).

    References: Brodersen et al., The balanced accuracy and its posterior distribution, ICPR 2010.

    >>> import jax.numpy as jnp
    >>> balanced_accuracy_score(jnp.array([-1.0, 2.0, 3.0]), jnp.array([0, 0, 1])).item()
    0.75
    """
    return _averaged(outputs, targets, mask, WITH_ROWS, lambda true, predicted, support: (true, support))


def top_k_accuracy_score(outputs: Array, targets: Array, mask: Array | None = None, *, k: int = 5) -> Array:
    """Computes the share of rows whose class is among the k classes of the largest logits.

    Of equal logits the first ones come first, so that k = 1 is the accuracy of `models.softmax_cross_entropy`.

    Args:
      outputs, targets, mask: as in `confusion_matrix`.
      k: in [1, C].

    Returns: [] in [0, 1]. NaN as `f1_score`.

    Raises: ValueError for other shapes, for more classes k than there are, and for more than 2^24 rows.

    Guarantees: equals scikit-learn to 1e-6 (tests/metrics/test_scores.py::test_against_scikit_learn).

    >>> import jax.numpy as jnp
    >>> top_k_accuracy_score(jnp.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), jnp.array([1, 2]), k=2).item()
    0.5
    """
    rows = labelled_rows(outputs, targets, mask)
    validate.integer("k", k, 1, rows.logits.shape[1], hint="There are so many classes.")
    of_label = jnp.take_along_axis(rows.logits, rows.labels[:, None], axis=1)
    is_earlier = jnp.arange(rows.logits.shape[1])[None] < rows.labels[:, None]
    place = ((rows.logits > of_label) | ((rows.logits == of_label) & is_earlier)).sum(axis=1)
    num_right = (rows.mask & (place < k)).sum(dtype=jnp.int32)
    return unless(~rows.are_valid, num_right / rows.mask.sum(dtype=jnp.int32))


def brier_score(outputs: Array, targets: Array, mask: Array | None = None) -> Array:
    """Computes the mean squared error of probabilities p = softmax(z): 1/n sum_i sum_c (p_ic - [y_i = c])^2.

    Of a binary model, or of two classes, it is 1/n sum_i (p_i - y_i)^2 with the probability p_i of label 1, which is
    half of that.

    Args:
      outputs, targets, mask: as in `confusion_matrix`.

    Returns: [] in [0, 2], or in [0, 1] for two classes. NaN as `f1_score`.

    Raises: ValueError for other shapes, and for more than 2^24 rows.

    Guarantees: equals float64 NumPy to 1e-6 (tests/metrics/test_scores.py::test_probabilities_against_numpy).

    References: Brier, Verification of forecasts expressed in terms of probability, 1950.

    >>> import jax.numpy as jnp
    >>> brier_score(jnp.array([0.0, 0.0]), jnp.array([0, 1])).item()
    0.25
    """
    rows = labelled_rows(outputs, targets, mask)
    num_classes = rows.logits.shape[1]
    error = jax.nn.softmax(rows.logits, axis=1) - jax.nn.one_hot(rows.labels, num_classes)
    of_rows = jnp.square(error).sum(axis=1) * (0.5 if num_classes == 2 else 1.0)
    return unless(~rows.are_valid, mean_over(of_rows, rows.mask))


def expected_calibration_error(
    outputs: Array, targets: Array, mask: Array | None = None, *, num_bins: int = 15
) -> Array:
    """Computes how far confidence is from accuracy: ECE = sum_b |B_b| / n |acc(B_b) - conf(B_b)|.

    Bin b of B holds the rows whose largest probability is in ((b - 1) / B, b / B]. A binary model has two classes.

    Args:
      outputs, targets, mask: as in `confusion_matrix`.
      num_bins: B >= 1, bins of equal width.

    Returns: [] in [0, 1]. NaN as `f1_score`.

    Raises: ValueError for other shapes or no bins, and for more than 2^24 rows.

    Guarantees: equals float64 NumPy to 1e-6 (tests/metrics/test_scores.py::test_probabilities_against_numpy).

    References: Guo et al., On calibration of modern neural networks, ICML 2017, equation 3.

    >>> import jax.numpy as jnp
    >>> round(expected_calibration_error(jnp.array([0.0, 0.0, 0.0]), jnp.array([0, 0, 0])).item(), 4)
    0.5
    """
    validate.integer("num_bins", num_bins, 1, 1 << 16)
    rows = labelled_rows(outputs, targets, mask)
    confidence = jax.nn.softmax(rows.logits, axis=1).max(axis=1)
    is_right = rows.logits.argmax(axis=1) == rows.labels
    bin_of_row = jnp.clip(jnp.ceil(confidence * num_bins).astype(jnp.int32) - 1, 0, num_bins - 1)
    excess = jnp.where(rows.mask, confidence - is_right, 0)

    def gap(b: Array) -> Array:
        return jnp.abs(precise_sum(jnp.where(bin_of_row == b, excess, 0)))

    gaps = jax.lax.map(gap, jnp.arange(num_bins, dtype=jnp.int32))
    return unless(~rows.are_valid, gaps.sum() / rows.mask.sum(dtype=jnp.int32))
