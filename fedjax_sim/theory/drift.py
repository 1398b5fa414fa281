"""This module computes exactly how several local steps change the aggregated gradient on quadratics.

From w, each client takes K steps to w_i. The gradient of such a round is defined in two different ways:

    end-point gradient    sum p_i grad f_i(w_i)                      = sum p_i (I - M_i) g_i
    pseudo-gradient       (w - w_next) / eta = sum p_i sum_k grad f_i(w_i^k)  = sum p_i M_i (w - a_i) / eta

Here g_i = H_i (w - a_i), and M_i is as in `theory.quadratic`. The drift bias is the end-point gradient minus grad F(w):

    bias = - sum p_i M_i g_i = - (sum p_i M_i) grad F  -  Cov_i(M_i, g_i)
                                 curvature part           heterogeneity part

The curvature part arises for identical clients too, and vanishes with grad F. The heterogeneity part is -eta K
Cov_i(H_i, g_i) to first order. It arises only if Hessians differ over clients, and it moves the fixed point.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.theory.quadratic import local_progress, quadratic_problem


@dataclasses.dataclass(frozen=True)
class QuadraticDrift:
    """The result of K local steps from one point; all fields are [d] float64. bias = curvature + heterogeneity."""

    gradient: np.ndarray  # grad F(w)
    end_point_gradient: np.ndarray  # sum p_i grad f_i(w_i)
    pseudo_gradient: np.ndarray  # (w - w_next) / eta
    bias: np.ndarray  # end_point_gradient - gradient
    curvature: np.ndarray  # the part of the bias that identical clients have too
    heterogeneity: np.ndarray  # minus the covariance over clients of local work and gradient
    leading_term: np.ndarray  # the leading term of the bias in eta: -eta sum p_i K_i H_i g_i


def quadratic_drift(
    hessians: Any, centers: Any, shares: Any = None, *, point: Any, num_steps: Any, step_size: float
) -> QuadraticDrift:
    """Computes the drift of FedAvg's clients from `point`, its parts and its leading term, in closed form.

    Args:
      hessians, centers, shares: see `theory.quadratic`.
      point: [d] w, the broadcast model (a number if d = 1).
      num_steps: K >= 0, or [N] K_i. Without steps there is no drift.
      step_size: eta >= 0.

    Returns: `QuadraticDrift`.

    Guarantees: The drift equals its definition, step by step
    (tests/theory/test_convergence.py::test_drift_is_its_definition). The leading term is exact at K = 1
    (::test_leading_term). Known counter-cases of the textbook claim hold (::test_drift_counter_cases).

    References: Karimireddy et al. 2020 (SCAFFOLD), section 3; derived above.

    >>> drift = quadratic_drift([1, 1, 1], [0, 2, 7], [0.2, 0.3, 0.5], point=1.0, num_steps=1, step_size=0.1)
    >>> print(drift.bias.round(6), drift.heterogeneity.round(6) + 0)
    [0.31] [0.]
    """
    hessians, centers, shares = quadratic_problem(hessians, centers, shares)
    point = np.atleast_1d(np.asarray(point, np.float64))
    if point.shape != centers.shape[1:] or not np.isfinite(point).all():
        validate.fail("point", f"{centers.shape[1]} finite numbers", point.tolist())
    progress = local_progress(hessians, num_steps, step_size, low=0)
    offsets = point - centers
    gradients = np.einsum("nij,nj->ni", hessians, offsets)
    lost_gradients = np.einsum("nij,nj->ni", progress, gradients)
    mean_gradient = shares @ gradients
    curvature = -np.einsum("n,nij,j->i", shares, progress, mean_gradient)
    weighted_steps = np.broadcast_to(np.asarray(num_steps, np.float64), len(shares)) * shares
    if step_size > 0:
        pseudo_gradient = np.einsum("n,nij,nj->i", shares, progress, offsets) / step_size
    else:
        # The limit of the quotient as eta -> 0.
        pseudo_gradient = weighted_steps @ gradients
    bias = -shares @ lost_gradients
    return QuadraticDrift(
        gradient=mean_gradient,
        end_point_gradient=mean_gradient + bias,
        pseudo_gradient=pseudo_gradient,
        bias=bias,
        curvature=curvature,
        heterogeneity=-np.einsum("n,nij,nj->i", shares, progress, gradients - mean_gradient),
        leading_term=-step_size * np.einsum("n,nij,nj->i", weighted_steps, hessians, gradients),
    )
