"""Metrics that an evaluation computes from the scores and labels of all its rows: `evaluation(metrics=...)`.

A config names them in `run.metrics`. Each is a function of arrays of this package under a name for logs, which is
scikit-learn's name where it has one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from fedjax_sim import validate
from fedjax_sim.metrics import classes, ranking, regression


class ScoreMetric(NamedTuple):
    """A metric of the scores and labels of a set of rows, which may be no mean over rows."""

    name: str  # in the record, behind "test_" and the like
    compute: Callable  # (outputs [n, ...], targets [n, ...], mask [n]) -> [] float32; NaN where it is not defined
    tasks: tuple[str, ...]  # of data sets (`FederatedData.task`), on whose outputs and targets it is defined


BINARY = ("binary",)
CLASSES = ("binary", "classification", "graph_classification")
NUMBERS = ("regression",)


def roc_auc() -> ScoreMetric:
    """Area under the ROC curve, 1/2 for guessing; of several classes the mean of each against the rest.

    See `roc_auc_score`.

    >>> roc_auc().name
    'roc_auc'
    """
    return ScoreMetric("roc_auc", ranking.roc_auc_score, CLASSES)


def average_precision() -> ScoreMetric:
    """Average precision, for classes with few rows; of several classes the mean of each against the rest.

    See `average_precision_score`.

    >>> average_precision().name
    'average_precision'
    """
    return ScoreMetric("average_precision", ranking.average_precision_score, CLASSES)


def f1_macro() -> ScoreMetric:
    """F1, the harmonic mean of precision and recall, as a mean over classes; see `f1_score`.

    >>> f1_macro().name
    'f1_macro'
    """
    return ScoreMetric("f1_macro", classes.f1_score, CLASSES)


def f1_weighted() -> ScoreMetric:
    """F1, the harmonic mean of precision and recall, as a mean over classes by their numbers of rows; see `f1_score`.

    >>> f1_weighted().name
    'f1_weighted'
    """
    return ScoreMetric("f1_weighted", functools.partial(classes.f1_score, average="weighted"), CLASSES)


def f1_binary() -> ScoreMetric:
    """F1, the harmonic mean of precision and recall, of label 1 of a binary task; see `f1_score`.

    >>> f1_binary().tasks
    ('binary',)
    """
    return ScoreMetric("f1_binary", functools.partial(classes.f1_score, average="binary"), BINARY)


def precision_macro() -> ScoreMetric:
    """Precision, the share of rows taken for a class that are of it, as a mean over classes; see `precision_score`.

    >>> precision_macro().name
    'precision_macro'
    """
    return ScoreMetric("precision_macro", classes.precision_score, CLASSES)


def precision_binary() -> ScoreMetric:
    """Precision, the share of rows taken for label 1 that have it; see `precision_score`.

    >>> precision_binary().name
    'precision_binary'
    """
    return ScoreMetric("precision_binary", functools.partial(classes.precision_score, average="binary"), BINARY)


def recall_macro() -> ScoreMetric:
    """Recall, the share of a class's rows that are taken for it, as a mean over classes; see `recall_score`.

    >>> recall_macro().name
    'recall_macro'
    """
    return ScoreMetric("recall_macro", classes.recall_score, CLASSES)


def recall_binary() -> ScoreMetric:
    """Recall, the share of the rows of label 1 that are taken for it; see `recall_score`.

    >>> recall_binary().name
    'recall_binary'
    """
    return ScoreMetric("recall_binary", functools.partial(classes.recall_score, average="binary"), BINARY)


def balanced_accuracy() -> ScoreMetric:
    """Accuracy in which each class that has rows counts alike; see `balanced_accuracy_score`.

    >>> balanced_accuracy().name
    'balanced_accuracy'
    """
    return ScoreMetric("balanced_accuracy", classes.balanced_accuracy_score, CLASSES)


def top_k_accuracy(k: int = 5) -> ScoreMetric:
    """Share of rows whose class is among the k most probable ones; see `top_k_accuracy_score`.

    Args:
      k: >= 1 and at most the number of classes. A config has the default.

    >>> top_k_accuracy(3).name
    'top_3_accuracy'
    """
    validate.integer("k", k)
    return ScoreMetric(f"top_{k}_accuracy", functools.partial(classes.top_k_accuracy_score, k=k), CLASSES[1:])


def brier() -> ScoreMetric:
    """Mean squared error of the probabilities of classes; see `brier_score`.

    >>> brier().name
    'brier'
    """
    return ScoreMetric("brier", classes.brier_score, CLASSES)


def calibration_error(num_bins: int = 15) -> ScoreMetric:
    """Expected calibration error, how far confidence is from accuracy; see `expected_calibration_error`.

    Args:
      num_bins: >= 1, bins of equal width. A config has the default.

    >>> calibration_error().name
    'calibration_error'
    """
    validate.integer("num_bins", num_bins)
    compute = functools.partial(classes.expected_calibration_error, num_bins=num_bins)
    return ScoreMetric("calibration_error", compute, CLASSES)


def rmse() -> ScoreMetric:
    """Root mean squared error; see `root_mean_squared_error`.

    >>> rmse().name
    'rmse'
    """
    return ScoreMetric("rmse", regression.root_mean_squared_error, NUMBERS)


def mae() -> ScoreMetric:
    """Mean absolute error; see `mean_absolute_error`.

    >>> mae().name
    'mae'
    """
    return ScoreMetric("mae", regression.mean_absolute_error, NUMBERS)


def r2() -> ScoreMetric:
    """R^2, the share of the targets' variance that is explained; see `r2_score`.

    >>> r2().name
    'r2'
    """
    return ScoreMetric("r2", regression.r2_score, NUMBERS)
