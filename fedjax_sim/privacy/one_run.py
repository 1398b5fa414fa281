"""An audit of one run: many canaries, each put in or left out by a fair coin, and guesses of these coins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np

from fedjax_sim import validate
from fedjax_sim.privacy.scores import Estimate
from fedjax_sim.validate import Number, PositiveInt, ShareBelowOne

__all__ = ["audit_one_run", "one_run_epsilon"]


@validate.named_arguments
def one_run_epsilon(
    num_canaries: PositiveInt,
    num_guesses: int,
    num_correct: int,
    *,
    delta: ShareBelowOne = 1e-5,
    confidence: Annotated[float, Number(0.5, 1, open_high=True)] = 0.99,
) -> float:
    """A lower bound of epsilon from guesses of which of many canaries took part in ONE run.

    Each of m canaries was put in or left out by its own fair coin; the auditor guessed r of the coins, v rightly.

    Args:
      num_canaries, num_guesses, num_correct: m >= r >= v.
      delta: in [0, 1).
      confidence: that the bound is true.

    Guarantees: 0 for chance; the bound of randomised response tends to its epsilon and never passes it more often than
    1 - confidence (tests/privacy/test_audit.py::test_one_run_bound).

    References: Steinke, Nasr and Jagielski 2023, theorem 5.2 and appendix D.

    >>> round(one_run_epsilon(1000, 100, 98, delta=1e-5, confidence=0.95), 2)
    2.71
    """
    from scipy import stats

    validate.integer("num_guesses", num_guesses, 0, num_canaries)
    validate.integer("num_correct", num_correct, 0, num_guesses)

    def chance(epsilon):  # of so many right guesses, at most
        right = 1 / (1 + math.exp(-epsilon))
        above = stats.binom.sf(num_correct - 1, num_guesses, right)
        below = np.cumsum(stats.binom.pmf(np.arange(num_correct - 1, -1, -1), num_guesses, right))
        worst = (below / np.arange(1, num_correct + 1)).max(initial=0.0)
        return above + 2 * num_canaries * delta * worst

    if chance(0.0) >= 1 - confidence:
        return 0.0
    low, high = 0.0, 1.0
    while chance(high) < 1 - confidence and high < 64:
        low, high = high, 2 * high
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
    """The best one-run bound: canaries with the highest scores are guessed in, with the lowest out, others not at all.

    Args:
      included: [m] bool, the canaries' fair coins.
      scores: [m], one per canary.
      guessed: shares of the canaries to guess; the error 1 - confidence is shared out evenly among them.

    References: Steinke, Nasr and Jagielski 2023, algorithm 1.
    """
    included, scores = np.asarray(included, bool), np.asarray(scores, np.float64)
    if included.shape != scores.shape or scores.ndim != 1 or not np.isfinite(scores).all():
        validate.fail("scores", "a finite score for each canary", f"shapes {included.shape} and {scores.shape}")
    order, best = np.argsort(scores, kind="stable"), (0.0, 0, 0)
    for share in guessed:
        half = max(int(share * scores.size) // 2, 1)
        correct = int(included[order[-half:]].sum() + (~included[order[:half]]).sum())
        each = 1 - (1 - confidence) / len(guessed)
        best = max(best, (one_run_epsilon(scores.size, 2 * half, correct, delta=delta, confidence=each), correct, half))
    note = f"{best[1]} of {2 * best[2]} guesses right about {scores.size} canaries in one run; no bound from above"
    return Estimate("one run", best[0], math.inf, note)
