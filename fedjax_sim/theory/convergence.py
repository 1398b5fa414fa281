"""This module gives fixed points of FedAvg, FedNova and FedProx on quadratics, and how fast rounds converge to them.

Problems are (hessians, centers, shares) as in `theory.quadratic`. All results are exact on quadratics.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.theory.quadratic import (
    average,
    checked_steps,
    local_progress,
    quadratic_problem,
    spectral_radius,
    symmetric_matrix,
)
from fedjax_sim.validate import NonNegative


def fedavg_fixed_point(
    hessians: Any, centers: Any, shares: Any = None, *, num_steps: Any, step_size: float
) -> np.ndarray:
    """Computes the fixed point of FedAvg with K full-batch local steps: w = (sum p_i M_i)^-1 sum p_i M_i a_i.

    M_i = I - (I - eta H_i)^K_i. For one step the fixed point is the optimum. As K grows it tends to the average of the
    centers. For unequal K_i it is near the optimum of another objective, see `effective_shares`.

    Args:
      hessians, centers, shares: see `theory.quadratic`.
      num_steps: K >= 1 local gradient steps, or [N] K_i.
      step_size: eta > 0 of the local steps.

    Returns: [d] float64.

    Guarantees: Simulated FedAvg reaches the fixed point
    (tests/theory/test_convergence.py::test_fixed_points_are_where_simulated_rounds_end), also with unequal steps
    (::test_unequal_steps_shift_the_fixed_point).

    References: Karimireddy et al., SCAFFOLD, 2020, section 3; Charles and Konecny, 2021, section 3.

    >>> print(fedavg_fixed_point([1, 10], [0, 1], num_steps=1, step_size=0.01).round(6))
    [0.909091]
    >>> print(fedavg_fixed_point([1, 1], [0, 1], num_steps=[1, 10], step_size=0.1).round(6))
    [0.866901]
    """
    hessians, centers, shares = quadratic_problem(hessians, centers, shares)
    return average(local_progress(hessians, num_steps, step_size), centers, shares)


def fedavg_contraction(hessians: Any, centers: Any, shares: Any = None, *, num_steps: Any, step_size: float) -> float:
    """Computes the factor by which a FedAvg round shortens the distance to its fixed point.

    It is rho(sum p_i (I - eta H_i)^K_i).

    Args:
      hessians, centers, shares, num_steps, step_size: as in `fedavg_fixed_point`.

    Returns: the spectral radius rho.

    Guarantees: Rounds diverge if the factor is above 1 (tests/theory/test_convergence.py::test_contraction_numbers).

    >>> print(round(fedavg_contraction([1, 10], [0, 1], num_steps=2, step_size=0.1), 6))
    0.405
    """
    hessians, _, shares = quadratic_problem(hessians, centers, shares)
    progress = np.einsum("n,nij->ij", shares, local_progress(hessians, num_steps, step_size))
    return spectral_radius(np.eye(len(progress)) - progress)


def fednova_fixed_point(
    hessians: Any, centers: Any, shares: Any = None, *, num_steps: Any, step_size: float
) -> np.ndarray:
    """Computes FedNova's fixed point, which is FedAvg's with M_i / K_i in place of M_i.

    It is the optimum only in the limit eta K -> 0.

    Normalised averaging removes the shift that unequal K_i cause, but not the drift of several local steps. For
    example, with curvature 1, a = (0, 1) and K = (1, 10), the fixed point is 0.394 for eta = 0.1 and tends to 0.5 as
    eta -> 0.

    Args:
      hessians, centers, shares, num_steps, step_size: as in `fedavg_fixed_point`.

    Returns: [d] float64.

    Guarantees: Unequal steps shift it as predicted
    (tests/theory/test_convergence.py::test_unequal_steps_shift_the_fixed_point). Simulated rounds converge to it
    (tests/oracles/test_fednova.py::test_fednova_converges_to_the_optimum_for_small_rates).

    References: Wang et al. 2020 (FedNova), section 4.

    >>> print(fednova_fixed_point([1, 1], [0, 1], num_steps=[1, 10], step_size=1e-7).round(6))
    [0.5]
    """
    hessians, centers, shares = quadratic_problem(hessians, centers, shares)
    steps_by_client = checked_steps(num_steps, len(shares))
    return average(
        local_progress(hessians, steps_by_client, step_size) / steps_by_client[:, None, None], centers, shares
    )


def _proximal_progress(
    hessians: np.ndarray, proximal_weight: float, num_steps: Any = None, step_size: float | None = None
) -> np.ndarray:
    """Computes the share of the way to its center that a client covers.

    It is (H_i + lambda I)^-1 H_i for exact local solves, and M_i of `theory.quadratic` for K steps.

    Args:
      hessians: [N, d, d] H_i, checked.
      proximal_weight: lambda >= 0; above 0 for exact solves with a singular Hessian.
      num_steps: K, or [N] K_i; None = exact solves.
      step_size: eta > 0; None = exact solves. Both are None, or neither.

    Returns: [N, d, d].
    """
    if (num_steps is None) != (step_size is None):
        validate.fail("num_steps, step_size", "both, or neither for exact solves", (num_steps, step_size))
    if step_size is not None:
        return local_progress(hessians, num_steps, step_size, proximal_weight)
    validate.in_range("proximal_weight", proximal_weight, 0)
    shifted = hessians + proximal_weight * np.eye(hessians.shape[-1])
    # lambda = 0 with a singular Hessian: the local minimum is not unique, so there is no exact solve.
    if not (np.linalg.cond(shifted) < 1e15).all():
        validate.fail("proximal_weight", "a number > 0 when a hessian is singular", proximal_weight)
    return np.linalg.solve(shifted, hessians)


def fedprox_fixed_point(
    hessians: Any,
    centers: Any,
    shares: Any = None,
    *,
    proximal_weight: float,
    num_steps: Any = None,
    step_size: float | None = None,
) -> np.ndarray:
    """Computes FedProx's fixed point: w = (sum p_i P_i)^-1 sum p_i P_i a_i, with P_i = (H_i + lambda I)^-1 H_i.

    Args:
      hessians, centers, shares: see `theory.quadratic`.
      proximal_weight: lambda >= 0 of the term (lambda / 2) |w - w_t|^2, including the half. At 0 the fixed point is the
        average of the centers; as lambda grows it tends to the optimum.
      num_steps, step_size: gradient steps on the local objective, K >= 1 or [N] K_i, and eta > 0. None: exact local
        solves.

    Returns: [d] float64.

    Guarantees: The fixed points of two clients have known values for lambda from 0 to 10^9
    (tests/theory/test_convergence.py::test_fedprox_sweep), and the fixed point of few steps is that of iterated rounds
    (::test_inexact_fedprox).

    References: Li et al., Federated optimization in heterogeneous networks, 2020, section 3.

    >>> print(fedprox_fixed_point([1, 10], [0, 1], proximal_weight=1.0).round(6))
    [0.645161]
    """
    hessians, centers, shares = quadratic_problem(hessians, centers, shares)
    return average(_proximal_progress(hessians, proximal_weight, num_steps, step_size), centers, shares)


def fedprox_contraction(
    hessians: Any,
    centers: Any,
    shares: Any = None,
    *,
    proximal_weight: float,
    num_steps: Any = None,
    step_size: float | None = None,
) -> float:
    """Computes the factor by which a FedProx round shortens the distance to its fixed point: rho(I - sum p_i P_i).

    With exact local solves it is rho(sum p_i lambda (H_i + lambda I)^-1).

    Args:
      hessians, centers, shares, proximal_weight, num_steps, step_size: as in `fedprox_fixed_point`.

    Returns: the spectral radius rho.

    Guarantees: The contractions of two clients have known values for lambda from 0 to 100
    (tests/theory/test_convergence.py::test_fedprox_sweep).

    >>> print(round(fedprox_contraction([1, 10], [0, 1], proximal_weight=1.0), 4))
    0.2955
    """
    hessians, _, shares = quadratic_problem(hessians, centers, shares)
    progress = np.einsum("n,nij->ij", shares, _proximal_progress(hessians, proximal_weight, num_steps, step_size))
    return spectral_radius(np.eye(len(progress)) - progress)


@validate.named_arguments
def proximal_solution(hessian: Any, linear: Any, anchor: Any, *, proximal_weight: NonNegative) -> np.ndarray:
    """Computes the minimum of 1/2 w^T H w - g^T w + lambda/2 |w - w_t|^2: (H + lambda I)^-1 (g + lambda w_t).

    Args:
      hessian: [d, d] H, symmetric.
      linear: [d] g.
      anchor: [d] w_t, the broadcast model.
      proximal_weight: lambda >= 0.

    Returns: [d] float64.

    Guarantees: Known values of a quadratic in two dimensions, which gradient descent reaches too
    (tests/theory/test_convergence.py::test_proximal_solution).

    >>> print(proximal_solution([[3, 1], [1, 2]], [1, -1], [0.5, 0.5], proximal_weight=1.0).round(6))
    [ 0.454545 -0.318182]
    """
    hessian, linear, anchor = (np.asarray(value, np.float64) for value in (hessian, linear, anchor))
    if hessian.shape != linear.shape * 2 or linear.shape != anchor.shape or linear.ndim != 1:
        validate.fail("hessian, linear, anchor", "shapes [d, d], [d], [d]", (hessian.shape, linear.shape, anchor.shape))
    return np.linalg.solve(hessian + proximal_weight * np.eye(len(linear)), linear + proximal_weight * anchor)


@validate.named_arguments
def proximal_curvature(hessian: Any, *, proximal_weight: NonNegative) -> tuple[float, float]:
    """Computes (mu + lambda, L + lambda): the least and the largest curvature of FedProx's local objective.

    Args:
      hessian: a number or [d, d], symmetric.
      proximal_weight: lambda >= 0.

    Guarantees: Both are the eigenvalues of the Hessian plus lambda
    (tests/theory/test_convergence.py::test_curvature_shifts_by_the_coefficient).

    >>> proximal_curvature([[3, 0], [0, 2]], proximal_weight=1.0)
    (3.0, 4.0)
    """
    eigenvalues = np.linalg.eigvalsh(symmetric_matrix("hessian", hessian))
    return float(eigenvalues.min() + proximal_weight), float(eigenvalues.max() + proximal_weight)
