"""This module runs many settings of quadratic clients as one program, each until it has converged.

The clients' Hessians and centers are arguments of the program and not constants in it, so one compilation serves all
settings of an algorithm.
"""

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

# Bounds of the eigenvalues of the clients' Hessians.
SMALLEST_CURVATURE = 0.5
LARGEST_CURVATURE = 2.0


class QuadraticProblem(NamedTuple):
    """N clients of equal weight with risks f_i(w) = (w - a_i)^T H_i (w - a_i) / 2.

    Fields:
      hessians: [N, d, d] H_i, float64.
      centers: [N, d] a_i, the optimum of each client, float64.
    """

    hessians: np.ndarray
    centers: np.ndarray

    @property
    def optimum(self) -> np.ndarray:
        """The minimum w* of the mean risk, [d]."""
        return theory.quadratic_optimum(*self)

    @property
    def start(self) -> np.ndarray:
        """The first model of every run, [d]: a point at distance 2 from the optimum."""
        return self.optimum + 2.0 / math.sqrt(self.centers.shape[1])

    def bias(self, **work: Any) -> float:
        """Returns the distance |w_inf - w*| of FedAvg's fixed point from the optimum.

        Args:
          **work: `num_steps` and `step_size`, as `theory.fedavg_fixed_point` takes them.
        """
        return float(np.linalg.norm(theory.fedavg_fixed_point(*self, **work) - self.optimum))

    def clients(self, num_steps: Any = 1, most: int = 1) -> Population:
        """Makes a population in which client i takes K_i local steps in one epoch of batches of one.

        For this, client i holds K_i copies of its quadratic. K_i can thereby be traced data, while the shapes of the
        program stay the same.

        Args:
          num_steps: K, or [N] K_i.
          most: places for examples in each client's arrays, at least the largest K_i.
        """
        size = len(self.centers)
        mask = np.arange(most)[None] < np.broadcast_to(num_steps, size)[:, None]
        return population.generated(size, _copies, {
            "hessian": jnp.asarray(self.hessians, jnp.float32), "center": jnp.asarray(self.centers, jnp.float32),
            "mask": jnp.asarray(mask),
        })  # fmt: skip


def _copies(parameters: Any, id: Any) -> ClientData:
    """Returns the data of client `id`: its quadratic once in each place, with a mask of the places that count."""
    mask = parameters["mask"][id]

    def copies(x):
        return jnp.broadcast_to(x[id][None], mask.shape + x.shape[1:])

    return ClientData({name: copies(parameters[name]) for name in ("hessian", "center")}, mask)


class Base(NamedTuple):
    """The base setting of a study; every other setting differs from it in one respect."""

    problem: QuadraticProblem
    num_steps: int
    step_size: float
    heterogeneity: float


def quadratic_clients(size: int, dimension: int, heterogeneity: float, seed: int) -> QuadraticProblem:
    """Makes random quadratic clients with curvatures between `SMALLEST_CURVATURE` and `LARGEST_CURVATURE`.

    Args:
      size: N.
      dimension: d.
      heterogeneity: spread of the clients' optima.
      seed: decides all Hessians and centers.
    """
    data = population.quadratics(
        num_clients=size, dimension=dimension, smallest_curvature=SMALLEST_CURVATURE,
        largest_curvature=LARGEST_CURVATURE, heterogeneity=heterogeneity, seed=seed,
    )  # fmt: skip
    return QuadraticProblem(*(data.test[name].astype(np.float64) for name in ("hessian", "center")))


def two_kinds(problem: QuadraticProblem, curvatures: Sequence[float]) -> QuadraticProblem:
    """Makes two kinds of clients: the first half has its optimum at 0 in every coordinate, the second half at 1.

    Args:
      problem: gives N and d.
      curvatures: the curvature of the first and of the second kind; Hessians are multiples of the identity.
    """
    size, dimension = problem.centers.shape
    is_second_kind = np.arange(size) >= size // 2
    # np.where takes the value for True first, hence the reversed order.
    hessians = np.where(is_second_kind, *curvatures[::-1])[:, None, None] * np.eye(dimension)
    return QuadraticProblem(hessians, np.repeat(is_second_kind[:, None].astype(float), dimension, 1))


class MeasuredRun(NamedTuple):
    """A setting of a run, with the distance that is measured at its end and the predicted value.

    Fields:
      conditions: the conditions of the comparison.
      quantity: the name of what is measured.
      problem: the clients.
      num_steps: K, or [N] K_i.
      step_size: eta of the local steps.
      predicted: the value of the closed form.
      target: [d] the point from which the distance is measured.
      rounds: how many rounds the run has; 0 runs until it has converged.
      scale: multiplies the measured distance.
    """

    conditions: dict[str, Any]
    quantity: str
    problem: QuadraticProblem
    num_steps: Any
    step_size: float
    predicted: float
    target: np.ndarray
    rounds: int = 0
    scale: float = 1.0


def run_settings(make: Callable, settings: Sequence[MeasuredRun], rounds: int | None = None) -> Iterator[Comparison]:
    """Runs all settings of one algorithm as one program, and yields a comparison for each.

    Args:
      make: step size -> algorithm; the step size is traced.
      settings: what is run and measured.
      rounds: of settings that name no number of rounds. None takes as many as FedAvg needs to shorten the distance
        from its fixed point by the factor 1e-8, and 10 more.

    Yields: for each setting the last distance to its target, times its scale.
    """
    runs = traced_runs(make, distance_to)
    largest_num_steps = max(int(np.max(setting.num_steps)) for setting in settings)
    num_rounds, resolutions = [], []
    for setting in settings:
        steps_by_client = np.broadcast_to(setting.num_steps, len(setting.problem.centers))
        contraction = theory.fedavg_contraction(
            *setting.problem, num_steps=steps_by_client, step_size=setting.step_size
        )
        step_contraction = theory.fedavg_contraction(*setting.problem, num_steps=1, step_size=setting.step_size)
        # The contraction is kept from zero, where its logarithm is infinite.
        until_converged = 10 + math.ceil(math.log(1e-8) / math.log(max(contraction, 1e-4)))
        num_rounds.append([setting.rounds or rounds or until_converged])
        # Each step rounds the model by about 2^-22 of its size; contraction makes the sum of these errors geometric.
        largest_coordinate = float(np.abs(setting.problem.start).max())
        resolutions.append(2.0**-22 * (1 + largest_coordinate) / (1 - step_contraction))
    keys = jax.random.split(jax.random.key(0), len(settings))
    starts = {"w": jnp.asarray(np.stack([setting.problem.start for setting in settings]), jnp.float32)}
    targets = jnp.asarray(np.stack([setting.target for setting in settings]), jnp.float32)
    clients = stacked([setting.problem.clients(setting.num_steps, largest_num_steps) for setting in settings])
    step_sizes = (jnp.asarray([setting.step_size for setting in settings], jnp.float32),)
    distances = runs(keys, starts, clients, step_sizes, targets, rounds=num_rounds)["distance"][:, 0]
    for setting, distance, resolution in zip(settings, distances, resolutions, strict=True):
        yield measured(
            setting.conditions,
            setting.quantity,
            [distance * setting.scale],
            setting.predicted,
            resolution=resolution * setting.scale,
        )


def distance_to(params: Any, target: Any) -> dict[str, Any]:
    """Returns the distance |w - target| of a model from a point, as an evaluation of `traced_runs`.

    Args:
      params: the model, {"w": [d]}.
      target: [d].
    """
    return {"distance": jnp.sqrt(jnp.sum((params["w"] - target) ** 2))}
