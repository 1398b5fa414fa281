"""How often secure aggregation aborts, and how many messages its sums hold, where clients leave at random."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedjax_sim import validate
from fedjax_sim.validate import PositiveInt

__all__ = ["abort_probability", "expected_messages"]

STEPS = 4  # advertise keys, share secrets, upload, unmask


def _stays(dropout: float | Sequence[float]) -> np.ndarray:
    """[4] the probability of being there after each step."""
    each = [dropout] * STEPS if np.ndim(dropout) == 0 else list(dropout)
    if len(each) != STEPS:
        validate.fail("dropout", "a probability, or one for each of the four steps", dropout)
    for i, probability in enumerate(each):
        validate.in_range(f"dropout[{i}]", probability, 0, 1)
    return np.cumprod([1 - x for x in each])


@validate.named_arguments
def expected_messages(num_clients: PositiveInt, dropout: float | Sequence[float]) -> float:
    """The mean number of messages that reach the server: m (1 - p_1) (1 - p_2) (1 - p_3).

    Guarantees: the mean over simulated rounds (tests/study/test_dropout.py).

    >>> expected_messages(100, [0.0, 0.0, 0.1, 0.5])
    90.0
    """
    return float(num_clients * _stays(dropout)[2])


@validate.named_arguments
def abort_probability(
    num_clients: PositiveInt,
    threshold: int,
    dropout: float | Sequence[float],
    *,
    neighbours: int | None = None,
    min_messages: int | None = None,
) -> float:
    """The probability that `aggregation.secure_sum` aborts a round, where m clients leave independently.

    On the complete graph all secrets have the same holders: with U the number of messages and A those of them who
    answer, the round is aborted if A < t or U < `min_messages`, and U and A given U are binomial. On a circle of k
    neighbours it is an upper bound, the sum over clients of the probability that one who shared has fewer than t
    holders left, at most 1; neighbours share holders, so the truth may be a few times smaller.

    Args:
      num_clients: m, all of whom report: on a circle the invited, for empty slots of a Poisson cohort are not on it;
        average over their number. Who is invited and does not report is one who leaves before the first step.
      threshold, dropout, neighbours, min_messages: as in `secure_sum`; on a circle 2 t > k.

    Guarantees: an enumeration of all ways to leave (tests/theory/test_secure_aggregation.py); the share of simulated
    rounds that are aborted, and below the bound on a circle (tests/study/test_dropout.py).

    References: Bonawitz et al. 2017, section 4 (correctness from t clients on); Bell et al. 2020, section 3.
    Derivation: binomial tails; on a circle the union bound.

    >>> round(abort_probability(3, 2, [0, 0, 0, 0.5]), 3)  # fewer than 2 of 3 answer: 4 cases of 8
    0.5
    """
    from scipy import stats

    holders = num_clients if neighbours is None else neighbours
    if neighbours is not None:
        validate.integer("neighbours", neighbours, 2, num_clients - 1)
    least_threshold = 1 if neighbours is None else neighbours // 2 + 1
    validate.integer("threshold", threshold, least_threshold, holders)
    least = threshold if min_messages is None else min_messages
    validate.integer("min_messages", least, 1, num_clients)
    _, shares, uploads, answers = _stays(dropout)
    if neighbours is not None:
        closed = shares * stats.binom.cdf(threshold - 1, neighbours, answers)
        few = stats.binom.cdf(least - 1, num_clients, uploads)
        return float(min(num_clients * closed + few, 1.0))
    messages = np.arange(least, num_clients + 1)
    answer = answers / uploads if uploads else 0.0
    opens = stats.binom.sf(threshold - 1, messages, answer)
    return float(np.clip(1 - (stats.binom.pmf(messages, num_clients, uploads) * opens).sum(), 0, 1))
