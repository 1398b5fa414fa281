"""This module computes the error floor of any smooth model near its optimum, from three matrices there.

The matrices are the Hessian and the covariances of gradients over clients and over minibatches.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.theory.coefficients import cohort_coefficients
from fedjax_sim.theory.cohorts import check_design
from fedjax_sim.theory.floor import SOURCES
from fedjax_sim.theory.quadratic import (
    checked_shares,
    checked_steps,
    covariance_matrix,
    covered,
    geometric_sum,
    spectral_radius,
    steps_kept,
    symmetric_matrix,
)


@dataclasses.dataclass(frozen=True, eq=False)
class MomentBudget:
    """The error floor of the local quadratic model, to leading order in the step size.

    It is exact if all clients share one Hessian and the noise does not depend on the model; then it is `budget`'s.
    Differences of the Hessians over clients, and higher derivatives, are left out.
    """

    bias: np.ndarray  # [d] stationary mean minus the optimum
    losses: dict[str, float]  # excess loss by component: drift and SOURCES
    covariances: dict[str, np.ndarray]  # [d, d] by source
    contraction: float  # spectral radius of the mean map
    client_factor: float  # factor of the client covariance: (1/m)(N - m)/(N - 1) for a uniform cohort
    message_factor: float  # factor of a message's own noise: 1/m

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
    """Computes the error floor of FedAvg near an optimum w*, component by component.

    Let H = V diag(h) V^T, q = 1 - (1 - eta h)^K and r = 1 - gamma q in each eigendirection. In the eigenbasis, a source
    that adds Q in each round leaves Q_ab (1 - s_ab^T) / (1 - s_ab), with s_ab = r_a r_b. If a fixed divisor meets
    cohorts of random size, s_ab has the additional term gamma^2 Var(sum_i c_i) q_a q_b. A client's update at w* is -(q
    / h) g_i.

    Args:
      hessian: [d, d] of F at w*, symmetric, positive semi-definite (flat directions need `num_rounds`).
      shares: [N] p_i; None = 1/N. Unequal shares need a fixed or numeric denominator. In the covariances of clients,
        minibatches and messages, clients are then weighted by p_i^2 / sum p_j^2 (not by p_i).
      step_size, num_steps, denominator, server_rate: as in `budget`.
      design: of the cohort, which treats all clients alike; None = all of `num_clients` in every round.
      num_clients: N; None if the design states it.
      client_covariance: [d, d] (1/N) sum (g_i - grad F)(g_i - grad F)^T of full-batch gradients at w*
        (`metrics.gradient_moments(..., weighting="uniform")`).
      minibatch_covariance: [d, d] of one local stochastic gradient around g_i. For batches of b of n examples without
        replacement, it is the covariance of the examples times (n - b) / (b (n - 1)), so b = n gives 0. Steps within
        one epoch are then not independent, although this function assumes that they are.
      quantization_variance, relative_error, privacy_variance: as in `budget`.
      pseudo_gradient: [d] of all clients at w* (`metrics.drift`). It shifts the fixed point by -eta (1 - (1 - eta
        H)^K)^-1 pseudo_gradient. None: there is no drift component.
      num_rounds: T rounds after a start at the optimum; None: the steady state.

    Returns: `MomentBudget`.

    Raises: ValueError for rounds that diverge, and for clients drawn with unequal probabilities. With a relative error
    omega, rounds diverge at the latest at eta L (1 + omega / m) = 2.

    Guarantees: Equal Hessians give `budget`'s components
    (tests/theory/test_moment_budget.py::test_equal_hessians_are_exact, with unequal shares ::test_unequal_shares).
    Simulated logistic regression has this floor (::test_simulated_logistic_regression). The limit of stability is at
    eta L (1 + omega / m) = 2 (::test_limit_of_stability). The error of the shift by drift is of second order in the
    differences of the Hessians (::test_drift_to_first_order).

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
    eigenvalues, vectors = np.linalg.eigh(hessian)
    # Rounding may make a zero eigenvalue slightly negative.
    eigenvalues = np.maximum(eigenvalues, 0)
    covered_share = covered(step_size * eigenvalues, num_steps)
    update_scale = step_size * geometric_sum(step_size * eigenvalues, num_steps)
    # `mean_decay` is 1 - r, and `second_moment_decay` is 1 - s. Differences from 1 keep the digits of small steps.
    mean_decay = server_rate * cohort.mean * covered_share
    second_moment_decay = mean_decay[:, None] + mean_decay[None, :] - np.outer(mean_decay, mean_decay)
    second_moment_decay = second_moment_decay - server_rate**2 * cohort.variance * np.outer(
        covered_share, covered_share
    )
    gain = _gain(second_moment_decay, num_rounds)

    # The covariances that one round adds: of clients, minibatches and messages, through K local steps.
    noise_scale = step_size**2 * steps_kept(step_size * eigenvalues, num_steps)
    minibatch = _scaled(vectors, noise_scale, minibatch_covariance, "minibatch_covariance")
    clients = _scaled(vectors, np.outer(update_scale, update_scale), client_covariance, "client_covariance")
    messages = covariance_matrix("quantization_variance", quantization_variance, dimension)
    messages = messages + relative_error * np.diag(np.diag(clients + minibatch))
    scaled_message_factor = server_rate**2 * cohort.message_factor
    sources = {
        "client_sampling": server_rate**2 * cohort.client_factor * clients,
        "minibatch": scaled_message_factor * minibatch,
        "quantization": scaled_message_factor * messages,
        "privacy_noise": server_rate**2 * covariance_matrix("privacy_variance", privacy_variance, dimension),
    }
    # What remains of them in the long run, or after `num_rounds` rounds.
    covariances = {name: _scaled(vectors, gain, sources[name], name) for name in SOURCES}
    if relative_error:
        covariances = _with_relative_error(
            covariances, vectors, covered_share, gain, scaled_message_factor * relative_error
        )
    bias = np.zeros(dimension)
    if pseudo_gradient is not None:
        bias = _shift(
            pseudo_gradient,
            vectors,
            covered_share,
            mean_decay=mean_decay,
            step_size=step_size,
            num_rounds=num_rounds,
        )
    losses = {"drift": float(bias @ hessian @ bias) / 2}
    losses |= {name: float(np.sum(hessian * covariance)) / 2 for name, covariance in covariances.items()}
    contraction = float(np.abs(1 - mean_decay).max())
    return MomentBudget(
        bias=bias,
        losses=losses,
        covariances=covariances,
        contraction=contraction,
        client_factor=cohort.client_factor,
        message_factor=cohort.message_factor,
    )


