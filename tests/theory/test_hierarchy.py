"""The closed forms of a hierarchy on quadratic clients, against iterated rounds in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_sim import theory

WORKED = ([1, 10, 2], [0, 1, -1], [0, 0, 1])  # two edges; the optimum is 8 / 13
STEPS = {"num_steps": 5, "step_size": 0.05}


@pytest.mark.parametrize("rounds, expected", [(1, 0.348549), (2, 0.303945), (5, 0.232549), (50, 0.207127)])
def test_worked_numbers(rounds, expected):
    """Fault: edges weighed by their number (1/2 each), or kappa steps in the place of kappa rounds."""
    assert abs(theory.hierarchy_fixed_point(*WORKED, edge_rounds=rounds, **STEPS)[0] - expected) < 5e-7
    assert abs(theory.quadratic_optimum(*WORKED[:2])[0] - 0.615385) < 5e-7


def problem(seed=0, n=7, d=3):
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(n, d, d)) / 2
    shares = rng.integers(1, 9, n).astype(float)
    return root @ np.swapaxes(root, 1, 2) + 0.1 * np.eye(d), rng.normal(size=(n, d)), shares / shares.sum()


EDGES = np.array([0, 2, 0, 5, 2, 0, 2])  # edge 5 has one client; names need not be consecutive


def test_one_edge_round_is_flat():
    """Fault: edges that are not weighed by their clients' shares."""
    h, a, shares = problem()
    flat = theory.fedavg_fixed_point(h, a, shares, **STEPS)
    np.testing.assert_allclose(theory.hierarchy_fixed_point(h, a, EDGES, shares, **STEPS), flat, rtol=1e-12)
    factor = theory.hierarchy_contraction(h, a, EDGES, shares, **STEPS)
    np.testing.assert_allclose(factor, theory.fedavg_contraction(h, a, shares, **STEPS), rtol=1e-12)
    nested = theory.hierarchy_fixed_point(h, a, np.zeros(7, int), shares, edge_rounds=9, **STEPS)
    np.testing.assert_allclose(nested, flat, rtol=1e-9)  # one edge: its own fixed point, however many rounds


def test_iterated_rounds():
    """Rounds by hand, in three dimensions and with unequal steps. Fault: a power or a share that is misplaced."""
    h, a, shares = problem(1)
    steps, rounds, w, ways = np.array([1, 2, 3, 4, 5, 6, 7]), 3, np.zeros(3), []
    expected = theory.hierarchy_fixed_point(h, a, EDGES, shares, edge_rounds=rounds, num_steps=steps, step_size=0.2)
    for _ in range(200):
        models = np.zeros(3)
        for edge in set(EDGES.tolist()):
            mine, own = np.flatnonzero(edge == EDGES), w
            for _ in range(rounds):
                ends = []
                for i in mine:
                    end = own
                    for _ in range(steps[i]):
                        end = end - 0.2 * h[i] @ (end - a[i])
                    ends.append(end)
                own = np.average(ends, axis=0, weights=shares[mine])
            models = models + shares[mine].sum() * own
        ways.append(np.linalg.norm(models - expected) / np.linalg.norm(w - expected))
        w = models
        if np.linalg.norm(w - expected) < 1e-9:
            break
    np.testing.assert_allclose(w, expected, atol=1e-8)
    factor = theory.hierarchy_contraction(h, a, EDGES, shares, edge_rounds=rounds, num_steps=steps, step_size=0.2)
    np.testing.assert_allclose(ways[-2], factor, rtol=1e-3)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"edges": [0, 0]}, "edges: expected 3 integers"),
        ({"edges": [0.0, 0.0, 1.0]}, "edges: expected 3 integers"),
        ({"edge_rounds": 0}, "edge_rounds: expected an integer"),
        ({"step_size": 1.5}, "step_size: expected one with which each edge's rounds contract"),
        ({"step_size": float("nan")}, "step_size: expected"),
    ],
)
def test_wrong_input(change, words):
    """Fault: a fixed point of rounds that diverge."""
    options = dict(zip(("hessians", "centers", "edges"), WORKED, strict=True)) | STEPS | change
    with pytest.raises(ValueError, match=words):
        theory.hierarchy_fixed_point(**options)


def test_an_edge_without_a_share_is_absent():
    """Fault: a division by an edge's weight of zero."""
    h, a, shares = problem()
    shares = np.where(EDGES == 5, 0, shares)
    there, kappa = EDGES != 5, {"edge_rounds": 3, **STEPS}
    for made in (theory.hierarchy_fixed_point, theory.hierarchy_contraction):
        with_it = made(h, a, EDGES, shares / shares.sum(), **kappa)
        without = made(h[there], a[there], EDGES[there], shares[there] / shares.sum(), **kappa)
        np.testing.assert_allclose(with_it, without, rtol=1e-12)
