"""Distances between label distributions, in float64 NumPy, and the label heterogeneity of a population."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.types import Population
from fedjax_sim.validate import PositiveInt

__all__ = [
    "earth_mover_distance",
    "jensen_shannon_divergence",
    "kullback_leibler_divergence",
    "l1_distance",
    "label_counts",
    "label_heterogeneity",
    "optimum_gap",
    "total_variation",
]

CLIENTS = 4096  # counted at once


def _pair(first: Any, second: Any) -> tuple[np.ndarray, np.ndarray]:
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if not first.ndim or not second.ndim or first.shape[-1] != second.shape[-1]:
        validate.fail("first, second", "probabilities on one support", (first.shape, second.shape))
    for name, value in (("first", first), ("second", second)):
        if not ((value >= 0).all() and np.allclose(value.sum(-1), 1, rtol=0, atol=1e-6)):
            validate.fail(name, "probabilities >= 0 that sum to 1", value)
    return first, second


def _plain(value: np.ndarray) -> Any:
    return float(value) if np.ndim(value) == 0 else value


def total_variation(first: Any, second: Any) -> Any:
    """TV = 1/2 sum |p - q|, in [0, 1].

    Args:
      first, second: [..., L] probabilities on one support; leading axes broadcast.

    Returns: a float, or [...] float64.

    Guarantees: tests/metrics/test_heterogeneity.py::test_worked_example, test_distances_are_distances.

    >>> round(total_variation([0.2, 0.5, 0.3], [0.5, 0.3, 0.2]), 12)
    0.3
    """
    first, second = _pair(first, second)
    return _plain(np.abs(first - second).sum(-1) / 2)


def l1_distance(first: Any, second: Any) -> Any:
    """sum |p - q| = 2 TV: what Zhao et al. 2018 call the earth mover's distance, though it uses no positions.

    >>> round(l1_distance([0.2, 0.5, 0.3], [0.5, 0.3, 0.2]), 12)
    0.6
    """
    first, second = _pair(first, second)
    return _plain(np.abs(first - second).sum(-1))


def earth_mover_distance(first: Any, second: Any, positions: Any) -> Any:
    """W1 in one dimension, the integral of |F_1 - F_2| between the distribution functions.

    At least the difference of the means, and equal to it if one distribution dominates the other.

    Args:
      first, second: [..., L] probabilities. positions: [L] finite positions of the support, in any order.

    Guarantees: equal to scipy's (tests/metrics/test_heterogeneity.py::test_earth_mover_distance_is_scipys); two
    examples by hand (::test_worked_example, test_gap_is_not_the_distance).

    >>> round(earth_mover_distance([0.2, 0.5, 0.3], [0.5, 0.3, 0.2], [0, 1, 2]), 12)
    0.4
    """
    first, second = _pair(first, second)
    positions = np.asarray(positions, np.float64)
    if positions.shape != first.shape[-1:] or not np.isfinite(positions).all():
        validate.fail("positions", f"{first.shape[-1]} finite numbers", positions)
    order = np.argsort(positions)
    ahead = np.cumsum((first - second)[..., order], -1)[..., :-1]
    return _plain((np.abs(ahead) * np.diff(positions[order])).sum(-1))


def kullback_leibler_divergence(first: Any, second: Any) -> Any:
    """KL(p || q) = sum p ln(p / q) in nat; infinite where q is 0 and p is not. Not symmetric.

    >>> round(kullback_leibler_divergence([0.2, 0.5, 0.3], [0.5, 0.3, 0.2]), 6)
    0.193794
    """
    from scipy.special import rel_entr

    return _plain(rel_entr(*_pair(first, second)).sum(-1))


def jensen_shannon_divergence(first: Any, second: Any) -> Any:
    """(KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2, in nat: symmetric, at most ln 2.

    >>> round(jensen_shannon_divergence([0.2, 0.5, 0.3], [0.5, 0.3, 0.2]), 7)
    0.0508746
    """
    from scipy.special import rel_entr

    first, second = _pair(first, second)
    middle = (first + second) / 2
    return _plain((rel_entr(first, middle) + rel_entr(second, middle)).sum(-1) / 2)


def optimum_gap(first: Any, second: Any, positions: Any) -> Any:
    """|E_1 Y - E_2 Y|: how far apart the best constant predictions under squared loss are; at most W1.

    >>> round(optimum_gap([0.2, 0.5, 0.3], [0.5, 0.3, 0.2], [0, 1, 2]), 12)
    0.4
    """
    first, second = _pair(first, second)
    positions = np.asarray(positions, np.float64)
    if positions.shape != first.shape[-1:] or not np.isfinite(positions).all():
        validate.fail("positions", f"{first.shape[-1]} finite numbers", positions)
    return _plain(np.abs((first - second) @ positions))


@validate.named_arguments
def label_counts(population: Population, *, num_labels: PositiveInt, label: str = "y") -> np.ndarray:
    """[N, L] int64: how many examples of each label every client has.

    Args:
      population: of examples with an integer leaf `label`, [n] or [n, ...]; negative labels are padding.
      num_labels: L; labels at or past it are an error.

    Guarantees: equal to a loop over clients (tests/metrics/test_heterogeneity.py::test_label_counts).
    """
    rows = jax.eval_shape(population.client, jnp.int32(0))
    if not isinstance(rows.examples, dict) or label not in rows.examples:
        validate.fail("label", "a leaf of the examples", label)
    if not jnp.issubdtype(rows.examples[label].dtype, jnp.integer):
        validate.fail("label", "integer labels", rows.examples[label].dtype, error=TypeError)

    @jax.jit
    def count(population, ids):
        def one(id):
            data = population.client(id)
            y = data.examples[label].astype(jnp.int32)
            there = data.mask.reshape(data.mask.shape + (1,) * (y.ndim - 1)) & (y >= 0)
            place = jnp.where(there, jnp.minimum(y, num_labels), num_labels + 1).reshape(-1)
            return jnp.zeros(num_labels + 2, jnp.int32).at[place].add(1)

        return jax.vmap(one)(ids)

    parts = []
    size = max(1, min(population.size, CLIENTS, (1 << 22) // max(1, rows.mask.shape[0])))
    for start in range(0, population.size, size):
        ids = np.arange(start, start + size, dtype=np.int32)  # ids past the last client are cut off below
        parts.append(np.asarray(count(population, ids)))
    counts = np.concatenate(parts)[: population.size].astype(np.int64)
    if counts[:, num_labels].any():
        validate.fail("num_labels", "a number above every label", num_labels)
    return counts[:, :num_labels]


def label_heterogeneity(counts: Any, *, positions: Any = None) -> dict[str, float]:
    """How far the clients' label distributions are from the pooled one, averaged over clients by examples.

    Args:
      counts: [N, L] labels of each client, `label_counts`; clients without any are left out.
      positions: [L] positions of ordered labels, for the earth mover's distance.

    Returns: means of total_variation, l1_distance, kullback_leibler, jensen_shannon (the weighted mean of
      KL(p_i || pooled) is the mutual information of client and label), entropy and labels_per_client (its
      exponential: the effective number of labels of a client), and earth_mover_distance if there are positions.

    Guarantees: 0 for equal clients, ln 2 of mutual information for two clients with a label each
    (tests/metrics/test_heterogeneity.py::test_label_heterogeneity).

    >>> label_heterogeneity([[4, 0], [0, 4]])["total_variation"]
    0.5
    """
    from scipy.special import entr

    counts = np.asarray(counts, np.float64)
    if counts.ndim != 2 or not ((counts >= 0) & np.isfinite(counts)).all() or not counts.sum():
        validate.fail("counts", "an array [N, L] of counts, not all 0", counts)
    counts = counts[counts.sum(1) > 0]
    shares, pooled = counts.sum(1) / counts.sum(), counts.sum(0) / counts.sum()
    own = counts / counts.sum(1, keepdims=True)
    entropy = entr(own).sum(-1)
    found = {
        "total_variation": total_variation(own, pooled),
        "l1_distance": l1_distance(own, pooled),
        "kullback_leibler": kullback_leibler_divergence(own, pooled),
        "jensen_shannon": jensen_shannon_divergence(own, pooled),
        "entropy": entropy,
        "labels_per_client": np.exp(entropy),
    }
    if positions is not None:
        found["earth_mover_distance"] = earth_mover_distance(own, pooled, positions)
    return {name: float(shares @ values) for name, values in found.items()}