def _check(step_size: float, num_steps: int, server_rate: float, relative_error: float, num_rounds: int | None) -> None:
    """Checks the numeric options of `budget_from_moments`."""
    validate.positive("step_size", step_size)
    validate.positive("server_rate", server_rate)
    validate.in_range("relative_error", relative_error, 0)
    checked_steps(num_steps, 1)
    if num_rounds is not None:
        validate.integer("num_rounds", num_rounds, 0)
        if relative_error:
            validate.fail("num_rounds", "None with a relative error", num_rounds)


class _Cohort(NamedTuple):
    """Moments of the cohort's weights c_i, where clients differ in their shares only."""

    mean: float  # mean of sum_i c_i
    variance: float  # variance of sum_i c_i
    client_factor: float  # factor of the covariance over clients
    message_factor: float  # factor of each message's own noise: sum_i E c_i^2


def _cohort(design: SamplingDesign | None, num_clients: int | None, shares: Any, denominator: str | float) -> _Cohort:
    """Computes the moments of a design's weights, or of all clients in every round.

    With equal shares, all clients are alike, and Cov(c) = a I + b 1 1^T. The matrix of ones has no effect, because the
    g_i - grad F sum to zero. The factor N a of the covariance over clients follows from

        sum_i Var(c_i) = N (a + b),    Var(sum_i c_i) = N a + N^2 b
        N a = (N sum_i Var(c_i) - Var(sum_i c_i)) / (N - 1)

    Args:
      design: of N clients; None = all `num_clients` take part in every round.
      num_clients: N; None with a design. Exactly one of the two is None.
      shares: [N] p_i >= 0 with sum 1; None = 1/N.
      denominator: as in `cohort_coefficients`; not "realised" with shares.

    Returns: `_Cohort`.

    Raises: ValueError for other combinations, and for a design with draw probabilities.
    """
    if design is None and num_clients is not None:
        validate.integer("num_clients", num_clients)
        population_size = num_clients
    elif design is not None and num_clients is None:
        check_design(design)
        population_size = design.population_size
        if design.draw_probabilities is not None:
            hint = "Covariances do not contain which clients are drawn more often."
            validate.fail("design", "clients drawn alike", design.scheme, hint)
    else:
        validate.fail("design, num_clients", "one of the two", (design, num_clients))
    shares_are_equal = shares is None
    shares = (
        np.full(population_size, 1 / population_size) if shares is None else checked_shares(shares, population_size)
    )
    if not shares_are_equal and denominator == "realised":
        validate.fail("shares", "None with denominator='realised'", "shares", "Use budget.")
    weights = cohort_coefficients(design, shares, denominator=denominator)
    total_variance = weights.diagonal.sum() + weights.scales @ weights.modes.sum(1) ** 2  # Var(sum_i c_i)
    sum_of_variances = (weights.second - weights.mean**2).sum()  # sum_i Var(c_i)
    N_a = (sum_of_variances * population_size - total_variance) / max(population_size - 1, 1)
    client_factor = float(N_a if shares_are_equal else weights.diagonal.sum())
    return _Cohort(
        mean=weights.mean.sum(),
        variance=total_variance,
        client_factor=client_factor,
        message_factor=float(weights.second.sum()),
    )


