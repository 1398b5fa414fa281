"""This module has what follows from the options of `rounds_to_target`: clients, noise of batches, and error floors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjax_sim import theory
from fedjax_sim.study.quadratic_settings import QuadraticProblem, quadratic_clients


def problems_of(options: Mapping[str, Any]) -> dict[str, QuadraticProblem]:
    """Returns the quadratic clients, by the name of their part.

    Args:
      options: the study's options.
    """
    data = quadratic_clients(options["num_clients"], options["dimension"], options["heterogeneity"], options["seed"])
    identity = np.broadcast_to(np.eye(options["dimension"]), data.hessians.shape)
    return {
        "one curvature": QuadraticProblem(identity, np.zeros_like(data.centers)),
        "one optimum": QuadraticProblem(data.hessians, np.zeros_like(data.centers)),
        "heterogeneous": data,
    }


def gradient_variances(options: Mapping[str, Any]) -> dict[int, float]:
    """Returns the variance of a coordinate of a batch's mean gradient, by batch size."""
    return {size: options["gradient_noise"] ** 2 / size for size in sorted({*options["batch_sizes"]})}


def middle_steps(options: Mapping[str, Any]) -> int:
    """Returns K of the noisy runs."""
    steps = sorted({*options["num_steps"]})
    return steps[len(steps) // 2]


def start_loss(problem: QuadraticProblem) -> float:
    """Returns the excess loss of the start."""
    distance = problem.start - problem.optimum
    return float(distance @ problem.hessians.mean(0) @ distance) / 2


def floor_over_target(options: Mapping[str, Any], local_steps: int, noise: float = 0.0) -> float:
    """Returns the error floor of the heterogeneous clients, divided by the target.

    Args:
      options: the study's options.
      local_steps: K.
      noise: variance of a coordinate of a gradient.
    """
    problem = problems_of(options)["heterogeneous"]
    work: dict[str, Any] = {"step_size": options["step_size"], "num_steps": local_steps, "gradient_noise": noise}
    return theory.budget(*problem, **work).total / (options["target"] * start_loss(problem))
