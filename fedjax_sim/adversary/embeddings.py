"""What embeddings of nodes tell about the graph: who is joined to whom, and of which kind a node is."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.types import Array

__all__ = ["edge_scores", "guessed_labels"]


def edge_scores(embeddings: Array, pairs: Array) -> Array:
    """Cosine similarity of the embeddings of each pair of nodes: high for neighbours where a layer averages over them.

    Args:
      embeddings: [V, d], as a server received them (`round.observe`).
      pairs: [L, 2] integers in [0, V).

    Returns: [L] in [-1, 1], 0 for an embedding of zeros; `auc` judges those of edges against those of other pairs.

    Guarantees: edges of communities are found, where nothing is joined for a reason nothing is
    (tests/adversary/test_embeddings.py::test_edges).

    References: Wu et al. 2022; He et al. 2021 (link stealing, attack 0).

    >>> edge_scores(jnp.array([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]), jnp.array([[0, 1], [0, 2]])).tolist()
    [1.0, 0.0]
    """
    embeddings, at = jnp.asarray(embeddings), np.asarray(pairs)
    if embeddings.ndim != 2:
        validate.fail("embeddings", "rows [V, d]", embeddings.shape)
    if at.ndim != 2 or at.shape[1] != 2 or at.dtype.kind not in "iu" or not ((at >= 0) & (at < len(embeddings))).all():
        validate.fail("pairs", f"integers [L, 2] in [0, {len(embeddings)})", at.shape)
    length = jnp.sqrt((embeddings * embeddings).sum(1))
    unit = embeddings / jnp.where(length > 0, length, 1)[:, None]
    return (unit[at[:, 0]] * unit[at[:, 1]]).sum(1)


def guessed_labels(embeddings: Array, known: Array, labels: Array) -> np.ndarray:
    """The label of every node, guessed from a few that the attacker knows: that of the nearest class mean.

    Args:
      embeddings: [V, d].
      known: [K] integers in [0, V), nodes whose labels the attacker has.
      labels: [K] integers, of those nodes.

    Returns: [V] labels, on the host. A share of right guesses above that of the most frequent label is a leak.

    Guarantees: tests/adversary/test_embeddings.py::test_labels.

    References: Duddu, Boutet and Shejwalkar 2020 (attribute inference from embeddings).

    >>> guessed_labels(jnp.array([[0.0], [1.0], [0.2]]), jnp.array([0, 1]), jnp.array([5, 6])).tolist()
    [5, 6, 5]
    """
    rows, at, given = (np.asarray(x) for x in (embeddings, known, labels))
    if at.ndim != 1 or given.shape != at.shape or not at.size or not ((at >= 0) & (at < len(rows))).all():
        validate.fail("known", f"nodes in [0, {len(rows)}), with a label each", (at.shape, given.shape))
    classes = np.unique(given)
    means = np.stack([rows[at[given == one]].mean(0) for one in classes]).astype(np.float64)
    away = ((rows[:, None].astype(np.float64) - means[None]) ** 2).sum(-1)
    return classes[away.argmin(1)]
