"""Attacks on embeddings of a graph's nodes: they infer edges, and labels of nodes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim import validate
from fedjax_sim.types import Array


def edge_scores(embeddings: ArrayLike, pairs: ArrayLike) -> Array:
    """Scores each pair of nodes by the cosine similarity of their embeddings.

    If a layer averages over neighbours, neighbours have a high similarity.

    Args:
      embeddings: [V, d], as a server received them (`round.observe`).
      pairs: [L, 2] integers in [0, V).

    Returns: [L] in [-1, 1]; 0 for an embedding of zeros. `auc` compares the scores of edges with those of other pairs.

    Raises: ValueError for arguments of other shapes, and for nodes out of range.

    Guarantees: edges over which the parties' layers sum are found. Dropped edges are not found, and no edges are if the
    server alone sums and features do not depend on the graph (tests/adversary/test_embeddings.py::test_edges).

    References: Wu et al. 2022; He et al. 2021 (link stealing, attack 0).

    >>> edge_scores(jnp.array([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]), jnp.array([[0, 1], [0, 2]])).tolist()
    [1.0, 0.0]
    """
    embeddings = jnp.asarray(embeddings)
    pairs = np.asarray(pairs)
    if embeddings.ndim != 2:
        validate.fail("embeddings", "rows [V, d]", embeddings.shape)
    are_pairs = pairs.ndim == 2 and pairs.shape[1] == 2 and pairs.dtype.kind in "iu"
    if not are_pairs or not ((pairs >= 0) & (pairs < len(embeddings))).all():
        validate.fail("pairs", f"integers [L, 2] in [0, {len(embeddings)})", pairs.shape)
    norms = jnp.sqrt((embeddings * embeddings).sum(1))
    unit = embeddings / jnp.where(norms > 0, norms, 1)[:, None]
    return (unit[pairs[:, 0]] * unit[pairs[:, 1]]).sum(1)


def guessed_labels(embeddings: ArrayLike, known: ArrayLike, labels: ArrayLike) -> np.ndarray:
    """Guesses the label of every node: the label of the nearest class mean, from nodes with known labels.

    Args:
      embeddings: [V, d].
      known: [K] integers in [0, V), the nodes whose labels the attacker knows.
      labels: [K] integers, the labels of these nodes.

    Returns: [V] labels, on the host. If more guesses are right than for the most frequent label, the embeddings leak
    labels.

    Raises: ValueError for nodes out of range, and for another number of labels than of nodes.

    Guarantees: in one test graph of two classes, more than 80 % of 300 labels are guessed right from a network's
    embeddings, and about half of them from noise, as by chance (tests/adversary/test_embeddings.py::test_labels).

    References: Duddu, Boutet and Shejwalkar 2020 (attribute inference from embeddings).

    >>> guessed_labels(jnp.array([[0.0], [1.0], [0.2]]), jnp.array([0, 1]), jnp.array([5, 6])).tolist()
    [5, 6, 5]
    """
    rows, known, labels = (np.asarray(x) for x in (embeddings, known, labels))
    has_labels = known.ndim == 1 and labels.shape == known.shape and known.size
    if not has_labels or not ((known >= 0) & (known < len(rows))).all():
        validate.fail("known", f"nodes in [0, {len(rows)}), with a label each", (known.shape, labels.shape))
    classes = np.unique(labels)
    means = np.stack([rows[known[labels == label]].mean(0) for label in classes]).astype(np.float64)
    squared_distances = ((rows[:, None].astype(np.float64) - means[None]) ** 2).sum(-1)
    return classes[squared_distances.argmin(1)]
