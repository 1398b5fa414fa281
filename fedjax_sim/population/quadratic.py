"""Clients with quadratic risks, f_i(w) = 1/2 (w - a_i)^T H_i (w - a_i): everything about them has a closed form.

The closed forms are float64 NumPy on (hessians [N, d, d], centers [N, d], shares [N]); for d = 1 they also take
hessians [N] and centers [N]. Shares p_i default to 1/N.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.federated_data import FederatedData
from fedjax_sim.population.population import indexed
from fedjax_sim.types import Array, Population

__all__ = [
    "fedavg_contraction",
    "fedavg_fixed_point",
    "fedprox_contraction",
    "fedprox_fixed_point",
    "proximal_solution",
    "quadratic_loss",
    "quadratic_optimum",
    "quadratic_population",
    "quadratics",
]


def _problem(hessians: Any, centers: Any, shares: Any = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(H [N, d, d], a [N, d], p [N]) in float64, checked."""
    hessians, centers = np.asarray(hessians, np.float64), np.asarray(centers, np.float64)
    if hessians.ndim == 1 and centers.ndim == 1:
        hessians, centers = hessians[:, None, None], centers[:, None]
    if centers.ndim != 2 or not len(centers) or hessians.shape != centers.shape + centers.shape[-1:]:
        validate.fail("hessians, centers", "shapes [N, d, d] and [N, d]", (hessians.shape, centers.shape))
    if not (np.isfinite(hessians).all() and np.isfinite(centers).all()):
        validate.fail("hessians, centers", "finite numbers", "NaN or inf")
    if not np.allclose(hessians, np.swapaxes(hessians, 1, 2), rtol=1e-6, atol=1e-8):
        validate.fail("hessians", "symmetric matrices", "an asymmetric one", "Use (H + H^T) / 2.")
    lowest = np.linalg.eigvalsh(hessians).min()
    if not (lowest >= -1e-6 * max(1.0, np.abs(hessians).max())):
        validate.fail("hessians", "no negative eigenvalue", float(lowest), "The risk would have no minimum.")
    shares = np.full(len(centers), 1 / len(centers)) if shares is None else np.asarray(shares, np.float64)
    if shares.shape != (len(centers),) or not ((shares >= 0).all() and np.isclose(shares.sum(), 1, rtol=1e-6)):
        validate.fail("shares", f"{len(centers)} numbers >= 0 that sum to 1", shares.tolist())
    return hessians, centers, shares


