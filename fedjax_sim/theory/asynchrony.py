"""This module predicts what asynchronous servers converge to, under delay and with clients that differ in speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.theory.quadratic import symmetric_matrix
from fedjax_sim.validate import NonNegative, Positive

MOST_DELAY = 1000  # the contraction needs the roots of a polynomial of degree delay + 1
NEGLIGIBLE = 1e-12  # total probability of the staleness values that `arrival_weights` leaves out
MOST_GAPS = 10_000_000  # number of staleness values that are summed at most


def fedasync_contraction(hessian: Any, delay: int, *, mixing_rate: float, step_size: float) -> float:
    """Computes the factor by which an arrival shrinks FedAsync's error in the long run.

    All models are `delay` versions old.

    With one local step of size eta, the recursion is w_{t+1} = (1 - alpha) w_t + alpha (1 - eta h) w_{t-tau}. The
    factor is the largest modulus of the roots of lambda^(tau+1) - (1 - alpha) lambda^tau - alpha (1 - eta h), over the
    eigenvalues h of the Hessian. It is below 1 for every delay if 0 < eta h < 2, because a mean of models is no longer
    than the longest of them.

    Args:
      hessian: a number or [d, d].
      delay: tau in [0, 1000], in server versions.
      mixing_rate: alpha in (0, 1], including the factor for the staleness tau.
      step_size: eta > 0.

    Returns: the factor; the error grows if it is above 1.

    Guarantees: The factor equals roots that were found by hand, and is below 1 for any delay
    (tests/theory/test_asynchrony.py::test_mixing_contracts).

    References: Xie, Koyejo and Gupta 2019 (FedAsync), algorithm 1, for the recursion.

    >>> round(fedasync_contraction(1.0, 1, mixing_rate=0.5, step_size=0.5), 6)  # (1 + sqrt(5)) / 4
    0.809017
    """
    largest_modulus = 0.0
    for fresh_weight, stale_weight in _modes(hessian, delay, mixing_rate, step_size):
        # Without delay both weights multiply the same model, and the polynomial has degree one.
        polynomial = (
            [1.0, -fresh_weight, *[0.0] * (delay - 1), -stale_weight] if delay else [1.0, -fresh_weight - stale_weight]
        )
        largest_modulus = max(largest_modulus, float(np.abs(np.roots(polynomial)).max()))
    return largest_modulus


def fedasync_floor(hessian: Any, delay: int, *, mixing_rate: float, step_size: float, noise: float = 1.0) -> float:
    """Computes the error floor of FedAsync, E|w - w*|^2 in the long run, if all models are `delay` versions old.

    The floor is exact on a quadratic.

    Each mode is an autoregression of order tau + 1. Its autocovariances solve the Yule-Walker equations c_k = (1 -
    alpha) c_{k-1} + alpha (1 - eta h) c_{tau+1-k} for k > 0. For k = 0, the variance (alpha eta sigma)^2 is added.

    Args:
      hessian, delay, mixing_rate, step_size: as in `fedasync_contraction`, which must be below 1.
      noise: sigma >= 0, standard deviation of each coordinate of a gradient.

    Returns: E|w - w*|^2.

    Raises: ValueError if the recursion does not contract.

    Guarantees: The floor solves the recursion's Lyapunov equation
    (tests/theory/test_asynchrony.py::test_floor_solves_lyapunov).

    >>> round(fedasync_floor(1.0, 0, mixing_rate=1.0, step_size=0.5), 6)  # SGD
    0.333333
    """
    factor = fedasync_contraction(hessian, delay, mixing_rate=mixing_rate, step_size=step_size)
    if not factor < 1:
        validate.fail("step_size", "a step at which every mode shrinks", step_size, f"The factor is {factor:g}.")
    validate.in_range("noise", noise, 0, wide=True)
    total_variance = 0.0
    for fresh_weight, stale_weight in _modes(hessian, delay, mixing_rate, step_size):
        # Row k holds the equation of c_k. Autocovariances are even in k, hence abs(k - 1).
        system = np.eye(delay + 2)
        for k in range(delay + 2):
            system[k, abs(k - 1)] -= fresh_weight
            system[k, delay + 1 - k] -= stale_weight
        total_variance += np.linalg.solve(system, np.eye(delay + 2)[0])[0]
    return float((mixing_rate * step_size * noise) ** 2 * total_variance)


def _modes(hessian: Any, delay: int, mixing_rate: float, step_size: float) -> list[tuple[float, float]]:
    """Checks the input, and returns the weights (1 - alpha, alpha (1 - eta h)) for each eigenvalue h."""
    validate.integer("delay", delay, 0, MOST_DELAY)
    validate.in_range("mixing_rate", mixing_rate, 0, 1, open_low=True)
    validate.positive("step_size", step_size)
    eigenvalues = np.linalg.eigvalsh(symmetric_matrix("hessian", hessian))
    return [(1 - mixing_rate, mixing_rate * (1 - step_size * h)) for h in eigenvalues]


@validate.named_arguments
def arrival_weights(
    rates: Sequence[float],
    staleness: Callable | None = None,
    *,
    step_size: NonNegative = 0.0,
    curvature: Positive = 1.0,
) -> np.ndarray:
    """Computes each client's weight in the limit of an asynchronous server, if clients differ in speed.

    The server converges to the mean of the clients' optima with these weights.

    All N clients are in flight, and each is sent the new version as soon as it arrives. Times are exponential. So the
    next arrival is client i with probability p_i = rate_i / sum, whatever came before, and its staleness is geometric:
    P(g) = p_i (1 - p_i)^g.

    Let S_i be the mean of the factor s(g), m the mean model, and u_i the mean model after an arrival of i, which is the
    model that i is sent. Then u_i = m - eta S_i h (u_i - c_i). The mean model m does not move if sum_i p_i S_i h (u_i -
    c_i) = 0. So m is the mean of the c_i with weights p_i S_i / (1 + eta h S_i).

    Args:
      rates: [N] arrivals of each client in a unit of time, > 0.
      staleness: s, (gaps) -> factors in [0, 1], as `server.staleness.polynomial()`; None = 1 for all.
      step_size: eta >= 0, one local step times the server's rate. 0: the limit of small steps.
      curvature: h > 0 of all clients.

    Returns: [N] weights with sum 1. They are the shares of the rates if nothing is discounted and steps are small.

    Raises: ValueError for rates that are not positive, and for a share so small that its staleness has too many values.

    Guarantees: The weights equal those of an event loop in NumPy
    (tests/theory/test_asynchrony.py::test_weights_of_arrivals). Simulated clients converge to the weighted mean
    (tests/study/test_staleness.py::test_predictions_hold).

    References: derived above; Koloskova, Stich and Jaggi 2022, section 5, for the bias itself.

    >>> arrival_weights([1, 3]).round(6).tolist()
    [0.25, 0.75]
    """
    validate.sequence("rates", rates)
    for rate in rates:
        validate.positive("rates", rate, wide=True)
    shares = np.asarray(rates, np.float64) / np.sum(np.asarray(rates, np.float64))
    discounted_shares = np.array([share * _mean_factor(share, staleness) for share in shares])
    weights = discounted_shares / (1 + step_size * curvature * discounted_shares / shares)
    return weights / weights.sum()


def _mean_factor(share: float, staleness: Callable | None) -> float:
    """Computes the mean of s(g) for a geometric g, P(g) = p (1 - p)^g."""
    if staleness is None or share == 1:
        return 1.0 if staleness is None else float(np.asarray(staleness(np.zeros(1, np.int32)), np.float64)[0])
    # P(g >= n) = (1 - p)^n, so this many values leave out a probability of NEGLIGIBLE.
    num_gaps = math.ceil(math.log(NEGLIGIBLE) / math.log1p(-share))
    if num_gaps > MOST_GAPS:
        validate.fail("rates", f"shares that make staleness of at most {MOST_GAPS:,}", f"a share of {share:g}")
    gaps = np.arange(num_gaps)
    return float(share * ((1 - share) ** gaps) @ np.asarray(staleness(gaps), np.float64))
