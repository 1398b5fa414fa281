"""This module predicts decentralised algorithms: the speed of consensus, fixed points and error floors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.validate import PositiveShare


def best_constant(least: float, most: float) -> float:
    """Computes gamma* = 2 / (lambda_2 + lambda_N), with which the matrix I - gamma L contracts fastest.

    Args:
      least: lambda_2 >= 0, the second smallest eigenvalue of the graph Laplacian L; 0 if the graph is not connected.
      most: lambda_N, the largest eigenvalue of L.

    >>> best_constant(4.0, 4.0)
    0.25
    """
    _check_extremes(least, most)
    return 2 / (least + most)


def best_contraction(least: float, most: float) -> float:
    """Computes the factor by which a round shrinks the disagreement of nodes if all edges have the best equal weight.

    The factor is that of the matrix I - gamma* L, with gamma* of `best_constant`: rho* = (lambda_N - lambda_2) /
    (lambda_N + lambda_2). Weights that differ between edges may contract faster.

    lambda_2 alone does not determine rho*. A star has lambda_2 = 1 for every N, and rho* = (N - 1) / (N + 1).

    Args:
      least, most: as in `best_constant`.

    Guarantees: The factor is measured (tests/network/test_mixing.py::test_it_contracts_at_the_slem). Graphs of 16 nodes
    have their order (tests/theory/test_consensus.py::test_order_of_graphs).

    References: Xiao and Boyd 2004, section 4.1.
    """
    _check_extremes(least, most)
    return (most - least) / (most + least)


def _check_extremes(least: float, most: float) -> None:
    validate.in_range("least", least, 0, wide=True)
    validate.in_range("most", most, max(least, 0), open_low=least <= 0, wide=True)


def consensus_error(eigenvalues: Any, rounds: Any, *, spread: float = 1.0) -> np.ndarray:
    """Computes the expected mean squared distance of nodes from their mean after some rounds.

    Nodes start independent and identically distributed.

    E (1/N) sum_i |x_i(t) - mean|^2 = spread^2 (1/N) sum_{k >= 2} |lambda_k|^(2 t). This is exact for a normal W whose
    rows and columns sum to 1. In the long run the second largest modulus decides; in the first rounds all moduli
    matter.

    Args:
      eigenvalues: [N] of W, or their moduli, in any order; one of them is 1.
      rounds: integers t >= 0.
      spread: the root of a node's expected squared distance from the mean of the common law.

    Returns: float64, shaped like `rounds`.

    Guarantees: Measured distances shrink as predicted
    (tests/algorithms/gossip/test_dpsgd.py::test_consensus_shrinks_as_predicted).

    >>> consensus_error([1.0, 0.5], [0, 1]).tolist()
    [0.5, 0.125]
    """
    moduli = np.sort(np.abs(np.asarray(eigenvalues)).astype(np.float64))[::-1]
    if moduli.ndim != 1 or not len(moduli) or not abs(moduli[0] - 1) < 1e-6:
        validate.fail("eigenvalues", "those of a mixing matrix, the largest one 1", moduli[:3].tolist())
    validate.in_range("spread", spread, 0, wide=True)
    times = np.asarray(rounds)
    if times.dtype.kind not in "iu" or (times < 0).any():
        validate.fail("rounds", "integers >= 0", rounds)
    powers = [float((moduli[1:] ** (2 * int(t))).sum()) for t in times.reshape(-1)]
    return spread**2 * np.array(powers).reshape(times.shape) / len(moduli)


@validate.named_arguments
def mixing_rounds(eigenvalues: Any, factor: PositiveShare) -> int:
    """Finds the least number of rounds after which `consensus_error` is at most `factor` times its start.

    Args:
      eigenvalues: as in `consensus_error`.
      factor: in (0, 1].

    Returns: a number of rounds.

    Raises: ValueError if the nodes do not reach consensus, because a second eigenvalue has modulus 1.

    >>> mixing_rounds([1.0, 0.5], 0.25)
    1
    """
    moduli = np.sort(np.abs(np.asarray(eigenvalues)).astype(np.float64))[::-1]
    if len(moduli) > 1 and not moduli[1] < 1:
        validate.fail("eigenvalues", "a second one of modulus below 1", moduli[1])
    target_error = factor * consensus_error(moduli, 0)
    low = 0
    high = 1
    # The error falls in every round: double until it is small enough, then bisect.
    while consensus_error(moduli, high) > target_error:
        low = high
        high = 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if consensus_error(moduli, middle) > target_error else (low, middle)
    return high if consensus_error(moduli, low) > target_error else low


def dgd_fixed_point(matrix: Any, curvatures: Any, centers: Any, learning_rate: float) -> np.ndarray:
    """Computes the models [N] to which DGD, x <- W x - rate H (x - c), converges.

    Node i has the objective f_i(x) = h_i (x - c_i)^2 / 2.

    The fixed point solves (I - W + rate H) x = rate H c. It minimises rate sum_i f_i + x^T (I - W) x / 2, so it lies
    within O(rate) of the optimum.

    Args:
      matrix: W [N, N].
      curvatures: [N] h_i > 0.
      centers: [N] c_i.
      learning_rate: rate > 0.

    Returns: [N].

    Raises: ValueError for other shapes, for numbers that are not finite, and for a rate with which the recursion does
    not contract, because no run converges then (tests/theory/test_consensus.py::test_where_nothing_stops).

    Guarantees: Runs converge to it
    (tests/algorithms/gossip/test_gradient_tracking.py::test_tracking_is_exact_where_dgd_stops).

    References: Yuan, Ling and Yin 2016, section 2.
    """
    validate.positive("learning_rate", learning_rate, wide=True)
    mixing = np.asarray(matrix, np.float64)
    curvatures_64 = np.asarray(curvatures, np.float64)
    optima = np.asarray(centers, np.float64)
    _check_finite(matrix=mixing, curvatures=curvatures_64, centers=optima)
    if curvatures_64.ndim != 1 or optima.shape != curvatures_64.shape or mixing.shape != 2 * curvatures_64.shape:
        shapes = mixing.shape, curvatures_64.shape, optima.shape
        validate.fail("matrix, curvatures, centers", "[N, N], [N] and [N]", shapes)
    if not (curvatures_64 > 0).all():
        validate.fail("curvatures", "numbers > 0", curvatures_64.min())
    # One step is x <- (W - rate H) x + rate H c, which contracts if the spectral radius is below 1.
    iteration_matrix = mixing - learning_rate * np.diag(curvatures_64)
    if (largest := np.abs(np.linalg.eigvals(iteration_matrix)).max()) >= 1:
        rule = "a rate with which the recursion contracts"
        hint = f"A mode has the factor {largest:g}."
        validate.fail("learning_rate", rule, learning_rate, hint)
    return np.linalg.solve(np.eye(len(curvatures_64)) - iteration_matrix, learning_rate * curvatures_64 * optima)


def _check_finite(**arrays: np.ndarray) -> None:
    """Refuses arrays with numbers that are not finite, by name."""
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            validate.fail(name, "finite numbers", "NaN or infinity")


class GossipFloor(NamedTuple):
    """The error floor of D-PSGD: the expected mean squared distance of nodes' models from the optimum, by cause."""

    # Noise in the mean over nodes, which does not depend on the graph: rate^2 sigma^2 / (N (1 - (1 - rate h)^2)).
    mean: float
    disagreement: float  # noise that keeps nodes apart
    heterogeneity: float  # different optima, which pull nodes apart

    @property
    def total(self) -> float:
        """The sum of the three."""
        return sum(self)


