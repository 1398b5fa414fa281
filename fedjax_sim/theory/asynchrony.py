"""What asynchronous servers converge to: FedAsync under delay, and whose optimum counts if clients differ in speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.theory.quadratic import symmetric_matrix
from fedjax_sim.validate import NonNegative, Positive

__all__ = ["arrival_weights", "fedasync_contraction", "fedasync_floor"]

MOST_DELAY = 1000
NEGLIGIBLE = 1e-12  # probability of the staleness that `arrival_weights` leaves out
MOST_GAPS = 10_000_000


def fedasync_contraction(hessian: Any, delay: int, *, mixing_rate: float, step_size: float) -> float:
    """The factor by which an arrival shrinks FedAsync's error in the long run, if all models are `delay` versions old.

    w_{t+1} = (1 - alpha) w_t + alpha (1 - eta h) w_{t-tau} for one local step of size eta: the largest root of
    lambda^(tau+1) - (1 - alpha) lambda^tau - alpha (1 - eta h), over the eigenvalues h of the Hessian. It is below 1
    for every delay where 0 < eta h < 2: a mean of models is no longer than the longest of them.

    Args:
      hessian: a number or [d, d].
      delay: tau in [0, 1000].
      mixing_rate: alpha in (0, 1], with the factor of the staleness tau in it.
      step_size: eta > 0.

    Guarantees: roots by hand, and below 1 for any delay (tests/theory/test_asynchrony.py::test_mixing_contracts).

    References: Xie, Koyejo and Gupta 2019 (FedAsync), algorithm 1, for the recursion.

    >>> round(fedasync_contraction(1.0, 1, mixing_rate=0.5, step_size=0.5), 6)  # (1 + sqrt(5)) / 4
    0.809017
    """
    largest = 0.0
    for own, old in _modes(hessian, delay, mixing_rate, step_size):
        equation = [1.0, -own, *[0.0] * (delay - 1), -old] if delay else [1.0, -own - old]
        largest = max(largest, float(np.abs(np.roots(equation)).max()))
    return largest


def fedasync_floor(hessian: Any, delay: int, *, mixing_rate: float, step_size: float, noise: float = 1.0) -> float:
    """Where FedAsync stays, if all models are `delay` versions old: E|w - w*|^2 in the long run; exact on a quadratic.

    Each mode is an autoregression of order tau + 1, whose autocovariances are c_k = (1 - alpha) c_{k-1} +
    alpha (1 - eta h) c_{tau+1-k} for k > 0, and for k = 0 that with the variance (alpha eta sigma)^2 (Yule and Walker).

    Args:
      hessian, delay, mixing_rate, step_size: as in `fedasync_contraction`; it must be below 1.
      noise: sigma >= 0, standard deviation of each coordinate of a gradient.

    Guarantees: the recursion's Lyapunov equation (tests/theory/test_asynchrony.py::test_floor_solves_lyapunov).

    >>> round(fedasync_floor(1.0, 0, mixing_rate=1.0, step_size=0.5), 6)  # SGD
    0.333333
    """
    factor = fedasync_contraction(hessian, delay, mixing_rate=mixing_rate, step_size=step_size)
    if not factor < 1:
        validate.fail("step_size", "a step at which every mode shrinks", step_size, f"The factor is {factor:g}.")
    validate.in_range("noise", noise, 0, wide=True)
    total = 0.0
    for own, old in _modes(hessian, delay, mixing_rate, step_size):
        system = np.eye(delay + 2)
        for k in range(delay + 2):
            system[k, abs(k - 1)] -= own
            system[k, delay + 1 - k] -= old
        total += np.linalg.solve(system, np.eye(delay + 2)[0])[0]
    return float((mixing_rate * step_size * noise) ** 2 * total)


def _modes(hessian: Any, delay: int, mixing_rate: float, step_size: float) -> list[tuple[float, float]]:
    """(1 - alpha, alpha (1 - eta h)) for each eigenvalue h; checked."""
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
    """How much each client's optimum counts in what an asynchronous server converges to, where clients differ in speed.

    All N clients are in flight and are sent the new version as soon as they arrive; times are exponential. Then the
    next to arrive is i with probability p_i = rate_i / sum, whatever came before, and its staleness is geometric:
    P(g) = p_i (1 - p_i)^g. With S_i the mean factor s(g), and u_i the mean model after an arrival of i (which is what i
    is sent), u_i = m - eta S_i h (u_i - c_i) where m is the mean model, and m stays where it is if
    sum_i p_i S_i h (u_i - c_i) = 0. So m is the mean of the c_i by the weights p_i S_i / (1 + eta h S_i).

    Args:
      rates: [N] arrivals of each client in a unit of time, > 0.
      staleness: s, (gaps) -> factors in [0, 1], as `server.staleness.polynomial()`; None = 1 for all.
      step_size: eta >= 0, one local step times the server's rate. 0: the limit of small steps.
      curvature: h > 0 of all clients.

    Returns: [N] with sum 1; the rates' shares if nothing is discounted and steps are small.

    Guarantees: an event loop in NumPy (tests/theory/test_asynchrony.py::test_weights_of_arrivals); simulated clients
    converge to it (tests/study/test_staleness.py::test_predictions_hold).

    References: derived above; Koloskova, Stich and Jaggi 2022, section 5, for the bias itself.

    >>> arrival_weights([1, 3]).round(6).tolist()
    [0.25, 0.75]
    """
    validate.sequence("rates", rates)
    for one in rates:
        validate.positive("rates", one, wide=True)
    shares = np.asarray(rates, np.float64) / np.sum(np.asarray(rates, np.float64))
    counted = np.array([share * _mean_factor(share, staleness) for share in shares])
    weights = counted / (1 + step_size * curvature * counted / shares)
    return weights / weights.sum()


def _mean_factor(share: float, staleness: Callable | None) -> float:
    """The mean of s(g) for a geometric g, P(g) = p (1 - p)^g."""
    if staleness is None or share == 1:
        return 1.0 if staleness is None else float(np.asarray(staleness(np.zeros(1, np.int32)), np.float64)[0])
    last = math.ceil(math.log(NEGLIGIBLE) / math.log1p(-share))
    if last > MOST_GAPS:
        validate.fail("rates", f"shares that make staleness of at most {MOST_GAPS:,}", f"a share of {share:g}")
    gaps = np.arange(last)
    return float(share * ((1 - share) ** gaps) @ np.asarray(staleness(gaps), np.float64))