def _average(matrices: np.ndarray, centers: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """(sum p_i M_i)^-1 sum p_i M_i a_i."""
    total = np.einsum("n,nij->ij", shares, matrices)
    if not (np.linalg.cond(total) < 1e15):
        validate.fail("hessians", "a unique solution", "a singular average", "No client sees one of the directions.")
    return np.linalg.solve(total, np.einsum("n,nij,nj->i", shares, matrices, centers))


def quadratic_optimum(hessians: Any, centers: Any, shares: Any = None) -> np.ndarray:
    """The global optimum w* = (sum p_i H_i)^-1 sum p_i H_i a_i, which is not the average of the centers.

    Guarantees: the gradient of the global risk vanishes there
    (tests/population/test_quadratic.py::test_optimum_is_stationary).

    >>> print(round(float(quadratic_optimum([1, 10], [0, 1])[0]), 6))
    0.909091
    """
    return _average(*_problem(hessians, centers, shares))


def _local_progress(hessians: np.ndarray, num_steps: int, step_size: float) -> np.ndarray:
    """I - (I - eta H_i)^K: the share of the way to its center that a client goes."""
    validate.integer("num_steps", num_steps)
    validate.positive("step_size", step_size)
    identity = np.eye(hessians.shape[-1])
    return identity - np.linalg.matrix_power(identity - step_size * hessians, num_steps)


def fedavg_fixed_point(
    hessians: Any, centers: Any, shares: Any = None, *, num_steps: int, step_size: float
) -> np.ndarray:
    """Where FedAvg with K full-batch local steps comes to rest, if it does: w = (sum p_i M_i)^-1 sum p_i M_i a_i.

    M_i = I - (I - eta H_i)^K. One step rests at the optimum; infinitely many rest at the average of the centers.

    Args:
      hessians, centers, shares: see the module.
      num_steps: K >= 1 local gradient steps.
      step_size: eta > 0 of those steps.

    Returns: [d] float64.

    Guarantees: simulated FedAvg reaches it
    (tests/population/test_quadratic.py::test_fixed_points_are_where_simulated_rounds_end).

    References: Karimireddy et al., SCAFFOLD, 2020, section 3; Charles and Konecny, 2021, section 3.

    >>> print(fedavg_fixed_point([1, 10], [0, 1], num_steps=1, step_size=0.01).round(6))
    [0.909091]
    """
    hessians, centers, shares = _problem(hessians, centers, shares)
    return _average(_local_progress(hessians, num_steps, step_size), centers, shares)


def fedavg_contraction(hessians: Any, centers: Any, shares: Any = None, *, num_steps: int, step_size: float) -> float:
    """The factor by which a FedAvg round shortens the distance to its fixed point: rho(sum p_i (I - eta H_i)^K).

    Guarantees: above 1 rounds diverge (tests/population/test_quadratic.py::test_contraction_numbers).

    >>> print(round(fedavg_contraction([1, 10], [0, 1], num_steps=2, step_size=0.1), 6))
    0.405
    """
    hessians, _, shares = _problem(hessians, centers, shares)
    progress = np.einsum("n,nij->ij", shares, _local_progress(hessians, num_steps, step_size))
    return float(np.abs(np.linalg.eigvals(np.eye(len(progress)) - progress)).max())


def _proximal_progress(hessians: np.ndarray, proximal_weight: float) -> np.ndarray:
    """(H_i + lambda I)^-1 H_i."""
    validate.in_range("proximal_weight", proximal_weight, 0)
    shifted = hessians + proximal_weight * np.eye(hessians.shape[-1])
    if not (np.linalg.cond(shifted) < 1e15).all():
        validate.fail("proximal_weight", "a number > 0 when a hessian is singular", proximal_weight)
    return np.linalg.solve(shifted, hessians)


def fedprox_fixed_point(hessians: Any, centers: Any, shares: Any = None, *, proximal_weight: float) -> np.ndarray:
    """Where FedProx with exact local solves comes to rest: w = (sum p_i P_i)^-1 sum p_i P_i a_i.

    P_i = (H_i + lambda I)^-1 H_i.

    Args:
      hessians, centers, shares: see the module.
      proximal_weight: lambda >= 0. At 0 the average of the centers; towards infinity the optimum.

    Returns: [d] float64.

    Guarantees: the numbers of the sweep over lambda
    (tests/population/test_quadratic.py::test_fedprox_sweep).

    References: Li et al., Federated optimization in heterogeneous networks, 2020, section 3.

    >>> print(fedprox_fixed_point([1, 10], [0, 1], proximal_weight=1.0).round(6))
    [0.645161]
    """
    hessians, centers, shares = _problem(hessians, centers, shares)
    return _average(_proximal_progress(hessians, proximal_weight), centers, shares)


def fedprox_contraction(hessians: Any, centers: Any, shares: Any = None, *, proximal_weight: float) -> float:
    """The factor by which a FedProx round with exact local solves shortens the distance to its fixed point.

    rho(sum p_i lambda (H_i + lambda I)^-1).

    Guarantees: tests/population/test_quadratic.py::test_fedprox_sweep.

    >>> print(round(fedprox_contraction([1, 10], [0, 1], proximal_weight=1.0), 4))
    0.2955
    """
    hessians, _, shares = _problem(hessians, centers, shares)
    progress = np.einsum("n,nij->ij", shares, _proximal_progress(hessians, proximal_weight))
    return float(np.abs(np.linalg.eigvals(np.eye(len(progress)) - progress)).max())


def proximal_solution(hessian: Any, linear: Any, anchor: Any, *, proximal_weight: float) -> np.ndarray:
    """The minimum of 1/2 w^T H w - g^T w + lambda/2 |w - w_t|^2: (H + lambda I)^-1 (g + lambda w_t).

    Args:
      hessian: [d, d] H, symmetric; linear: [d] g; anchor: [d] w_t, the broadcast model.
      proximal_weight: lambda >= 0.

    Returns: [d] float64.

    Guarantees: tests/population/test_quadratic.py::test_proximal_solution.

    >>> print(proximal_solution([[3, 1], [1, 2]], [1, -1], [0.5, 0.5], proximal_weight=1.0).round(6))
    [ 0.454545 -0.318182]
    """
    validate.in_range("proximal_weight", proximal_weight, 0)
    hessian, linear, anchor = (np.asarray(value, np.float64) for value in (hessian, linear, anchor))
    if hessian.shape != linear.shape * 2 or linear.shape != anchor.shape or linear.ndim != 1:
        validate.fail("hessian, linear, anchor", "shapes [d, d], [d], [d]", (hessian.shape, linear.shape, anchor.shape))
    return np.linalg.solve(hessian + proximal_weight * np.eye(len(linear)), linear + proximal_weight * anchor)


def quadratic_loss(params: Any, examples: Any, key: Array | None = None) -> dict[str, Array]:
    """1/2 (w - a)^T H (w - a) for every example.

    Args:
      params: {"w": [d]}.
      examples: {"hessian": [n, d, d], "center": [n, d]}.
      key: unused; losses share this signature.

    Returns: {"loss": [n] float32}.

    Guarantees: its gradient is H (w - a) (tests/population/test_quadratic.py::test_loss_gradient).

    >>> example = {"hessian": np.full((1, 1, 1), 4.0), "center": np.zeros((1, 1))}
    >>> print(quadratic_loss({"w": np.ones(1)}, example)["loss"])
    [2.]
    """
    away = params["w"][None, :] - examples["center"]
    return {"loss": 0.5 * jnp.einsum("ni,nij,nj->n", away, examples["hessian"], away)}


def quadratic_population(hessians: Any, centers: Any, *, counts: Any = None) -> Population:
    """One client per quadratic; client i reports n_i identical examples, so its share is n_i / sum n.

    Args:
      hessians: [N, d, d] (or [N]); centers: [N, d] (or [N]).
      counts: [N] integers n_i >= 1; None for one each. Copies are index rows, not memory.

    Returns: a population of examples {"hessian": [n, d, d], "center": [n, d]}.

    Guarantees: counts act as weights (tests/population/test_quadratic.py::test_counts_are_weights).

    >>> quadratic_population([1.0, 1.0], [0.0, 1.0], counts=[1, 9]).size
    2
    """
    hessians, centers, _ = _problem(hessians, centers)
    counts = np.ones(len(centers), np.int64) if counts is None else np.asarray(counts)
    if counts.shape != (len(centers),) or counts.dtype.kind not in "iu" or not (counts >= 1).all():
        validate.fail("counts", f"{len(centers)} integers >= 1", counts.tolist())
    table = {"hessian": hessians.astype(np.float32), "center": centers.astype(np.float32)}
    rows = np.repeat(np.arange(len(centers), dtype=np.int32), counts)
    return indexed(table, (rows, np.concatenate([[0], np.cumsum(counts)])))


def quadratics(
    *,
    num_clients: int = 10,
    dimension: int = 10,
    smallest_curvature: float = 0.5,
    largest_curvature: float = 2.0,
    heterogeneity: float = 1.0,
    max_examples: int = 1,
    seed: int = 0,
) -> FederatedData:
    """Random quadratic clients: randomly rotated Hessians, Gaussian centers.

    Args:
      num_clients: N. dimension: d.
      smallest_curvature, largest_curvature: eigenvalues of every H_i are uniform in this interval, > 0.
      heterogeneity: standard deviation >= 0 of the centers' coordinates around one common Gaussian point.
      max_examples: n_i is uniform in 1..max_examples, the client's weight.
      seed: decides everything.

    Returns: `FederatedData` with task "quadratic"; its test set is one row per example of the population, so the mean
      test loss is the global risk.

    Guarantees: eigenvalues lie in the interval and heterogeneity 0 gives every client one optimum
    (tests/population/test_quadratic.py::test_random_quadratics).

    >>> data = quadratics(num_clients=4, dimension=3)
    >>> data.train.size, data.test["hessian"].shape
    (4, (4, 3, 3))
    """
    validate.integer("num_clients", num_clients)
    validate.integer("dimension", dimension, high=10_000)
    validate.integer("max_examples", max_examples)
    validate.integer("seed", seed, 0)
    validate.positive("smallest_curvature", smallest_curvature)
    validate.in_range("largest_curvature", largest_curvature, smallest_curvature)
    validate.in_range("heterogeneity", heterogeneity, 0)
    rng = np.random.default_rng(seed)
    rotations = np.linalg.qr(rng.normal(size=(num_clients, dimension, dimension)))[0]
    eigenvalues = rng.uniform(smallest_curvature, largest_curvature, (num_clients, dimension))
    hessians = np.einsum("nik,nk,njk->nij", rotations, eigenvalues, rotations)
    centers = rng.normal(size=dimension)[None] + heterogeneity * rng.normal(size=(num_clients, dimension))
    counts = rng.integers(1, max_examples, num_clients, endpoint=True)
    train = quadratic_population(hessians, centers, counts=counts)
    rows = np.repeat(np.arange(num_clients), counts)
    test = {"hessian": hessians[rows].astype(np.float32), "center": centers[rows].astype(np.float32)}
    return FederatedData(train, test, None, (dimension,), 1, "quadratic", name="quadratics")
