"""The error floor of any smooth model near its optimum, from three matrices: Hessian and gradient covariances there."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.theory.coefficients import cohort_coefficients
from fedjax_sim.theory.floor import SOURCES
from fedjax_sim.theory.quadratic import covariance_matrix, steps

__all__ = ["MomentBudget", "budget_from_moments"]

MAX_SWEEPS = 20_000


@dataclasses.dataclass(frozen=True, eq=False)
class MomentBudget:
    """The floor of the local quadratic model, to leading order in the step size.

    Exact if all clients share one Hessian, their shares are equal and noise does not depend on the model (then it is
    `budget`'s); what Hessians differ over clients, and higher derivatives, is left out.
    """

    bias: np.ndarray  # [d] stationary mean less the optimum
    losses: dict[str, float]  # excess loss by component: drift and SOURCES
    covariances: dict[str, np.ndarray]  # [d, d] by source
    contraction: float  # rho of the mean map
    client_factor: float  # of the client covariance: (1/m)(N - m)/(N - 1) for a uniform cohort
    letter_factor: float  # of a letter's own noise: 1/m

    @property
    def total(self) -> float:
        """The expected excess loss."""
        return sum(self.losses.values())


def budget_from_moments(
    hessian: Any,
    *,
    step_size: float,
    num_steps: int = 1,
    design: SamplingDesign | None = None,
    num_clients: int | None = None,
    denominator: str = "fixed",
    server_rate: float = 1.0,
    client_covariance: Any = 0.0,
    minibatch_covariance: Any = 0.0,
    quantization_variance: Any = 0.0,
    relative_error: float = 0.0,
    privacy_variance: Any = 0.0,
    pseudo_gradient: Any = None,
    num_rounds: int | None = None,
) -> MomentBudget:
    """The error floor of FedAvg near an optimum w*, component by component.

    With H = V diag(h) V^T, q = 1 - (1 - eta h)^K and r = 1 - gamma q in each eigendirection, a source that adds Q in
    each round leaves Q_ab (1 - s_ab^T) / (1 - s_ab) in the eigenbasis, s_ab = r_a r_b (and gamma^2 Var(sum_i c_i)
    q_a q_b where a fixed divisor meets cohorts of random size). A client's update at w* is -(q / h) g_i.

    Args:
      hessian: [d, d] of F at w*, symmetric, positive semi-definite (flat directions need `num_rounds`).
      step_size, num_steps, denominator, server_rate: of `budget`.
      design: of the cohort; None = all of `num_clients`, every round.
      client_covariance: [d, d] sum p_i (g_i - grad F)(g_i - grad F)^T of full-batch gradients at w*, divisor N.
      minibatch_covariance: [d, d] of one local stochastic gradient around g_i: the examples' covariance times
        (n - b) / (b (n - 1)) for batches of b of n without replacement, and b = n gives 0. Steps within one epoch are
        then not independent, as this takes them to be.
      quantization_variance, relative_error, privacy_variance: of `budget`.
      pseudo_gradient: [d] of all clients at w* (`metrics.drift`); the fixed point is shifted by
        -eta (1 - (1 - eta H)^K)^-1 times it. Without it there is no drift component.
      num_rounds: T rounds after a start at the optimum; default: at rest.

    Returns: a `MomentBudget`.

    Raises: ValueError for rounds that diverge: with a relative error omega that is before eta L (1 + omega / m) = 2.

    Guarantees: `budget`'s components for equal Hessians (tests/theory/test_moment_budget.py::
    test_equal_hessians_are_exact); simulated logistic regression (::test_simulated_logistic_regression); the limit of
    T34 (::test_limit_of_stability); the shift (::test_drift_to_first_order).

    References: Mandt, Hoffman and Blei 2017, section 3; derived as in `theory.floor`.

    >>> floor = budget_from_moments([[2.0]], step_size=0.3, minibatch_covariance=1.5, num_clients=1)
    >>> round(float(floor.covariances["minibatch"][0, 0]), 6)  # eta sigma^2 / (h (2 - eta h))
    0.160714
    """
    hessian = covariance_matrix("hessian", hessian, np.shape(hessian)[-1] if np.ndim(hessian) else 1)
    if hessian.ndim != 2 or not np.allclose(hessian, hessian.T, rtol=1e-6, atol=1e-8):
        validate.fail("hessian", "one symmetric matrix [d, d]", hessian.shape)
    dimension = len(hessian)
    validate.positive("step_size", step_size)
    validate.positive("server_rate", server_rate)
    validate.in_range("relative_error", relative_error, 0)
    steps(num_steps, 1)
    if num_rounds is not None:
        validate.integer("num_rounds", num_rounds, 0)
    if (design is None) == (num_clients is None):
        validate.fail("design, num_clients", "one of the two", (design, num_clients))
    if num_clients is not None:
        validate.integer("num_clients", num_clients)
    size = num_clients if design is None else getattr(design, "population_size", 1)
    weights = cohort_coefficients(design, np.full(size, 1 / size), denominator=denominator)
    client_factor, letter_factor = float(weights.diagonal.sum()), float(weights.second.sum())
    values, vectors = np.linalg.eigh(hessian)
    values = np.maximum(values, 0)
    left = 1 - step_size * values
    summed = np.where(values > 0, (1 - left**num_steps) / np.where(values > 0, values, 1), step_size * num_steps)
    gone = 1 - left**num_steps
    kept = 1 - server_rate * weights.mean.sum() * gone
    total_variance = weights.diagonal.sum() + weights.scales @ weights.modes.sum(1) ** 2  # of sum_i c_i
    pairs = np.outer(kept, kept) + server_rate**2 * total_variance * np.outer(gone, gone)
    stays = np.isclose(pairs, 1, rtol=0, atol=1e-15)
    if num_rounds is None:
        if not (pairs < 1).all():
            hint = "Take smaller steps; or give num_rounds, if the Hessian has flat directions."
            validate.fail("step_size", "a round that contracts", float(np.abs(pairs).max()), hint)
        gain = 1 / (1 - pairs)
    else:
        gain = np.where(stays, num_rounds, (1 - pairs**num_rounds) / np.where(stays, 1, 1 - pairs))

    def turned(scale: np.ndarray, covariance: Any, name: str) -> np.ndarray:
        """In the eigenbasis, scaled elementwise, and back."""
        matrix = covariance_matrix(name, covariance, dimension)
        return vectors @ (vectors.T @ matrix @ vectors * scale) @ vectors.T

    ratio = np.outer(left, left)
    own = np.isclose(ratio, 1, rtol=0, atol=1e-13)
    walk = step_size**2 * np.where(own, num_steps, (1 - ratio**num_steps) / np.where(own, 1, 1 - ratio))
    minibatch = turned(walk, minibatch_covariance, "minibatch_covariance")
    clients = turned(np.outer(summed, summed), client_covariance, "client_covariance")
    letters = covariance_matrix("quantization_variance", quantization_variance, dimension)
    letters = letters + relative_error * np.diag(np.diag(clients + minibatch))
    second = server_rate**2 * letter_factor
    sources = {
        "client_sampling": server_rate**2 * client_factor * clients,
        "minibatch": second * minibatch,
        "quantization": second * letters,
        "privacy_noise": covariance_matrix("privacy_variance", privacy_variance, dimension),
    }
    progress = (vectors * gone) @ vectors.T
    covariances = {}
    for name in SOURCES:
        source = sources[name]
        covariance = turned(gain, source, name)
        if relative_error and source.any():
            if num_rounds is not None:
                validate.fail("num_rounds", "None with a relative error", num_rounds)
            covariance = _with_own_error(covariance, source, gain, vectors, progress, second * relative_error)
        covariances[name] = covariance
    bias = np.zeros(dimension)
    if pseudo_gradient is not None:
        pseudo = np.asarray(pseudo_gradient, np.float64)
        if pseudo.shape != (dimension,) or not np.isfinite(pseudo).all():
            validate.fail("pseudo_gradient", f"{dimension} finite numbers", pseudo)
        reach = -step_size * np.where(gone > 0, 1 / np.where(gone > 0, gone, 1), 0)
        bias = vectors @ (reach * (1 if num_rounds is None else 1 - kept**num_rounds) * (vectors.T @ pseudo))
    losses = {"drift": float(bias @ hessian @ bias) / 2}
    losses |= {name: float(np.sum(hessian * covariance)) / 2 for name, covariance in covariances.items()}
    return MomentBudget(bias, losses, covariances, float(np.abs(kept).max()), client_factor, letter_factor)


def _with_own_error(start, source, gain, vectors, progress, scale) -> np.ndarray:
    """The covariance whose letters' error grows with it: X = L^-1[source + scale diag(M X M)], by iteration."""
    covariance, first = start, np.trace(start)
    for _ in range(MAX_SWEEPS):
        grown = source + scale * np.diag(np.diag(progress @ covariance @ progress))
        new = vectors @ (vectors.T @ grown @ vectors * gain) @ vectors.T
        change = np.trace(new) - np.trace(covariance)
        covariance = new
        if change <= 1e-13 * np.trace(new):
            return covariance
        if not (np.trace(new) < 1e12 * first):
            break
    validate.fail("step_size", "a round whose mean square contracts", "growth without end", "Take smaller steps.")
