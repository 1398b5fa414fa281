"""This module holds the algebra that all closed forms on quadratic clients share.

Client i has the objective f_i(w) = 1/2 (w - a_i)^T H_i (w - a_i).

A problem is (hessians [N, d, d], centers [N, d], shares [N]), or for d = 1 (hessians [N], centers [N]). Shares p_i are
the weights of the clients in the global risk F = sum_i p_i f_i; by default they are 1/N. All arrays are float64.

The local work of a client is linear. With A_i = I - eta (H_i + lambda I), K steps end at

    w_i = w - M_i (w - a_i),    M_i = (I - A_i^K) (H_i + lambda I)^-1 H_i

For lambda = 0 this is M_i = I - (I - eta H_i)^K. Independent gradient noise of covariance S adds the covariance eta^2
sum_{k < K} A_i^k S A_i^k.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.validate import NonNegative, Positive


def quadratic_problem(hessians: Any, centers: Any, shares: Any = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Checks a quadratic problem and returns it as (H [N, d, d], a [N, d], p [N]) in float64.

    Args:
      hessians: H, [N, d, d], or [N] for d = 1; symmetric and positive semi-definite.
      centers: a, [N, d], or [N] for d = 1.
      shares: p, [N] >= 0 that sum to 1; None = 1/N.

    Raises: ValueError for other shapes, numbers that are not finite, Hessians that are not symmetric and positive
    semi-definite, and shares that are negative or do not sum to 1.

    >>> [array.shape for array in quadratic_problem([1, 10], [0, 1])]
    [(2, 1, 1), (2, 1), (2,)]
    """
    hessians = np.asarray(hessians, np.float64)
    centers = np.asarray(centers, np.float64)
    if hessians.ndim == 1 and centers.ndim == 1:
        hessians = hessians[:, None, None]
        centers = centers[:, None]
    if centers.ndim != 2 or not centers.size or hessians.shape != centers.shape + centers.shape[-1:]:
        validate.fail("hessians, centers", "shapes [N, d, d] and [N, d]", (hessians.shape, centers.shape))
    if not (np.isfinite(hessians).all() and np.isfinite(centers).all()):
        validate.fail("hessians, centers", "finite numbers", "NaN or inf")
    if not np.allclose(hessians, np.swapaxes(hessians, 1, 2), rtol=1e-6, atol=1e-8):
        validate.fail("hessians", "symmetric matrices", "an asymmetric one", "Use (H + H^T) / 2.")
    # Rounding may make a zero eigenvalue slightly negative, so there is a tolerance.
    smallest_eigenvalue = np.linalg.eigvalsh(hessians).min()
    if not (smallest_eigenvalue >= -1e-6 * max(1.0, np.abs(hessians).max())):
        validate.fail(
            "hessians", "no negative eigenvalue", float(smallest_eigenvalue), "The risk would have no minimum."
        )
    shares = np.full(len(centers), 1 / len(centers)) if shares is None else shares
    return hessians, centers, checked_shares(shares, len(centers))


def checked_shares(shares: Any, num_clients: int) -> np.ndarray:
    """Checks the shares and returns them as [N] float64; raises ValueError unless they are >= 0 with sum 1."""
    shares = np.asarray(shares, np.float64)
    if shares.shape != (num_clients,) or not ((shares >= 0).all() and np.isclose(shares.sum(), 1, rtol=1e-6)):
        validate.fail("shares", f"{num_clients} numbers >= 0 that sum to 1", shares.tolist())
    return shares


