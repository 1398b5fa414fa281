"""The error floor of any smooth model near its optimum, from three matrices: Hessian and gradient covariances there."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.theory.coefficients import cohort_coefficients
from fedjax_sim.theory.floor import SOURCES
from fedjax_sim.theory.quadratic import (
    checked_shares,
    covariance_matrix,
    covered,
    spectral_radius,
    steps,
    steps_kept,
    summed,
    symmetric_matrix,
)

__all__ = ["MomentBudget", "budget_from_moments"]


@dataclasses.dataclass(frozen=True, eq=False)
class MomentBudget:
    """The floor of the local quadratic model, to leading order in the step size.

    Exact if all clients share one Hessian and noise does not depend on the model (then it is `budget`'s). Differences
    of the Hessians over clients, and higher derivatives, are left out.
    """

    bias: np.ndarray  # [d] stationary mean less the optimum
    losses: dict[str, float]  # excess loss by component: drift and SOURCES
    covariances: dict[str, np.ndarray]  # [d, d] by source
    contraction: float  # rho of the mean map
    client_factor: float  # of the client covariance: (1/m)(N - m)/(N - 1) for a uniform cohort
    message_factor: float  # of a message's own noise: 1/m

    @property
    def total(self) -> float:
        """The expected excess loss."""
        return sum(self.losses.values())


def budget_from_moments(
    hessian: Any,
    shares: Any = None,
    *,
    step_size: float,
    num_steps: int = 1,
    design: SamplingDesign | None = None,
    num_clients: int | None = None,
    denominator: str | float = "fixed",
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
      shares: [N] p_i; None = 1/N. Unequal ones need a fixed or numeric denominator, and clients are then weighed by
        p_i^2 / sum p_j^2 (not by p_i) in the covariances of clients, minibatches and messages.
      step_size, num_steps, denominator, server_rate: of `budget`.
      design: of the cohort, clients alike; None = all of `num_clients`, every round.
      client_covariance: [d, d] (1/N) sum (g_i - grad F)(g_i - grad F)^T of full-batch gradients at w*
        (`metrics.gradient_moments(..., weighting="uniform")`).
      minibatch_covariance: [d, d] of one local stochastic gradient around g_i: the examples' covariance times
        (n - b) / (b (n - 1)) for batches of b of n without replacement, and b = n gives 0. Steps within one epoch are
        then not independent, as this takes them to be.
      quantization_variance, relative_error, privacy_variance: of `budget`.
      pseudo_gradient: [d] of all clients at w* (`metrics.drift`); the fixed point is shifted by
        -eta (1 - (1 - eta H)^K)^-1 times it. Without it there is no drift component.
      num_rounds: T rounds after a start at the optimum; None: the steady state.

    Returns: a `MomentBudget`.

    Raises: ValueError for rounds that diverge, which with a relative error omega they do at the latest where
      eta L (1 + omega / m) = 2; for clients drawn with unequal chances.

    Guarantees: `budget`'s components for equal Hessians (tests/theory/test_moment_budget.py::
    test_equal_hessians_are_exact, with unequal shares ::test_unequal_shares); simulated logistic regression
    (::test_simulated_logistic_regression); the limit eta L (1 + omega / m) = 2
    (::test_limit_of_stability); the shift (::test_drift_to_first_order).

    References: Mandt, Hoffman and Blei 2017, section 3; derived as in `theory.floor`.

    >>> floor = budget_from_moments([[2.0]], step_size=0.3, minibatch_covariance=1.5, num_clients=1)
    >>> round(float(floor.covariances["minibatch"][0, 0]), 6)  # eta sigma^2 / (h (2 - eta h))
    0.160714
    """
    hessian = symmetric_matrix("hessian", hessian)
    dimension = len(hessian)
    covariance_matrix("hessian", hessian, dimension)
    _check(step_size, num_steps, server_rate, relative_error, num_rounds)
    cohort = _cohort(design, num_clients, shares, denominator)
    values, vectors = np.linalg.eigh(hessian)
    values = np.maximum(values, 0)
    gone = covered(step_size * values, num_steps)
    walked = step_size * summed(step_size * values, num_steps)
    forgotten = server_rate * cohort.mean * gone  # 1 - r
    lost = forgotten[:, None] + forgotten[None, :] - np.outer(forgotten, forgotten)
    lost = lost - server_rate**2 * cohort.variance * np.outer(gone, gone)  # 1 - s
    gain = _gain(lost, num_rounds)

    walk = step_size**2 * steps_kept(step_size * values, num_steps)
    minibatch = _scaled(vectors, walk, minibatch_covariance, "minibatch_covariance")
    clients = _scaled(vectors, np.outer(walked, walked), client_covariance, "client_covariance")
    messages = covariance_matrix("quantization_variance", quantization_variance, dimension)
    messages = messages + relative_error * np.diag(np.diag(clients + minibatch))
    second = server_rate**2 * cohort.message_factor
    sources = {
        "client_sampling": server_rate**2 * cohort.client_factor * clients,
        "minibatch": second * minibatch,
        "quantization": second * messages,
        "privacy_noise": server_rate**2 * covariance_matrix("privacy_variance", privacy_variance, dimension),
    }
    covariances = {name: _scaled(vectors, gain, sources[name], name) for name in SOURCES}
    if relative_error:
        covariances = _with_relative_error(covariances, vectors, gone, gain, second * relative_error)
    bias = np.zeros(dimension)
    if pseudo_gradient is not None:
        bias = _shift(pseudo_gradient, vectors, gone, forgotten, step_size, num_rounds)
    losses = {"drift": float(bias @ hessian @ bias) / 2}
    losses |= {name: float(np.sum(hessian * covariance)) / 2 for name, covariance in covariances.items()}
    contraction = float(np.abs(1 - forgotten).max())
    return MomentBudget(bias, losses, covariances, contraction, cohort.client_factor, cohort.message_factor)


def _check(step_size: float, num_steps: int, server_rate: float, relative_error: float, num_rounds: int | None) -> None:
    validate.positive("step_size", step_size)
    validate.positive("server_rate", server_rate)
    validate.in_range("relative_error", relative_error, 0)
    steps(num_steps, 1)
    if num_rounds is not None:
        validate.integer("num_rounds", num_rounds, 0)
        if relative_error:
            validate.fail("num_rounds", "None with a relative error", num_rounds)


class _Cohort(NamedTuple):
    """Moments of the cohort's weights c_i, with clients alike but for their shares."""

    mean: float  # of sum_i c_i
    variance: float  # of sum_i c_i
    client_factor: float  # of the covariance over clients
    message_factor: float  # of each message's own noise: sum_i E c_i^2


def _cohort(design: SamplingDesign | None, num_clients: int | None, shares: Any, denominator: str | float) -> _Cohort:
    if (design is None) == (num_clients is None):
        validate.fail("design, num_clients", "one of the two", (design, num_clients))
    if num_clients is not None:
        validate.integer("num_clients", num_clients)
    size = num_clients if design is None else getattr(design, "population_size", 1)
    if getattr(design, "draw_probabilities", None) is not None:
        hint = "Covariances do not contain which clients are drawn more often."
        validate.fail("design", "clients drawn alike", design.scheme, hint)
    alike, shares = shares is None, np.full(size, 1 / size) if shares is None else checked_shares(shares, size)
    if not alike and denominator == "realised":
        validate.fail("shares", "None with denominator='realised'", "shares", "Use budget.")
    weights = cohort_coefficients(design, shares, denominator=denominator)
    total_variance = weights.diagonal.sum() + weights.scales @ weights.modes.sum(1) ** 2
    variance = (weights.second - weights.mean**2).sum()
    apart = (variance * size - total_variance) / max(size - 1, 1)  # if alike, Cov(c) = apart / N I + const
    client_factor = float(apart if alike else weights.diagonal.sum())
    return _Cohort(weights.mean.sum(), total_variance, client_factor, float(weights.second.sum()))


def _gain(lost: np.ndarray, num_rounds: int | None) -> np.ndarray:
    """[d, d] sum over rounds of what remains of a round's error, where 1 - s = `lost` of it goes in each round."""
    if num_rounds is not None:
        return summed(lost, num_rounds)
    if not (lost > 1e-15).all():
        hint = "Take smaller steps; or give num_rounds, if the Hessian has flat directions."
        validate.fail("step_size", "a round that contracts", float(1 - lost.min()), hint)
    return 1 / lost


def _scaled(vectors: np.ndarray, scale: np.ndarray, covariance: Any, name: str) -> np.ndarray:
    """A covariance scaled elementwise in the eigenbasis."""
    matrix = covariance_matrix(name, covariance, len(vectors))
    return vectors @ (vectors.T @ matrix @ vectors * scale) @ vectors.T


def _with_relative_error(
    covariances: dict[str, np.ndarray], vectors: np.ndarray, gone: np.ndarray, gain: np.ndarray, scale: float
) -> dict[str, np.ndarray]:
    """Each source's covariance X with the compression error that it causes itself.

    X = gain(source + diag u) with u = scale diag(M X M) is linear in the d numbers u, and is solved for them.
    """
    progress = (vectors * gone) @ vectors.T
    growth = scale * _compression_map(np.outer(gone, gone) * gain, vectors)
    if not ((radius := spectral_radius(growth)) < 1):
        validate.fail("step_size", "a round whose mean square contracts", radius, "Take smaller steps.")
    found = {}
    for name, covariance in covariances.items():
        met = np.linalg.solve(np.eye(len(vectors)) - growth, scale * np.diag(progress @ covariance @ progress))
        found[name] = covariance + _scaled(vectors, gain, np.diag(met), name)
    return found


def _shift(
    pseudo_gradient: Any,
    vectors: np.ndarray,
    gone: np.ndarray,
    forgotten: np.ndarray,
    step_size: float,
    num_rounds: int | None,
) -> np.ndarray:
    """[d] by which the pseudo-gradient at the optimum moves the mean."""
    pseudo = np.asarray(pseudo_gradient, np.float64)
    if pseudo.shape != gone.shape or not np.isfinite(pseudo).all():
        validate.fail("pseudo_gradient", f"{len(gone)} finite numbers", pseudo)
    reach = -step_size * np.where(gone > 0, 1 / np.where(gone > 0, gone, 1), 0)
    return vectors @ (reach * (1 if num_rounds is None else covered(forgotten, num_rounds)) * (vectors.T @ pseudo))


def _compression_map(gain: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """[d, d] u -> diag(V (gain * V^T diag(u) V) V^T), by the few eigenvectors that such gains need."""
    strengths, modes = np.linalg.eigh(gain)
    some = np.abs(strengths) > 1e-15 * np.abs(strengths).max()
    parts = zip(strengths[some], modes.T[some], strict=True)
    return sum(strength * ((vectors * mode) @ vectors.T) ** 2 for strength, mode in parts)
