"""Nodes without a server: how fast they agree, and where they stop."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.validate import PositiveShare

__all__ = [
    "GossipFloor",
    "agreed_weights",
    "best_constant",
    "best_contraction",
    "consensus_error",
    "dgd_fixed_point",
    "dpsgd_floor",
    "mixing_rounds",
]


def best_constant(least: float, most: float) -> float:
    """gamma* = 2 / (lambda_2 + lambda_N), with which I - gamma L contracts fastest.

    >>> best_constant(4.0, 4.0)
    0.25
    """
    _check_extremes(least, most)
    return 2 / (least + most)


def best_contraction(least: float, most: float) -> float:
    """rho* = (lambda_N - lambda_2) / (lambda_N + lambda_2): what a distance shrinks by in a round at best.

    lambda_2 alone does not say it: a star has lambda_2 = 1 for every N, and rho* = (N - 1) / (N + 1).

    Guarantees: measured (tests/network/test_mixing.py::test_it_contracts_at_the_slem); graphs of 16 nodes have their
    order (tests/theory/test_consensus.py::test_order_of_graphs).

    References: Xiao and Boyd 2004, section 4.1.
    """
    _check_extremes(least, most)
    return (most - least) / (most + least)


def _check_extremes(least: float, most: float) -> None:
    validate.in_range("least", least, 0, wide=True)
    validate.in_range("most", most, max(least, 0), open_low=least <= 0, wide=True)


def consensus_error(eigenvalues: Any, rounds: Any, *, spread: float = 1.0) -> np.ndarray:
    """The expected mean squared distance from the mean after some rounds, of nodes that start independent and alike.

    E (1/N) sum_i |x_i(t) - mean|^2 = spread^2 (1/N) sum_{k >= 2} |lambda_k|^(2 t): exact for a normal W with rows and
    columns that add up to 1. In the long run the second modulus decides, in the first rounds all of them do.

    Args:
      eigenvalues: [N] of W, or their moduli, in any order; one of them is 1.
      rounds: integers >= 0.
      spread: the root of a node's expected squared distance from the common law's mean.

    Returns: float64, shaped like `rounds`.

    Guarantees: tests/algorithms/gossip/test_dpsgd.py::test_consensus_shrinks_as_predicted.

    >>> consensus_error([1.0, 0.5], [0, 1]).tolist()
    [0.5, 0.125]
    """
    values = np.sort(np.abs(np.asarray(eigenvalues)).astype(np.float64))[::-1]
    if values.ndim != 1 or not len(values) or not abs(values[0] - 1) < 1e-6:
        validate.fail("eigenvalues", "those of a mixing matrix, the largest one 1", values[:3].tolist())
    validate.in_range("spread", spread, 0, wide=True)
    times = np.asarray(rounds)
    if times.dtype.kind not in "iu" or (times < 0).any():
        validate.fail("rounds", "integers >= 0", rounds)
    powers = [float((values[1:] ** (2 * int(t))).sum()) for t in times.reshape(-1)]
    return spread**2 * np.array(powers).reshape(times.shape) / len(values)


@validate.named_arguments
def mixing_rounds(eigenvalues: Any, factor: PositiveShare) -> int:
    """The fewest rounds after which `consensus_error` is `factor` of what it was.

    Raises: ValueError where the nodes do not agree: a second eigenvalue of modulus 1.

    >>> mixing_rounds([1.0, 0.5], 0.25)
    1
    """
    values = np.sort(np.abs(np.asarray(eigenvalues)).astype(np.float64))[::-1]
    if len(values) > 1 and not values[1] < 1:
        validate.fail("eigenvalues", "a second one of modulus below 1", values[1])
    wanted = factor * consensus_error(values, 0)
    low, high = 0, 1
    while consensus_error(values, high) > wanted:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if consensus_error(values, middle) > wanted else (low, middle)
    return high if consensus_error(values, low) > wanted else low


def dgd_fixed_point(matrix: Any, curvatures: Any, centers: Any, learning_rate: float) -> np.ndarray:
    """Where DGD x <- W x - rate H (x - c) stops: the models [N] of nodes with f_i(x) = h_i (x - c_i)^2 / 2.

    (I - W + rate H) x = rate H c. It is a minimum of rate sum_i f_i + x^T (I - W) x / 2, and so within O(rate) of the
    optimum.

    Args:
      matrix: W [N, N]. curvatures, centers: [N], h_i > 0.

    Raises: ValueError for other shapes, what is not finite, and a rate with which the recursion does not contract: no
    run stops there (tests/theory/test_consensus.py::test_where_nothing_stops).

    Guarantees: where runs stop
    (tests/algorithms/gossip/test_gradient_tracking.py::test_tracking_is_exact_where_dgd_stops).

    References: Yuan, Ling and Yin 2016, section 2.
    """
    validate.positive("learning_rate", learning_rate, wide=True)
    weights, curved = np.asarray(matrix, np.float64), np.asarray(curvatures, np.float64)
    points = np.asarray(centers, np.float64)
    _check_finite(matrix=weights, curvatures=curved, centers=points)
    if curved.ndim != 1 or points.shape != curved.shape or weights.shape != 2 * curved.shape:
        shapes = weights.shape, curved.shape, points.shape
        validate.fail("matrix, curvatures, centers", "[N, N], [N] and [N]", shapes)
    if not (curved > 0).all():
        validate.fail("curvatures", "numbers > 0", curved.min())
    step = weights - learning_rate * np.diag(curved)
    if (largest := np.abs(np.linalg.eigvals(step)).max()) >= 1:
        rule, hint = "a rate with which the recursion contracts", f"A mode has the factor {largest:g}."
        validate.fail("learning_rate", rule, learning_rate, hint)
    return np.linalg.solve(np.eye(len(curved)) - step, learning_rate * curved * points)


def _check_finite(**arrays: np.ndarray) -> None:
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            validate.fail(name, "finite numbers", "NaN or infinity")


class GossipFloor(NamedTuple):
    """The expected mean squared distance of nodes' models from the optimum at which D-PSGD stays, by cause."""

    mean: float  # noise in the nodes' mean, which no graph changes: rate^2 sigma^2 / (N (1 - (1 - rate h)^2))
    disagreement: float  # noise that keeps nodes apart
    heterogeneity: float  # optima of their own that pull nodes apart

    @property
    def total(self) -> float:
        """The sum of the three."""
        return sum(self)


