"""This module measures the points that FedAvg and its corrections converge to, and compares them with closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import optax

from fedjax_sim import algorithms, population, sampling, theory
from fedjax_sim.round.options import RecipeOptions
from fedjax_sim.study.drift.parts import PAIR
from fedjax_sim.study.findings import Comparison
from fedjax_sim.study.quadratic_settings import (
    SMALLEST_CURVATURE,
    Base,
    MeasuredRun,
    QuadraticProblem,
    run_settings,
    two_kinds,
)

MORE_ROUNDS = 1200  # the fewest rounds of algorithms whose rate has no closed form here
UNEQUAL_ETAS = (0.1, 0.01)  # step sizes of clients with unequal numbers of steps


def fixed_point_rows(
    base: Base, problems: dict[float, QuadraticProblem], steps: Sequence[int], etas: Sequence[float]
) -> Iterator[Comparison]:
    """Measures distances of fixed points from the optimum, and contractions of single rounds.

    Args:
      base: the base setting of the study.
      problems: the clients, by their heterogeneity.
      steps: K, rising.
      etas: step sizes of local steps, rising.

    Yields: a comparison for each setting of each algorithm.
    """
    size = len(base.problem.centers)
    makes = _algorithms(size)
    equal_hessians = two_kinds(base.problem, (1.0, 1.0))
    unequal_steps = np.where(np.arange(size) < size // 2, 1, 10)
    settings = [*_grid("FedAvg", base, steps, etas), *_heterogeneities(base, problems)]
    settings += [*_two_curvatures(base, steps), _one_round(base), *_unequal_steps(equal_hessians, unequal_steps)]
    yield from run_settings(makes["FedAvg"], settings)
    yield from run_settings(makes["FedAvg by examples"], list(_unequal_by_examples(equal_hessians, unequal_steps)))
    yield from run_settings(makes["FedNova"], list(_unequal_fednova(equal_hessians, unequal_steps)), MORE_ROUNDS // 4)
    # The slowest setting has one local step of the smallest size: these rounds shorten its error by 1e-8.
    slowest_rounds = math.ceil(math.log(1e-8) / math.log(1 - etas[0] * SMALLEST_CURVATURE))
    rounds = max(MORE_ROUNDS, slowest_rounds)
    for name in ("SCAFFOLD", "FedDyn", "Mime"):
        unequal = _distance(name, "unequal steps", equal_hessians, num_steps=unequal_steps, eta=0.1, predicted=0.0)
        settings = [*_grid(name, base, steps, etas), unequal]
        yield from run_settings(makes[name], settings, rounds)


def _algorithms(size: int) -> dict[str, Callable]:
    """Returns functions step size -> algorithm, by name; a client's number of examples is its number of steps."""
    loss = population.quadratic_loss
    work: RecipeOptions = {"num_epochs": 1, "batch_size": 1, "mesh": None}
    uniform: RecipeOptions = {**work, "weighting": "uniform"}
    everybody = sampling.full(size)
    return {
        "FedAvg": lambda eta: algorithms.fedavg(loss, everybody, optax.sgd(eta), **uniform),
        "FedAvg by examples": lambda eta: algorithms.fedavg(loss, everybody, optax.sgd(eta), **work),
        "FedNova": lambda eta: algorithms.fednova(loss, everybody, optax.sgd(eta), **uniform),
        "SCAFFOLD": lambda eta: algorithms.scaffold(loss, everybody, optax.sgd(eta), **uniform),
        "FedDyn": lambda eta: algorithms.feddyn(loss, everybody, optax.sgd(eta), coefficient=1.0, **uniform),
        "Mime": lambda eta: algorithms.mime(loss, everybody, optax.sgd(eta), rule="sgd", **uniform),
    }


def _distance(
    algorithm: str,
    part: str,
    problem: QuadraticProblem,
    *,
    num_steps: Any,
    eta: float,
    predicted: float,
    heterogeneity: float | None = None,
) -> MeasuredRun:
    """Makes a setting that runs until it has converged and measures the distance to the optimum.

    Args:
      algorithm: its name, for the conditions.
      part: the part of the study, for the conditions.
      problem: N clients in d dimensions.
      num_steps: K, or [N] K_i.
      eta: the size of local steps.
      predicted: |w_inf - w*| by the closed form.
      heterogeneity: spread of the optima, for the conditions; None where the part does not have it.
    """
    k = num_steps if np.ndim(num_steps) == 0 else f"{min(num_steps)} and {max(num_steps)}"
    conditions = {"part": part, "algorithm": algorithm, "local_steps": k, "step_size": eta,
                  "heterogeneity": heterogeneity}  # fmt: skip
    return MeasuredRun(
        conditions=conditions,
        quantity="distance to the optimum",
        problem=problem,
        num_steps=num_steps,
        step_size=eta,
        predicted=predicted,
        target=problem.optimum,
    )


def _grid(algorithm: str, base: Base, steps: Sequence[int], etas: Sequence[float]) -> Iterator[MeasuredRun]:
    """Yields a setting for each number and size of local steps. Only FedAvg has a bias."""
    for eta in etas:
        for k in steps:
            predicted = base.problem.bias(num_steps=k, step_size=eta) if algorithm == "FedAvg" else 0.0
            yield _distance(
                algorithm,
                "fixed point",
                base.problem,
                num_steps=k,
                eta=eta,
                predicted=predicted,
                heterogeneity=base.heterogeneity,
            )


