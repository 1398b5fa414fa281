"""The points that FedAvg and its corrections converge to, simulated beside their closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import optax

from fedjax_sim import algorithms, population, sampling, theory
from fedjax_sim.study.drift.parts import PAIR
from fedjax_sim.study.findings import Comparison
from fedjax_sim.study.quadratic_settings import SMALLEST_CURVATURE, Base, MeasuredRun, Problem, run_settings, two_kinds

__all__ = ["fixed_point_rows"]

MORE_ROUNDS = 1200  # at least, for algorithms whose rate has no closed form here
UNEQUAL_ETAS = (0.1, 0.01)  # step sizes of clients with unequal numbers of steps


def fixed_point_rows(
    base: Base, problems: dict[float, Problem], steps: Sequence[int], etas: Sequence[float]
) -> Iterator[Comparison]:
    """Distances from the optimum at which the algorithms end, and contractions of single rounds.

    Args:
      base: the setting that the others differ from in one thing.
      problems: by the heterogeneity of their clients.
      steps, etas: numbers and sizes of local steps, rising.
    """
    size = len(base.problem.centers)
    makes = _algorithms(size)
    alike, unequal = two_kinds(base.problem, (1.0, 1.0)), np.where(np.arange(size) < size // 2, 1, 10)
    settings = [*_grid("FedAvg", base, steps, etas), *_heterogeneities(base, problems)]
    settings += [*_two_curvatures(base, steps), _one_round(base), *_unequal_steps(alike, unequal)]
    yield from run_settings(makes["FedAvg"], settings)
    yield from run_settings(makes["FedAvg by examples"], list(_unequal_by_examples(alike, unequal)))
    yield from run_settings(makes["FedNova"], list(_unequal_fednova(alike, unequal)), MORE_ROUNDS // 4)
    one_step = math.ceil(math.log(1e-8) / math.log(1 - etas[0] * SMALLEST_CURVATURE))  # rounds that one step takes
    rounds = max(MORE_ROUNDS, one_step)
    for name in ("SCAFFOLD", "FedDyn", "Mime"):
        settings = [*_grid(name, base, steps, etas), _distance(name, "unequal steps", alike, unequal, 0.1, 0.0)]
        yield from run_settings(makes[name], settings, rounds)


def _algorithms(size: int) -> dict[str, Callable]:
    loss, work = population.quadratic_loss, {"num_epochs": 1, "batch_size": 1, "mesh": None}
    uniform = work | {"weighting": "uniform"}
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
    problem: Problem,
    num_steps: Any,
    eta: float,
    predicted: float,
    heterogeneity: float | None = None,
) -> MeasuredRun:
    """A run to its end, whose distance to the optimum is read."""
    k = num_steps if np.ndim(num_steps) == 0 else f"{min(num_steps)} and {max(num_steps)}"
    conditions = {"part": part, "algorithm": algorithm, "local_steps": k, "step_size": eta,
                  "heterogeneity": heterogeneity}  # fmt: skip
    return MeasuredRun(conditions, "distance to the optimum", problem, num_steps, eta, predicted, problem.optimum)


def _grid(algorithm: str, base: Base, steps: Sequence[int], etas: Sequence[float]) -> Iterator[MeasuredRun]:
    """All numbers and sizes of steps; FedAvg alone is biased."""
    for eta in etas:
        for k in steps:
            away = base.problem.bias(num_steps=k, step_size=eta) if algorithm == "FedAvg" else 0.0
            yield _distance(algorithm, "fixed point", base.problem, k, eta, away, base.heterogeneity)


def _heterogeneities(base: Base, problems: dict[float, Problem]) -> Iterator[MeasuredRun]:
    """FedAvg against the spread of the optima, and with one Hessian for all clients."""
    work = {"num_steps": base.num_steps, "step_size": base.step_size}
    for h, problem in problems.items():
        yield _distance("FedAvg", "heterogeneity", problem, *work.values(), problem.bias(**work), h)
    size = len(base.problem.centers)
    one_kind = Problem(np.repeat(base.problem.hessians[:1], size, 0), base.problem.centers)
    yield _distance("FedAvg", "equal Hessians", one_kind, *work.values(), 0.0, base.heterogeneity)


def _two_curvatures(base: Base, steps: Sequence[int]) -> Iterator[MeasuredRun]:
    """FedAvg on clients of curvature 1 and 10: the fixed point, and the contraction of one round towards it."""
    pair, eta = two_kinds(base.problem, PAIR), min(base.step_size, 0.05)  # a step that suits curvature 10
    for k in steps:
        if k > 10:
            continue
        where, rate = (
            f(*pair, num_steps=k, step_size=eta) for f in (theory.fedavg_fixed_point, theory.fedavg_contraction)
        )
        yield _distance("FedAvg", "two curvatures", pair, k, eta, pair.bias(num_steps=k, step_size=eta))
        shrinks = _distance("FedAvg", "two curvatures", pair, k, eta, rate)
        far = 1 / float(np.linalg.norm(pair.start - where))
        yield shrinks._replace(quantity="contraction of a round", target=where, rounds=1, scale=far)


def _one_round(base: Base) -> MeasuredRun:
    """FedAvg's pseudo-gradient: the way of one round over the step size."""
    work = {"num_steps": base.num_steps, "step_size": base.step_size}
    moved = theory.quadratic_drift(*base.problem, point=base.problem.start, **work).pseudo_gradient
    length = float(np.linalg.norm(moved))
    sent = _distance("FedAvg", "one round", base.problem, *work.values(), length, base.heterogeneity)
    return sent._replace(quantity="pseudo-gradient", target=base.problem.start, rounds=1, scale=1 / base.step_size)


def _unequal_steps(alike: Problem, unequal: np.ndarray) -> Iterator[MeasuredRun]:
    """FedAvg where half of the clients take one step and half ten."""
    for eta in UNEQUAL_ETAS:
        yield _distance("FedAvg", "unequal steps", alike, unequal, eta, alike.bias(num_steps=unequal, step_size=eta))


def _unequal_by_examples(alike: Problem, unequal: np.ndarray) -> Iterator[MeasuredRun]:
    """The same with shares by examples: the optimum is another."""
    shares = unequal / unequal.sum()
    goal = alike._replace(centers=np.broadcast_to(shares @ alike.centers, alike.centers.shape)).optimum
    for eta in UNEQUAL_ETAS:
        where = theory.fedavg_fixed_point(*alike, shares, num_steps=unequal, step_size=eta)
        one = _distance("FedAvg by examples", "unequal steps", alike, unequal, eta, float(np.linalg.norm(where - goal)))
        yield one._replace(target=goal)


def _unequal_fednova(alike: Problem, unequal: np.ndarray) -> Iterator[MeasuredRun]:
    for eta in UNEQUAL_ETAS:
        where = theory.fednova_fixed_point(*alike, num_steps=unequal, step_size=eta)
        away = float(np.linalg.norm(where - alike.optimum))
        yield _distance("FedNova", "unequal steps", alike, unequal, eta, away)
