"""Eigenvalues of large graphs agree with those of small ones and with closed forms."""

import numpy as np
import pytest

from fedjax_sim import network, theory
from fedjax_sim.network import eigenvalues
from tests.refusals import refused

GRAPHS = {
    "ring": lambda: network.ring(300),
    "torus": lambda: network.torus(300, rows=15),
    "random": lambda: network.erdos_renyi(300, 0.05, seed=2),
    "star": lambda: network.star(300),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_lanczos(name, monkeypatch):
    """The same numbers as from all eigenvalues: both where Lanczos converges and where a factorisation takes over.

    Catches the eigenvalue of the constant vector taken for the second one, and a gap that is lost in a tolerance."""
    graph = GRAPHS[name]()
    mixing = network.metropolis(graph)
    dense = network.laplacian_extremes(graph), network.spectrum(network.matrix_of(mixing))
    monkeypatch.setattr(eigenvalues, "DENSE", 10)
    np.testing.assert_allclose(network.laplacian_extremes(graph), dense[0], rtol=1e-3)
    np.testing.assert_allclose(network.spectrum(network.matrix_of(mixing)), dense[1], rtol=1e-4, atol=1e-6)


def test_large_rings_by_factors():
    """Catches Lanczos that gives up, or stops early, where the gap is 4e-6."""
    found = network.laplacian_extremes(network.ring(3_000))
    np.testing.assert_allclose(found[0], theory.laplacian_spectrum("ring", 3_000)[1], rtol=1e-6)
    np.testing.assert_allclose(found[1], 4, rtol=1e-6)


def test_negative_eigenvalues_count():
    """A hypercube whose step is near its limit: lambda_N = 1 - 22 x 0.088 decides. Catches a modulus of the second
    eigenvalue alone, by Lanczos."""
    found = network.spectrum(network.matrix_of(network.laplacian(network.hypercube(2048), step=0.088)))
    np.testing.assert_allclose(found, (1 - 2 * 0.088, 1 - 22 * 0.088, 22 * 0.088 - 1, 2 - 22 * 0.088), atol=1e-5)


def test_a_gap_below_the_tolerance(monkeypatch):
    """Catches a gap of 4e-4 read off an eigenvalue that is known to 1e-4."""
    monkeypatch.setattr(eigenvalues, "DENSE", 10)
    lanczos = eigenvalues._lanczos
    blurred = lambda matrix: lanczos(matrix) - 1e-4 if hasattr(matrix, "matvec") else lanczos(matrix)  # noqa: E731
    monkeypatch.setattr(eigenvalues, "_lanczos", blurred)
    monkeypatch.setattr(eigenvalues, "TOLERANCE", 1e-4)
    np.testing.assert_allclose(
        network.algebraic_connectivity(network.ring(300)), 2 - 2 * np.cos(np.pi / 150), rtol=1e-3
    )


def test_directed(monkeypatch):
    """Catches moduli of complex eigenvalues that are read as real ones."""
    graph = network.exponential(64)
    expected = theory.exponential_spectrum(64)[1]
    matrix = network.matrix_of(network.neighbour_mean(graph))
    np.testing.assert_allclose(network.spectrum(matrix).slem, expected, rtol=1e-6)
    with pytest.raises(ValueError, match="graph: expected an undirected graph"):
        network.algebraic_connectivity(graph)


def test_islands(monkeypatch):
    """Catches a gap above 0 for a graph of two parts, dense and by Lanczos; and matrices that do not mix."""
    parts = network.from_edges(40, [(i, i + 1) for i in range(39) if i != 20])
    for limit in (1500, 10):
        monkeypatch.setattr(eigenvalues, "DENSE", limit)
        assert network.algebraic_connectivity(parts) == 0
        assert network.spectrum(network.matrix_of(network.metropolis(parts))).gap < 1e-6
    with pytest.raises(ValueError, match="matrix: expected rows or columns"):
        network.spectrum(np.eye(3) * 2)
    for other in (network.ring(9), network.metropolis(network.ring(9))):
        with refused("matrix", value=type(other).__name__, hint="network.matrix_of"):
            network.spectrum(other)
    with pytest.raises(ValueError, match="graph: expected at least two nodes"):
        network.laplacian_extremes(network.ring(1))
