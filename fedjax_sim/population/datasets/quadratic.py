"""Clients can have quadratic risks f_i(w) = 1/2 (w - a_i)^T H_i (w - a_i), for which `fedjax_sim.theory` is exact.

Here and in `theory` the risks are given as hessians H_i [N, d, d] and centers a_i [N, d], or as [N] and [N] for d = 1.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.federated_data import FederatedData
from fedjax_sim.population.partition import Partition
from fedjax_sim.population.population import Indexed, indexed
from fedjax_sim.types import Array
from fedjax_sim.validate import Integer, NonNegative, NonNegativeInt, Positive, PositiveInt


def _checked_risks(hessians: Any, centers: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the risks' hessians and centers in one form, after checks.

    Args:
      hessians: H_i, anything that NumPy makes an array of: [N, d, d], or [N] for d = 1. They must be symmetric up to a
        relative 1e-6, and positive semi-definite: no eigenvalue is below -1e-6 max(1, the largest absolute entry of
        all H_i).
      centers: a_i, [N, d], or [N] for d = 1; N >= 1. All numbers must be finite in float32.

    Returns: hessians [N, d, d] and centers [N, d], float64.

    Raises: TypeError for other dtypes than booleans, integers and floats; ValueError for whatever else breaks these
      rules.
    """
    hessians = np.asarray(hessians)
    centers = np.asarray(centers)
    for values in (hessians, centers):
        if values.dtype.kind not in "biuf":
            validate.fail("hessians, centers", "real numbers", str(values.dtype), error=TypeError)
    hessians = hessians.astype(np.float64)
    centers = centers.astype(np.float64)
    if hessians.ndim == 1 and centers.ndim == 1:
        hessians = hessians[:, None, None]
        centers = centers[:, None]
    if centers.ndim != 2 or not len(centers) or hessians.shape != centers.shape + centers.shape[-1:]:
        validate.fail("hessians, centers", "shapes [N, d, d] and [N, d]", (hessians.shape, centers.shape))
    with np.errstate(over="ignore"):  # a number beyond float32 becomes inf, which is refused
        if not all(np.isfinite(values.astype(np.float32)).all() for values in (hessians, centers)):
            validate.fail("hessians, centers", "finite numbers that float32 holds", "NaN, inf or larger ones")
    if not np.allclose(hessians, np.swapaxes(hessians, 1, 2), rtol=1e-6, atol=1e-8):
        validate.fail("hessians", "symmetric matrices", "an asymmetric one", "Use (H + H^T) / 2.")
    smallest = np.linalg.eigvalsh(hessians).min()
    # The tolerance allows for rounding of a semi-definite matrix that was computed in float32.
    if not (smallest >= -1e-6 * max(1.0, np.abs(hessians).max())):
        validate.fail("hessians", "no negative eigenvalue", float(smallest), "The risk would have no minimum.")
    return hessians, centers


def quadratic_loss(params: Any, examples: Any, key: Array | None = None) -> dict[str, Array]:
    """Computes the loss 1/2 (w - a)^T H (w - a) of every example.

    Args:
      params: {"w": [d]}.
      examples: {"hessian": [n, d, d], "center": [n, d]}.
      key: unused, so it may be None. All losses share this signature.

    Returns: {"loss": [n] float32}.

    Guarantees: the gradient by w is H (w - a) up to rounding, for a symmetric H
    (tests/population/datasets/test_quadratic.py::test_loss_gradient).

    >>> example = {"hessian": np.full((1, 1, 1), 4.0), "center": np.zeros((1, 1))}
    >>> print(quadratic_loss({"w": np.ones(1)}, example)["loss"])
    [2.]
    """
    difference = params["w"][None, :] - examples["center"]
    return {"loss": 0.5 * jnp.einsum("ni,nij,nj->n", difference, examples["hessian"], difference)}