def dpsgd_floor(
    eigenvalues: Any, vectors: Any, centers: Any, *, learning_rate: float, curvature: float, noise: float
) -> GossipFloor:
    """Computes the error floor of D-PSGD, x <- W x - rate (h (x - c) + noise), for nodes with equal curvature; exact.

    In the basis of W's eigenvectors each mode is a scalar recursion with factor lambda_k - rate h. Noise leaves the
    variance rate^2 sigma^2 / (1 - (lambda_k - rate h)^2) in the mode. The centers' component c_k in the mode shifts it
    by rate h c_k / (1 - lambda_k + rate h). Both grow as the gap 1 - lambda_2 shrinks.

    Args:
      eigenvalues, vectors: [N] and [N, N] of a symmetric W, as from `numpy.linalg.eigh`.
      centers: [N] c_i.
      learning_rate: rate > 0.
      curvature: h > 0.
      noise: sigma >= 0, standard deviation of a node's gradient.

    Returns: `GossipFloor`.

    Raises: ValueError for a rate with which a mode does not shrink, for other shapes, for numbers that are not finite,
    and for a W that does not keep the constant vector.

    Guarantees: The floor is that of noisy quadratics (tests/theory/test_consensus.py::test_floor_of_noisy_quadratics),
    also for a graph that is not connected (::test_floor_of_two_islands). It is larger for a smaller gap
    (::test_floor_falls_with_the_gap).

    References: Lian et al. 2017, theorem 1 (as a bound); Yuan, Ling and Yin 2016.
    """
    validate.positive("learning_rate", learning_rate, wide=True)
    validate.positive("curvature", curvature, wide=True)
    validate.in_range("noise", noise, 0, wide=True)
    values = np.asarray(eigenvalues, np.float64)
    num_nodes = len(eigenvalues)
    basis = np.asarray(vectors, np.float64)
    optima = np.asarray(centers, np.float64)
    _check_finite(eigenvalues=values, vectors=basis, centers=optima)
    if values.shape != (num_nodes,) or basis.shape != (num_nodes, num_nodes) or optima.shape != (num_nodes,):
        shapes = values.shape, basis.shape, optima.shape
        validate.fail("eigenvalues, vectors, centers", "[N], [N, N] and [N]", shapes)
    # Only modes with eigenvalue 1 may have a part along the constant vector.
    if np.abs((values - 1) * basis.sum(0)).max() > 1e-4 * np.sqrt(num_nodes):
        validate.fail("eigenvalues, vectors", "those of a W that keeps the constant vector", "others")
    pull = learning_rate * curvature
    factors = values - pull
    if not (np.abs(factors) < 1).all():
        rule = "a rate with which every mode shrinks"
        validate.fail(
            "learning_rate", rule, learning_rate, f"A mode has the factor {factors[abs(factors).argmax()]:g}."
        )
    noise_variances = (learning_rate * noise) ** 2 / (1 - factors**2) / num_nodes
    centered_modes = basis.T @ (optima - optima.mean())
    squared_shifts = (pull * centered_modes / (1 - factors)) ** 2 / num_nodes
    # The mode with eigenvalue 1 is the mean over nodes; the centers are centered, so it has no shift.
    mean_mode = int(np.abs(values - 1).argmin())
    other_variances = np.delete(noise_variances, mean_mode)
    return GossipFloor(float(noise_variances[mean_mode]), float(other_variances.sum()), float(squared_shifts.sum()))


