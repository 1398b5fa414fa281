"""This module computes the eigenvalues of graphs and mixing matrices, which decide how fast nodes reach consensus.

Host code: all eigenvalues of small matrices, and extreme eigenvalues of large sparse matrices by Lanczos.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy

from fedjax_sim import validate
from fedjax_sim.network.topology import Graph, is_connected

DENSE = 1500  # up to so many nodes, all eigenvalues are computed
TOLERANCE = 1e-6  # tolerance of Lanczos, relative to the largest eigenvalue


class Spectrum(NamedTuple):
    """The eigenvalues of a mixing matrix that decide how fast it mixes."""

    second: float  # lambda_2, the largest eigenvalue except that of the constant vector
    smallest: float  # lambda_N
    slem: float  # the second largest modulus: the factor of the distance from the mean in a round, in the long run
    gap: float  # 1 - slem


def laplacian_matrix(graph: Graph) -> scipy.sparse.csr_matrix:
    """Computes the Laplacian L = D - A of an undirected graph, [N, N] sparse float64.

    Raises: ValueError for a directed graph.

    Guarantees: Its eigenvalues are those of the closed forms (tests/theory/test_consensus.py::test_closed_forms).

    >>> from fedjax_sim.network.topology import path
    >>> laplacian_matrix(path(2)).toarray().tolist()
    [[1.0, -1.0], [-1.0, 1.0]]
    """
    if graph.directed:
        validate.fail("graph", "an undirected graph", "a directed one", "Its Laplacian is not symmetric.")
    return scipy.sparse.csr_matrix(scipy.sparse.diags(graph.in_degrees.astype(np.float64)) - graph.adjacency())


def laplacian_extremes(graph: Graph) -> tuple[float, float]:
    """Computes lambda_2 and lambda_N of an undirected graph's Laplacian. lambda_2 is 0 if the graph is not connected.

    Args:
      graph: undirected, of N >= 2 nodes.

    Raises: ValueError for a directed graph, for a single node, and for a graph so large and badly connected that
    Lanczos does not converge.

    Guarantees: The values equal the closed forms to 1e-8 (tests/theory/test_consensus.py::test_closed_forms), also by
    Lanczos (tests/network/test_eigenvalues.py::test_lanczos).

    References: Fiedler 1973; Olfati-Saber, Fax and Murray 2007, section II.
    """
    matrix = laplacian_matrix(graph)
    num_nodes = graph.population_size
    if num_nodes < 2:
        validate.fail("graph", "at least two nodes", num_nodes)
    if num_nodes <= DENSE:
        eigenvalues = np.linalg.eigvalsh(matrix.toarray())
        return float(max(eigenvalues[1], 0.0)) if is_connected(graph) else 0.0, float(eigenvalues[-1])
    largest = -_smallest(-matrix)
    if not is_connected(graph):
        return 0.0, largest
    # The second smallest eigenvalue of L is the second largest of (largest I - L), which Lanczos finds better.
    return largest - _second(scipy.sparse.identity(num_nodes, format="csr") * largest - matrix, largest), largest


def algebraic_connectivity(graph: Graph) -> float:
    """Computes lambda_2 of the Laplacian: above 0 for a connected graph, and larger for a better connected graph.

    It gives no rate of mixing by itself. For example, a star has 1 for every N. Use `spectrum` of the mixing matrix.

    Args:
      graph: as for `laplacian_extremes`.

    Raises: as `laplacian_extremes`.

    Guarantees: The result equals closed forms (tests/theory/test_consensus.py::test_closed_forms), and is 0 for a graph
    that is not connected (tests/network/test_topology.py::test_points_of_failure).

    >>> from fedjax_sim.network.topology import star
    >>> round(algebraic_connectivity(star(10)), 9)
    1.0
    """
    return laplacian_extremes(graph)[0]


def spectrum(matrix: Any) -> Spectrum:
    """Computes the `Spectrum` of a mixing matrix.

    Its eigenvalue 1 belongs to the constant vector, or to the weights that the matrix keeps.

    Args:
      matrix: [N, N] dense or sparse, with rows (or columns) that sum to 1. If it is not symmetric, `second` and
        `smallest` are the real parts.

    Raises: ValueError for another matrix, and if Lanczos does not converge.

    Guarantees: Dense and sparse matrices give the same result (tests/network/test_eigenvalues.py::test_lanczos).
    Measured contraction agrees (tests/network/test_mixing.py::test_it_contracts_at_the_slem).

    References: Boyd, Diaconis and Xiao 2004, section 1.

    >>> spectrum(np.full((4, 4), 0.25)).gap.__round__(9)
    1.0
    """
    # A Graph or a Mixing is refused here, because SciPy's own error would print it whole.
    if isinstance(matrix, (Graph, tuple)):
        hint = "That of a mixing is network.matrix_of(mixing); of a graph, take network.metropolis(graph), say."
        validate.fail("matrix", "an [N, N] matrix, dense or sparse", type(matrix).__name__, hint)
    matrix = scipy.sparse.csr_matrix(matrix, dtype=np.float64)
    num_nodes = matrix.shape[0]
    if matrix.shape != (num_nodes, num_nodes) or num_nodes < 2:
        validate.fail("matrix", "[N, N] with N of at least 2", matrix.shape)
    sum_errors = [np.abs(np.asarray(matrix.sum(axis)).ravel() - 1).max() for axis in (0, 1)]
    if not min(sum_errors) < 1e-6:
        validate.fail("matrix", "rows or columns that add up to 1", f"off by {min(sum_errors):g}")
    is_symmetric = abs(matrix - matrix.T).max() < 1e-7
    if num_nodes <= DENSE:
        dense = matrix.toarray()
        eigenvalues = np.linalg.eigvalsh((dense + dense.T) / 2) if is_symmetric else np.linalg.eigvals(dense)
        # The eigenvalue 1 itself does not decay; all others do.
        others = np.delete(eigenvalues, np.abs(eigenvalues - 1).argmin())
        return _spectrum(others.real.max(), others.real.min(), np.abs(others).max())
    if not is_symmetric:
        largest = _converged(
            lambda: scipy.sparse.linalg.eigs(matrix, 2, which="LM", return_eigenvectors=False, ncv=48, maxiter=200)
        )
        others = np.delete(largest, np.abs(largest - 1).argmin())
        slem = float(np.abs(others).max())
        return Spectrum(float(np.real(others).max()), np.nan, slem, 1 - slem)
    second = _second(matrix, 1.0)
    smallest = _smallest(matrix)
    return _spectrum(second, smallest, max(abs(second), abs(smallest)))


def _spectrum(second: float | np.floating, smallest: float | np.floating, slem: float | np.floating) -> Spectrum:
    """Makes a `Spectrum` of Python floats."""
    return Spectrum(float(second), float(smallest), float(slem), float(1 - slem))


def _second(matrix: scipy.sparse.csr_matrix, top: float) -> float:
    """Computes the second largest eigenvalue of a symmetric matrix M: the largest of M - top 1 1^T / N.

    The constant vector has the eigenvalue 0 there, so the result is 0 if the second largest of M is below 0.

    Args:
      matrix: M, [N, N].
      top: its largest eigenvalue, which is that of the constant vector 1.

    Raises: ValueError if Lanczos does not converge with a factorisation either.
    """
    # Subtracting the mean moves the constant vector from the top to 0, so that the second becomes the largest.
    estimate = _lanczos(
        scipy.sparse.linalg.LinearOperator(matrix.shape, lambda x: matrix @ x - top * x.mean(), dtype=np.float64)
    )
    # Lanczos is trusted only if its tolerance is small against the distance to the top.
    if estimate is not None and TOLERANCE * top < 1e-3 * (top - estimate):
        return estimate
    return float(_near(matrix, top, 2).min())


def _smallest(matrix: scipy.sparse.csr_matrix) -> float:
    """Computes the smallest eigenvalue of a symmetric matrix."""
    estimate = _lanczos(-matrix)
    if estimate is not None:
        return -estimate
    diagonal = matrix.diagonal()
    # Gershgorin: each eigenvalue is at least some diagonal entry minus the magnitudes beside it.
    bound = diagonal + abs(diagonal) - np.asarray(abs(matrix).sum(1)).ravel()
    return -float(_near(-matrix, -bound.min(), 1).max())


def _lanczos(matrix: Any) -> float | None:
    """Computes the largest eigenvalue of a symmetric matrix; None if Lanczos does not converge.

    This happens if the next eigenvalue is too close.
    """
    try:
        options = {"return_eigenvectors": False, "tol": TOLERANCE, "ncv": 48, "maxiter": 40}
        return float(scipy.sparse.linalg.eigsh(matrix, 1, which="LA", **options)[0])
    except scipy.sparse.linalg.ArpackNoConvergence:
        return None


def _near(matrix: scipy.sparse.csr_matrix, top: float, count: int) -> np.ndarray:
    """Computes the eigenvalues of a symmetric matrix that are nearest to an upper bound, by a sparse factorisation.

    Where Lanczos is slow, the graph is nearly a line or a grid, and factors stay sparse.

    Args:
      matrix: [N, N].
      top: no eigenvalue is larger.
      count: how many are computed, >= 1.

    Returns: [count].

    Raises: ValueError if Lanczos does not converge.
    """
    # Slightly above the bound, so that the shifted matrix is not singular.
    above = top + 1e-9 * abs(top)
    factors = scipy.sparse.linalg.splu(scipy.sparse.csc_matrix(matrix - scipy.sparse.identity(matrix.shape[0]) * above))
    inverse = scipy.sparse.linalg.LinearOperator(matrix.shape, factors.solve, dtype=np.float64)
    options = {"sigma": above, "OPinv": inverse, "return_eigenvectors": False, "tol": 1e-9, "maxiter": 1000}
    return _converged(lambda: scipy.sparse.linalg.eigsh(matrix, count, **options))


def _converged(call: Any) -> np.ndarray:
    """Calls ARPACK; raises a ValueError with a hint if it does not converge."""
    try:
        return call()
    except scipy.sparse.linalg.ArpackNoConvergence as error:
        hint = "For a ring, path or torus take the closed form: theory.laplacian_spectrum."
        validate.fail("matrix", "one for which Lanczos converges", str(error), hint)
