"""This module measures how much communication a target costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.types.shares import reaches
from fedjax_sim.validate import Finite


@validate.named_arguments
def rounds_to_target(
    values: Any, target: Finite, *, rounds: Sequence[int] | None = None, rising: bool = False, interpolate: bool = False
) -> float:
    """Finds the first round after which a metric has reached a target; infinite if it never does.

    Args:
      values: [T] the metric after each of `rounds`; NaN if it was not evaluated.
      target: reached by values of at most this number, or of at least this number if `rising`.
      rounds: [T] rising round numbers; 1, 2, ..., T by default.
      rising: True for metrics that should be large, such as accuracies.
      interpolate: whether the best value so far is interpolated linearly between the two evaluations around the
        crossing.

    Returns: a round number, which is fractional if interpolated; math.inf if the target is not reached.

    Raises: ValueError for values or rounds that are no lists of numbers of the same length, in rising order.

    Guarantees: The result is the first crossing, and never a NaN
    (tests/metrics/test_communication.py::test_first_crossing). It is the same for 1 - x with `rising`
    (::test_directions). Interpolation uses the best value so far (::test_interpolation).

    References: McMahan et al. 2017, section 3 (best value so far, linear interpolation).

    >>> rounds_to_target([2.0, 1.0, 1.5, 0.5], 1.2), rounds_to_target([0.5, 0.7], 0.9, rising=True)
    (2.0, inf)
    >>> rounds_to_target([2.0, 1.0], 1.5, rounds=[10, 20], interpolate=True)
    15.0
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not values.size:
        validate.fail("values", "a list of numbers, one an evaluation", values.tolist())
    round_numbers = np.arange(1, len(values) + 1) if rounds is None else np.asarray(rounds)
    if (
        round_numbers.shape != values.shape
        or round_numbers.dtype.kind not in "iu"
        or not (np.diff(round_numbers) > 0).all()
        or round_numbers[0] < 0
    ):
        validate.fail("rounds", f"{len(values)} rising integers >= 0", round_numbers.tolist())
    sign = -1.0 if rising else 1.0
    is_evaluated = ~np.isnan(values)
    round_numbers = round_numbers[is_evaluated]
    best = np.minimum.accumulate(sign * values[is_evaluated])
    # Logged metrics are float32: 5 right answers of 100 may be 0.049999997, and reach 0.05.
    reached = reaches(-best, -sign * target)
    if not reached.any():
        return math.inf
    first = int(np.argmax(reached))
    if not interpolate or first == 0 or not np.isfinite(best[first - 1 : first + 1]).all():
        return float(round_numbers[first])
    # The first evaluation has no predecessor, and infinite values cannot be interpolated.
    share = min((best[first - 1] - sign * target) / (best[first - 1] - best[first]), 1.0)
    return float(round_numbers[first - 1] + share * (round_numbers[first] - round_numbers[first - 1]))
