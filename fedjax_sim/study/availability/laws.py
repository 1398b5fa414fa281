"""Closed forms: where FedAvg ends, and how far it strays, when clients with f_i = |w - a_i|^2 / 2 come and go.

A round moves the model by s (a_i - w), s = 1 - (1 - eta)^K, averaged over those who are there. So w is a moving average
of what rounds see, and everything follows from the law of that.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

__all__ = ["Law", "corrected", "daily", "naive", "persistent", "round_contraction"]


class Law(NamedTuple):
    """Of the model after many rounds."""

    mean: np.ndarray  # [d]
    variance: float  # trace of the covariance

    def excess(self, optimum: np.ndarray) -> float:
        """E F(w) - F(w*)."""
        return float(((self.mean - optimum) ** 2).sum() + self.variance) / 2


def round_contraction(num_steps: int, step_size: float) -> float:
    """s = 1 - (1 - eta)^K, the share of the way to its optimum that a client goes in a round."""
    return 1 - (1 - step_size) ** num_steps


def _subsets(size: int) -> np.ndarray:
    """[2^N, N] bool, every set of clients, the empty one first."""
    return (np.arange(1 << size)[:, None] >> np.arange(size)) & 1 == 1


def _seen(centers: np.ndarray, rates: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """([2^N, d] means of the sets, [2^N] chances of the sets that are not empty, [d] the mean of what is seen)."""
    there = _subsets(len(centers))
    means = there @ centers / np.maximum(there.sum(1), 1)[:, None]
    chances = np.where(there, rates, 1 - rates).prod(1)
    chances[0] = 0
    chances /= chances.sum()
    return means, chances, chances @ means


def naive(centers: np.ndarray, rates: np.ndarray, s: float) -> Law:
    """The mean over those who are there, each with a chance of its own, independently in each round.

    Rounds without anybody change nothing, so sets are conditional on somebody.
    """
    means, chances, mean = _seen(centers, rates)
    return Law(mean, s / (2 - s) * float(chances @ ((means - mean) ** 2).sum(1)))


def corrected(centers: np.ndarray, rates: np.ndarray, s: float) -> Law:
    """Horvitz-Thompson: sum over those who are there of (a_i - w) / (N r_i).

    With A = sum 1_i / (N r_i) and B = sum 1_i (a_i - mean) / (N r_i), e <- (1 - s A) e + s B: A has mean 1, B mean 0.
    """
    size, mean = len(centers), centers.mean(0)
    noise = (1 - rates) / rates / size**2
    source = s**2 * float(noise @ ((centers - mean) ** 2).sum(1))
    return Law(mean, source / (1 - (1 - 2 * s + s**2 * (1 + noise.sum()))))


def persistent(centers: np.ndarray, leaves: float, comes: float, s: float) -> Law:
    """The mean over those who are there, each a Markov chain of its own that moves once a round.

    Var w = s / (2 - s) [C_0 + 2 sum_k (1 - s)^k C_k], C_k the autocovariance of what rounds see. The chain of all sets
    is a product of chains, applied axis by axis. Rounds without anybody are neglected.
    """
    size = len(centers)
    means, chances, mean = _seen(centers, np.full(size, comes / (leaves + comes)))
    away = np.where(chances[:, None] > 0, means - mean, 0.0)
    chain = np.array([[1 - comes, comes], [leaves, 1 - leaves]])
    total, later = float(chances @ (away**2).sum(1)), away
    for k in range(1, math.ceil(math.log(1e-12) / math.log(1 - s)) + 1):
        grid = later.reshape((2,) * size + (-1,))
        for axis in range(size):
            grid = np.moveaxis(np.tensordot(chain, grid, (1, axis)), 0, axis)
        later = grid.reshape(away.shape)
        total += 2 * (1 - s) ** k * float(chances @ (away * later).sum(1))
    return Law(mean, s / (2 - s) * total)


def daily(centers: np.ndarray, there: np.ndarray, s: float, days: int) -> np.ndarray:
    """[hours, d] the model at each hour of the last day, before that hour's round, from zero.

    Args:
      there: [hours, N] bool, who is there at each hour of the day.
    """
    model, path = np.zeros(centers.shape[1]), np.zeros((len(there), centers.shape[1]))
    for _ in range(days):
        for hour, present in enumerate(there):
            path[hour] = model
            if present.any():
                model = model + s * (centers[present].mean(0) - model)
    return path