def _heterogeneities(base: Base, problems: dict[float, QuadraticProblem]) -> Iterator[MeasuredRun]:
    """Yields settings of FedAvg for each spread of the optima, and a setting with one Hessian for all clients."""
    work = {"num_steps": base.num_steps, "step_size": base.step_size}
    for h, problem in problems.items():
        yield _distance(
            "FedAvg", "heterogeneity", problem, num_steps=base.num_steps, eta=base.step_size,
            predicted=problem.bias(**work), heterogeneity=h,
        )  # fmt: skip
    size = len(base.problem.centers)
    equal_hessians = QuadraticProblem(np.repeat(base.problem.hessians[:1], size, 0), base.problem.centers)
    yield _distance(
        "FedAvg", "equal Hessians", equal_hessians, num_steps=base.num_steps, eta=base.step_size, predicted=0.0,
        heterogeneity=base.heterogeneity,
    )  # fmt: skip


def _two_curvatures(base: Base, steps: Sequence[int]) -> Iterator[MeasuredRun]:
    """Yields settings of FedAvg on clients of curvature 1 and 10: the fixed point, and the contraction of a round.

    Predicted are |w_inf - w*| and the contraction rho = |w_1 - w_inf| / |w_0 - w_inf| = mean of (1 - eta h_i)^K.

    Args:
      base: the base setting, which gives N and d. Its eta is used up to 0.05, which is stable for curvature 10.
      steps: K, rising; only K <= 10 are run.

    Yields: two settings for each K.
    """
    pair = two_kinds(base.problem, PAIR)
    eta = min(base.step_size, 0.05)  # a step that is small enough for curvature 10
    for k in steps:
        if k > 10:
            continue
        fixed_point = theory.fedavg_fixed_point(*pair, num_steps=k, step_size=eta)
        contraction = theory.fedavg_contraction(*pair, num_steps=k, step_size=eta)
        yield _distance(
            "FedAvg", "two curvatures", pair, num_steps=k, eta=eta, predicted=pair.bias(num_steps=k, step_size=eta)
        )
        # The distance to the fixed point after one round, divided by the distance at the start.
        after_one_round = _distance("FedAvg", "two curvatures", pair, num_steps=k, eta=eta, predicted=contraction)
        scale = 1 / float(np.linalg.norm(pair.start - fixed_point))
        yield after_one_round._replace(quantity="contraction of a round", target=fixed_point, rounds=1, scale=scale)


def _one_round(base: Base) -> MeasuredRun:
    """Makes the setting that measures FedAvg's pseudo-gradient: the update of a round divided by the step size."""
    work = {"num_steps": base.num_steps, "step_size": base.step_size}
    pseudo_gradient = theory.quadratic_drift(*base.problem, point=base.problem.start, **work).pseudo_gradient
    length = float(np.linalg.norm(pseudo_gradient))
    setting = _distance(
        "FedAvg", "one round", base.problem, num_steps=base.num_steps, eta=base.step_size, predicted=length,
        heterogeneity=base.heterogeneity,
    )  # fmt: skip
    return setting._replace(quantity="pseudo-gradient", target=base.problem.start, rounds=1, scale=1 / base.step_size)


def _unequal_steps(problem: QuadraticProblem, num_steps: np.ndarray) -> Iterator[MeasuredRun]:
    """Yields settings of FedAvg with a different number of local steps for each client."""
    for eta in UNEQUAL_ETAS:
        predicted = problem.bias(num_steps=num_steps, step_size=eta)
        yield _distance("FedAvg", "unequal steps", problem, num_steps=num_steps, eta=eta, predicted=predicted)


def _unequal_by_examples(problem: QuadraticProblem, num_steps: np.ndarray) -> Iterator[MeasuredRun]:
    """Yields the same settings with clients weighted by their numbers of examples, which moves the optimum."""
    shares = num_steps / num_steps.sum()
    # With equal Hessians the optimum is the weighted mean of the clients' optima.
    weighted_optimum = problem._replace(
        centers=np.broadcast_to(shares @ problem.centers, problem.centers.shape)
    ).optimum
    for eta in UNEQUAL_ETAS:
        fixed_point = theory.fedavg_fixed_point(*problem, shares, num_steps=num_steps, step_size=eta)
        predicted = float(np.linalg.norm(fixed_point - weighted_optimum))
        setting = _distance(
            "FedAvg by examples", "unequal steps", problem, num_steps=num_steps, eta=eta, predicted=predicted
        )
        yield setting._replace(target=weighted_optimum)


def _unequal_fednova(problem: QuadraticProblem, num_steps: np.ndarray) -> Iterator[MeasuredRun]:
    """Yields settings of FedNova with a different number of local steps for each client."""
    for eta in UNEQUAL_ETAS:
        fixed_point = theory.fednova_fixed_point(*problem, num_steps=num_steps, step_size=eta)
        predicted = float(np.linalg.norm(fixed_point - problem.optimum))
        yield _distance("FedNova", "unequal steps", problem, num_steps=num_steps, eta=eta, predicted=predicted)
