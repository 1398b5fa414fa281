"""This module audits a single run with many canaries: fair coins decide which take part, and scores guess the coins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np

from fedjax_sim import validate
from fedjax_sim.privacy.scores import Estimate
from fedjax_sim.validate import Number, PositiveInt, ShareBelowOne


@validate.named_arguments
def one_run_epsilon(
    num_canaries: PositiveInt,
    num_guesses: int,
    num_correct: int,
    *,
    delta: ShareBelowOne = 1e-5,
    confidence: Annotated[float, Number(0.5, 1, open_high=True)] = 0.99,
) -> float:
    """Computes a lower bound of epsilon from guesses of which of many canaries took part in one run.

    Each of m canaries was put in or left out by its own fair coin. The auditor guessed r of the coins, and v of these
    guesses were right.

    Args:
      num_canaries, num_guesses, num_correct: m >= r >= v.
      delta: in [0, 1).
      confidence: the probability that the bound is true, in [0.5, 1).

    Returns: a lower bound of epsilon; 0 if the guesses are no better than chance.

    Guarantees: The bound is 0 for guesses by chance. For randomised response, the bound tends to the true epsilon, and
    exceeds it with probability at most 1 - confidence (tests/privacy/test_audit.py::test_one_run_bound).

    References: Steinke, Nasr and Jagielski 2023, theorem 5.2 and appendix D.

    >>> round(one_run_epsilon(1000, 100, 98, delta=1e-5, confidence=0.95), 2)
    2.71
    """
    from scipy import stats

    validate.integer("num_guesses", num_guesses, 0, num_canaries)
    validate.integer("num_correct", num_correct, 0, num_guesses)

    def chance(epsilon):
        """Bounds the probability of `num_correct` right guesses, for a mechanism with this epsilon."""
        success_rate = 1 / (1 + math.exp(-epsilon))
        binomial_tail = stats.binom.sf(num_correct - 1, num_guesses, success_rate)
        # delta may raise the number of right guesses. The worst way concentrates it on i values below v, for some i.
        interval_masses = np.cumsum(stats.binom.pmf(np.arange(num_correct - 1, -1, -1), num_guesses, success_rate))
        largest_density = (interval_masses / np.arange(1, num_correct + 1)).max(initial=0.0)
        return binomial_tail + 2 * num_canaries * delta * largest_density

    if chance(0.0) >= 1 - confidence:
        return 0.0
    # Doubling and then bisection find the least epsilon under which this many right guesses are not too unlikely.
    low = 0.0
    high = 1.0
    while chance(high) < 1 - confidence and high < 64:
        low = high
        high = 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if chance(middle) < 1 - confidence else (low, middle)
    return low


def audit_one_run(
    included: np.ndarray,
    scores: np.ndarray,
    *,
    delta: float = 1e-5,
    confidence: float = 0.99,
    guessed: Sequence[float] = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
) -> Estimate:
    """Computes the best lower bound of epsilon from one run, over several numbers of guesses.

    Canaries with the highest scores are guessed in, canaries with the lowest scores are guessed out, and the others are
    not guessed.

    Args:
      included: [m] bool, the fair coins of the canaries.
      scores: [m], one score per canary.
      delta, confidence: as in `one_run_epsilon`.
      guessed: shares of the canaries to guess, each in (0, 1]. The error 1 - confidence is divided evenly among them.

    Returns: `Estimate` with an infinite upper end, because one run bounds epsilon from below only.

    Raises: ValueError for scores that are not finite, or not one per canary.

    References: Steinke, Nasr and Jagielski 2023, algorithm 1.
    """
    included = np.asarray(included, bool)
    scores = np.asarray(scores, np.float64)
    if included.shape != scores.shape or scores.ndim != 1 or not np.isfinite(scores).all():
        validate.fail("scores", "a finite score for each canary", f"shapes {included.shape} and {scores.shape}")
    order = np.argsort(scores, kind="stable")
    best_bound = (0.0, 0, 0)
    for share in guessed:
        num_each_side = max(math.floor(validate.as_written(share) * scores.size) // 2, 1)
        correct = int(included[order[-num_each_side:]].sum() + (~included[order[:num_each_side]]).sum())
        # Bonferroni over the numbers of guesses, because the best bound is reported.
        confidence_each = 1 - (1 - confidence) / len(guessed)
        best_bound = max(
            best_bound,
            (
                one_run_epsilon(scores.size, 2 * num_each_side, correct, delta=delta, confidence=confidence_each),
                correct,
                num_each_side,
            ),
        )
    lower, num_correct, num_each_side = best_bound
    guesses = f"{num_correct} of {2 * num_each_side} guesses right"
    note = f"{guesses} about {scores.size} canaries in one run; no bound from above"
    return Estimate("one run", lower, math.inf, note)
