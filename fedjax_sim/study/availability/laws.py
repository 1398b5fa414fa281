"""This module has the closed-form mean and variance of FedAvg's model when clients come and go.

Clients have risks f_i = |w - a_i|^2 / 2. A round moves the model by s (a_i - w), with s = 1 - (1 - eta)^K, averaged
over the available clients. The model is therefore an exponential moving average of the rounds' mean optima, and its
moments follow from theirs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Law(NamedTuple):
    """A `Law` holds the moments of the model after many rounds.

    Fields:
      mean: [d].
      variance: the trace of the covariance.
    """

    mean: np.ndarray
    variance: float

    def excess(self, optimum: np.ndarray) -> float:
        """Returns the expected excess loss E F(w) - F(w*).

        Args:
          optimum: [d] w*.
        """
        return float(((self.mean - optimum) ** 2).sum() + self.variance) / 2


def round_contraction(num_steps: int, step_size: float) -> float:
    """Returns s = 1 - (1 - eta)^K, the share of the distance to its optimum that a client goes in a round.

    Args:
      num_steps: K.
      step_size: eta, in (0, 1).
    """
    return 1 - (1 - step_size) ** num_steps


def _subsets(size: int) -> np.ndarray:
    """Returns every set of N clients as a mask, [2^N, N] bool; the empty set is first."""
    return (np.arange(1 << size)[:, None] >> np.arange(size)) & 1 == 1


def _round_means(centers: np.ndarray, rates: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the distribution of the mean optimum of a round, given that at least one client is available.

    Returns: (mean optimum of each set of clients [2^N, d], its probability [2^N], the expectation [d]).
    """
    is_available = _subsets(len(centers))
    means = is_available @ centers / np.maximum(is_available.sum(1), 1)[:, None]
    probabilities = np.where(is_available, rates, 1 - rates).prod(1)
    probabilities[0] = 0
    probabilities /= probabilities.sum()
    return means, probabilities, probabilities @ means


def naive(centers: np.ndarray, rates: np.ndarray, s: float) -> Law:
    """Computes the moments under the mean over available clients, who are drawn independently in each round.

    A round without clients changes nothing, so the sets of clients are conditional on not being empty.

    Args:
      centers: [N, d] a_i.
      rates: [N] r_i, the probability that a client is available.
      s: the share of the distance that a client goes in a round, as `round_contraction` gives it.
    """
    means, probabilities, mean = _round_means(centers, rates)
    # The variance of an exponential moving average of independent numbers.
    return Law(mean, s / (2 - s) * float(probabilities @ ((means - mean) ** 2).sum(1)))


def corrected(centers: np.ndarray, rates: np.ndarray, s: float) -> Law:
    """Computes the moments under Horvitz-Thompson: the sum over available clients of (a_i - w) / (N r_i).

    Let 1_i say that client i is available, A = sum 1_i / (N r_i) and B = sum 1_i (a_i - mean) / (N r_i). The error
    e = w - mean then becomes (1 - s A) e + s B. A has mean 1 and B has mean 0, so there is no bias, and the variance
    is the fixed point of the second moment.

    Args:
      centers: [N, d] a_i.
      rates: [N] r_i, the probability that a client is available.
      s: the share of the distance that a client goes in a round, as `round_contraction` gives it.
    """
    size = len(centers)
    mean = centers.mean(0)
    weight_variances = (1 - rates) / rates / size**2  # of 1_i / (N r_i)
    source = s**2 * float(weight_variances @ ((centers - mean) ** 2).sum(1))
    # E (1 - s A)^2 = 1 - 2 s + s^2 (1 + Var A).
    return Law(mean, source / (1 - (1 - 2 * s + s**2 * (1 + weight_variances.sum()))))


def persistent(centers: np.ndarray, leaves: float, comes: float, s: float) -> Law:
    """Computes the moments under the mean over available clients, when each client follows a Markov chain.

    Var w = s / (2 - s) [C_0 + 2 sum_k (1 - s)^k C_k], where C_k is the autocovariance of the rounds' mean optima. The
    chain of all sets of clients is a product of the clients' chains, and is applied axis by axis. Rounds without
    clients are neglected.

    Args:
      centers: [N, d] a_i.
      leaves: the probability that an available client leaves before the next round.
      comes: the probability that an absent client comes before the next round.
      s: the share of the distance that a client goes in a round, as `round_contraction` gives it.
    """
    size = len(centers)
    means, probabilities, mean = _round_means(centers, np.full(size, comes / (leaves + comes)))
    deviations = np.where(probabilities[:, None] > 0, means - mean, 0.0)
    chain = np.array([[1 - comes, comes], [leaves, 1 - leaves]])
    total = float(probabilities @ (deviations**2).sum(1))
    later_deviations = deviations  # expected k rounds later, given the set now
    # Terms are dropped where (1 - s)^k is below 1e-12; 1 - s may be zero, which has no logarithm.
    for k in range(1, math.ceil(math.log(1e-12) / math.log(max(1 - s, 1e-12))) + 1):
        # One axis of length 2 for each client, absent or available, instead of a matrix of 2^N x 2^N.
        grid = later_deviations.reshape((2,) * size + (-1,))
        for axis in range(size):
            grid = np.moveaxis(np.tensordot(chain, grid, (1, axis)), 0, axis)
        later_deviations = grid.reshape(deviations.shape)
        total += 2 * (1 - s) ** k * float(probabilities @ (deviations * later_deviations).sum(1))
    return Law(mean, s / (2 - s) * total)


def daily(centers: np.ndarray, there: np.ndarray, s: float, days: int) -> np.ndarray:
    """Computes the model at each hour of the last day, before the round of that hour, in a run from zero.

    Args:
      centers: [N, d] a_i.
      there: [hours, N] bool, which clients are available at each hour of the day.
      s: the share of the distance that a client goes in a round, as `round_contraction` gives it.
      days: the length of the run.

    Returns: [hours, d].
    """
    model = np.zeros(centers.shape[1])
    path = np.zeros((len(there), centers.shape[1]))
    for _ in range(days):
        for hour, present in enumerate(there):
            path[hour] = model
            if present.any():
                model = model + s * (centers[present].mean(0) - model)
    return path
