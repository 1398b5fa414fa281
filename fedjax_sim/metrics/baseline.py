"""This module computes the metrics of the best constant prediction, which any model must beat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def constant_baseline(test: Any, task: str, special_tokens: Sequence[int] = ()) -> dict[str, float]:
    """Computes the metrics of the best constant prediction on a test set.

    The constant is chosen on the test set itself, so no constant that is learned elsewhere does better.

    Args:
      test: examples with integer labels "y" (-1 marks padding) or real targets "y" [n, k].
      task, special_tokens: as in `population.FederatedData`.

    Returns: `baseline_accuracy`, the share of the most frequent label (of words, without special tokens), and
      `baseline_loss`. The loss is the entropy of the labels in nats (that of the unigram model for next tokens), or the
      variance of the targets. The dict is empty for other tasks, and for a test set without targets.

    >>> constant_baseline({"y": np.array([[0, 1], [1, -1]])}, "next_token")
    {'baseline_accuracy': 0.6666666666666666, 'baseline_loss': 0.6365141682948128}
    >>> constant_baseline({"y": np.array([[0, 1], [1, -1]])}, "next_token", special_tokens=(1,))["baseline_accuracy"]
    1.0
    >>> constant_baseline({"y": np.array([[1.0], [3.0]])}, "regression")
    {'baseline_loss': 1.0}
    """
    if task == "regression" and len(test["y"]):
        return {"baseline_loss": float(np.asarray(test["y"], np.float64).var(axis=0).mean())}
    if task not in ("binary", "classification", "graph_classification", "next_token", "node_classification"):
        return {}
    labels = np.asarray(test["y"]).reshape(-1)
    # Negative labels are padding.
    counts = np.bincount(labels[labels >= 0])
    if not counts.size:
        return {}
    shares = counts[counts > 0] / counts.sum()
    words = np.delete(counts, [token for token in special_tokens if token < counts.size])
    most_frequent = words.max(initial=0) / max(words.sum(), 1)
    return {"baseline_accuracy": float(most_frequent), "baseline_loss": float(-(shares * np.log(shares)).sum())}
