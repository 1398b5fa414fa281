"""This module measures FedProx on quadratics for pairs of proximal weight and local step, beside its closed forms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import algorithms, population, sampling, theory
from fedjax_sim.instruments.traced_runs import stacked, traced_runs
from fedjax_sim.study.claims import Row, selected
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.study.quadratic_settings import QuadraticProblem, distance_to
from fedjax_sim.theory.quadratic import local_progress

MAP = "weight and step"  # the part of the study
ROUNDING = 1e-5  # of a gap, as a share of it or of 1


class ProximalMap(NamedTuple):
    """What is run for every pair: N quadratic clients who all take part, K full-batch steps, and T rounds."""

    problem: QuadraticProblem
    num_steps: int
    num_rounds: int


def predicted_gap(setting: ProximalMap, weight: float, step: float, num_rounds: int) -> float:
    """Computes the distance of FedProx to the optimum after some rounds, |w* - w_T|.

    A round is w -> w - P (w - w_inf), with P the mean of the clients' shares of the way, so that w_T - w_inf is
    (I - P)^T (w_0 - w_inf).

    Args:
      setting: clients and local work.
      weight: lambda.
      step: eta.
      num_rounds: T.

    Guarantees: it is the distance of rounds that NumPy takes step by step
    (tests/study/test_stragglers.py::test_the_map_is_numpy).
    """
    problem = setting.problem
    work = {"proximal_weight": weight, "num_steps": setting.num_steps, "step_size": step}
    fixed_point = theory.fedprox_fixed_point(*problem, **work)
    progress = local_progress(problem.hessians, setting.num_steps, step, weight).mean(0)
    rounds = np.linalg.matrix_power(np.eye(len(progress)) - progress, num_rounds)
    return float(np.linalg.norm(fixed_point + rounds @ (problem.start - fixed_point) - problem.optimum))


def map_rows(setting: ProximalMap, weights: Sequence[float], steps: Sequence[float]) -> Iterator[Comparison]:
    """Measures the gap of each pair after all rounds, and after one round where theory says that rounds diverge.

    Args:
      setting: clients, local work and rounds.
      weights: lambda.
      steps: eta of local steps.

    Yields: for each pair of weight and step the gap, the distance to the optimum.
    """
    problem = setting.problem
    everybody = sampling.full(len(problem.centers))

    def make(eta, weight):
        return algorithms.fedprox(
            population.quadratic_loss, everybody, optax.sgd(eta), coefficient=weight, num_steps=setting.num_steps,
            weighting="uniform", mesh=None,
        )  # fmt: skip

    pairs = [(weight, step) for weight in weights for step in steps]
    contractions = [
        theory.fedprox_contraction(*problem, proximal_weight=weight, num_steps=setting.num_steps, step_size=step)
        for weight, step in pairs
    ]
    num_rounds = [setting.num_rounds if contraction < 1 else 1 for contraction in contractions]
    values = tuple(jnp.asarray([pair[i] for pair in pairs], jnp.float32) for i in (1, 0))
    starts, targets = (
        jnp.broadcast_to(jnp.asarray(x, jnp.float32), (len(pairs), x.size)) for x in (problem.start, problem.optimum)
    )
    keys = jax.random.split(jax.random.key(0), len(pairs))
    clients = stacked([problem.clients()] * len(pairs))
    runs = traced_runs(make, distance_to)
    evaluated_rounds = [[rounds] for rounds in num_rounds]
    gaps = runs(keys, {"w": starts}, clients, values, targets, rounds=evaluated_rounds)["distance"][:, 0]
    for (weight, step), contraction, rounds, gap in zip(pairs, contractions, num_rounds, gaps, strict=True):
        conditions = {
            "part": MAP, "algorithm": "FedProx", "proximal_weight": weight, "step_size": step,
            "contraction": contraction, "rounds": rounds,
        }  # fmt: skip
        predicted = predicted_gap(setting, weight, step, rounds)
        yield measured(conditions, "gap", [gap], predicted, resolution=ROUNDING * max(1.0, predicted))


def best_weights(rows: Sequence[Row]) -> dict[float, Row]:
    """Returns, for each step size, the row with the smallest measured gap among pairs that contract.

    Args:
      rows: the rows of the study. A step size at which no pair contracts is left out.
    """
    best: dict[float, Row] = {}
    for row in selected(rows, part=MAP):
        step = row["step_size"]
        if row["contraction"] < 1 and (step not in best or row["measured"] < best[step]["measured"]):
            best[step] = row
    return best
