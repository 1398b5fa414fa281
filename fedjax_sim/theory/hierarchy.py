"""Closed forms of a hierarchy on quadratic clients: where it converges to, and how fast.

With p_i the clients' shares, q_e = sum_{i in e} p_i, and M_i as in `theory.quadratic`, a round of edge e is

    w <- w - B_e (w - w_e),    B_e = sum_{i in e} (p_i / q_e) M_i,    B_e w_e = sum_{i in e} (p_i / q_e) M_i a_i,

so kappa of them leave A_e^kappa = (I - B_e)^kappa of the way to the edge's own fixed point w_e, and the cloud's is

    w = (sum_e q_e (I - A_e^kappa))^-1 sum_e q_e (I - A_e^kappa) w_e.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim import validate
from fedjax_sim.theory.quadratic import average, local_progress, quadratic_problem, spectral_radius

__all__ = ["hierarchy_contraction", "hierarchy_fixed_point"]


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
    """The model that cloud rounds of kappa edge rounds converge to, everybody taking part.

    With one edge round it is that of flat FedAvg; with more it moves to the mean of the edges' own fixed points.

    Args:
      hessians, centers, shares: of the clients, as for `fedavg_fixed_point`.
      edges: [N] integers, the edge of each client.
      edge_rounds: kappa. num_steps: K, or one for each client. step_size: eta of the clients' gradient descent.

    Returns: [d] float64.

    Raises: ValueError for edges of another length, and where a round of an edge, or of the cloud, does not contract.

    Guarantees: one edge round is flat FedAvg's (tests/theory/test_hierarchy.py::test_one_edge_round_is_flat); equals
    iterated rounds in any dimension (::test_iterated_rounds), and simulated ones
    (tests/algorithms/hierarchy/test_hierfavg.py::test_fixed_points).

    References: derived here from the recursion of Liu et al. 2020 (HierFAVG), algorithm 1.

    >>> problem = [1, 10, 2], [0, 1, -1], [0, 0, 1]
    >>> for kappa in (1, 2):
    ...     print(hierarchy_fixed_point(*problem, edge_rounds=kappa, num_steps=5, step_size=0.05).round(6))
    [0.348549]
    [0.303945]
    """
    covered, points, weights = _edges(hessians, centers, edges, shares, edge_rounds, num_steps, step_size)
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
    """The factor by which a cloud round brings the model closer to `hierarchy_fixed_point`; arguments as there.

    Guarantees: tests/theory/test_hierarchy.py::test_iterated_rounds.

    >>> round(hierarchy_contraction([1, 10, 2], [0, 1, -1], [0, 0, 1], edge_rounds=2, num_steps=5, step_size=0.05), 6)
    0.224239
    """
    covered, _, weights = _edges(hessians, centers, edges, shares, edge_rounds, num_steps, step_size)
    return spectral_radius(np.eye(covered.shape[-1]) - np.einsum("e,eij->ij", weights, covered))


def _edges(
    hessians: Any, centers: Any, edges: ArrayLike, shares: Any, edge_rounds: int, num_steps: Any, step_size: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(I - A_e^kappa [G, d, d], w_e [G, d], q_e [G])."""
    hessians, centers, shares = quadratic_problem(hessians, centers, shares)
    validate.integer("edge_rounds", edge_rounds)
    edges = np.asarray(edges)
    if edges.shape != shares.shape or edges.dtype.kind not in "iu":
        validate.fail("edges", f"{len(shares)} integers, one per client", edges)
    progress, found = local_progress(hessians, num_steps, step_size), []
    for edge in np.unique(edges):
        mine, weight = edges == edge, shares[edges == edge].sum()
        if weight == 0:
            continue
        each = shares[mine] / weight
        left = np.eye(centers.shape[1]) - np.einsum("n,nij->ij", each, progress[mine])
        if not spectral_radius(left) < 1:
            hint = "Take a smaller step_size, or clients with curvature along every direction."
            validate.fail("step_size", "one with which each edge's rounds contract", step_size, hint)
        power = np.linalg.matrix_power(left, edge_rounds)
        found.append((np.eye(len(left)) - power, average(progress[mine], centers[mine], each), weight))
    covered, points, weights = (np.array(x) for x in zip(*found, strict=True))
    return covered, points, weights
