"""This module computes the error floor of FedAvg with constant steps, and divides it by cause.

On quadratics a round is

    w' = w + gamma (sum_i c_i (-M_i (w - a_i) + n_i + q_i) + z)

    c_i    the cohort's random weights (`theory.coefficients`)
    n_i    gradient noise that is left after K local steps
    q_i    the quantiser's error on an update
    z      privacy noise on the aggregate

Let w_inf be the fixed point of the mean, e = w - w_inf, g_i = M_i (w_inf - a_i) and B = I - gamma sum_i c_i M_i. With
Q_i, V_i and Z for the covariances of n_i, q_i and z, the stationary covariance Sigma of e solves

    Sigma = E[B Sigma B^T] + gamma^2 (sum_ij Cov(c)_ij g_i g_j^T + sum_i E[c_i^2] (Q_i + V_i) + Z).

This equation is linear in its sources. So the covariance is a sum of components, and each is solved for on its own,
exactly. Cohorts also multiply the error, because B is random; every component includes this effect. With the bias b =
w_inf - w*, the excess loss is (tr H Sigma + b^T H b) / 2. `Budget` states which results are exact.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.theory.coefficients import Coefficients, cohort_coefficients
from fedjax_sim.theory.quadratic import (
    average,
    covariance_matrix,
    local_noise,
    local_progress,
    quadratic_optimum,
    quadratic_problem,
    spectral_radius,
)
from fedjax_sim.validate import NonNegative, Positive

SOURCES = ("client_sampling", "minibatch", "quantization", "privacy_noise")
MAX_DIMENSION = 40  # the equation has d^2 unknowns, so its matrix has d^4 entries
MAX_ROUNDS = 1_000_000


@dataclasses.dataclass(frozen=True, eq=False)
class Budget:
    """A `Budget` states the error floor of FedAvg and its components.

    The floor is exact for quadratic clients, if errors of gradients and messages are independent of the model and of
    each other. `exact` is False if the ratio of the cohort's weights is taken to leading order. The error of a uniform
    quantiser, d Delta^2 / 6, is its mean over the position between two levels. That is a good model while updates
    spread over a level or more.
    """

    fixed_point: np.ndarray  # [d] w_inf, the stationary mean
    optimum: np.ndarray  # [d] w*
    hessian: np.ndarray  # [d, d] of the global risk
    losses: dict[str, float]  # excess loss by component: drift, sampling_bias, and SOURCES
    covariances: dict[str, np.ndarray]  # [d, d] by source
    contraction: float  # factor of the mean's distance from w_inf in a round
    mean_square_contraction: float  # factor of the covariance's distance in a round; a floor exists if it is below 1
    exact: bool
    mean_map: np.ndarray = dataclasses.field(repr=False)  # [d, d] E B
    second_map: np.ndarray = dataclasses.field(repr=False)  # [d^2, d^2] X -> E[B X B^T]
    cross_map: np.ndarray = dataclasses.field(repr=False)  # [d^2, d] E e -> E[B e r^T] + its transpose
    source: np.ndarray = dataclasses.field(repr=False)  # [d, d] covariance that one round adds

    @property
    def covariance(self) -> np.ndarray:
        """The stationary covariance, [d, d]."""
        return sum(self.covariances.values(), np.zeros_like(self.hessian))

    @property
    def bias(self) -> np.ndarray:
        """The stationary mean minus the optimum, [d]."""
        return self.fixed_point - self.optimum

    @property
    def total(self) -> float:
        """The expected excess loss F - F* of the model in steady state."""
        return sum(self.losses.values())

    def _start(self, start: Any) -> np.ndarray:
        """Computes the distance e of a start model from the fixed point, [d]; checks the input."""
        point = np.atleast_1d(np.asarray(start, np.float64))
        if point.shape != self.optimum.shape or not np.isfinite(point).all():
            validate.fail("start", f"{len(self.optimum)} finite numbers", point.tolist())
        return point - self.fixed_point

    def expected_loss(self, num_rounds: int, *, start: Any) -> np.ndarray:
        """Computes E F(w_t) - F* from the model `start` on, [T + 1]: the whole curve down to the floor.

        Args:
          num_rounds: T >= 0.
          start: [d] the initial model (a number if d = 1).

        Guarantees: The curve equals the enumerated one
        (tests/theory/test_floor.py::test_expected_path_is_the_enumerated_one).
        """
        validate.integer("num_rounds", num_rounds, 0)
        mean_error = self._start(start)
        second_moment = np.outer(mean_error, mean_error).reshape(-1)
        weights = self.hessian.reshape(-1) / 2
        gradient_at_fixed_point = self.hessian @ self.bias
        constant = self.bias @ gradient_at_fixed_point / 2
        losses = np.empty(num_rounds + 1)
        for t in range(num_rounds + 1):
            # F(w) - F* is quadratic in e, so its mean needs the first two moments of e only.
            losses[t] = weights @ second_moment + mean_error @ gradient_at_fixed_point + constant
            second_moment = self.second_map @ second_moment + self.cross_map @ mean_error + self.source.reshape(-1)
            mean_error = self.mean_map @ mean_error
        return losses

    def rounds_to_floor(self, start: Any) -> float:
        """Finds the first round in which the start costs no more than the noise: e^T H e <= tr H Sigma.

        Args:
          start: [d] the initial model (a number if d = 1).

        Returns: an int; math.inf beyond a million rounds.

        Raises: ValueError for a floor of zero.

        Guarantees: The inequality holds in this round and not before
        (tests/theory/test_floor.py::test_rounds_to_floor).
        """
        mean_error = self._start(start)
        floor = float(np.trace(self.hessian @ self.covariance))
        if not (floor > 0):
            validate.fail("budget", "a floor above zero", floor, "Without noise use rounds_until.")
        for t in range(MAX_ROUNDS):
            if mean_error @ self.hessian @ mean_error <= floor:
                return t
            mean_error = self.mean_map @ mean_error
        return math.inf


def _kronecker(spread: np.ndarray, dimension: int) -> np.ndarray:
    """Makes the map X -> sum_ij C_ij M_i X M_j^T, [d^2, d^2], from the spread [(a c), (b d)] of the flattened M."""
    return spread.reshape((dimension,) * 4).transpose(0, 2, 1, 3).reshape(dimension**2, dimension**2)


def _radius(matrix: np.ndarray) -> float:
    """Computes the spectral radius of a map on matrices."""
    # Without a relative error the map is symmetric, because all M_i are.
    if np.allclose(matrix, matrix.T, rtol=0, atol=1e-13):
        return float(np.abs(np.linalg.eigvalsh(matrix)).max())
    if len(matrix) <= 400:
        return spectral_radius(matrix)
    # Computing all eigenvalues of a large matrix takes long, and only the largest is needed.
    from scipy.sparse.linalg import eigs

    return float(np.abs(eigs(matrix, k=1, which="LM", return_eigenvectors=False, v0=np.ones(len(matrix))))[0])


def _second_moment_maps(
    weights: Coefficients,
    mean_map: np.ndarray,
    progress: np.ndarray,
    pushes: np.ndarray,
    *,
    server_rate: float,
    relative_error: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Computes the linear maps by which a round acts on second moment and mean: `Budget`'s second_map and cross_map.

    A round moves e to B e - gamma sum_i c_i g_i + noise. So E e e^T becomes S(E e e^T) + R(E e) and a constant, with

        S(X) = E[B] X E[B]^T + gamma^2 sum_ij Cov(c)_ij M_i X M_j^T + D(gamma^2 omega sum_i E[c_i^2] M_i X M_i^T)
        R(e) = C(e) + C(e)^T
        C(e) = gamma^2 sum_ij Cov(c)_ij M_i e g_j^T + D(gamma^2 omega sum_i E[c_i^2] M_i e g_i^T)

    D keeps the diagonal of a matrix, and sets all other entries to 0. Its terms come from the relative error: that on
    coordinate a of the update M_i e + g_i has the variance omega (M_i e + g_i)_a^2.

    Args:
      weights: moments of c.
      mean_map: [d, d] E[B].
      progress: [N, d, d] M_i.
      pushes: [N, d] g_i.
      server_rate: gamma > 0.
      relative_error: omega >= 0.

    Returns: (S [d^2, d^2] on flattened matrices, R [d^2, d]).
    """
    num_clients, dimension = pushes.shape
    flat_progress = progress.reshape(num_clients, -1)
    second_moments = server_rate**2 * weights.second  # [N] gamma^2 E c_i^2
    second_map = np.kron(mean_map, mean_map) + server_rate**2 * _kronecker(
        weights.spread(flat_progress, flat_progress), dimension
    )
    # C as [a, b, c]: the entry (a, b) of the second moment, from the entry c of the mean.
    spread = weights.spread(flat_progress, pushes).reshape((dimension,) * 3)
    cross = server_rate**2 * spread.transpose(0, 2, 1)
    if relative_error:
        # The error on each coordinate is independent and has variance omega times its square, so only the diagonal of
        # the covariance grows.
        diagonal_map = relative_error * _kronecker(
            (flat_progress * second_moments[:, None]).T @ flat_progress, dimension
        )
        diagonal = np.arange(dimension) * (dimension + 1)
        second_map[diagonal] += diagonal_map[diagonal]
        diagonal_cross = relative_error * np.einsum("n,nac,na->ac", second_moments, progress, pushes)
        cross[np.arange(dimension), np.arange(dimension)] += diagonal_cross
    return second_map, (cross + cross.transpose(1, 0, 2)).reshape(dimension**2, dimension)