def average(matrices: np.ndarray, centers: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Computes the matrix-weighted average (sum p_i M_i)^-1 sum p_i M_i a_i.

    Args:
      matrices: M, [N, d, d].
      centers: a, [N, d].
      shares: p, [N].

    Raises: ValueError if sum p_i M_i is singular.
    """
    total = np.einsum("n,nij->ij", shares, matrices)
    if not (np.linalg.cond(total) < 1e15):
        hint = "No client has curvature along one of the directions."
        validate.fail("hessians", "a unique solution", "a singular average", hint)
    return np.linalg.solve(total, np.einsum("n,nij,nj->i", shares, matrices, centers))


def spectral_radius(matrix: np.ndarray) -> float:
    """Computes the largest magnitude of an eigenvalue."""
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def checked_steps(num_steps: Any, num_clients: int, low: int = 1) -> np.ndarray:
    """Returns the numbers of local steps K_i, [N], from one integer for all clients or one for each; checked."""
    if np.ndim(num_steps) == 0:
        validate.integer("num_steps", num_steps, low)
        return np.full(num_clients, num_steps)
    by_client = np.asarray(num_steps)
    if by_client.shape != (num_clients,) or by_client.dtype.kind not in "iu" or not (by_client >= low).all():
        validate.fail("num_steps", f"an integer >= {low}, or {num_clients} of them", by_client.tolist())
    return by_client


def quadratic_optimum(hessians: Any, centers: Any, shares: Any = None) -> np.ndarray:
    """Computes the global optimum w* = (sum p_i H_i)^-1 sum p_i H_i a_i, which is not the average of the centers.

    Args:
      hessians, centers, shares: as in `quadratic_problem`.

    Guarantees: The gradient of the global risk vanishes there
    (tests/theory/test_convergence.py::test_optimum_is_stationary).

    >>> print(round(float(quadratic_optimum([1, 10], [0, 1])[0]), 6))
    0.909091
    """
    return average(*quadratic_problem(hessians, centers, shares))


def effective_shares(shares: Any, num_steps: Any) -> np.ndarray:
    """Computes the shares of the objective that small steps with unequal local work really minimise.

    They are proportional to p_i K_i.

    For example, weights n_i together with numbers of steps in proportion to n_i give shares in proportion to n_i^2.

    Args:
      shares: [N] p_i.
      num_steps: [N] K_i, or one integer.

    Returns: [N] float64 with sum 1. FedAvg's fixed point tends to the `quadratic_optimum` with these shares.

    Guarantees: The fixed point of FedAvg tends to this optimum
    (tests/theory/test_convergence.py::test_unequal_steps_shift_the_fixed_point).

    References: Wang et al. 2020 (FedNova), theorem 1.

    >>> print(effective_shares([10 / 110, 100 / 110], [10, 100]).round(4))  # one epoch, batches of one
    [0.0099 0.9901]
    """
    shares = np.asarray(shares, np.float64)
    if shares.ndim != 1 or not ((shares >= 0).all() and np.isclose(shares.sum(), 1, rtol=1e-6)):
        validate.fail("shares", "numbers >= 0 that sum to 1", shares.tolist())
    weights = shares * checked_steps(num_steps, len(shares))
    return weights / weights.sum()


@validate.named_arguments
def local_progress(
    hessians: np.ndarray, num_steps: Any, step_size: float, proximal_weight: NonNegative = 0.0, *, low: int = 1
) -> np.ndarray:
    """Computes the matrices M_i, [N, d, d]: the share of the way to its center that a client covers.

    Args:
      hessians: [N, d, d].
      num_steps: K >= `low`, or [N] of them.
      step_size: eta > 0 (>= 0 if `low` is 0).
      proximal_weight: lambda >= 0 of FedProx.
      low: 0 or 1, the least number of steps that is allowed.

    >>> print(local_progress(np.array([[[1.0]]]), 2, 0.1).round(6))
    [[[0.19]]]
    """
    (validate.in_range if low == 0 else validate.positive)("step_size", step_size, *([0] if low == 0 else []))
    powers = checked_steps(num_steps, len(hessians), low)[:, None]
    eigenvalues, vectors = np.linalg.eigh(hessians)
    eigenvalues = np.maximum(eigenvalues, 0)
    shifted = eigenvalues + proximal_weight
    # h / (h + lambda), the share that an exact solve would cover; 0 in flat directions.
    exact_solution_share = np.divide(eigenvalues, shifted, out=np.zeros_like(eigenvalues), where=shifted > 0)
    progress = covered(step_size * shifted, powers) * exact_solution_share
    return np.einsum("nia,na,nja->nij", vectors, progress, vectors)


@validate.named_arguments
def local_noise(
    hessians: np.ndarray, noise: Any, num_steps: Any, step_size: Positive, proximal_weight: NonNegative = 0.0
) -> np.ndarray:
    """Computes the covariance [N, d, d] that gradient noise leaves in each client's model after its K_i steps.

    The noise is independent over steps.

    Args:
      hessians: [N, d, d].
      noise: S, the covariance of one stochastic gradient: a variance per coordinate >= 0, [d, d] for all, or [N, d, d].
      num_steps, step_size, proximal_weight: as in `local_progress`.

    Guarantees: The covariance equals the step-by-step recursion
    (tests/theory/test_convergence.py::test_noise_of_local_steps).

    >>> print(local_noise(np.array([[[1.0]]]), 4.0, 2, 0.1).round(6))
    [[[0.0724]]]
    """
    noise = covariance_matrix("noise", noise, hessians.shape[-1], len(hessians))
    powers = checked_steps(num_steps, len(hessians))[:, None, None]
    eigenvalues, vectors = np.linalg.eigh(hessians)
    sum_of_powers = steps_kept(step_size * (np.maximum(eigenvalues, 0) + proximal_weight), powers)
    in_eigenbasis = np.einsum("nia,nij,njb->nab", vectors, noise, vectors) * sum_of_powers
    return step_size**2 * np.einsum("nia,nab,njb->nij", vectors, in_eigenbasis, vectors)


def covered(rate: np.ndarray, powers: Any) -> np.ndarray:
    """Computes 1 - (1 - rate)^powers, elementwise; it keeps its digits for tiny rates too."""
    # log1p is exact for small rates, but undefined from a rate of 1 on; so the two cases are computed apart.
    small_rates = -np.expm1(powers * np.log1p(-np.minimum(rate, 0.5)))
    return np.where(rate < 0.5, small_rates, 1 - (1 - np.maximum(rate, 0.5)) ** powers)


def steps_kept(rate: np.ndarray, powers: Any) -> np.ndarray:
    """Computes the sum over k < powers of ((1 - rate_a) (1 - rate_b))^k, [..., d, d]."""
    return geometric_sum(rate[..., :, None] + rate[..., None, :] - rate[..., :, None] * rate[..., None, :], powers)


def geometric_sum(lost: np.ndarray, powers: Any) -> np.ndarray:
    """Computes the geometric sum over k < powers of (1 - lost)^k, elementwise."""
    return np.where(lost == 0, powers, covered(lost, powers) / np.where(lost == 0, 1, lost))


def symmetric_matrix(name: str, matrix: Any) -> np.ndarray:
    """Returns a number or a symmetric matrix as [d, d] float64; checked."""
    matrix = np.asarray(matrix, np.float64)
    matrix = matrix[None, None] if matrix.ndim == 0 else matrix
    square = matrix.ndim == 2 and matrix.size and matrix.shape[0] == matrix.shape[1] and np.isfinite(matrix).all()
    if not square or not np.allclose(matrix, matrix.T, rtol=1e-6, atol=1e-8):
        validate.fail(name, "a finite number or one symmetric matrix [d, d]", matrix)
    return matrix


def covariance_matrix(name: str, covariance: Any, dimension: int, num_clients: int | None = None) -> np.ndarray:
    """Returns a covariance as a matrix, checked.

    Args:
      name: the name of the argument, for errors.
      covariance: a variance v per coordinate, which stands for v I, or [d, d], or with `num_clients` [N, d, d].
      dimension: d.
      num_clients: N; None if there is no axis over clients.

    Returns: [d, d], or [N, d, d] with `num_clients`.
    """
    covariance = np.asarray(covariance, np.float64)
    if covariance.ndim == 0 and np.isfinite(covariance):
        covariance = covariance * np.eye(dimension)
    common_shape = (dimension, dimension)
    client_shape = (num_clients, dimension, dimension)
    if covariance.shape not in (common_shape, client_shape) or not np.isfinite(covariance).all():
        expected_shapes = common_shape if num_clients is None else f"{common_shape} or {client_shape}"
        validate.fail(name, f"a finite variance per coordinate, or {expected_shapes}", covariance)
    if num_clients is not None:
        covariance = np.broadcast_to(covariance, (num_clients, *common_shape))
    # The symmetric part decides; a covariance from a simulation is symmetric up to rounding only.
    smallest_eigenvalue = np.linalg.eigvalsh((covariance + np.swapaxes(covariance, -1, -2)) / 2).min()
    if not (smallest_eigenvalue >= -1e-9 * max(1e-30, np.abs(covariance).max())):
        validate.fail(name, "variances >= 0", float(smallest_eigenvalue))
    return covariance
