"""How much communication a target costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.validate import Finite

__all__ = ["rounds_to_target"]


@validate.named_arguments
def rounds_to_target(
    values: Any, target: Finite, *, rounds: Sequence[int] | None = None, rising: bool = False, interpolate: bool = False
) -> float:
    """The first round after which a metric has reached a target; infinite if it never has.

    Args:
      values: [T] the metric after each of `rounds`; NaN where it was not evaluated.
      target: reached by values of at most this, or of at least this if `rising`.
      rounds: [T] rising round numbers; 1, 2, ..., T by default.
      rising: True for accuracies.
      interpolate: linearly between the two evaluations around the crossing, of the best value so far.

    Guarantees: the first crossing, and none at a NaN (tests/metrics/test_communication.py::test_first_crossing); the
    same for 1 - x (::test_directions); interpolation (::test_interpolation).

    References: McMahan et al. 2017, section 3 (best value so far, linear interpolation).

    >>> rounds_to_target([2.0, 1.0, 1.5, 0.5], 1.2), rounds_to_target([0.5, 0.7], 0.9, rising=True)
    (2.0, inf)
    >>> rounds_to_target([2.0, 1.0], 1.5, rounds=[10, 20], interpolate=True)
    15.0
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not values.size:
        validate.fail("values", "a list of numbers, one an evaluation", values.tolist())
    at = np.arange(1, len(values) + 1) if rounds is None else np.asarray(rounds)
    if at.shape != values.shape or at.dtype.kind not in "iu" or not (np.diff(at) > 0).all() or at[0] < 0:
        validate.fail("rounds", f"{len(values)} rising integers >= 0", at.tolist())
    sign = -1.0 if rising else 1.0
    known = ~np.isnan(values)
    at, best = at[known], np.minimum.accumulate(sign * values[known])
    reached = best <= sign * target
    if not reached.any():
        return math.inf
    first = int(np.argmax(reached))
    if not interpolate or first == 0 or not np.isfinite(best[first - 1 : first + 1]).all():
        return float(at[first])
    share = (best[first - 1] - sign * target) / (best[first - 1] - best[first])
    return float(at[first - 1] + share * (at[first] - at[first - 1]))
