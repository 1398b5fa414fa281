"""This module gives the spectra of graphs in closed form."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fedjax_sim import validate
from fedjax_sim.validate import Integer, PositiveInt


def _cycle(n: int) -> np.ndarray:
    """Computes Laplacian eigenvalues of a cycle; for n <= 2 there is a single edge or none."""
    return 2 - 2 * np.cos(2 * np.pi * np.arange(n) / n) if n > 2 else np.arange(n) * 2.0


# Laplacian eigenvalues of each graph, in any order.
SPECTRA = {
    "complete": lambda n: np.r_[0.0, np.full(n - 1, float(n))],
    "hypercube": lambda n: 2.0 * np.bitwise_count(np.arange(n)).astype(float),
    "path": lambda n: 2 - 2 * np.cos(np.pi * np.arange(n) / n),
    "ring": _cycle,
    "star": lambda n: np.r_[0.0, np.full(max(n - 2, 0), 1.0), np.full(int(n > 1), float(n))],
    "torus": lambda n, rows: np.add.outer(_cycle(rows), _cycle(n // rows)).ravel(),
}


@validate.named_arguments
def laplacian_spectrum(graph: str, population_size: PositiveInt, *, rows: int | None = None) -> np.ndarray:
    """Computes all eigenvalues of the Laplacian of a graph in rising order, [N] float64.

    Args:
      graph: "complete", "hypercube", "path", "ring", "star" or "torus", as in `network`.
      population_size: N.
      rows: of a torus; None = the divisor of N that is nearest to a square.

    Raises: ValueError for sizes that the graph does not have.

    Guarantees: The eigenvalues equal those of the matrices to 1e-8 (tests/theory/test_consensus.py::test_closed_forms).

    References: Fiedler 1973; Brouwer and Haemers 2012, section 1.4.

    >>> laplacian_spectrum("star", 4).tolist()
    [0.0, 1.0, 1.0, 4.0]
    """
    validate.one_of("graph", graph, sorted(SPECTRA))
    sizes = [population_size]
    if graph == "hypercube" and population_size & (population_size - 1):
        validate.fail("population_size", "a power of 2", population_size)
    if graph == "torus":
        if rows is None:
            rows = max(divisor for divisor in range(1, int(population_size**0.5) + 1) if population_size % divisor == 0)
        validate.integer("rows", rows, 2, max(population_size // 2, 2))
        if population_size % rows or population_size // rows < 2:
            validate.fail("rows", f"a divisor of N = {population_size} from 2 to N / 2", rows)
        sizes.append(rows)
    # Formulas are in the order of their Fourier modes, not of their values.
    return np.sort(SPECTRA[graph](*sizes))


@validate.named_arguments
def exponential_spectrum(population_size: PositiveInt) -> np.ndarray:
    """Computes the moduli of the eigenvalues of `network.exponential` with equal shares in falling order, [N] float64.

    The matrix is a circulant, so it is normal. Hence each round multiplies a distance by at most its second modulus.

    Args:
      population_size: N.

    Guarantees: The moduli equal those of the matrices (tests/theory/test_consensus.py::test_exponential_spectrum).

    References: Ying et al. 2021, proposition 1.
    """
    row = np.zeros(population_size)
    hops = [0] + [1 << exponent for exponent in range((population_size - 1).bit_length())]
    np.add.at(row, np.array(hops) % population_size, 1 / len(hops))
    # The eigenvalues of a circulant are the Fourier transform of its first row.
    return np.sort(np.abs(np.fft.fft(row)))[::-1]


@validate.named_arguments
def regular_spectrum(population_size: Annotated[int, Integer(2)], degree: int) -> np.ndarray:
    """Computes the eigenvalues of the adjacency matrix of a large random regular graph in falling order, [N].

    The first eigenvalue is the degree k. The others are quantiles of the law of Kesten and McKay, with the density k
    sqrt(4 (k - 1) - x^2) / (2 pi (k^2 - x^2)) for |x| <= 2 sqrt(k - 1). This is an estimate: the law is the limit of
    large N, and single graphs have a few short cycles more or less.

    Args:
      population_size: N >= 2.
      degree: k >= 3.

    Guarantees: The second and fourth moments are those of the law, and the sixth moment of a graph's mixing is met to 4
    % (tests/theory/test_consensus.py::test_random_regular_spectrum).

    References: McKay 1981.
    """
    validate.integer("degree", degree, 3, max(population_size - 1, 3))
    edge = 2 * np.sqrt(degree - 1)
    # The quadrature is over angles with x = edge cos(angle), because the density is smooth in the angle.
    angles = (np.arange(20_000) + 0.5) * np.pi / 20_000
    x = edge * np.cos(angles)
    mass = np.cumsum(np.sin(angles) ** 2 / (degree**2 - x**2))
    quantile_levels = (np.arange(population_size - 1) + 0.5) / (population_size - 1)
    return np.r_[float(degree), np.interp(quantile_levels, mass / mass[-1], x)]