def dpsgd_floor(
    eigenvalues: Any, vectors: Any, centers: Any, *, learning_rate: float, curvature: float, noise: float
) -> GossipFloor:
    """The floor of D-PSGD, x <- W x - rate (h (x - c) + noise), for nodes of one curvature; exact.

    In the basis of W's eigenvectors each mode is a scalar recursion with factor lambda_k - rate h: noise leaves it with
    variance rate^2 sigma^2 / (1 - (lambda_k - rate h)^2), and the centers' part c_k of the mode shifts it by
    rate h c_k / (1 - lambda_k + rate h). The smaller the gap 1 - lambda_2, the larger both.

    Args:
      eigenvalues, vectors: [N] and [N, N] of a symmetric W, as of `numpy.linalg.eigh`.
      centers: [N] c_i. curvature: h > 0. noise: sigma >= 0, standard deviation of a node's gradient.

    Raises: ValueError for a rate with which a mode does not shrink, other shapes, what is not finite, and a W that does
    not keep the constant vector.

    Guarantees: tests/theory/test_consensus.py::test_floor_of_noisy_quadratics; of a graph that falls apart too
    (::test_floor_of_two_islands); larger for a smaller gap
    (::test_floor_falls_with_the_gap).

    References: Lian et al. 2017, theorem 1 (as a bound); Yuan, Ling and Yin 2016.
    """
    validate.positive("learning_rate", learning_rate, wide=True)
    validate.positive("curvature", curvature, wide=True)
    validate.in_range("noise", noise, 0, wide=True)
    values, size = np.asarray(eigenvalues, np.float64), len(eigenvalues)
    basis, points = np.asarray(vectors, np.float64), np.asarray(centers, np.float64)
    _check_finite(eigenvalues=values, vectors=basis, centers=points)
    if values.shape != (size,) or basis.shape != (size, size) or points.shape != (size,):
        shapes = values.shape, basis.shape, points.shape
        validate.fail("eigenvalues, vectors, centers", "[N], [N, N] and [N]", shapes)
    if np.abs((values - 1) * basis.sum(0)).max() > 1e-4 * np.sqrt(size):
        validate.fail("eigenvalues, vectors", "those of a W that keeps the constant vector", "others")
    pull = learning_rate * curvature
    factors = values - pull
    if not (np.abs(factors) < 1).all():
        rule = "a rate with which every mode shrinks"
        validate.fail(
            "learning_rate", rule, learning_rate, f"A mode has the factor {factors[abs(factors).argmax()]:g}."
        )
    noisy = (learning_rate * noise) ** 2 / (1 - factors**2) / size
    away = basis.T @ (points - points.mean())
    shifted = (pull * away / (1 - factors)) ** 2 / size
    first = int(np.abs(values - 1).argmin())
    rest = np.delete(noisy, first)
    return GossipFloor(float(noisy[first]), float(rest.sum()), float(shifted.sum()))


def agreed_weights(matrix: Any) -> np.ndarray:
    """How much each node counts in what nodes agree on, [N] with sum 1: the left eigenvector of W's eigenvalue 1.

    All 1 / N where columns of W add up to 1 too; elsewhere those who are heard more count more. Under push-sum all
    count alike.

    Raises: ValueError for a matrix whose rows do not add up to 1, and one with which nodes do not agree.

    Guarantees: where mixing ends (tests/network/test_mixing.py::test_pushing_corrects_what_taking_biases).

    References: Nedic and Olshevsky 2015, section 1 (on why push-sum is needed).

    >>> agreed_weights([[0.5, 0.5], [1.0, 0.0]]).round(4).tolist()
    [0.6667, 0.3333]
    """
    weights = np.asarray(matrix, np.float64)
    if weights.ndim != 2 or weights.shape[0] != weights.shape[1] or not np.allclose(weights.sum(1), 1, atol=1e-6):
        validate.fail("matrix", "[N, N] with rows that add up to 1", weights.shape)
    size = len(weights)
    if (kept := int((np.abs(np.linalg.eigvals(weights)) > 1 - 1e-9).sum())) > 1:
        hint = "The graph falls apart, or models go round and round."
        validate.fail("matrix", "one with which nodes agree: a single eigenvalue of modulus 1", kept, hint)
    equations = np.vstack([weights.T - np.eye(size), np.ones(size)])
    return np.linalg.lstsq(equations, np.r_[np.zeros(size), 1.0], rcond=None)[0]
