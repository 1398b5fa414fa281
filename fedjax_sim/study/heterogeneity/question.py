"""How different are the clients, by which measure, and does the measure predict how much slower training is?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import algorithms, metrics, population, sampling, theory, validate
from fedjax_sim.instruments.traced_runs import stacked, traced_runs
from fedjax_sim.study.findings import Comparison, Findings, measured
from fedjax_sim.study.heterogeneity.figure import heterogeneity_figure
from fedjax_sim.study.heterogeneity.models import COHORT, digits_population, model_rows, synthetic_population
from fedjax_sim.study.heterogeneity.ranks import rank_correlations
from fedjax_sim.study.heterogeneity.reading import heterogeneity_reading
from fedjax_sim.study.quadratic_settings import LARGEST_CURVATURE, quadratic_clients
from fedjax_sim.validate import Positive

__all__ = ["heterogeneity"]

QUESTION = "How different are the clients, and how much slower does that make training?"
STEP_SIZES = np.geomspace(0.005, 1 / LARGEST_CURVATURE, 40)  # of which the best is taken
SHARE = 1e-3  # of the start's excess loss: the target on quadratics
MAX_ROUNDS = 300


@validate.named_arguments
def heterogeneity(
    *,
    spreads: Sequence[float] = (0.0, 0.25, 0.5, 1.0, 2.0),
    num_clients: int = 20,
    dimension: int = 4,
    num_steps: int = 5,
    alphas: Sequence[float] = (0.03, 0.1, 0.3, 1.0, 10.0),
    synthetic: Sequence[float] = (0.0, 0.5, 1.0),
    model_clients: int = 100,
    learning_rate: Positive = 0.1,
    reference_rounds: int = 25,
    num_rounds: int = 150,
    num_runs: int = 8,
    seed: int = 0,
) -> Findings:
    """How different are the clients? Measures of heterogeneity, and how they go with the rounds that training takes.

    Distances of two label distributions, with the models that fit them; quadratic clients, whose rounds to a target at
    the best constant step have a closed form; and digits with Dirichlet labels and Synthetic(alpha, alpha), each beside
    the same examples shuffled over clients of the same sizes: the slowdown is the ratio of their rounds.

    Args:
      spreads: of the quadratic clients' optima. num_clients: N; dimension: d.
      num_steps: K of FedAvg everywhere.
      alphas: of the digits' label shares. synthetic: alpha = beta of Synthetic. Empty leaves them out.
      model_clients: N of the digits, a third of it of Synthetic; ten a round, batches of ten.
      learning_rate: of the models' local steps.
      reference_rounds: the target is the mean test loss of the shuffled clients after that many.
      num_rounds: T; a population that needs more has no slowdown. num_runs: of each model.
      seed: decides everything.

    Returns: `Findings`.

    Guarantees: every prediction lies in its interval (tests/study/test_heterogeneity.py::test_predictions_hold), and a
    round more or less does not (::test_it_can_tell_another_round); shuffling removes heterogeneity and keeps the
    examples (::test_shuffled_clients_hold_the_same_examples).

    References: Li et al. 2020 (FedProx), definition 3 and section 5.1; Hsu, Qi and Brown 2019; Zhao et al. 2018.
    """
    options = dict(locals())
    _check(options)
    key = jax.random.key(seed)
    found = [*_labels()]
    found += _quadratics(num_clients, dimension, num_steps, sorted({*spreads}), seed)
    third = max(COHORT, model_clients // 3)
    families = {
        "digits MLP": [digits_population(model_clients, value, seed) for value in sorted({*alphas})],
        "Synthetic": [synthetic_population(third, value, seed) for value in sorted({*synthetic})],
    }
    for name, fields in families.items():
        if fields:
            found += model_rows(key, name, fields, options)
    found += rank_correlations(found)
    options = {name: list(value) if isinstance(value, Sequence) else value for name, value in options.items()}
    theories = {"spreads": spreads, "path": lambda spread: _best(num_clients, dimension, num_steps, spread, seed)[2]}
    reading = list(heterogeneity_reading(options, found))
    return Findings("heterogeneity", QUESTION, found, reading, lambda: heterogeneity_figure(found, **theories), options)


def _check(options: dict[str, Any]) -> None:
    for name, least in (("spreads", 1), ("alphas", 0), ("synthetic", 0)):
        validate.sequence(name, options[name], least=least)
    for name in ("spreads", "synthetic"):
        for value in options[name]:
            validate.in_range(name, value, 0, 100)
    for value in options["alphas"]:
        validate.positive("alphas", value)
    for name, low, high in (
        ("num_clients", 2, 10_000), ("dimension", 1, 40), ("num_steps", 1, 200), ("model_clients", COHORT, 100_000),
        ("reference_rounds", 1, 10_000), ("num_rounds", 1, 10_000), ("num_runs", 2, 1000),
    ):  # fmt: skip
        validate.integer(name, options[name], low, high)
    validate.integer("seed", options["seed"], 0)
    validate.in_range("learning_rate", options["learning_rate"], 0, 10, open_low=True)
    if options["num_rounds"] <= options["reference_rounds"]:
        validate.fail("num_rounds", "more than reference_rounds", options["num_rounds"])


def _labels() -> Iterator[Comparison]:
    """Pairs of clients with ten labels each: the gap between the constants that fit them best, under squared loss."""

    def loss(params, examples, key):
        return {"loss": (params["w"] - examples["y"]) ** 2 / 2}

    def make(rate):
        return algorithms.fedavg(loss, sampling.full(1), optax.sgd(rate), num_steps=1, mesh=None)

    pairs = {
        "(.2, .5, .3) and (.5, .3, .2)": ((2, 5, 3), (5, 3, 2)),
        "(.5, 0, .5) and (0, 1, 0)": ((5, 0, 5), (0, 10, 0)),
    }
    values = np.arange(3.0)
    sites = [np.repeat(values, counts).astype(np.float32) for pair in pairs.values() for counts in pair]
    clients = stacked([population.stored({"y": site}, [0, len(site)]) for site in sites])
    keys = jax.random.split(jax.random.key(0), len(sites))
    runs = traced_runs(make, lambda params, target: {"w": params["w"]})
    best = runs(keys, {"w": jnp.zeros(len(sites))}, clients, (jnp.full(len(sites), 0.5),), jnp.zeros(len(sites)), [60])
    for (name, pair), (first, second) in zip(pairs.items(), best["w"].reshape(-1, 2), strict=True):
        laws = np.array(pair) / 10
        conditions, gap = {"part": "labels 0, 1, 2", "population": name}, abs(first - second)
        distance = metrics.earth_mover_distance(*laws, values)
        yield measured(
            conditions, "gap of the fitted constants", gap, metrics.optimum_gap(*laws, values), resolution=1e-6
        )
        yield measured(
            conditions, "gap, and earth mover's distance", gap, distance, kind="upper bound", resolution=1e-6
        )
        for words, value in (("total variation", metrics.total_variation(*laws)), ("L1", metrics.l1_distance(*laws)),
                             ("Jensen-Shannon", metrics.jensen_shannon_divergence(*laws))):  # fmt: skip
            yield measured(conditions, words, value)


def _best(size: int, dimension: int, k: int, spread: float, seed: int) -> tuple[Any, float, float]:
    """(problem, step, rounds): the constant step with the fewest rounds to the target, by the closed form."""
    problem = quadratic_clients(size, dimension, spread, seed)
    best = problem, float(STEP_SIZES[0]), math.inf
    for eta in STEP_SIZES:
        path = theory.budget(*problem, step_size=float(eta), num_steps=k).expected_loss(MAX_ROUNDS, start=problem.start)
        rounds = metrics.rounds_to_target(path[1:], SHARE * path[0])
        if rounds < best[2]:
            best = problem, float(eta), rounds
    return best


def _quadratics(size: int, dimension: int, k: int, spreads: Sequence[float], seed: int) -> Iterator[Comparison]:
    def make(eta):
        return algorithms.fedavg(
            population.quadratic_loss, sampling.full(size), optax.sgd(eta), num_steps=k, weighting="uniform", mesh=None
        )

    def excess(params, target):
        away = params["w"] - target["optimum"]
        return {"loss": away @ target["hessian"] @ away / 2}

    best = [_best(size, dimension, k, spread, seed) for spread in spreads]
    problems = [one[0] for one in best]
    starts = {"w": jnp.asarray(np.stack([one.start for one in problems]), jnp.float32)}
    goals = stacked([
        {"optimum": jnp.asarray(one.optimum, jnp.float32), "hessian": jnp.asarray(one.hessians.mean(0), jnp.float32)}
        for one in problems
    ])  # fmt: skip
    keys = jax.random.split(jax.random.key(0), len(best))
    etas = (jnp.asarray([eta for _, eta, _ in best], jnp.float32),)
    last = max([10, *(int(rounds) for *_, rounds in best if math.isfinite(rounds))]) + 1
    clients = stacked([one.clients() for one in problems])
    paths = traced_runs(make, excess)(keys, starts, clients, etas, goals, np.arange(1, last + 1))["loss"]
    for spread, (problem, eta, rounds), path in zip(spreads, best, paths, strict=True):
        conditions = {"part": "quadratics", "population": f"spread {spread:g}", "step_size": float(f"{eta:.3g}")}
        at = {"w": jnp.asarray(problem.optimum, jnp.float32)}
        seen = metrics.gradient_heterogeneity(population.quadratic_loss, at, problem.clients())
        yield measured(conditions, "gradient dissimilarity", seen.dissimilarity)
        expected = theory.budget(*problem, step_size=eta, num_steps=k).expected_loss(last, start=problem.start)
        target = SHARE * expected[0]
        if not math.isfinite(rounds):
            yield measured(
                conditions, "loss after the last round", path[-1], expected[-1], resolution=1e-5 * expected[0]
            )
            continue
        unsure = int((np.abs(expected[1:] / target - 1) < 1e-4).sum())
        count = metrics.rounds_to_target(path, target)
        count = count if math.isfinite(count) else float(last + 1)
        yield measured(conditions, "rounds to target", count, rounds, resolution=unsure)
