"""Client drift on quadratics: what several local steps do to the gradient that the server receives, exactly.

From w each client takes K steps to w_i. Two different things are called the gradient of such a round:

    end-point gradient    sum p_i grad f_i(w_i)                      = sum p_i (I - M_i) g_i
    pseudo-gradient       (w - w_next) / eta = sum p_i sum_k grad f_i(w_i^k)  = sum p_i M_i (w - a_i) / eta

with g_i = H_i (w - a_i) and M_i of `theory.quadratic`. The drift bias is the end-point gradient minus grad F(w):

    bias = - sum p_i M_i g_i = - (sum p_i M_i) grad F  -  Cov_i(M_i, g_i)
                                 curvature part           heterogeneity part

The curvature part is there for identical clients too, and vanishes with grad F; the heterogeneity part, -eta K
Cov_i(H_i, g_i) to first order, needs clients whose Hessians differ, and moves the fixed point.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.theory.quadratic import local_progress, quadratic_problem

__all__ = ["QuadraticDrift", "quadratic_drift"]


@dataclasses.dataclass(frozen=True)
class QuadraticDrift:
    """What K local steps from one point do; all [d] float64. bias = curvature + heterogeneity."""

    gradient: np.ndarray  # grad F(w)
    end_point_gradient: np.ndarray  # sum p_i grad f_i(w_i)
    pseudo_gradient: np.ndarray  # (w - w_next) / eta
    bias: np.ndarray  # end_point_gradient - gradient
    curvature: np.ndarray  # the part that identical clients have too
    heterogeneity: np.ndarray  # minus the covariance over clients of local work and gradient
    leading_term: np.ndarray  # of the bias: -eta sum p_i K_i H_i g_i


def quadratic_drift(
    hessians: Any, centers: Any, shares: Any = None, *, point: Any, num_steps: Any, step_size: float
) -> QuadraticDrift:
    """The drift of FedAvg's clients from `point`, its parts and its leading term, in closed form.

    Args:
      hessians, centers, shares: see `theory.quadratic`.
      point: [d] w, the broadcast model (a number if d = 1).
      num_steps: K >= 0, or [N] K_i. step_size: eta >= 0. Without steps there is no drift.

    Guarantees: the definition, step by step (tests/theory/test_convergence.py::test_drift_is_its_definition); exact
    leading term at K = 1 (::test_leading_term); the counter-cases of the textbook claim (::test_drift_counter_cases).

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
    away = point - centers
    gradients = np.einsum("nij,nj->ni", hessians, away)
    moved = np.einsum("nij,nj->ni", progress, gradients)
    mean = shares @ gradients
    curvature = -np.einsum("n,nij,j->i", shares, progress, mean)
    lost = np.broadcast_to(np.asarray(num_steps, np.float64), len(shares)) * shares
    if step_size > 0:
        pseudo = np.einsum("n,nij,nj->i", shares, progress, away) / step_size
    else:
        pseudo = lost @ gradients
    bias = -shares @ moved
    return QuadraticDrift(
        gradient=mean,
        end_point_gradient=mean + bias,
        pseudo_gradient=pseudo,
        bias=bias,
        curvature=curvature,
        heterogeneity=-np.einsum("n,nij,nj->i", shares, progress, gradients - mean),
        leading_term=-step_size * np.einsum("n,nij,nj->i", lost, hessians, gradients),
    )