def quadratic_population(hessians: Any, centers: Any, *, counts: Any = None) -> Indexed:
    """Builds a population with one client for each quadratic risk.

    Client i holds n_i identical examples, so its weight is n_i / sum_j n_j.

    Args:
      hessians: [N, d, d], or [N] for d = 1. Symmetric and positive semi-definite.
      centers: [N, d], or [N] for d = 1.
      counts: [N] integers n_i >= 1. None means one example for each client. A copy costs one index in memory.

    Returns: a population of examples {"hessian": [n, d, d], "center": [n, d]}.

    Guarantees: counts act as weights (tests/population/datasets/test_quadratic.py::test_counts_are_weights).

    >>> quadratic_population([1.0, 1.0], [0.0, 1.0], counts=[1, 9]).size
    2
    """
    hessians, centers = _checked_risks(hessians, centers)
    counts = np.ones(len(centers), np.int64) if counts is None else np.asarray(counts)
    if counts.shape != (len(centers),) or counts.dtype.kind not in "iu" or not (counts >= 1).all():
        validate.fail("counts", f"{len(centers)} integers >= 1", counts.tolist())
    if (total := sum(map(int, counts))) > validate.INT32_MAX:
        validate.fail("counts", f"{validate.INT32_MAX} rows at most", total)
    table = {"hessian": hessians.astype(np.float32), "center": centers.astype(np.float32)}
    # Copies of an example are row numbers of one table.
    rows = np.repeat(np.arange(len(centers), dtype=np.int32), counts)
    return indexed(table, Partition(rows, np.concatenate([[0], np.cumsum(counts)])))


@validate.named_arguments
def quadratics(
    *,
    num_clients: PositiveInt = 10,
    dimension: Annotated[int, Integer(1, 10000)] = 10,
    smallest_curvature: Positive = 0.5,
    largest_curvature: float = 2.0,
    heterogeneity: NonNegative = 1.0,
    max_examples: PositiveInt = 1,
    seed: NonNegativeInt = 0,
) -> FederatedData:
    """Draws clients with random quadratic risks: the Hessians are randomly rotated, the centers are Gaussian.

    Args:
      num_clients: N.
      dimension: d.
      smallest_curvature, largest_curvature: the eigenvalues of every H_i are uniform in this interval, > 0.
      heterogeneity: standard deviation >= 0 of the centers' coordinates around one common Gaussian point.
      max_examples: n_i, the number of examples and so the client's weight, is uniform in 1, ..., max_examples.
      seed: of all draws.

    Returns: `FederatedData` with task "quadratic". Its test set has one row for each example of the population, so the
      mean test loss is the global risk.

    Guarantees: eigenvalues lie in the interval, and heterogeneity 0 gives all clients the same optimum
    (tests/population/datasets/test_quadratic.py::test_random_quadratics).

    >>> data = quadratics(num_clients=4, dimension=3)
    >>> data.train.size, data.test["hessian"].shape
    (4, (4, 3, 3))
    """
    validate.in_range("largest_curvature", largest_curvature, smallest_curvature)
    rng = np.random.default_rng(seed)
    # The Q factor of a Gaussian matrix is a random orthogonal matrix, and H = Q diag(eigenvalues) Q^T.
    rotations = np.linalg.qr(rng.normal(size=(num_clients, dimension, dimension)))[0]
    eigenvalues = rng.uniform(smallest_curvature, largest_curvature, (num_clients, dimension))
    hessians = np.einsum("nik,nk,njk->nij", rotations, eigenvalues, rotations)
    centers = rng.normal(size=dimension)[None] + heterogeneity * rng.normal(size=(num_clients, dimension))
    counts = rng.integers(1, max_examples, num_clients, endpoint=True)
    train = dataclasses.replace(quadratic_population(hessians, centers, counts=counts), learned=())
    rows = np.repeat(np.arange(num_clients), counts)
    test = {"hessian": hessians[rows].astype(np.float32), "center": centers[rows].astype(np.float32)}
    return FederatedData(
        train=train,
        test=test,
        held_out=None,
        input_shape=(dimension,),
        num_outputs=1,
        task="quadratic",
        name="quadratics",
    )
