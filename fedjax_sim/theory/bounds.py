"""This module evaluates published bounds, with every constant as a function of the problem.

The bounds are FedProx's drift and descent, and those of Li et al. on FedAvg.

A bound is not a prediction. For exact answers see `theory.convergence` and `theory.floor`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.theory.quadratic import quadratic_optimum, quadratic_problem
from fedjax_sim.validate import NonNegative, Number, Positive, PositiveInt, Share


@dataclasses.dataclass(frozen=True)
class ProximalDrift:
    """A `ProximalDrift` states the distances of FedProx's exact local solutions from w_bar*.

    The point w_bar* is the minimum of F + (lambda / 2) |w - w_t|^2.
    """

    center: np.ndarray  # [d] w_bar*
    distances: np.ndarray  # [N] |w_i* - w_bar*|
    dissimilarity: float  # G = max_i |grad f_i - grad F| at w_bar*
    bound: float  # G / (mu + lambda)


@validate.named_arguments
def proximal_drift(
    hessians: Any, centers: Any, shares: Any = None, *, anchor: Any, proximal_weight: NonNegative
) -> ProximalDrift:
    """Computes FedProx's client drift and its bound, |w_i* - w_bar*| <= G / (mu + lambda).

    The drift is measured from w_bar*, the minimum of F + (lambda / 2) |w - w_t|^2. The dissimilarity G is taken at
    w_bar* too, not at the minimum of F. Proof: phi_i = f_i + (lambda / 2)|w - w_t|^2 is (mu + lambda)-strongly convex,
    and its gradient at w_bar* is grad f_i - grad F.

    Args:
      hessians, centers, shares: see `theory.quadratic`. mu is the least curvature of any client.
      anchor: [d] w_t, the broadcast model.
      proximal_weight: lambda >= 0, with mu + lambda > 0.

    Returns: `ProximalDrift`.

    Guarantees: The bound holds on 1,000 random problems and is tight for H_i = mu I
    (tests/theory/test_bounds.py::test_proximal_drift).

    References: Li et al. 2020 (FedProx), section 3; derived above.

    >>> drift = proximal_drift([2, 2], [0, 1], anchor=0.2, proximal_weight=3.0)
    >>> print(drift.distances.round(6), round(drift.bound, 6))
    [0.2 0.2] 0.2
    """
    hessians, centers, shares = quadratic_problem(hessians, centers, shares)
    anchor = np.atleast_1d(np.asarray(anchor, np.float64))
    if anchor.shape != centers.shape[1:] or not np.isfinite(anchor).all():
        validate.fail("anchor", f"{centers.shape[1]} finite numbers", anchor)
    curvature = float(np.linalg.eigvalsh(hessians).min()) + proximal_weight
    if not (curvature > 1e-12):
        validate.fail("proximal_weight", "a number > 0 when a hessian is singular", proximal_weight)
    proximal_hessian = proximal_weight * np.eye(len(anchor))
    linear_terms = np.einsum("nij,nj->ni", hessians, centers)
    # Minima of f_i + (lambda / 2) |w - w_t|^2 by client, and the minimum of their weighted sum.
    local_solutions = np.linalg.solve(
        hessians + proximal_hessian, (linear_terms + proximal_weight * anchor)[..., None]
    )[..., 0]
    center = np.linalg.solve(
        np.einsum("n,nij->ij", shares, hessians) + proximal_hessian, shares @ linear_terms + proximal_weight * anchor
    )
    gradients = np.einsum("nij,nj->ni", hessians, center - centers)
    # G is taken at w_bar*, where the proximal terms of all clients are equal and cancel.
    dissimilarity = float(np.linalg.norm(gradients - shares @ gradients, axis=1).max())
    distances = np.linalg.norm(local_solutions - center, axis=1)
    return ProximalDrift(center, distances, dissimilarity, dissimilarity / curvature)


@validate.named_arguments
def fedprox_descent(
    smoothness: Positive,
    *,
    proximal_weight: float,
    dissimilarity: Annotated[float, Number(1)],
    cohort_size: PositiveInt,
    inexactness: Share = 0.0,
    negative_curvature: NonNegative = 0.0,
) -> float:
    """Computes rho of E F(w_next) <= F(w) - rho |grad F(w)|^2 for FedProx. If rho > 0, descent is guaranteed.

    rho = 1/mu - gamma B/mu - B (1 + gamma) sqrt(2) / (mu' sqrt(K)) - L B (1 + gamma) / (mu' mu)
    - L (1 + gamma)^2 B^2 / (2 mu'^2) - L B^2 (1 + gamma)^2 (2 sqrt(2 K) + 2) / (mu'^2 K)

    Here mu is the proximal weight and mu' = mu - L_-.

    Args:
      smoothness: L > 0 of every f_i.
      proximal_weight: mu > L_-.
      dissimilarity: B >= 1 (`metrics.gradient_heterogeneity(...).b_dissimilarity`, at its largest).
      cohort_size: K clients, drawn in proportion to p_i.
      inexactness: gamma in [0, 1] of the local solves; 0 = exact.
      negative_curvature: L_- >= 0, such that Hessians are at least -L_- I.

    Returns: rho, which may be negative.

    Guarantees: The expected loss falls by at least rho |grad F(w)|^2, enumerated over all cohorts
    (tests/theory/test_bounds.py::test_fedprox_descends).

    References: Li et al. 2020 (FedProx), theorem 4.

    >>> fedprox_descent(1.0, proximal_weight=100.0, dissimilarity=1.0, cohort_size=100) > 0
    True
    """
    validate.in_range("proximal_weight", proximal_weight, negative_curvature, open_low=True)
    mu = proximal_weight
    mu_bar = proximal_weight - negative_curvature
    b = dissimilarity
    one_plus_gamma = 1 + inexactness
    return (
        (1 - inexactness * b) / mu
        - b * one_plus_gamma * math.sqrt(2 / cohort_size) / mu_bar
        - smoothness * b * one_plus_gamma / (mu_bar * mu)
        - smoothness * one_plus_gamma**2 * b**2 / (2 * mu_bar**2)
        - smoothness * b**2 * one_plus_gamma**2 * (2 * math.sqrt(2 * cohort_size) + 2) / (mu_bar**2 * cohort_size)
    )


@dataclasses.dataclass(frozen=True)
class FedAvgBound:
    """Holds the constants of Li et al.'s theorems 1 to 3, and computes the loss that the theorems guarantee.

    The theorems hold for strongly convex, smooth losses, and for the falling step sizes of `step_size`. `fedavg_bound`
    computes the constants of quadratic clients.

    Guarantees: The loss of simulated FedAvg with the steps `step_size` stays below `excess_loss`, for schemes I, II and
    full (tests/theory/test_bounds.py::test_fedavg_stays_below).

    References: Li et al., On the convergence of FedAvg on non-IID data, ICLR 2020, theorems 1 to 3.

    >>> losses = {"strong_convexity": 1.0, "smoothness": 2.0, "heterogeneity": 0.5}
    >>> bound = FedAvgBound(**losses, gradient_noise=0.0, gradient_bound=4.0, num_steps=1)
    >>> round(float(bound.excess_loss(100, start=1.0)), 4)
    0.3478
    """

    strong_convexity: float  # mu
    smoothness: float  # L
    heterogeneity: float  # Gamma = F* - sum p_i f_i*
    gradient_noise: float  # sum p_i^2 sigma_i^2, sigma_i^2 = E |stochastic gradient - gradient|^2
    gradient_bound: float  # G^2 >= E |stochastic gradient|^2 at every model that is reached
    num_steps: int  # E local steps between two averages
    cohort_size: int | None = None  # K clients; None = all: theorem 1
    num_clients: int | None = None  # N, for scheme II
    # "full", "I" (with replacement, in proportion to p_i) or "II" (uniform without replacement, p_i = 1/N)
    scheme: str = "full"

    def __post_init__(self) -> None:
        validate.positive("strong_convexity", self.strong_convexity)
        validate.in_range("smoothness", self.smoothness, self.strong_convexity)
        for name in ("heterogeneity", "gradient_noise", "gradient_bound"):
            validate.in_range(name, getattr(self, name), 0)
        validate.integer("num_steps", self.num_steps)
        validate.one_of("scheme", self.scheme, ("full", "I", "II"))
        if self.scheme != "full":
            validate.integer("cohort_size", self.cohort_size)
        elif self.cohort_size is not None:
            validate.fail("cohort_size", "None for full participation", self.cohort_size, "Or give scheme 'I' or 'II'.")
        if self.scheme == "II":
            assert self.cohort_size is not None, "checked above"
            validate.integer("num_clients", self.num_clients, self.cohort_size)

    @property
    def condition(self) -> float:
        """kappa = L / mu."""
        return self.smoothness / self.strong_convexity

    @property
    def delay(self) -> float:
        """gamma = max(8 kappa, E), which makes the first steps small enough."""
        return max(8 * self.condition, self.num_steps)

    @property
    def local_noise(self) -> float:
        """B = sum p_i^2 sigma_i^2 + 6 L Gamma + 8 (E - 1)^2 G^2."""
        drift = 8 * (self.num_steps - 1) ** 2 * self.gradient_bound
        return self.gradient_noise + 6 * self.smoothness * self.heterogeneity + drift

    @property
    def sampling_noise(self) -> float:
        """C = 4 E^2 G^2 / K, times (N - K) / (N - 1) for scheme II; 0 for full participation."""
        if self.cohort_size is None:
            return 0.0
        finite_population_correction = 1.0
        if self.scheme == "II":
            assert self.num_clients is not None, "checked when the bound is made"
            finite_population_correction = (self.num_clients - self.cohort_size) / max(self.num_clients - 1, 1)
        return finite_population_correction * 4 * self.num_steps**2 * self.gradient_bound / self.cohort_size

    def step_size(self, step: Any) -> Any:
        """Computes eta_t = 2 / (mu (gamma + t)) of local step t = 0, 1, ..., which counts over all rounds."""
        return 2 / (self.strong_convexity * (self.delay + np.asarray(step, np.float64)))

    def excess_loss(self, num_steps: Any, start: float) -> Any:
        """Computes the bound on E F(w_T) - F*.

        It is kappa / (gamma + T - 1) (2 (B + C) / mu + mu gamma / 2 |w_1 - w*|^2).

        Args:
          num_steps: T >= 1, the number of local steps in all rounds, a multiple of E; may be an array.
          start: |w_1 - w*|^2.

        Returns: the bound, shaped like `num_steps`.

        Raises: ValueError for steps that are not positive multiples of E.
        """
        steps = np.asarray(num_steps)
        if steps.dtype.kind not in "iu" or not ((steps >= 1) & (steps % self.num_steps == 0)).all():
            validate.fail("num_steps", f"positive multiples of the {self.num_steps} local steps", num_steps)
        validate.in_range("start", start, 0)
        noise_term = 2 * (self.local_noise + self.sampling_noise) / self.strong_convexity
        start_term = self.strong_convexity * self.delay / 2 * start
        return self.condition / (self.delay + steps - 1) * (noise_term + start_term)


@validate.named_arguments
def fedavg_bound(
    hessians: Any,
    centers: Any,
    shares: Any = None,
    *,
    radius: Positive,
    num_steps: int,
    gradient_noise: NonNegative = 0.0,
    cohort_size: int | None = None,
    scheme: str = "full",
) -> FedAvgBound:
    """Computes Li et al.'s constants for quadratic clients.

    Gradients of quadratics are unbounded. So G^2 holds only in a ball around w*, and every local model must stay inside
    of the ball.

    Args:
      hessians, centers, shares: see `theory.quadratic`.
      radius: of the ball, > 0.
      num_steps: E local steps of a round.
      gradient_noise: variance per coordinate of a stochastic gradient.
      cohort_size, scheme: as in `FedAvgBound`.

    Returns: `FedAvgBound`.

    Raises: ValueError for unequal shares with scheme "II".

    Guarantees: Gamma, L and mu equal their definitions (tests/theory/test_bounds.py::test_constants).

    >>> bound = fedavg_bound([1.0, 1.0], [0.0, 1.0], radius=1.0, num_steps=2)
    >>> bound.heterogeneity, bound.gradient_bound
    (0.125, 2.25)
    """
    hessians, centers, shares = quadratic_problem(hessians, centers, shares)
    if scheme == "II" and not np.allclose(shares * len(shares), 1):
        validate.fail("shares", "equal ones with scheme 'II'", shares.tolist(), "Li et al.'s theorem 3 assumes them.")
    optimum = quadratic_optimum(hessians, centers, shares)
    offsets = optimum - centers
    gradients = np.einsum("nij,nj->ni", hessians, offsets)
    eigenvalues = np.linalg.eigvalsh(hessians)
    variance = gradient_noise * centers.shape[1]
    # |grad f_i(w)| <= |grad f_i(w*)| + L_i |w - w*| everywhere in the ball.
    gradient_norms = np.linalg.norm(gradients, axis=1) + eigenvalues.max(axis=1) * radius
    return FedAvgBound(
        strong_convexity=float(eigenvalues.min()),
        smoothness=float(eigenvalues.max()),
        heterogeneity=float(shares @ np.einsum("ni,ni->n", offsets, gradients)) / 2,
        gradient_noise=float(shares @ shares) * variance,
        gradient_bound=float(gradient_norms.max()) ** 2 + variance,
        num_steps=num_steps,
        cohort_size=cohort_size,
        num_clients=len(shares) if scheme == "II" else None,
        scheme=scheme,
    )
