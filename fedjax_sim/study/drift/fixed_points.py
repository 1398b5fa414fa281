"""Where FedAvg and its corrections come to rest, simulated beside the closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import optax

from fedjax_sim import algorithms, population, sampling, theory
from fedjax_sim.study.drift.parts import PAIR
from fedjax_sim.study.findings import Comparison
from fedjax_sim.study.quadratic_settings import SMALLEST, Base, Problem, Setting, run_settings, two_kinds

__all__ = ["fixed_point_rows"]

MORE_ROUNDS = 1200  # at least, for algorithms whose rate has no closed form here


def _algorithms(size: int) -> dict[str, Callable]:
    loss, work = population.quadratic_loss, {"num_epochs": 1, "batch_size": 1, "mesh": None}
    uniform = work | {"weighting": "uniform"}
    everybody = sampling.full(size)
    return {
        "FedAvg": lambda eta: algorithms.fedavg(loss, everybody, optax.sgd(eta), **uniform),
        "FedAvg by examples": lambda eta: algorithms.fedavg(loss, everybody, optax.sgd(eta), **work),
        "FedNova": lambda eta: algorithms.fednova(loss, everybody, learning_rate=eta, **uniform),
        "SCAFFOLD": lambda eta: algorithms.scaffold(loss, everybody, learning_rate=eta, **uniform),
        "FedDyn": lambda eta: algorithms.feddyn(loss, everybody, optax.sgd(eta), coefficient=1.0, **uniform),
        "Mime": lambda eta: algorithms.mime(loss, everybody, rule="sgd", learning_rate=eta, **uniform),
    }


def fixed_point_rows(
    base: Base, problems: dict[float, Problem], steps: Sequence[int], etas: Sequence[float]
) -> Iterator[Comparison]:
    """The distances to the optimum at which the algorithms come to rest, and how fast they get there."""
    size = len(base.problem.centers)
    makes = _algorithms(size)
    one_kind = Problem(np.repeat(base.problem.hessians[:1], size, 0), base.problem.centers)
    pair, alike = two_kinds(base.problem, PAIR), two_kinds(base.problem, (1.0, 1.0))

    def rest(algorithm, part, problem, num_steps, eta, predicted, heterogeneity=None) -> Setting:
        k = num_steps if np.ndim(num_steps) == 0 else f"{min(num_steps)} and {max(num_steps)}"
        conditions = {"part": part, "algorithm": algorithm, "local_steps": k, "step_size": eta,
                      "heterogeneity": heterogeneity}  # fmt: skip
        return Setting(conditions, "distance to the optimum", problem, num_steps, eta, predicted, problem.optimum)

    def grid(algorithm, of: Callable) -> list[Setting]:
        return [
            rest(algorithm, "fixed point", base.problem, k, eta, of(k, eta), base.heterogeneity)
            for eta in etas for k in steps
        ]  # fmt: skip

    settings = grid("FedAvg", lambda k, eta: base.problem.bias(num_steps=k, step_size=eta))
    work = {"num_steps": base.num_steps, "step_size": base.step_size}
    for h, problem in problems.items():
        settings.append(rest("FedAvg", "heterogeneity", problem, *work.values(), problem.bias(**work), h))
    settings.append(rest("FedAvg", "equal Hessians", one_kind, *work.values(), 0.0, base.heterogeneity))
    for k in steps:  # the pair of row Q3, whose step must suit curvature 10
        eta = min(base.step_size, 0.05)
        where, rate = (
            f(*pair, num_steps=k, step_size=eta) for f in (theory.fedavg_fixed_point, theory.fedavg_contraction)
        )
        if k <= 10:
            settings.append(rest("FedAvg", "two curvatures", pair, k, eta, pair.bias(num_steps=k, step_size=eta)))
            shrinks = rest("FedAvg", "two curvatures", pair, k, eta, rate)
            far = 1 / float(np.linalg.norm(pair.start - where))
            settings.append(shrinks._replace(quantity="contraction of a round", target=where, rounds=1, scale=far))
    moved = theory.quadratic_drift(*base.problem, point=base.problem.start, **work).pseudo_gradient
    sent = rest("FedAvg", "one round", base.problem, *work.values(), float(np.linalg.norm(moved)), base.heterogeneity)
    settings.append(
        sent._replace(quantity="pseudo-gradient", target=base.problem.start, rounds=1, scale=1 / base.step_size)
    )
    unequal = np.where(np.arange(size) < size // 2, 1, 10)
    for eta in (0.1, 0.01):
        settings.append(
            rest("FedAvg", "unequal steps", alike, unequal, eta, alike.bias(num_steps=unequal, step_size=eta))
        )
    yield from run_settings(makes["FedAvg"], settings)

    shares = unequal / unequal.sum()
    goal = alike._replace(centers=np.broadcast_to(shares @ alike.centers, alike.centers.shape)).optimum
    settings = []
    for eta in (0.1, 0.01):
        where = theory.fedavg_fixed_point(*alike, shares, num_steps=unequal, step_size=eta)
        one = rest("FedAvg by examples", "unequal steps", alike, unequal, eta, float(np.linalg.norm(where - goal)))
        settings.append(one._replace(target=goal))
    yield from run_settings(makes["FedAvg by examples"], settings)

    settings = []
    for eta in (0.1, 0.01):
        where = theory.fednova_fixed_point(*alike, num_steps=unequal, step_size=eta)
        settings.append(
            rest("FedNova", "unequal steps", alike, unequal, eta, float(np.linalg.norm(where - alike.optimum)))
        )
    yield from run_settings(makes["FedNova"], settings, MORE_ROUNDS // 4)

    rounds = max(MORE_ROUNDS, math.ceil(math.log(1e-8) / math.log(1 - etas[0] * SMALLEST)))  # that one step takes
    for name in ("SCAFFOLD", "FedDyn", "Mime"):
        settings = [*grid(name, lambda k, eta: 0.0), rest(name, "unequal steps", alike, unequal, 0.1, 0.0)]
        yield from run_settings(makes[name], settings, rounds)
