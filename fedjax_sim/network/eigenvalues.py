"""How fast a graph, or a mixing matrix, brings nodes to agree: eigenvalues on the host, dense or by Lanczos."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy import sparse
from scipy.sparse import linalg

from fedjax_sim import validate
from fedjax_sim.network.topology import Graph, is_connected

__all__ = ["Spectrum", "algebraic_connectivity", "laplacian_extremes", "laplacian_matrix", "spectrum"]

DENSE = 1500  # nodes up to which all eigenvalues are computed
TOLERANCE = 1e-6  # of Lanczos, relative to the largest eigenvalue


class Spectrum(NamedTuple):
    """The eigenvalues of a mixing matrix that decide how fast it mixes."""

    second: float  # lambda_2, the largest one below that of the constant vector
    smallest: float  # lambda_N
    slem: float  # the second largest modulus: what the distance from the mean shrinks by, in the long run
    gap: float  # 1 - slem


def laplacian_matrix(graph: Graph) -> sparse.csr_matrix:
    """L = D - A of an undirected graph, [N, N] sparse float64.

    Guarantees: its eigenvalues are those of the closed forms (tests/theory/test_consensus.py::test_closed_forms).

    >>> from fedjax_sim.network.topology import path
    >>> laplacian_matrix(path(2)).toarray().tolist()
    [[1.0, -1.0], [-1.0, 1.0]]
    """
    if graph.directed:
        validate.fail("graph", "an undirected graph", "a directed one", "Its Laplacian is not symmetric.")
    return sparse.csr_matrix(sparse.diags(graph.in_degrees.astype(np.float64)) - graph.adjacency())


def laplacian_extremes(graph: Graph) -> tuple[float, float]:
    """lambda_2 and lambda_N of an undirected graph's Laplacian; lambda_2 is 0 where the graph falls apart.

    Raises: ValueError for a directed graph, one of a single node, and one so large and badly connected that Lanczos
    does not converge.

    Guarantees: the closed forms to 1e-8 (tests/theory/test_consensus.py::test_closed_forms); by Lanczos too
    (tests/network/test_eigenvalues.py::test_lanczos).

    References: Fiedler 1973; Olfati-Saber, Fax and Murray 2007, section II.
    """
    matrix, size = laplacian_matrix(graph), graph.population_size
    if size < 2:
        validate.fail("graph", "at least two nodes", size)
    if size <= DENSE:
        values = np.linalg.eigvalsh(matrix.toarray())
        return float(max(values[1], 0.0)) if is_connected(graph) else 0.0, float(values[-1])
    most = -_smallest(-matrix)
    if not is_connected(graph):
        return 0.0, most
    return most - _second(sparse.identity(size, format="csr") * most - matrix, most), most


def algebraic_connectivity(graph: Graph) -> float:
    """lambda_2 of the Laplacian: above 0 for a connected graph, and the larger the better connected.

    Alone it gives no rate of mixing: the star has 1 for every N (`spectrum` of the mixing matrix that is used).

    Guarantees: tests/theory/test_consensus.py::test_closed_forms; 0 for a graph that falls apart
    (tests/network/test_topology.py::test_points_of_failure).

    >>> from fedjax_sim.network.topology import star
    >>> round(algebraic_connectivity(star(10)), 9)
    1.0
    """
    return laplacian_extremes(graph)[0]


def spectrum(matrix: Any) -> Spectrum:
    """`Spectrum` of a mixing matrix with the eigenvalue 1: of its constant vector, or of the weights that it keeps.

    Args:
      matrix: [N, N] dense or sparse, with rows (or columns) that add up to 1; of one that is not symmetric `second` and
        `smallest` are those real parts.

    Raises: ValueError for another matrix, and where Lanczos does not converge.

    Guarantees: of dense and sparse ones alike (tests/network/test_eigenvalues.py::test_lanczos); what is measured
    contracts like this (tests/network/test_mixing.py::test_it_contracts_at_the_slem).

    References: Boyd, Diaconis and Xiao 2004, section 1.

    >>> spectrum(np.full((4, 4), 0.25)).gap.__round__(9)
    1.0
    """
    if isinstance(matrix, (Graph, tuple)):  # a Graph or a Mixing, which SciPy would print whole
        hint = "That of a mixing is network.matrix_of(mixing); of a graph, take network.metropolis(graph), say."
        validate.fail("matrix", "an [N, N] matrix, dense or sparse", type(matrix).__name__, hint)
    matrix = sparse.csr_matrix(matrix, dtype=np.float64)
    size = matrix.shape[0]
    if matrix.shape != (size, size) or size < 2:
        validate.fail("matrix", "[N, N] with N of at least 2", matrix.shape)
    sums = [np.abs(np.asarray(matrix.sum(axis)).ravel() - 1).max() for axis in (0, 1)]
    if not min(sums) < 1e-6:
        validate.fail("matrix", "rows or columns that add up to 1", f"off by {min(sums):g}")
    symmetric = abs(matrix - matrix.T).max() < 1e-7
    if size <= DENSE:
        dense = matrix.toarray()
        values = np.linalg.eigvalsh((dense + dense.T) / 2) if symmetric else np.linalg.eigvals(dense)
        rest = np.delete(values, np.abs(values - 1).argmin())
        return _of(rest.real.max(), rest.real.min(), np.abs(rest).max())
    if not symmetric:
        largest = _converged(lambda: linalg.eigs(matrix, 2, which="LM", return_eigenvectors=False, ncv=48, maxiter=200))
        rest = np.delete(largest, np.abs(largest - 1).argmin())
        return Spectrum(float(rest.real.max()), np.nan, float(np.abs(rest).max()), 1 - float(np.abs(rest).max()))
    second, smallest = _second(matrix, 1.0), _smallest(matrix)
    return _of(second, smallest, max(abs(second), abs(smallest)))


def _of(second: float, smallest: float, slem: float) -> Spectrum:
    return Spectrum(float(second), float(smallest), float(slem), float(1 - slem))


def _second(matrix: sparse.csr_matrix, top: float) -> float:
    """The second largest eigenvalue of a symmetric matrix whose largest one, `top`, is that of the constant vector."""
    found = _lanczos(linalg.LinearOperator(matrix.shape, lambda x: matrix @ x - top * x.mean(), dtype=np.float64))
    if found is not None and TOLERANCE * top < 1e-3 * (top - found):
        return found
    return float(_near(matrix, top, 2).min())


def _smallest(matrix: sparse.csr_matrix) -> float:
    """The smallest eigenvalue of a symmetric matrix."""
    found = _lanczos(-matrix)
    if found is not None:
        return -found
    diagonal = matrix.diagonal()
    bound = diagonal + abs(diagonal) - np.asarray(abs(matrix).sum(1)).ravel()  # Gershgorin
    return -float(_near(-matrix, -bound.min(), 1).max())


def _lanczos(matrix: Any) -> float | None:
    """The largest eigenvalue of a symmetric matrix; None where it does not stand apart enough from the next."""
    try:
        kind = {"return_eigenvectors": False, "tol": TOLERANCE, "ncv": 48, "maxiter": 40}
        return float(linalg.eigsh(matrix, 1, which="LA", **kind)[0])
    except linalg.ArpackNoConvergence:
        return None


def _near(matrix: sparse.csr_matrix, top: float, count: int) -> np.ndarray:
    """The eigenvalues of a symmetric matrix nearest to an upper bound, by a factorisation: where Lanczos is slow the
    graph is nearly a line or a grid, and factors stay sparse."""
    above = top + 1e-9 * abs(top)
    factors = linalg.splu(sparse.csc_matrix(matrix - sparse.identity(matrix.shape[0]) * above))
    inverse = linalg.LinearOperator(matrix.shape, factors.solve, dtype=np.float64)
    kind = {"sigma": above, "OPinv": inverse, "return_eigenvectors": False, "tol": 1e-9, "maxiter": 1000}
    return _converged(lambda: linalg.eigsh(matrix, count, **kind))


def _converged(call: Any) -> np.ndarray:
    try:
        return call()
    except linalg.ArpackNoConvergence as error:
        hint = "For a ring, path or torus take the closed form: theory.laplacian_spectrum."
        validate.fail("matrix", "one for which Lanczos converges", str(error), hint)
        raise
