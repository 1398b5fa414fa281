"""Metrics of predicted numbers: root mean squared error, mean absolute error, and R^2.

A row that is not finite makes them infinite or NaN.
"""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim.metrics.scored_rows import mean_over, number_rows, precise_sum, unless
from fedjax_sim.types import Array


def root_mean_squared_error(outputs: Array, targets: Array, mask: Array | None = None) -> Array:
    """Computes RMSE = sqrt(1/n sum_i (f_i - y_i)^2), over all coordinates of all rows.

    Args:
      outputs: f, [n, ...], or [n, 1] for scalar targets [n].
      targets: y, the same shape, or [n], of any real dtype.
      mask: [n] bool, which rows are real; None: all of them.

    Returns: [], in units of the targets; NaN without any real row.

    Raises: ValueError for other shapes, and for more than 2^24 numbers.

    Guarantees: equals scikit-learn to 1e-6 (tests/metrics/test_scores.py::test_numbers_against_scikit_learn).

    >>> import jax.numpy as jnp
    >>> root_mean_squared_error(jnp.array([4.0, 4.0]), jnp.array([1.0, 7.0])).item()
    3.0
    """
    rows = number_rows(outputs, targets, mask)
    return jnp.sqrt(mean_over(jnp.square(rows.predictions - rows.targets), rows.mask))


def mean_absolute_error(outputs: Array, targets: Array, mask: Array | None = None) -> Array:
    """Computes MAE = 1/n sum_i |f_i - y_i|, over all coordinates of all rows.

    Args:
      outputs, targets, mask: as in `root_mean_squared_error`.

    Returns: [], in units of the targets; NaN without any real row.

    Raises: ValueError for other shapes, and for more than 2^24 numbers.

    Guarantees: equals scikit-learn to 1e-6 (tests/metrics/test_scores.py::test_numbers_against_scikit_learn).

    >>> import jax.numpy as jnp
    >>> mean_absolute_error(jnp.array([1.0, 5.0]), jnp.array([1.0, 1.0])).item()
    2.0
    """
    rows = number_rows(outputs, targets, mask)
    return mean_over(jnp.abs(rows.predictions - rows.targets), rows.mask)


def r2_score(outputs: Array, targets: Array, mask: Array | None = None) -> Array:
    """Computes R^2 = 1 - sum_i (f_i - y_i)^2 / sum_i (y_i - mean y)^2, over all coordinates of all rows.

    Args:
      outputs, targets, mask: as in `root_mean_squared_error`.

    Returns: [] at most 1; 0 for a model that always predicts the mean. NaN if all targets are equal, where it is not
      defined.

    Raises: ValueError for other shapes, and for more than 2^24 numbers.

    Guarantees: equals scikit-learn to 1e-6 (tests/metrics/test_scores.py::test_numbers_against_scikit_learn), also for
    targets far from 0 (::test_r2_far_from_zero).

    References: Draper and Smith, Applied regression analysis, 1998, section 1.3.

    >>> import jax.numpy as jnp
    >>> r2_score(jnp.array([1.0, 2.0, 6.0]), jnp.array([1.0, 2.0, 3.0])).item()
    -3.5
    """
    rows = number_rows(outputs, targets, mask)
    error = precise_sum(jnp.square(rows.predictions - rows.targets))
    # A first guess of the mean is subtracted before the mean is computed, so that large targets lose no digits.
    centred = rows.targets - mean_over(rows.targets, rows.mask)
    centred = jnp.where(rows.mask, centred - mean_over(centred, rows.mask), 0)
    spread = precise_sum(jnp.square(centred))
    # The difference of equal targets from their mean is not 0, as the mean is rounded.
    highest = jnp.where(rows.mask, rows.targets, -jnp.inf).max(initial=-jnp.inf)
    lowest = jnp.where(rows.mask, rows.targets, jnp.inf).min(initial=jnp.inf)
    return unless(~(highest > lowest), 1 - error / spread)
