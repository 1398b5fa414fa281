"""How evenly a metric is spread over clients: the worst tenth of them, its deviation, Jain's and Gini's indices."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedjax_sim import validate


def lowest_decile(values: Any) -> float:
    """Computes the mean over the tenth of the clients with the lowest values, rounded up to whole clients.

    Args:
      values: [N] a metric of each client, such as its accuracy. NaN gives NaN, which a diverged model's losses may be.

    Raises: ValueError for no values.

    >>> lowest_decile([0.9, 0.5, 0.8, 0.7])
    0.5
    """
    ascending, num_clients = _sorted(values)
    return float(ascending[:num_clients].mean())


def highest_decile(values: Any) -> float:
    """Computes the mean over the tenth of the clients with the highest values, as `lowest_decile`.

    >>> highest_decile([0.9, 0.5, 0.8, 0.7])
    0.9
    """
    ascending, num_clients = _sorted(values)
    return float(ascending[-num_clients:].mean())


def _sorted(values: Any) -> tuple[np.ndarray, int]:
    """Returns the values from the lowest up, all NaN if one is, and how many clients a tenth are."""
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not values.size:
        validate.fail("values", "[N] numbers, one for each client", values)
    # NumPy sorts NaN to the end, where a mean of the lowest values would miss it.
    ascending = np.full_like(values, np.nan) if np.isnan(values).any() else np.sort(values)
    return ascending, -(-len(values) // 10)


def fairness(values: Any) -> dict[str, float]:
    """Computes how evenly a metric is spread over clients. All clients count alike.

    Args:
      values: [N] >= 0, finite: a metric of each client, such as its accuracy (`metrics.per_client` has its sums).

    Returns: a dict.
      mean, variance: over clients; the variance divides by N.
      lowest_decile, highest_decile: means over the tenths of the clients with the lowest and the highest values.
      jain: (sum x)^2 / (N sum x^2), from 1/N for one client that has everything to 1 for equal ones.
      gini: sum_ij |x_i - x_j| / (2 N sum x), from 0 for equal clients to 1 - 1/N for one that has everything.
      Where all values are 0 the clients are equal: jain is 1, and gini 0.

    Raises: ValueError for values that are negative or not finite, and for none.

    Guarantees: both indices are those of their double sums, at their bounds and between, and a unit of measurement
    changes neither (tests/metrics/test_fairness.py::test_indices_are_their_double_sums).

    References: Jain, Chiu, Hawe 1984; Li, Sanjabi, Beirami, Smith 2020, section 4, report variance and worst tenth.

    >>> {name: round(value, 3) for name, value in fairness([1.0, 1.0, 4.0]).items() if name in ("jain", "gini")}
    {'jain': 0.667, 'gini': 0.333}
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not values.size or not (np.isfinite(values) & (values >= 0)).all():
        validate.fail("values", "[N] finite numbers >= 0, one for each client", values)
    total = values.sum()
    ranks = np.arange(1, len(values) + 1)
    is_spread = total > 0
    # The double sum of Gini's index, by ranks of the sorted values.
    gini = ((2 * ranks - len(values) - 1) * np.sort(values)).sum() / (len(values) * total) if is_spread else 0.0
    shares = values / total if is_spread else values  # squares of shares neither overflow nor vanish
    return {
        "mean": float(values.mean()),
        "variance": float(values.var()),
        "lowest_decile": lowest_decile(values),
        "highest_decile": highest_decile(values),
        "jain": float(1 / (len(values) * np.square(shares).sum())) if is_spread else 1.0,
        "gini": float(gini),
    }
