"""This study measures how different clients are, and whether a measure predicts how much slower training is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import algorithms, metrics, population, sampling, theory, validate
from fedjax_sim.instruments.traced_runs import stacked, traced_runs
from fedjax_sim.study.findings import Comparison, Findings, measured, rows_of
from fedjax_sim.study.heterogeneity.best_step import SHARE, best_step
from fedjax_sim.study.heterogeneity.claims import heterogeneity_claims
from fedjax_sim.study.heterogeneity.figure import heterogeneity_figure
from fedjax_sim.study.heterogeneity.models import COHORT, digits_population, model_rows, synthetic_population
from fedjax_sim.study.heterogeneity.ranks import rank_correlations
from fedjax_sim.validate import Positive

QUESTION = "How different are the clients, and how much slower does that make training?"


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
    """How different are the clients? Measures heterogeneity, and how it goes with the rounds that training takes.

    The study has three parts. The first compares distances of two label distributions with the gap between the models
    that fit them. The second has quadratic clients, whose rounds to a target at the best constant step have a closed
    form. The third trains models on digits with Dirichlet labels and on Synthetic(alpha, alpha). There, each population
    is compared with the same examples shuffled over clients of the same sizes: the slowdown is the ratio of the rounds
    that the two need.

    Args:
      spreads: spreads of the quadratic clients' optima.
      num_clients: N of the quadratics.
      dimension: d of the quadratics.
      num_steps: K of FedAvg everywhere.
      alphas: parameters of the digits' Dirichlet label shares; an empty list leaves the digits out.
      synthetic: alpha = beta of Synthetic; an empty list leaves it out.
      model_clients: N of the digits; Synthetic has a third of it, but at least ten clients. Cohorts have ten clients,
        and batches ten examples.
      learning_rate: the learning rate of the models' local steps.
      reference_rounds: the target is the mean test loss of the shuffled clients after that many rounds.
      num_rounds: T; a population that needs more rounds has no slowdown.
      num_runs: runs of each model.
      seed: decides everything.

    Returns: `Findings`.

    Guarantees: every prediction lies in its interval (tests/study/test_heterogeneity.py::test_predictions_hold). A
    prediction of a round more or less does not (::test_it_can_tell_another_round). Shuffling removes heterogeneity and
    keeps the examples (::test_shuffled_clients_hold_the_same_examples).

    References: Li et al. 2020 (FedProx), definition 3 and section 5.1; Hsu, Qi and Brown 2019; Zhao et al. 2018.
    """
    options = dict(locals())
    _check(options)
    key = jax.random.key(seed)
    comparisons = [*_labels()]
    comparisons += _quadratics(num_clients, dimension, num_steps, sorted({*spreads}), seed)
    num_synthetic_clients = max(COHORT, model_clients // 3)
    families = {
        "digits MLP": [digits_population(model_clients, value, seed) for value in sorted({*alphas})],
        "Synthetic": [synthetic_population(num_synthetic_clients, value, seed) for value in sorted({*synthetic})],
    }
    for name, populations in families.items():
        if populations:
            comparisons += model_rows(key, name, populations, options)
    comparisons += rank_correlations(comparisons)
    options = {name: list(value) if isinstance(value, Sequence) else value for name, value in options.items()}
    rows = rows_of(comparisons)
    return Findings(
        name="heterogeneity",
        question=QUESTION,
        comparisons=comparisons,
        claims=list(heterogeneity_claims(rows, options)),
        figure=partial(heterogeneity_figure, rows, options),
        options=options,
    )


def _check(options: dict[str, Any]) -> None:
    """Raises an error that names the first option that is out of range.

    Args:
      options: the arguments of `heterogeneity`, by name.
    """
    for name, least_length in (("spreads", 1), ("alphas", 0), ("synthetic", 0)):
        validate.sequence(name, options[name], least=least_length)
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
    """Compares the gap between the best constant models of two clients with distances of their label distributions.

    Each client has ten labels and the squared loss, so its best constant is the mean of its labels. FedAvg with a
    single client finds the constant.

    Yields: for each pair of clients the gap as theory has it, the gap against its upper bound, and three distances that
      predict no gap.
    """

    def loss(params, examples, key):
        return {"loss": (params["w"] - examples["y"]) ** 2 / 2}

    def make(rate):
        return algorithms.fedavg(loss, sampling.full(1), optax.sgd(rate), num_steps=1, mesh=None)

    pairs = {
        "(.2, .5, .3) and (.5, .3, .2)": ((2, 5, 3), (5, 3, 2)),
        "(.5, 0, .5) and (0, 1, 0)": ((5, 0, 5), (0, 10, 0)),
    }
    label_values = np.arange(3.0)
    client_labels = [np.repeat(label_values, counts).astype(np.float32) for pair in pairs.values() for counts in pair]
    num_clients = len(client_labels)
    clients = stacked([population.stored({"y": labels}, [0, len(labels)]) for labels in client_labels])
    keys = jax.random.split(jax.random.key(0), num_clients)
    runs = traced_runs(make, lambda params, target: {"w": params["w"]})
    rates = (jnp.full(num_clients, 0.5),)
    targets = jnp.zeros(num_clients)  # unused: the evaluation returns the model itself
    best = runs(keys, {"w": jnp.zeros(num_clients)}, clients, rates, targets, rounds=[60])
    for (name, pair), (first, second) in zip(pairs.items(), best["w"].reshape(-1, 2), strict=True):
        shares, other_shares = np.array(pair) / 10
        conditions = {"part": "labels 0, 1, 2", "population": name}
        gap = abs(first - second)
        distance = metrics.earth_mover_distance(shares, other_shares, label_values)
        yield measured(
            conditions,
            "gap of the fitted constants",
            gap,
            metrics.optimum_gap(shares, other_shares, label_values),
            resolution=1e-6,
        )
        yield measured(
            conditions, "gap, and earth mover's distance", gap, distance, kind="upper bound", resolution=1e-6
        )
        # Distances that ignore the positions of labels predict no gap; they are shown beside it.
        for quantity, value in (
            ("total variation", metrics.total_variation(shares, other_shares)),
            ("L1", metrics.l1_distance(shares, other_shares)),
            ("Jensen-Shannon", metrics.jensen_shannon_divergence(shares, other_shares)),
        ):
            yield measured(conditions, quantity, value)


def _quadratics(size: int, dimension: int, k: int, spreads: Sequence[float], seed: int) -> Iterator[Comparison]:
    """Measures the rounds to the target at the best constant step, for each spread of the clients' optima.

    The rounds are the first t with F(w_t) - F* <= SHARE (F(w_0) - F*). The closed form of F(w_t) predicts them.

    Args:
      size: N, all of whom take part.
      dimension: d.
      k: K full-batch local steps.
      spreads: [S] of the clients' optima, rising, >= 0.
      seed: decides the clients.

    Yields: for each spread the dissimilarity of the gradients at the optimum, and the rounds to the target. If no step
      reaches the target, the excess loss after the last round takes the place of the rounds.
    """

    def make(eta):
        return algorithms.fedavg(
            population.quadratic_loss, sampling.full(size), optax.sgd(eta), num_steps=k, weighting="uniform", mesh=None
        )

    def excess(params, target):
        distance = params["w"] - target["optimum"]
        return {"loss": distance @ target["hessian"] @ distance / 2}

    best = [best_step(size, dimension, k, spread, seed) for spread in spreads]
    problems = [problem for problem, _, _ in best]
    starts = {"w": jnp.asarray(np.stack([problem.start for problem in problems]), jnp.float32)}
    targets = stacked([
        {
            "optimum": jnp.asarray(problem.optimum, jnp.float32),
            "hessian": jnp.asarray(problem.hessians.mean(0), jnp.float32),
        }
        for problem in problems
    ])  # fmt: skip
    keys = jax.random.split(jax.random.key(0), len(best))
    step_sizes = (jnp.asarray([eta for _, eta, _ in best], jnp.float32),)
    # One round more than predicted, so that a run that is a round late still shows when it arrives.
    last_round = max([10, *(int(rounds) for *_, rounds in best if math.isfinite(rounds))]) + 1
    clients = stacked([problem.clients() for problem in problems])
    runs = traced_runs(make, excess)
    paths = runs(keys, starts, clients, step_sizes, targets, rounds=np.arange(1, last_round + 1))["loss"]
    for spread, (problem, eta, rounds), path in zip(spreads, best, paths, strict=True):
        conditions = {"part": "quadratics", "population": f"spread {spread:g}", "step_size": float(f"{eta:.3g}")}
        optimum = {"w": jnp.asarray(problem.optimum, jnp.float32)}
        at_optimum = metrics.gradient_heterogeneity(population.quadratic_loss, optimum, problem.clients())
        yield measured(conditions, "gradient dissimilarity", at_optimum.dissimilarity)
        expected = theory.budget(*problem, step_size=eta, num_steps=k).expected_loss(last_round, start=problem.start)
        target = SHARE * expected[0]
        if not math.isfinite(rounds):
            yield measured(
                conditions, "loss after the last round", path[-1], expected[-1], resolution=1e-5 * expected[0]
            )
            continue
        # In rounds whose loss is the target up to rounding, a run in float32 may be on either side of it.
        num_unsure_rounds = int((np.abs(expected[1:] / target - 1) < 1e-4).sum())
        count = metrics.rounds_to_target(path, target)
        count = count if math.isfinite(count) else float(last_round + 1)
        yield measured(conditions, "rounds to target", count, rounds, resolution=num_unsure_rounds)
