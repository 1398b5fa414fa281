"""This module measures distances between label distributions, and the label heterogeneity of a population."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.types import Population
from fedjax_sim.validate import PositiveInt

CLIENTS_AT_ONCE = 4096  # the most clients whose labels are counted at once


def _pair(first: Any, second: Any) -> tuple[np.ndarray, np.ndarray]:
    """Checks that both are probabilities on one support, and returns them as float64."""
    first = np.asarray(first, np.float64)
    second = np.asarray(second, np.float64)
    if not first.ndim or not second.ndim or first.shape[-1] != second.shape[-1]:
        validate.fail("first, second", "probabilities on one support", (first.shape, second.shape))
    for name, value in (("first", first), ("second", second)):
        if not ((value >= 0).all() and np.allclose(value.sum(-1), 1, rtol=0, atol=1e-6)):
            validate.fail(name, "probabilities >= 0 that sum to 1", value)
    return first, second


def _plain(value: np.ndarray) -> Any:
    """Returns a Python float in place of an array without axes."""
    return float(value) if np.ndim(value) == 0 else value


def total_variation(first: Any, second: Any) -> Any:
    """Computes the total variation distance, TV = 1/2 sum |p - q|, in [0, 1].

    Args:
      first, second: [..., L] probabilities on one support; leading axes broadcast.

    Returns: a float, or [...] float64.

    Guarantees: an example by hand is met (tests/metrics/test_heterogeneity.py::test_worked_example); the result is
    symmetric, 0 for equal rows, and at most 1 (::test_distances_are_distances).

    >>> round(total_variation([0.2, 0.5, 0.3], [0.5, 0.3, 0.2]), 12)
    0.3
    """
    first, second = _pair(first, second)
    return _plain(np.abs(first - second).sum(-1) / 2)


def l1_distance(first: Any, second: Any) -> Any:
    """Computes the L1 distance, sum |p - q| = 2 TV.

    Zhao et al. 2018 call it the earth mover's distance, although it does not depend on positions.

    Args:
      first, second: as in `total_variation`.

    >>> round(l1_distance([0.2, 0.5, 0.3], [0.5, 0.3, 0.2]), 12)
    0.6
    """
    first, second = _pair(first, second)
    return _plain(np.abs(first - second).sum(-1))


def earth_mover_distance(first: Any, second: Any, positions: Any) -> Any:
    """Computes the Wasserstein distance W1 in one dimension.

    It is the integral of |F_1 - F_2| over the distribution functions.

    It is at least the difference of the means, and equal to it if one distribution dominates the other.

    Args:
      first, second: [..., L] probabilities.
      positions: [L] finite positions of the support, in any order.

    Returns: a float, or [...] float64.

    Guarantees: The distance equals scipy's (tests/metrics/test_heterogeneity.py::test_earth_mover_distance_is_scipys),
    and two examples by hand (::test_worked_example, ::test_gap_is_not_the_distance).

    >>> round(earth_mover_distance([0.2, 0.5, 0.3], [0.5, 0.3, 0.2], [0, 1, 2]), 12)
    0.4
    """
    first, second = _pair(first, second)
    positions = np.asarray(positions, np.float64)
    if positions.shape != first.shape[-1:] or not np.isfinite(positions).all():
        validate.fail("positions", f"{first.shape[-1]} finite numbers", positions)
    order = np.argsort(positions)
    distribution_gap = np.cumsum((first - second)[..., order], -1)[..., :-1]
    return _plain((np.abs(distribution_gap) * np.diff(positions[order])).sum(-1))


def kullback_leibler_divergence(first: Any, second: Any) -> Any:
    """Computes the divergence KL(p || q) = sum p ln(p / q) in nats.

    It is not symmetric, and infinite if q is 0 where p is not.

    Args:
      first, second: p and q, as in `total_variation`.

    Returns: a float, or [...] float64, in [0, inf].

    Guarantees: an example by hand is met, in both directions
    (tests/metrics/test_heterogeneity.py::test_worked_example), and the result may be infinite
    (::test_distances_are_distances).

    >>> round(kullback_leibler_divergence([0.2, 0.5, 0.3], [0.5, 0.3, 0.2]), 6)
    0.193794
    """
    from scipy.special import rel_entr

    return _plain(rel_entr(*_pair(first, second)).sum(-1))


def jensen_shannon_divergence(first: Any, second: Any) -> Any:
    """Computes the divergence (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2, in nats.

    It is symmetric and at most ln 2.

    Args:
      first, second: p and q, as in `total_variation`.

    >>> round(jensen_shannon_divergence([0.2, 0.5, 0.3], [0.5, 0.3, 0.2]), 7)
    0.0508746
    """
    from scipy.special import rel_entr

    first, second = _pair(first, second)
    middle = (first + second) / 2
    return _plain((rel_entr(first, middle) + rel_entr(second, middle)).sum(-1) / 2)


def optimum_gap(first: Any, second: Any, positions: Any) -> Any:
    """Computes |E_1 Y - E_2 Y|, the distance of the best constant predictions under squared loss; at most W1.

    Args:
      first, second, positions: as in `earth_mover_distance`.

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
    """Counts the examples of each label that every client has, as [N, L] int64.

    Args:
      population: of examples with an integer leaf `label`, [n] or [n, ...]; negative labels are padding.
      num_labels: L; a label that is not below L is an error.
      label: the name of the leaf.

    Raises: ValueError, TypeError for a leaf that does not exist or is not of integers, and for labels of at least L.

    Guarantees: The counts equal those of a loop over clients (tests/metrics/test_heterogeneity.py::test_label_counts).
    """
    client_spec = jax.eval_shape(population.client, jnp.int32(0))
    if not isinstance(client_spec.examples, dict) or label not in client_spec.examples:
        validate.fail("label", "a leaf of the examples", label)
    if not jnp.issubdtype(client_spec.examples[label].dtype, jnp.integer):
        validate.fail("label", "integer labels", client_spec.examples[label].dtype, error=TypeError)

    @jax.jit
    def count(population, ids):
        def of_client(id):
            data = population.client(id)
            labels = data.examples[label].astype(jnp.int32)
            is_valid = data.mask.reshape(data.mask.shape + (1,) * (labels.ndim - 1)) & (labels >= 0)
            # Two bins more: labels of at least L, which are refused below, and padding, which is dropped.
            bins = jnp.where(is_valid, jnp.minimum(labels, num_labels), num_labels + 1).reshape(-1)
            return jnp.zeros(num_labels + 2, jnp.int32).at[bins].add(1)

        return jax.vmap(of_client)(ids)

    blocks = []
    block_size = max(1, min(population.size, CLIENTS_AT_ONCE, (1 << 22) // max(1, client_spec.mask.shape[0])))
    for start in range(0, population.size, block_size):
        # The last block has ids past the last client, so that its shape is the same; they are cut off below.
        ids = np.arange(start, start + block_size, dtype=np.int32)
        blocks.append(np.asarray(count(population, ids)))
    counts = np.concatenate(blocks)[: population.size].astype(np.int64)
    if counts[:, num_labels].any():
        validate.fail("num_labels", "a number above every label", num_labels)
    return counts[:, :num_labels]


def label_heterogeneity(counts: Any, *, positions: Any = None) -> dict[str, float]:
    """Computes how far the clients' label distributions are from the pooled one, averaged over examples.

    Args:
      counts: [N, L] labels of each client, as from `label_counts`. Clients without labels are left out.
      positions: [L] positions of ordered labels, for the earth mover's distance.

    Returns: a dict of means. `total_variation`, `l1_distance`, `kullback_leibler` and `jensen_shannon` are distances
    from the pooled distribution; the weighted mean of KL(p_i || pooled) is the mutual information of client and label.
    `entropy` is that of a client's labels, and `labels_per_client` its exponential, the effective number of labels of a
    client. `earth_mover_distance` is there only with positions.

    Guarantees: All distances are 0 for equal clients, and the mutual information is ln 2 for two clients with one label
    each (tests/metrics/test_heterogeneity.py::test_label_heterogeneity).

    >>> label_heterogeneity([[4, 0], [0, 4]])["total_variation"]
    0.5
    """
    from scipy.special import entr

    counts = np.asarray(counts, np.float64)
    if counts.ndim != 2 or not ((counts >= 0) & np.isfinite(counts)).all() or not counts.sum():
        validate.fail("counts", "an array [N, L] of counts, not all 0", counts)
    counts = counts[counts.sum(1) > 0]
    shares = counts.sum(1) / counts.sum()
    # Every measure below compares each client with the pooled distribution, row by row.
    pooled = counts.sum(0) / counts.sum()
    by_client = counts / counts.sum(1, keepdims=True)
    entropy = entr(by_client).sum(-1)
    values_by_name = {
        "total_variation": total_variation(by_client, pooled),
        "l1_distance": l1_distance(by_client, pooled),
        "kullback_leibler": kullback_leibler_divergence(by_client, pooled),
        "jensen_shannon": jensen_shannon_divergence(by_client, pooled),
        "entropy": entropy,
        "labels_per_client": np.exp(entropy),
    }
    if positions is not None:
        values_by_name["earth_mover_distance"] = earth_mover_distance(by_client, pooled, positions)
    # Weighted by examples: with these weights the mean of KL(p_i || pooled) is a mutual information.
    return {name: float(shares @ values) for name, values in values_by_name.items()}