def _loss(hessian: np.ndarray, offset: np.ndarray) -> float:
    """Computes the excess loss at a distance from the optimum."""
    return float(offset @ hessian @ offset) / 2


@validate.named_arguments
def budget(
    hessians: Any,
    centers: Any,
    shares: Any = None,
    *,
    step_size: float,
    num_steps: Any = 1,
    design: SamplingDesign | None = None,
    denominator: str | float = "fixed",
    server_rate: Positive = 1.0,
    gradient_noise: Any = 0.0,
    quantization_variance: Any = 0.0,
    relative_error: NonNegative = 0.0,
    privacy_variance: Any = 0.0,
    proximal_weight: float = 0.0,
) -> Budget:
    """Computes the error floor of FedAvg (or FedProx) on quadratic clients, component by component.

    Args:
      hessians, centers, shares: see `theory.quadratic`; d at most 40.
      step_size: eta > 0 of the local steps.
      num_steps: K >= 1 local steps, or [N] K_i.
      design: the sampler's `SamplingDesign`; None = all clients in every round.
      denominator: "fixed", "realised" (`mean`) or the number D of a `fixed_mean(D)`: see `theory.coefficients`.
      server_rate: gamma > 0.
      gradient_noise: S, the covariance of one local stochastic gradient, independent over steps: a variance per
        coordinate, [d, d], or [N, d, d].
      quantization_variance: V, the covariance of the error of one message, in the same forms. For a uniform stochastic
        quantiser it is Delta^2 / 6 per coordinate.
      relative_error: omega >= 0. An unbiased error on each coordinate by itself, whose variance is omega times the
        coordinate's square. It multiplies the distance, and moves the limit of stability.
      privacy_variance: of the noise on the aggregate: (z C / m)^2 per coordinate for `fixed_mean(m)`, or [d, d].
      proximal_weight: lambda >= 0 of FedProx.

    Returns: `Budget`.

    Raises: ValueError for wrong input, and for rounds whose mean square diverges.

    Guarantees: The covariance is the second moment over all cohorts, enumerated
    (tests/theory/test_floor.py::test_covariance_is_the_enumerated_one). Rounds of the real simulator have each
    component, and their sum (::test_simulated_floors). Floors of scalar quadratics under quantisation, privacy noise
    and gradient noise equal closed forms (::test_floors_of_scalar_quadratics). For m equal clients the limit of
    stability is at eta L (1 + omega / m) = 2 (::test_relative_error_moves_the_limit_of_stability).

    References: derived above; for one client Mandt, Hoffman and Blei 2017; Malinovskiy et al. 2020 for fixed points.

    >>> floor = budget([1.0, 10.0], [0.0, 1.0], step_size=0.05, num_steps=5, gradient_noise=1.0)
    >>> print({name: round(loss, 6) for name, loss in floor.losses.items() if loss})
    {'drift': 0.026627, 'minibatch': 0.011173}
    """
    hessians, centers, shares = quadratic_problem(hessians, centers, shares)
    num_clients, dimension = centers.shape
    validate.integer("dimension", dimension, 1, MAX_DIMENSION, hint="Use budget_from_moments for more.")
    weights = cohort_coefficients(design, shares, denominator=denominator)
    progress = local_progress(hessians, num_steps, step_size, proximal_weight)
    # The mean: how a round moves it, and where it converges to.
    mean_map = np.eye(dimension) - server_rate * np.einsum("n,nij->ij", weights.mean, progress)
    contraction = spectral_radius(mean_map)
    hessian = np.einsum("n,nij->ij", shares, hessians)
    optimum = quadratic_optimum(hessians, centers, shares)
    fixed_point = average(progress, centers, weights.mean)
    drifted = average(progress, centers, shares)
    # The covariance that one round adds, by source. Row i of `pushes` is g_i.
    pushes = np.einsum("nij,nj->ni", progress, fixed_point - centers)
    minibatch = local_noise(hessians, gradient_noise, num_steps, step_size, proximal_weight)
    messages = covariance_matrix("quantization_variance", quantization_variance, dimension, num_clients)
    squared_updates = np.einsum("ni,ni->ni", pushes, pushes) + np.einsum("nii->ni", minibatch)
    second_moments = server_rate**2 * weights.second
    sources: dict[str, np.ndarray] = {
        "client_sampling": server_rate**2 * weights.spread(pushes, pushes),
        "minibatch": np.einsum("n,nij->ij", second_moments, minibatch),
        "quantization": np.einsum("n,nij->ij", second_moments, messages)
        + np.diag(relative_error * (second_moments @ squared_updates)),
        "privacy_noise": server_rate**2 * covariance_matrix("privacy_variance", privacy_variance, dimension),
    }
    second_map, cross = _second_moment_maps(
        weights, mean_map, progress, pushes, server_rate=server_rate, relative_error=relative_error
    )
    radius = _radius(second_map)
    if not (max(radius, contraction) < 1):
        validate.fail(
            "step_size", "a round whose mean square contracts", radius, "Take smaller steps, or more clients."
        )
    # One linear system with a right-hand side for each source.
    stacked = np.stack([source.reshape(-1) for source in sources.values()], axis=1)
    solutions = np.linalg.solve(np.eye(dimension**2) - second_map, stacked).T.reshape(-1, dimension, dimension)
    covariances = dict(zip(sources, solutions, strict=True))
    # Drift: the bias if all clients took part. What cohorts add to it is the sampling bias.
    drift = _loss(hessian, drifted - optimum)
    losses = {"drift": drift, "sampling_bias": _loss(hessian, fixed_point - optimum) - drift}
    losses |= {name: float(np.trace(hessian @ covariance)) / 2 for name, covariance in covariances.items()}
    return Budget(
        fixed_point=fixed_point,
        optimum=optimum,
        hessian=hessian,
        losses=losses,
        covariances=covariances,
        contraction=contraction,
        mean_square_contraction=radius,
        exact=weights.exact,
        mean_map=mean_map,
        second_map=second_map,
        cross_map=cross,
        source=sum(sources.values(), np.zeros_like(hessian)),
    )
