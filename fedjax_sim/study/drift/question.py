"""What do several local steps do? Where FedAvg and its corrections come to rest, and the drift on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import optax

from fedjax_sim import algorithms, population, sampling, theory, validate
from fedjax_sim.study.drift.figure import drift_figure, drift_reading
from fedjax_sim.study.drift.parts import PAIR, bias_rows, model_rows, proximal_rows
from fedjax_sim.study.findings import Comparison, Findings
from fedjax_sim.study.quadratic_settings import (
    LARGEST,
    SMALLEST,
    Base,
    Problem,
    Setting,
    quadratic_clients,
    run_settings,
    two_kinds,
)

__all__ = ["drift"]

QUESTION = "What do several local steps do to the place where training comes to rest?"
MORE_ROUNDS = 1200  # at least, for algorithms whose rate has no closed form here


def drift(
    *,
    num_clients: int = 20,
    dimension: int = 4,
    heterogeneities: Sequence[float] = (0.0, 0.5, 1.0, 2.0),
    step_sizes: Sequence[float] = (0.05, 0.1, 0.2),
    num_steps: Sequence[int] = (1, 2, 4, 10, 30),
    proximal_weights: Sequence[float] = (0.0, 0.1, 1.0, 10.0, 100.0),
    model_clients: int = 50,
    alpha: float = 0.3,
    seed: int = 0,
) -> Findings:
    """What do several local steps do? Fixed points and drift of FedAvg and of its corrections, against closed forms.

    Clients have quadratic risks with Hessians of their own; everybody takes part with full batches, so nothing is
    random. The number of local steps is a client's number of copies of its quadratic, one a step, for one epoch. Then
    logistic regression on digits, whose drift is measured at one model.

    Args:
      num_clients: N, even. dimension: d.
      heterogeneities: spreads of the clients' optima; the last but one is the base.
      step_sizes: eta of local steps, at most 0.5. num_steps: K. The middle ones are the base.
      proximal_weights: lambda of FedProx, with the half.
      model_clients: N of the digits; 0 leaves them out. alpha: of their Dirichlet label shares.
      seed: decides everything.

    Returns: `Findings`.

    Guarantees: every prediction lies in its interval (tests/study/test_drift.py::test_predictions_hold), and one 5 %
    off does not (::test_it_can_tell_a_wrong_formula).

    References: Karimireddy et al. 2020 (SCAFFOLD), section 3; Li et al. 2020 (FedProx); Wang et al. 2020 (FedNova);
    Acar et al. 2021 (FedDyn); Karimireddy et al. 2021 (Mime).
    """
    options = dict(locals())
    _check(options)
    problems = {h: quadratic_clients(num_clients, dimension, h, seed) for h in sorted({*heterogeneities})}
    steps, etas = sorted({*num_steps}), sorted({*step_sizes})
    base = Base(
        problems[_middle(heterogeneities)], steps[len(steps) // 2], etas[len(etas) // 2], _middle(heterogeneities)
    )
    found = [*_fixed_points(base, problems, steps, etas), *proximal_rows(base, sorted({*proximal_weights}))]
    found += bias_rows(base, steps)
    if model_clients:
        found += model_rows(model_clients, alpha, steps, seed)
    options = {name: list(value) if isinstance(value, Sequence) else value for name, value in options.items()}
    reading = list(drift_reading(base, found))
    return Findings("drift", QUESTION, found, reading, lambda: drift_figure(base, found, steps, etas), options)


def _middle(values: Sequence[float]) -> float:
    values = sorted({*values})
    return values[max(0, len(values) - 2)]


def _check(options: dict[str, Any]) -> None:
    for name in ("heterogeneities", "step_sizes", "num_steps", "proximal_weights"):
        validate.sequence(name, options[name])
    validate.integer("num_clients", options["num_clients"], 2)
    if options["num_clients"] % 2:
        validate.fail("num_clients", "an even number", options["num_clients"], "Two kinds of clients are compared.")
    validate.integer("dimension", options["dimension"], 1, 40)
    for name in ("heterogeneities", "proximal_weights"):
        for value in options[name]:
            validate.in_range(name, value, 0, 1e4)
    for value in options["step_sizes"]:
        validate.in_range("step_sizes", value, 0.005, 1 / LARGEST, hint=f"Curvatures go up to {LARGEST:g}.")
    for value in options["num_steps"]:
        validate.integer("num_steps", value, 1, 200)
    validate.integer("model_clients", options["model_clients"], 0)
    validate.positive("alpha", options["alpha"])
    validate.integer("seed", options["seed"], 0)


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


def _fixed_points(
    base: Base, problems: dict[float, Problem], steps: Sequence[int], etas: Sequence[float]
) -> Iterator[Comparison]:
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