def _gain(decay: np.ndarray, num_rounds: int | None) -> np.ndarray:
    """Sums over rounds what remains of a round's error, [d, d], if each round removes the share `decay`."""
    if num_rounds is not None:
        return geometric_sum(decay, num_rounds)
    if not (decay > 1e-15).all():
        hint = "Take smaller steps; or give num_rounds, if the Hessian has flat directions."
        validate.fail("step_size", "a round that contracts", float(1 - decay.min()), hint)
    return 1 / decay


def _scaled(vectors: np.ndarray, scale: np.ndarray, covariance: Any, name: str) -> np.ndarray:
    """Scales a covariance elementwise in the eigenbasis."""
    matrix = covariance_matrix(name, covariance, len(vectors))
    return vectors @ (vectors.T @ matrix @ vectors * scale) @ vectors.T


def _with_relative_error(
    covariances: dict[str, np.ndarray], vectors: np.ndarray, covered_share: np.ndarray, gain: np.ndarray, scale: float
) -> dict[str, np.ndarray]:
    """Returns each source's covariance X, together with the compression error that the source itself causes.

    Let G be the linear map from what each round adds to what remains, X_0 = G(source), and M = V diag(q) V^T. The
    messages' errors add a diagonal covariance diag(u) in each round, with

        X = X_0 + G(diag u),    u = scale diag(M X M)

    So u solves the d linear equations (I - growth) u = scale diag(M X_0 M) with growth: u -> scale diag(M G(diag u) M).

    Args:
      covariances: source -> X_0, [d, d].
      vectors: [d, d] V, the eigenvectors of the Hessian as columns.
      covered_share: [d] q = 1 - (1 - eta h)^K.
      gain: [d, d] the map G: in the eigenbasis it multiplies entry by entry.
      scale: gamma^2 omega sum_i E c_i^2 >= 0.

    Returns: source -> X, [d, d].

    Raises: ValueError if `growth` does not contract, because the mean square then diverges.
    """
    progress = (vectors * covered_share) @ vectors.T  # M
    # The map from the compression variance u of a round to the one that it causes later; it must contract.
    growth = scale * _compression_map(np.outer(covered_share, covered_share) * gain, vectors)
    if not ((radius := spectral_radius(growth)) < 1):
        validate.fail("step_size", "a round whose mean square contracts", radius, "Take smaller steps.")
    with_error = {}
    for name, covariance in covariances.items():
        u = np.linalg.solve(np.eye(len(vectors)) - growth, scale * np.diag(progress @ covariance @ progress))
        with_error[name] = covariance + _scaled(vectors, gain, np.diag(u), name)
    return with_error


def _shift(
    pseudo_gradient: Any,
    vectors: np.ndarray,
    covered_share: np.ndarray,
    *,
    mean_decay: np.ndarray,
    step_size: float,
    num_rounds: int | None,
) -> np.ndarray:
    """Computes the shift of the mean that the pseudo-gradient at the optimum causes.

    It is -eta V diag(1 / q) V^T pseudo_gradient in the steady state. After T rounds from the optimum, each
    eigendirection has 1 - r^T of it.

    Args:
      pseudo_gradient: [d] of all clients at w*.
      vectors: [d, d] V, the eigenvectors of the Hessian as columns.
      covered_share: [d] q = 1 - (1 - eta h)^K in each eigendirection.
      mean_decay: [d] 1 - r = gamma E[sum_i c_i] q.
      step_size: eta > 0.
      num_rounds: T >= 0; None = the steady state.

    Returns: [d].
    """
    pseudo_64 = np.asarray(pseudo_gradient, np.float64)
    if pseudo_64.shape != covered_share.shape or not np.isfinite(pseudo_64).all():
        validate.fail("pseudo_gradient", f"{len(covered_share)} finite numbers", pseudo_64)
    # A direction without curvature is not covered at all, and has no finite shift.
    scale = -step_size * np.where(covered_share > 0, 1 / np.where(covered_share > 0, covered_share, 1), 0)
    share_of_limit = 1 if num_rounds is None else covered(mean_decay, num_rounds)  # 1 - r^T
    return vectors @ (scale * share_of_limit * (vectors.T @ pseudo_64))


def _compression_map(gain: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Makes the map u -> diag(V (gain * V^T diag(u) V) V^T), [d, d].

    It is a sum over the eigenvectors of `gain`, of which a few matter.
    """
    strengths, modes = np.linalg.eigh(gain)
    is_significant = np.abs(strengths) > 1e-15 * np.abs(strengths).max()
    terms = zip(strengths[is_significant], modes.T[is_significant], strict=True)
    maps = (strength * ((vectors * mode) @ vectors.T) ** 2 for strength, mode in terms)
    return sum(maps, np.zeros_like(gain))
