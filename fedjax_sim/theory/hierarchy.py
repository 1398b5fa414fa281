"""This module gives the fixed point of a hierarchy on quadratic clients, and how fast rounds converge to it.

With p_i the clients' shares, q_e = sum_{i in e} p_i, and M_i as in `theory.quadratic`, a round of edge e is

    w <- w - B_e (w - w_e),    B_e = sum_{i in e} (p_i / q_e) M_i,    B_e w_e = sum_{i in e} (p_i / q_e) M_i a_i.

So kappa edge rounds leave A_e^kappa = (I - B_e)^kappa of the distance to the edge's own fixed point w_e. The cloud's
fixed point is

    w = (sum_e q_e (I - A_e^kappa))^-1 sum_e q_e (I - A_e^kappa) w_e.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim import validate
from fedjax_sim.theory.quadratic import average, local_progress, quadratic_problem, spectral_radius


def hierarchy_fixed_point(
    hessians: Any,
    centers: Any,
    edges: ArrayLike,
    shares: Any = None,
    *,
    edge_rounds: int = 1,
    num_steps: Any,
    step_size: float,
) -> np.ndarray:
    """Computes the model to which cloud rounds of kappa edge rounds converge, if all clients take part.

    With one edge round it is the fixed point of flat FedAvg. With more edge rounds it moves to the mean of the edges'
    own fixed points.

    Args:
      hessians, centers, shares: of the clients, as for `fedavg_fixed_point`.
      edges: [N] integers, the edge of each client.
      edge_rounds: kappa >= 1.
      num_steps: K local steps, or [N] K_i.
      step_size: eta of the clients' gradient descent.

    Returns: [d] float64.

    Raises: ValueError for edges of another length, and if a round of an edge, or of the cloud, does not contract.

    Guarantees: One edge round gives the fixed point of flat FedAvg
    (tests/theory/test_hierarchy.py::test_one_edge_round_is_flat). The fixed point equals iterated rounds in any
    dimension (::test_iterated_rounds), and simulated rounds
    (tests/algorithms/hierarchy/test_hierfavg.py::test_fixed_points).

    References: derived here from the recursion of Liu et al. 2020 (HierFAVG), algorithm 1.

    >>> problem = [1, 10, 2], [0, 1, -1], [0, 0, 1]
    >>> for kappa in (1, 2):
    ...     print(hierarchy_fixed_point(*problem, edge_rounds=kappa, num_steps=5, step_size=0.05).round(6))
    [0.348549]
    [0.303945]
    """
    covered, points, weights = _edges(
        hessians, centers, edges, shares, edge_rounds=edge_rounds, num_steps=num_steps, step_size=step_size
    )
    return average(covered, points, weights)


def hierarchy_contraction(
    hessians: Any,
    centers: Any,
    edges: ArrayLike,
    shares: Any = None,
    *,
    edge_rounds: int = 1,
    num_steps: Any,
    step_size: float,
) -> float:
    """Computes the factor by which a cloud round brings the model closer to `hierarchy_fixed_point`.

    Args:
      hessians, centers, edges, shares, edge_rounds, num_steps, step_size: as in `hierarchy_fixed_point`.

    Returns: a spectral radius.

    Guarantees: Iterated rounds converge at this rate (tests/theory/test_hierarchy.py::test_iterated_rounds).

    >>> round(hierarchy_contraction([1, 10, 2], [0, 1, -1], [0, 0, 1], edge_rounds=2, num_steps=5, step_size=0.05), 6)
    0.224239
    """
    covered, _, weights = _edges(
        hessians, centers, edges, shares, edge_rounds=edge_rounds, num_steps=num_steps, step_size=step_size
    )
    return spectral_radius(np.eye(covered.shape[-1]) - np.einsum("e,eij->ij", weights, covered))


def _edges(
    hessians: Any, centers: Any, edges: ArrayLike, shares: Any, *, edge_rounds: int, num_steps: Any, step_size: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computes what each edge contributes to a cloud round: I - A_e^kappa, w_e and q_e of the module's docstring.

    Args:
      hessians, centers, shares: H_i, a_i and p_i, as for `quadratic_problem`; shares None = 1/N.
      edges: [N] integers, the edge of each client.
      edge_rounds: kappa >= 1.
      num_steps: K, or [N] K_i.
      step_size: eta > 0.

    Returns: (I - A_e^kappa [G, d, d], w_e [G, d], q_e [G]) of the G edges whose share q_e is above 0, in rising
      order of the edges' numbers.

    Raises: ValueError for edges of another shape, and for an edge whose rounds do not contract.
    """
    hessians, centers, shares = quadratic_problem(hessians, centers, shares)
    validate.integer("edge_rounds", edge_rounds)
    edges = np.asarray(edges)
    if edges.shape != shares.shape or edges.dtype.kind not in "iu":
        validate.fail("edges", f"{len(shares)} integers, one per client", edges)
    progress = local_progress(hessians, num_steps, step_size)
    by_edge = []
    for edge in np.unique(edges):
        in_edge = edges == edge
        weight = shares[edges == edge].sum()  # q_e
        # An edge whose clients have no share does not count, and its shares would be 0 / 0.
        if weight == 0:
            continue
        edge_shares = shares[in_edge] / weight  # p_i / q_e
        edge_map = np.eye(centers.shape[1]) - np.einsum("n,nij->ij", edge_shares, progress[in_edge])  # A_e
        if not spectral_radius(edge_map) < 1:
            hint = "Take a smaller step_size, or clients with curvature along every direction."
            validate.fail("step_size", "one with which each edge's rounds contract", step_size, hint)
        power = np.linalg.matrix_power(edge_map, edge_rounds)
        fixed_point = average(progress[in_edge], centers[in_edge], edge_shares)  # w_e
        by_edge.append((np.eye(len(edge_map)) - power, fixed_point, weight))
    covered, points, weights = (np.array(values) for values in zip(*by_edge, strict=True))
    return covered, points, weights
