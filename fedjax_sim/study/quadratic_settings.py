"""Quadratic clients as arguments of one program: problems, and runs on them until they have converged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import population, theory
from fedjax_sim.instruments.traced_runs import stacked, traced_runs
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.types import ClientData, Population

__all__ = [
    "LARGEST_CURVATURE",
    "SMALLEST_CURVATURE",
    "Base",
    "MeasuredRun",
    "Problem",
    "distance_to",
    "quadratic_clients",
    "run_settings",
    "two_kinds",
]

SMALLEST_CURVATURE, LARGEST_CURVATURE = 0.5, 2.0  # curvatures


class Problem(NamedTuple):
    """Clients f_i = (w - a_i)^T H_i (w - a_i) / 2 of equal weight."""

    hessians: np.ndarray  # [N, d, d] float64
    centers: np.ndarray  # [N, d]

    @property
    def optimum(self) -> np.ndarray:
        return theory.quadratic_optimum(*self)

    @property
    def start(self) -> np.ndarray:
        return self.optimum + 2.0 / math.sqrt(self.centers.shape[1])

    def bias(self, **work: Any) -> float:
        """Distance |w_inf - w*| of FedAvg's fixed point from the optimum."""
        return float(np.linalg.norm(theory.fedavg_fixed_point(*self, **work) - self.optimum))

    def clients(self, num_steps: Any = 1, most: int = 1) -> Population:
        """The population: client i has K_i copies of its quadratic, in arrays of `most` places. One epoch in batches of
        one is then K_i local steps."""
        size = len(self.centers)
        mask = np.arange(most)[None] < np.broadcast_to(num_steps, size)[:, None]
        return population.generated(size, _copies, {
            "hessian": jnp.asarray(self.hessians, jnp.float32), "center": jnp.asarray(self.centers, jnp.float32),
            "mask": jnp.asarray(mask),
        })  # fmt: skip


def _copies(parameters: Any, id: Any) -> ClientData:
    mask = parameters["mask"][id]

    def copies(x):
        return jnp.broadcast_to(x[id][None], mask.shape + x.shape[1:])

    return ClientData({name: copies(parameters[name]) for name in ("hessian", "center")}, mask)


class Base(NamedTuple):
    """The setting that all others differ from in one respect."""

    problem: Problem
    num_steps: int
    step_size: float
    heterogeneity: float


def quadratic_clients(size: int, dimension: int, heterogeneity: float, seed: int) -> Problem:
    """Random quadratic clients with curvatures between `SMALLEST_CURVATURE` and `LARGEST_CURVATURE`."""
    data = population.quadratics(
        num_clients=size, dimension=dimension, smallest_curvature=SMALLEST_CURVATURE,
        largest_curvature=LARGEST_CURVATURE, heterogeneity=heterogeneity, seed=seed,
    )  # fmt: skip
    return Problem(*(data.test[name].astype(np.float64) for name in ("hessian", "center")))


def two_kinds(problem: Problem, curvatures: Sequence[float]) -> Problem:
    """Half of the clients have their optimum at 0, half at 1, in every coordinate, with the curvatures given."""
    size, dimension = problem.centers.shape
    late = np.arange(size) >= size // 2
    hessians = np.where(late, *curvatures[::-1])[:, None, None] * np.eye(dimension)
    return Problem(hessians, np.repeat(late[:, None].astype(float), dimension, 1))


class MeasuredRun(NamedTuple):
    """A run, and what is measured in it."""

    conditions: dict[str, Any]
    quantity: str
    problem: Problem
    num_steps: Any  # K, or [N] K_i
    step_size: float
    predicted: float
    target: np.ndarray  # from which distances are measured
    rounds: int = 0  # 0: until it has converged
    scale: float = 1.0  # of what is measured


def run_settings(make: Callable, settings: Sequence[MeasuredRun], rounds: int | None = None) -> Iterator[Comparison]:
    """Runs all settings of one algorithm, as one program.

    Args:
      make: step size -> algorithm.
      rounds: of settings that name none; None: as many as FedAvg's contraction asks for.
    """
    runs = traced_runs(make, distance_to)
    most = max(int(np.max(one.num_steps)) for one in settings)
    looks, resolutions = [], []
    for one in settings:
        shares = np.broadcast_to(one.num_steps, len(one.problem.centers))
        rate = theory.fedavg_contraction(*one.problem, num_steps=shares, step_size=one.step_size)
        slow = theory.fedavg_contraction(*one.problem, num_steps=1, step_size=one.step_size)
        looks.append([one.rounds or rounds or 10 + math.ceil(math.log(1e-8) / math.log(max(rate, 1e-4)))])
        resolutions.append(2.0**-22 * (1 + float(np.abs(one.problem.start).max())) / (1 - slow))
    keys = jax.random.split(jax.random.key(0), len(settings))
    starts = {"w": jnp.asarray(np.stack([one.problem.start for one in settings]), jnp.float32)}
    targets = jnp.asarray(np.stack([one.target for one in settings]), jnp.float32)
    clients = stacked([one.problem.clients(one.num_steps, most) for one in settings])
    values = (jnp.asarray([one.step_size for one in settings], jnp.float32),)
    away = runs(keys, starts, clients, values, targets, looks)["distance"][:, 0]
    for one, distance, resolution in zip(settings, away, resolutions, strict=True):
        yield measured(
            one.conditions, one.quantity, [distance * one.scale], one.predicted, resolution=resolution * one.scale
        )


def distance_to(params: Any, target: Any) -> dict[str, Any]:
    """|w - target|."""
    return {"distance": jnp.sqrt(jnp.sum((params["w"] - target) ** 2))}
