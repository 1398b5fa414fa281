"""This module searches for the constant step with which quadratic clients reach the target in the fewest rounds."""

from __future__ import annotations

import math

import numpy as np

from fedjax_sim import metrics, theory
from fedjax_sim.study.quadratic_settings import LARGEST_CURVATURE, QuadraticProblem, quadratic_clients

STEP_SIZES = np.geomspace(0.005, 1 / LARGEST_CURVATURE, 40)  # of which the best is taken on quadratics
SHARE = 1e-3  # the target on quadratics, as a share of the start's excess loss
MAX_ROUNDS = 300  # on quadratics


def best_step(size: int, dimension: int, k: int, spread: float, seed: int) -> tuple[QuadraticProblem, float, float]:
    """Searches for the constant step with the fewest rounds to the target, by the closed form.

    Args:
      size: N.
      dimension: d.
      k: K full-batch local steps.
      spread: of the clients' optima.
      seed: decides the clients.

    Returns: (problem, step, rounds); rounds is infinite if no step reaches the target within MAX_ROUNDS.
    """
    problem = quadratic_clients(size, dimension, spread, seed)
    best = problem, float(STEP_SIZES[0]), math.inf
    for eta in STEP_SIZES:
        budget = theory.budget(*problem, step_size=float(eta), num_steps=k)
        losses = budget.expected_loss(MAX_ROUNDS, start=problem.start)
        rounds = metrics.rounds_to_target(losses[1:], SHARE * losses[0])
        if rounds < best[2]:
            best = problem, float(eta), rounds
    return best
