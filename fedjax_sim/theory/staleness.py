"""This module predicts gradient descent with stale gradients: stable steps, error floors and mean staleness.

On a quadratic of curvature h, steps with gradients that are tau versions old are w_{t+1} = w_t - eta h w_{t-tau}.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.theory.quadratic import symmetric_matrix
from fedjax_sim.validate import NonNegativeInt, Positive, PositiveInt

MOST_DELAY = 1000  # the contraction needs the roots of a polynomial of degree delay + 1


@validate.named_arguments
def delayed_step_limit(delay: NonNegativeInt, *, curvature: Positive = 1.0) -> float:
    """Computes the largest stable step with gradients that are `delay` versions old: (2 / h) sin(pi / (2 (2 tau + 1))).

    At the limit, lambda^(tau+1) = lambda^tau - eta h has a root on the unit circle. Without delay the limit is 2 / h.
    For long delays it is about pi / (2 tau h).

    Args:
      delay: tau >= 0.
      curvature: h > 0, the largest eigenvalue of the Hessian.

    Guarantees: The limits have known values for delays of 0 to 20, and the spectral radius is 1 at the limit
    (tests/theory/test_staleness.py::test_limits). Simulated rounds converge at 0.99 of the limit and diverge at 1.01 of
    it (::test_simulated_rounds_have_the_limit).

    References: Levin and May 1976 (A note on difference-delay equations), on this recursion.

    >>> [round(delayed_step_limit(delay), 6) for delay in (0, 1, 2, 10)]
    [2.0, 1.0, 0.618034, 0.14946]
    """
    return 2 * math.sin(math.pi / (2 * (2 * delay + 1))) / curvature


@validate.named_arguments
def delayed_contraction(hessian: Any, delay: int, *, step_size: Positive) -> float:
    """Computes the factor by which a step with stale gradients shrinks the error in the long run.

    Gradients are `delay` versions old. The error grows if the factor is above 1.

    It is the largest root of lambda^(tau+1) - lambda^tau + eta h, over the eigenvalues h of the Hessian.

    Args:
      hessian: a number or [d, d].
      delay: tau in [0, 1000].
      step_size: eta > 0.

    Guarantees: The factor is 1 at `delayed_step_limit`, and |1 - eta h| without delay
    (tests/theory/test_staleness.py::test_limits).

    >>> round(delayed_contraction(1.0, 1, step_size=0.25), 6)
    0.5
    """
    validate.integer("delay", delay, 0, MOST_DELAY)
    eigenvalues = np.linalg.eigvalsh(symmetric_matrix("hessian", hessian))
    # lambda^(tau+1) - lambda^tau + eta h has zeros between its coefficients; without delay it has degree one.
    zeros = [0.0] * (delay - 1)
    polynomials = [[1.0, -1.0, *zeros, step_size * h] if delay else [1.0, step_size * h - 1.0] for h in eigenvalues]
    return float(max(np.abs(np.roots(coefficients)).max() for coefficients in polynomials))


def delayed_floor(hessian: Any, delay: int, *, step_size: float, noise: float = 1.0) -> float:
    """Computes the error floor of SGD with gradients `delay` versions old, E|w - w*|^2 in the long run.

    The floor is exact on a quadratic.

    A mode of curvature h is w_{t+1} = w_t - a w_{t-tau} + e_t, with a = eta h and e of variance (eta sigma)^2. Its
    autocovariances are c_k = c_{k-1} - a c_{tau+1-k} for 0 < k <= tau + 1, so that c_{k+1} - 2 c_k + c_{k-1} = -a^2
    c_k. This is a cosine in k of frequency theta, with 2 sin(theta / 2) = a. Both ends of the recursion determine phase
    and size:

      c_0 = (eta sigma)^2 cot((pi - (2 tau + 1) theta) / 4) / (2 sin theta).

    Without delay this is (eta sigma)^2 / (a (2 - a)). For small steps it is about 1 + (tau + 1/2) a times eta sigma^2 /
    (2 h). At `delayed_step_limit` it is infinite.

    Args:
      hessian: a number or [d, d], positive definite.
      delay: tau >= 0.
      step_size: eta, below the limit of the largest curvature.
      noise: sigma >= 0, standard deviation of each coordinate of a gradient, independent over steps.

    Raises: ValueError for a step at which a mode does not shrink, and for a curvature that is not positive.

    Guarantees: The floor solves the recursion's Lyapunov equation
    (tests/theory/test_staleness.py::test_floor_solves_lyapunov). Simulated rounds stay there
    (tests/study/test_staleness.py::test_predictions_hold).

    References: derived above; Kuechler and Mensch 1992, for the same equation in continuous time.

    >>> round(delayed_floor(1.0, 0, step_size=0.5), 6), round(delayed_floor(1.0, 1, step_size=0.5), 6)
    (0.333333, 0.6)
    """
    curvatures = np.linalg.eigvalsh(symmetric_matrix("hessian", hessian))
    if not curvatures.min() > 0:
        validate.fail("hessian", "a positive definite matrix", f"an eigenvalue {curvatures.min():g}")
    limit = delayed_step_limit(delay, curvature=float(curvatures.max()))
    validate.in_range("step_size", step_size, 0, limit, open_low=True, open_high=True, hint="The limit at this delay.")
    validate.in_range("noise", noise, 0, wide=True)
    # Each mode has its own frequency; the floor is the sum of their variances c_0.
    theta = 2 * np.arcsin(step_size * curvatures / 2)
    mode_variances = 1 / (2 * np.sin(theta) * np.tan((math.pi - (2 * delay + 1) * theta) / 4))
    return float((step_size * noise) ** 2 * mode_variances.sum())


class StaleError(NamedTuple):
    """The error of a gradient that was taken at an older model, and its bound."""

    error: float  # |H d|
    bound: float  # L |d|, L the largest eigenvalue


def stale_gradient_error(hessian: Any, displacement: Any) -> StaleError:
    """Computes |grad f(w_stale) - grad f(w_now)| and its bound L |w_stale - w_now|.

    Both are equal along the steepest direction.

    Args:
      hessian: a number or [d, d].
      displacement: [d], w_now - w_stale.

    Returns: `StaleError`.

    Guarantees: The error is within its bound, and reaches it along the steepest direction
    (tests/theory/test_staleness.py::test_errors_of_stale_gradients).

    >>> print([round(value, 4) for value in stale_gradient_error([[1, 0], [0, 10]], [0.5, 1.0])])
    [10.0125, 11.1803]
    """
    hessian = symmetric_matrix("hessian", hessian)
    displacement = np.atleast_1d(np.asarray(displacement, np.float64))
    if displacement.shape != (len(hessian),) or not np.isfinite(displacement).all():
        validate.fail("displacement", f"{len(hessian)} finite numbers", displacement.tolist())
    largest = np.abs(np.linalg.eigvalsh(hessian)).max()
    return StaleError(float(np.linalg.norm(hessian @ displacement)), float(largest * np.linalg.norm(displacement)))


@validate.named_arguments
def expected_staleness(concurrency: PositiveInt, buffer_size: int = 1, *, waits: bool = False) -> float:
    """Computes the mean staleness in the long run of C clients in flight and buffers of K.

    It is (C - 1) / K, for any law of delays.

    While an update is in flight, C - 1 other updates arrive on average, whichever clients are slow. The reason is that
    each arrival passes the C - 1 others in flight. If clients that arrived wait for the next version, only C - K are
    in flight at each new version, and the mean is (C - K) / K.

    Args:
      concurrency: C >= 1 clients, which are always in flight.
      buffer_size: K in [1, C].
      waits: whether a client gets new work only once the buffer is full, as with `fedbuff(refill="same")`.

    Guarantees: Simulated clients have this mean, for several laws of delays
    (tests/algorithms/asynchronous/test_arrivals.py::test_mean_staleness_is_that_of_the_number_in_flight).

    References: Koloskova, Stich and Jaggi 2022, section 3, for the average delay with K = 1.

    >>> expected_staleness(13, 4), expected_staleness(12, 4, waits=True)
    (3.0, 2.0)
    """
    validate.integer("buffer_size", buffer_size, 1, concurrency)
    return (concurrency - (buffer_size if waits else 1)) / buffer_size
