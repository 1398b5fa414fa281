"""This module predicts how often secure aggregation aborts, and the number of summed messages, under random dropout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedjax_sim import validate
from fedjax_sim.validate import PositiveInt

STEPS = 4  # steps of the protocol: advertise keys, share secrets, upload, unmask


def _presence_probabilities(dropout: float | Sequence[float]) -> np.ndarray:
    """Computes the probability that a client is still present after each of the four steps."""
    values = np.asarray(dropout, object).tolist()  # a list, or one number
    dropout_by_step = values if isinstance(values, list) else [values] * STEPS
    if len(dropout_by_step) != STEPS:
        validate.fail("dropout", "a probability, or one for each of the four steps", dropout)
    for step, probability in enumerate(dropout_by_step):
        validate.in_range(f"dropout[{step}]", probability, 0, 1)
    return np.cumprod([1 - probability for probability in dropout_by_step])


@validate.named_arguments
def expected_messages(num_clients: PositiveInt, dropout: float | Sequence[float]) -> float:
    """Computes the mean number of messages that reach the server: m (1 - p_1) (1 - p_2) (1 - p_3).

    Args:
      num_clients: m.
      dropout: the probability that a client leaves before a step; a number, or one for each of the four steps.

    Guarantees: The number is the mean over simulated rounds (tests/study/test_dropout.py).

    >>> expected_messages(100, [0.0, 0.0, 0.1, 0.5])
    90.0
    """
    return float(num_clients * _presence_probabilities(dropout)[2])


@validate.named_arguments
def abort_probability(
    num_clients: PositiveInt,
    threshold: int,
    dropout: float | Sequence[float],
    *,
    neighbours: int | None = None,
    min_messages: int | None = None,
) -> float:
    """Computes the probability that `aggregation.secure_sum` aborts a round, if m clients leave independently.

    On the complete graph all secrets have the same holders. Let U be the number of messages, and A the number of their
    senders who answer. The round is aborted if A < t or U < `min_messages`. U, and A given U, are binomial.

    On a circle of k neighbours the result is an upper bound, at most 1. It is the sum over clients of the probability
    that a client shared its secrets and has fewer than t holders left. Neighbours share holders, so the true
    probability may be a few times smaller.

    Args:
      num_clients: m, all of whom report. On a circle these are the invited clients, because empty slots of a Poisson
        cohort are not on the circle; average over their number. A client that is invited and does not report counts as
        a client that leaves before the first step.
      threshold, dropout, neighbours, min_messages: as in `secure_sum`; on a circle 2 t > k.

    Guarantees: On the complete graph, the probability equals an enumeration of all ways to leave
    (tests/theory/test_secure_aggregation.py). It equals the share of simulated rounds that are aborted, which on a
    circle is below the bound (tests/study/test_dropout.py).

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
    least_messages = threshold if min_messages is None else min_messages
    validate.integer("min_messages", least_messages, 1, num_clients)
    # Probabilities that a client is still present after each step; the first step decides nothing by itself.
    _, share_probability, upload_probability, answer_probability = _presence_probabilities(dropout)
    if neighbours is not None:
        loss_probability = share_probability * stats.binom.cdf(threshold - 1, neighbours, answer_probability)
        few_messages_probability = stats.binom.cdf(least_messages - 1, num_clients, upload_probability)
        return float(min(num_clients * loss_probability + few_messages_probability, 1.0))
    messages = np.arange(least_messages, num_clients + 1)
    answer_given_upload = answer_probability / upload_probability if upload_probability else 0.0
    open_probability = stats.binom.sf(threshold - 1, messages, answer_given_upload)
    return float(
        np.clip(1 - (stats.binom.pmf(messages, num_clients, upload_probability) * open_probability).sum(), 0, 1)
    )