def agreed_weights(matrix: Any) -> np.ndarray:
    """Computes the weight of each node in the value on which nodes agree.

    The weights are the left eigenvector of W's eigenvalue 1, with sum 1.

    All weights are 1 / N if the columns of W sum to 1 too. Otherwise nodes to which others listen more have larger
    weights. Under push-sum all nodes have equal weights.

    Args:
      matrix: W [N, N], with rows that sum to 1.

    Returns: [N] weights.

    Raises: ValueError for a matrix whose rows do not sum to 1, and for a matrix with which nodes do not reach
    consensus.

    Guarantees: Mixing ends at this weighted mean
    (tests/network/test_mixing.py::test_pushing_corrects_what_taking_biases).

    References: Nedic and Olshevsky 2015, section 1 (on why push-sum is needed).

    >>> agreed_weights([[0.5, 0.5], [1.0, 0.0]]).round(4).tolist()
    [0.6667, 0.3333]
    """
    weights = np.asarray(matrix, np.float64)
    if weights.ndim != 2 or weights.shape[0] != weights.shape[1] or not np.allclose(weights.sum(1), 1, atol=1e-6):
        validate.fail("matrix", "[N, N] with rows that add up to 1", weights.shape)
    num_nodes = len(weights)
    if (num_unit_eigenvalues := int((np.abs(np.linalg.eigvals(weights)) > 1 - 1e-9).sum())) > 1:
        hint = "The graph falls apart, or models go round and round."
        validate.fail(
            "matrix", "one with which nodes agree: a single eigenvalue of modulus 1", num_unit_eigenvalues, hint
        )
    # W^T x = x together with sum x = 1, solved by least squares because there is one equation more than unknowns.
    equations = np.vstack([weights.T - np.eye(num_nodes), np.ones(num_nodes)])
    return np.linalg.lstsq(equations, np.r_[np.zeros(num_nodes), 1.0], rcond=None)[0]
