"""This module predicts SGD on quadratics: error floors, rates, decaying steps, and rounds until a target."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.theory.quadratic import (
    covariance_matrix,
    local_noise,
    local_progress,
    quadratic_problem,
    spectral_radius,
    symmetric_matrix,
)
from fedjax_sim.validate import NonNegative, Positive, ShareBelowOne


@validate.named_arguments
def sgd_contraction(hessian: Any, *, step_size: Positive) -> float:
    """Computes the factor by which a step of SGD shrinks the distance to the optimum.

    It is |1 - eta h|, or rho(I - eta H).

    It is below 1 while eta lambda_max < 2.

    Args:
      hessian: a number or [d, d].
      step_size: eta > 0.

    >>> sgd_contraction(2.0, step_size=0.25)
    0.5
    """
    hessian = symmetric_matrix("hessian", hessian)
    return spectral_radius(np.eye(len(hessian)) - step_size * hessian)


@validate.named_arguments
def sgd_floor(curvature: Any, noise_variance: Any, *, step_size: Positive) -> Any:
    """Computes the stationary variance of SGD with a constant step, for each eigendirection.

    It is eta sigma^2 / (h (2 - eta h)).

    It solves V = (1 - eta h)^2 V + eta^2 sigma^2, which follows from e' = (1 - eta h) e - eta xi. The floor of the loss
    is h/2 times the variance.

    Args:
      curvature: h > 0, a number or an array of eigenvalues.
      noise_variance: sigma^2 >= 0 of a coordinate of a stochastic gradient.
      step_size: eta in (0, 2 / h).

    Returns: a number, or an array if an argument is an array.

    Raises: ValueError for steps at which SGD diverges.

    Guarantees: Simulated SGD has this variance (tests/theory/test_convergence.py::test_simulated_sgd_has_the_floor).

    >>> sgd_floor(1.0, 1.0, step_size=0.5)
    0.3333333333333333
    """
    curvature = np.asarray(curvature, np.float64)
    noise_variance = np.asarray(noise_variance, np.float64)
    if not ((curvature > 0) & (step_size * curvature < 2)).all():
        validate.fail(
            "curvature", f"numbers in (0, 2 / step_size = {2 / step_size:g})", curvature.tolist(), "Diverges."
        )
    if not ((noise_variance >= 0) & np.isfinite(noise_variance)).all():
        validate.fail("noise_variance", "finite numbers >= 0", noise_variance.tolist())
    floor = step_size * noise_variance / (curvature * (2 - step_size * curvature))
    return float(floor) if floor.ndim == 0 else floor


def stationary_covariance(
    hessians: Any, noise: Any, shares: Any = None, *, step_size: float, num_steps: Any = 1
) -> np.ndarray:
    """Computes the stationary covariance of FedAvg with all clients under gradient noise: Sigma = A Sigma A + Q.

    A = sum p_i (I - eta H_i)^K, and Q = sum p_i^2 eta^2 sum_{k<K} (I - eta H_i)^k S_i (I - eta H_i)^k. The equation is
    solved as a discrete Lyapunov equation. One client and one step are SGD. For cohorts see `theory.budget`.

    Args:
      hessians: [N, d, d], [N] (d = 1), or one [d, d].
      noise: S, a variance per coordinate, [d, d] or [N, d, d].
      shares, step_size, num_steps: as in `fedavg_fixed_point`.

    Returns: [d, d] float64.

    Raises: ValueError if rounds diverge.

    Guarantees: A scalar gives `sgd_floor`, and matrices solve the equation
    (tests/theory/test_convergence.py::test_stationary_covariance). The simulator has this covariance
    (::test_simulated_sgd_has_the_floor).

    References: Mandt, Hoffman and Blei 2017, section 3 (in continuous time).

    >>> print(stationary_covariance([[2.0, 0], [0, 1]], 1.0, step_size=0.5))
    [[0.25       0.        ]
     [0.         0.33333333]]
    """
    from scipy.linalg import solve_discrete_lyapunov

    # A single matrix [d, d] is one client.
    hessians = np.atleast_1d(np.asarray(hessians, np.float64))
    if hessians.ndim == 2:
        hessians = hessians[None]
    hessians, _, shares = quadratic_problem(hessians, np.zeros(hessians.shape[:2]), shares)
    # Shares enter squared, because clients' noise is independent.
    noise_covariance = np.einsum("n,nij->ij", shares**2, local_noise(hessians, noise, num_steps, step_size))
    progress = np.einsum("n,nij->ij", shares, local_progress(hessians, num_steps, step_size))
    round_map = np.eye(len(progress)) - progress
    if not (spectral_radius(round_map) < 1):
        validate.fail("step_size", "a round that contracts", spectral_radius(round_map), "Take smaller steps.")
    return solve_discrete_lyapunov(round_map, noise_covariance)


def excess_loss(hessian: Any, covariance: Any, bias: Any = 0.0) -> float:
    """Computes F - F* of a model with this covariance and this distance to the optimum: (tr H Sigma + b^T H b) / 2.

    Args:
      hessian: H, a number or [d, d].
      covariance: Sigma, a variance per coordinate or [d, d].
      bias: b, the mean minus the optimum; a number or [d].

    >>> excess_loss([[2.0]], [[0.25]], [1.0])
    1.25
    """
    hessian = symmetric_matrix("hessian", hessian)
    covariance = covariance_matrix("covariance", covariance, len(hessian))
    bias = np.asarray(bias, np.float64)
    if bias.shape not in ((), (1,), (len(hessian),)) or not np.isfinite(bias).all():
        validate.fail("bias", f"a finite number or {len(hessian)} of them", bias)
    bias = np.broadcast_to(bias, len(hessian))
    return float(np.trace(hessian @ covariance) + bias @ hessian @ bias) / 2


def expected_squared_distance(curvature: Any, noise_variance: Any, step_sizes: Any, *, start: Any = 0.0) -> np.ndarray:
    """Computes E (w_t - w*)^2 under any step sizes, from the exact recursion v' = (1 - eta_t h)^2 v + eta_t^2 sigma^2.

    Args:
      curvature: h >= 0, a number or [d] eigenvalues.
      noise_variance: sigma^2 >= 0.
      step_sizes: [T] eta_t >= 0.
      start: (w_0 - w*)^2 in each direction.

    Returns: [T + 1] (or [T + 1, d]) float64.

    Guarantees: The recursion and its limit agree (tests/theory/test_convergence.py::test_decaying_steps).

    >>> print(expected_squared_distance(1.0, 1.0, [0.5, 0.25], start=4.0))
    [4.       1.25     0.765625]
    """
    step_sizes = np.asarray(step_sizes, np.float64)
    if step_sizes.ndim != 1 or not ((step_sizes >= 0) & np.isfinite(step_sizes)).all():
        validate.fail("step_sizes", "a list of finite numbers >= 0", step_sizes.tolist())
    arguments = {"curvature": curvature, "noise_variance": noise_variance, "start": start}
    for name, values in arguments.items():
        if not ((np.float64(values) >= 0) & np.isfinite(np.float64(values))).all():
            validate.fail(name, "finite numbers >= 0", values)
    # Arguments of different shapes are directions of one problem.
    curvature, noise_variance, start_variance = np.broadcast_arrays(*map(np.float64, arguments.values()))
    variances = [start_variance]
    for step_size in step_sizes:
        variances.append((1 - step_size * curvature) ** 2 * variances[-1] + step_size**2 * noise_variance)
    return np.array(variances)


@validate.named_arguments
def decaying_step_limit(curvature: Positive, noise_variance: NonNegative, *, step_constant: float) -> float:
    """Computes lim t E (w_t - w*)^2 for steps c / t: c^2 sigma^2 / (2 c h - 1). There is no floor, only this rate.

    The limit is least, sigma^2 / h^2, at c = 1/h. For c h <= 1/2 the influence of the start decays more slowly than
    1/t, so there is no limit.

    Args:
      curvature: h > 0.
      noise_variance: sigma^2 >= 0.
      step_constant: c > 1 / (2 h).

    Guarantees: The recursion and its limit agree (tests/theory/test_convergence.py::test_decaying_steps).

    References: Chung 1954; Nemirovski et al. 2009, section 2.1.

    >>> decaying_step_limit(1.0, 1.0, step_constant=1.0)
    1.0
    """
    hint = "Slower decay of the start than 1/t otherwise."
    validate.in_range("step_constant", step_constant, 1 / (2 * curvature), open_low=True, hint=hint)
    return step_constant**2 * noise_variance / (2 * step_constant * curvature - 1)


@validate.named_arguments
def rounds_until(contraction: ShareBelowOne, start: float, target: float) -> int:
    """Finds the least number of rounds T with start * contraction^T <= target.

    Args:
      contraction: factor in [0, 1) of a round: rho for a distance, rho^2 for a loss.
      start: the initial distance or loss, >= 0.
      target: > 0. Use the error floor for the rounds until the bias of the start equals the floor.

    Guarantees: The inequality holds at T and not at T - 1 (tests/theory/test_convergence.py::test_rounds_until).

    >>> rounds_until(0.5, 8.0, 1.0)
    3
    """
    validate.in_range("start", start, 0, wide=True)
    validate.positive("target", target, wide=True)
    if start <= target:
        return 0
    if contraction == 0:
        return 1

    def remaining(rounds: int) -> float:
        # In two halves, because the whole power may be too small for a float.
        return start * contraction ** (rounds // 2) * contraction ** (rounds - rounds // 2)

    rounds = max(1, math.ceil((math.log(target) - math.log(start)) / math.log(contraction)))
    # The logarithms may be off by one round.
    while rounds > 1 and remaining(rounds - 1) <= target:
        rounds -= 1
    while remaining(rounds) > target:
        rounds += 1
    return rounds
