"""How many clients must take part? Variance of a round's aggregate, and the loss it ends in, against participation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import aggregation, client, models, population, sampling, server, theory, validate
from fedjax_sim.algorithms import federated
from fedjax_sim.instruments.moments import population_moments
from fedjax_sim.instruments.runs import independent_runs, squared_distance
from fedjax_sim.prng import stream
from fedjax_sim.study.findings import FEW, Comparison, Findings, least_runs, measured
from fedjax_sim.study.participation.figure import participation_figure
from fedjax_sim.types import Aggregator, Algorithm, Population, Sampler

__all__ = ["participation"]

QUESTION = "How many clients must take part in a round?"
SIGNAL = 1.0  # |g| of the population's mean
SPREAD = 2.0  # sigma: the root of the trace of the population's covariance, divisor N
STEP_SIZE = 0.5  # of the runs to the floor
FLOOR_ROUNDS = 60  # (1 - STEP_SIZE)^(2 FLOOR_ROUNDS) is nothing beside a floor
VMAPPED = 1 << 16  # clients that rounds under one vmap have together


def participation(
    *,
    population_sizes: Sequence[int] = (10, 100, 10_000, 1_000_000),
    rates: Sequence[float] = (0.001, 0.01, 0.1, 0.5, 0.9, 1.0),
    largest_cohort: int = 5_000,
    dimension: int = 8,
    num_rounds: int = 3000,
    tolerance: float = 0.05,
    compare_samplers: bool = True,
    model_clients: int = 20_000,
    model_rounds: int = 400,
    seed: int = 0,
) -> Findings:
    """How many clients must take part? Variance and final loss against m/N, with and without the finite population.

    Clients hold vectors u_i (quadratic risks |w - u_i|^2 / 2), correlated with their number of examples; then the
    digits, whose MLP's updates are summed over all clients once, and measured against cohorts.

    Args:
      population_sizes: N. rates: m/N; cohorts of more than `largest_cohort` clients are left out.
      dimension: d of the vectors.
      num_rounds: independent rounds behind each variance.
      tolerance: alpha: the standard deviation of the cohort's mean may be alpha |mean|.
      compare_samplers: whether other samplers and tables are measured too, for the N nearest to 100 (if 50 at least).
      model_clients: N of the digits; 0 leaves them out. model_rounds: rounds behind each of their variances.
      seed: decides everything.

    Returns: `Findings`; variances are traces of covariances.

    Guarantees: every prediction lies in its interval (tests/study/test_participation.py::test_predictions_hold), and a
    formula without the finite population does not (::test_it_can_tell_a_wrong_formula).

    References: Cochran 1977, chapters 2 and 6; Li et al. 2020 (FedAvg on non-IID data), section 3.3.
    """
    for name, given in (("population_sizes", population_sizes), ("rates", rates)):
        validate.sequence(name, given)
    for size in population_sizes:
        validate.integer("population_sizes", size, 2)
    for rate in rates:
        validate.in_range("rates", rate, 0, 1, open_low=True)
    validate.integer("largest_cohort", largest_cohort)
    validate.integer("dimension", dimension, 1, 40)
    validate.integer("num_rounds", num_rounds, max(100, least_runs(dimension)), hint=FEW)
    validate.in_range("tolerance", tolerance, 1e-4, 100)
    validate.one_of("compare_samplers", compare_samplers, (True, False))
    validate.integer("model_clients", model_clients, 0)
    validate.integer("model_rounds", model_rounds, 50)
    validate.integer("seed", seed, 0)
    key = jax.random.key(seed)
    clients = {size: _Clients(size, dimension, seed) for size in sorted(set(population_sizes))}
    found: list[Comparison] = []
    for size, field in clients.items():
        cohorts = sorted({max(1, round(rate * size)) for rate in rates})
        for cohort in (m for m in cohorts if m <= largest_cohort):
            found.append(field.variance(key, cohort, sampling.uniform(size, cohort), "mean", num_rounds, "variance"))
    middle = min(clients, key=lambda size: abs(size - 100))
    cohort = max(5, middle // 10)
    if compare_samplers and middle >= 50 and cohort <= largest_cohort:
        found += clients[middle].designs(key, cohort, num_rounds)
    required = {size: theory.required_cohort_size(size, _ratio(tolerance)) for size in clients}
    for size, cohort in required.items():
        if cohort < min(size, largest_cohort):
            found.append(clients[size].tolerated(key, cohort, tolerance, num_rounds))
    cohorts = sorted({max(1, round(rate * middle)) for rate in rates if rate > 0.01})
    for cohort in (m for m in cohorts if m <= largest_cohort):
        found.append(clients[middle].floor(key, cohort, num_rounds))
    if model_clients:
        found += _digits(key, model_clients, model_rounds, seed)
    options = {
        "population_sizes": list(population_sizes), "rates": list(rates), "largest_cohort": largest_cohort,
        "dimension": dimension, "num_rounds": num_rounds, "tolerance": tolerance,
        "compare_samplers": compare_samplers, "model_clients": model_clients,
        "model_rounds": model_rounds, "seed": seed,
    }  # fmt: skip
    reading = list(_reading(found, required, tolerance))
    figure = partial(participation_figure, found, tolerance, signal=SIGNAL, spread=SPREAD, step_size=STEP_SIZE)
    return Findings("participation", QUESTION, found, reading, figure, options)


def _ratio(tolerance: float) -> Any:
    return theory.noise_to_signal_ratio(SPREAD**2, SIGNAL, tolerance)


def _loss(params, examples, key):
    return {"loss": 0.5 * jnp.sum((params["w"][None] - examples["x"]) ** 2, -1)}


class _Clients:
    """N clients with values of mean norm SIGNAL and spread SPREAD, exactly, that grow with the clients' weights."""

    def __init__(self, size: int, dimension: int, seed: int):
        rng = np.random.default_rng([seed, size])
        self.size, self.dimension = size, dimension
        self.weights = np.clip(np.round(np.exp(rng.normal(3.0, 0.7, size))), 1, 200).astype(np.int64)
        values = rng.normal(size=(size, dimension))
        values[:, 0] += 0.7 * np.sqrt(dimension) * np.log(self.weights / 20)
        values -= values.mean(0)
        values *= SPREAD / np.sqrt((values**2).sum() / size)
        self.values = (values + SIGNAL / np.sqrt(dimension)).astype(np.float32)
        self.params = {"w": jnp.zeros(dimension)}

    def population(self, weighted: bool = False) -> Population:
        counts = self.weights if weighted else np.ones(self.size, np.int64)
        rows = np.repeat(np.arange(self.size, dtype=np.int32), counts)
        return population.indexed({"x": self.values}, (rows, np.concatenate([[0], np.cumsum(counts)])))

    def algorithm(
        self, sampler: Sampler, table: Aggregator, weighted: bool = False, step_size: float = 1.0
    ) -> Algorithm:
        weighting = "examples" if weighted else "uniform"
        work = client.local_sgd(_loss, optax.sgd(step_size), client.work(num_steps=1, weighting=weighting))
        return federated(sampler, work, table, server.optimizer(optax.sgd(1.0)), mesh=None)

    def variance(
        self,
        key,
        cohort: int,
        sampler: Sampler,
        estimator: str,
        num_rounds: int,
        part: str,
        table: Aggregator | None = None,
        weighted: bool = False,
        **law: Any,
    ) -> Comparison:
        """The mean squared distance of the aggregate from its own mean, over independent rounds."""
        table = aggregation.mean(weighting="uniform") if table is None else table
        predicted = theory.design_variance(
            sampler.design, self.values, self.weights if weighted else None, estimator=estimator, **law
        )
        conditions = self._conditions(part, cohort, sampler, estimator + (" by examples" if weighted else ""))
        draws = independent_runs(
            stream(key, str(conditions)),  # comparisons share no randomness
            self.algorithm(sampler, table, weighted),
            self.params,
            self.population(weighted),
            num_rounds,
            evaluation=squared_distance({"w": jnp.asarray(predicted.mean, jnp.float32)}),
            batch=max(1, min(200, VMAPPED // sampler.num_slots // (16 if weighted else 1))),
        )
        kind = "exact" if predicted.exact else "leading order"
        rounding = 1e-12 * SPREAD**2
        samples = draws["squared_error"]
        return measured(conditions, "variance", samples, predicted.variance, kind=kind, resolution=rounding)

    def _conditions(self, part: str, cohort: int, sampler: Sampler, estimator: str) -> dict[str, Any]:
        scheme = sampler.design.scheme.replace("uniform_without_replacement", "uniform").replace("_", " ")
        return {"part": part, "population_size": self.size, "cohort_size": cohort, "sampler": scheme,
                "estimator": estimator.replace("_", " ")}  # fmt: skip

    def designs(self, key, cohort: int, num_rounds: int) -> Iterator[Comparison]:
        """The samplers and tables side by side, for cohorts of one expected size."""
        size, total = self.size, float(self.weights.sum())
        uniform = sampling.uniform(size, cohort)
        slots = min(size, cohort + math.ceil(8 * math.sqrt(cohort)))  # a padded cohort: truncated, hardly ever
        poisson = sampling.poisson(size, cohort / size, num_slots=slots)
        yield self.variance(key, cohort, sampling.with_replacement(size, cohort), "mean", num_rounds, "designs")
        yield self.variance(key, cohort, poisson, "fixed_mean", num_rounds, "designs", aggregation.fixed_mean(cohort),
                            denominator=cohort)  # fmt: skip
        yield self.variance(key, cohort, poisson, "mean", num_rounds, "designs", weighting="uniform")
        for sampler, estimator, table in (
            (uniform, "mean", aggregation.mean()),
            (uniform, "horvitz_thompson", aggregation.horvitz_thompson(uniform.design, total)),
            (sampling.weighted(self.weights, cohort), "li_scheme_one", aggregation.li_scheme_one()),
        ):
            yield self.variance(key, cohort, sampler, estimator, num_rounds, "designs", table, weighted=True)

    def tolerated(self, key, cohort: int, tolerance: float, num_rounds: int) -> Comparison:
        """The variance at the required cohort size, over what the tolerance allows."""
        one = self.variance(key, cohort, sampling.uniform(self.size, cohort), "mean", num_rounds, "tolerance")
        allowed = (tolerance * SIGNAL) ** 2
        return one._replace(
            quantity="variance / allowed",
            measured=one.measured / allowed,
            standard_error=one.standard_error / allowed,
            predicted=one.predicted / allowed,
        )

    def floor(self, key, cohort: int, num_rounds: int) -> Comparison:
        """The expected excess loss that runs end in, against the budget's closed form."""
        sampler = sampling.uniform(self.size, cohort)
        algorithm = self.algorithm(sampler, aggregation.mean(weighting="uniform"), step_size=STEP_SIZE)
        values = self.values.astype(np.float64)
        draws = independent_runs(
            stream(key, f"floor {self.size} {cohort}"),
            algorithm,
            self.params,
            self.population(),
            max(100, least_runs(self.dimension), num_rounds // 4),
            evaluation=squared_distance({"w": jnp.asarray(values.mean(0), jnp.float32)}),
            rounds=FLOOR_ROUNDS,
            batch=max(1, min(200, VMAPPED // cohort)),
        )
        hessians = np.broadcast_to(np.eye(self.dimension), (self.size, self.dimension, self.dimension))
        budget = theory.budget(hessians, values, step_size=STEP_SIZE, design=sampler.design, denominator="realised")
        conditions = self._conditions("final loss", cohort, sampler, "mean")
        return measured(conditions, "excess loss", draws["squared_error"] / 2, budget.total, resolution=1e-11)


def _digits(key, size: int, num_rounds: int, seed: int) -> Iterator[Comparison]:
    """The digits' MLP: the variance of all clients' updates, counted once, then cohorts against it."""
    data = population.digits(num_clients=size, seed=seed)
    model = models.mlp(input_shape=data.input_shape, num_outputs=data.num_outputs)
    loss_fn = models.supervised(model, models.default_loss(data.task))
    params = model.init(jax.random.fold_in(key, 2))[0]
    work = client.local_sgd(loss_fn, optax.sgd(0.1), client.work(num_steps=1, weighting="uniform"))
    moments = population_moments(key, work, params, data.train)
    for cohort in (c for c in (10, 100) if c < size):
        sampler = sampling.uniform(size, cohort)
        algorithm = federated(
            sampler, work, aggregation.mean(weighting="uniform"), server.optimizer(optax.sgd(1.0)), mesh=None
        )
        draws = independent_runs(
            stream(key, f"digits {cohort}"), algorithm, params, data.train, num_rounds,
            evaluation=squared_distance(jax.tree.map(jnp.add, params, moments.mean)),
        )  # fmt: skip
        predicted = theory.cohort_mean_variance(moments.variance, size, cohort)
        conditions = {"part": "digits MLP", "population_size": size, "cohort_size": cohort, "sampler": "uniform",
                      "estimator": "mean"}  # fmt: skip
        yield measured(conditions, "variance", draws["squared_error"], predicted)


def _of(found: Sequence[Comparison], part: str) -> list[Comparison]:
    return [one for one in found if one.conditions["part"] == part]


def _reading(found: Sequence[Comparison], required: dict[int, int], tolerance: float) -> Iterator[str]:
    yield (
        f"The variance of a cohort's mean is (sigma^2 / m) (N - m) / (N - 1), sigma^2 = {SPREAD**2:g} with divisor N. "
        "The last factor, the finite population correction, is about 1 - m/N for N of a hundred and more: it depends "
        "on the participation rate and not on the size of the population. That it is about 1 because N is large is a "
        "mistake: at 10 to 15 % participation it is 0.9 to 0.85. With few clients it is more, 1 - (m - 1)/(N - 1) and "
        "so exactly 1 at N = 10, m = 1; at m = N nothing is left to vary."
    )
    sizes = ", ".join(
        f"{cohort:,} of {size:,} ({cohort / size:.{1 if cohort * 1000 >= size else 3}%})"
        for size, cohort in required.items()
    )
    least = min(required)
    yield (
        f"For a standard deviation of at most {tolerance:g} of the mean's length, the least cohorts are {sizes}. "
        "What a large population saves is not variance at a given m but the rate: the same few clients are a small "
        "share of many."
        + (" A small population (cross-silo) must call nearly everybody." if required[least] >= 0.8 * least else "")
    )
    by_table = {(one.conditions["sampler"], one.conditions["estimator"]): one for one in _of(found, "designs")}
    poisson = [by_table.get(("truncated poisson", name)) for name in ("fixed mean", "mean")]
    if all(poisson):
        ratio = poisson[0].measured / poisson[1].measured
        yield (
            f"Poisson cohorts divided by their expected size vary {ratio:.2f} times as much as divided by the size "
            "that came: the number of clients is noise as well. Privacy needs the fixed divisor, and pays for it here."
        )
    if by_table:
        yield (
            "The mean by examples over a uniform cohort is a ratio estimator: slightly biased for the population's "
            "weighted mean, and less noisy than the unbiased Horvitz-Thompson estimate wherever updates are far from "
            "zero, for that one also carries the noise of the weights. Its variance is predicted to first order in 1/m."
        )
    if _of(found, "final loss"):
        yield (
            f"With a constant step of {STEP_SIZE:g} the runs come to rest at an excess loss of "
            f"eta / (2 - eta) times half of the variance: the floor falls with participation exactly as the variance "
            "does, and vanishes at m = N. It is a property of constant steps: with steps that decay as 1/t it vanishes."
        )
