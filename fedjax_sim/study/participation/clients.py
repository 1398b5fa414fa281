"""Clients that hold vectors: variances of a cohort's aggregate, and error floors of runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import aggregation, client, population, sampling, server, theory
from fedjax_sim.algorithms import federated
from fedjax_sim.instruments.runs import independent_runs, squared_distance
from fedjax_sim.prng import stream
from fedjax_sim.study.findings import Comparison, least_runs, measured
from fedjax_sim.types import Aggregator, Algorithm, Population, Sampler

__all__ = ["FLOOR_STEP_SIZE", "SIGNAL", "SPREAD", "WeightedClients"]

SIGNAL = 1.0  # |g| of the population's mean
SPREAD = 2.0  # sigma: the root of the trace of the population's covariance, divisor N
FLOOR_STEP_SIZE = 0.5  # of the runs to the floor
FLOOR_ROUNDS = 60  # (1 - STEP_SIZE)^(2 FLOOR_ROUNDS) is negligible beside a floor
VMAPPED = 1 << 16  # clients that rounds under one vmap have together


def _loss(params, examples, key):
    return {"loss": 0.5 * jnp.sum((params["w"][None] - examples["x"]) ** 2, -1)}


class WeightedClients:
    """N clients whose values have a mean of norm SIGNAL and a spread of SPREAD, and grow with the clients' weights."""

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
        """One example a client, or as many copies of it as the client's weight."""
        counts = self.weights if weighted else np.ones(self.size, np.int64)
        rows = np.repeat(np.arange(self.size, dtype=np.int32), counts)
        return population.indexed({"x": self.values}, (rows, np.concatenate([[0], np.cumsum(counts)])))

    def algorithm(
        self, sampler: Sampler, aggregator: Aggregator, weighted: bool = False, step_size: float = 1.0
    ) -> Algorithm:
        """One local step a round, weighted by examples or uniformly."""
        weighting = None if weighted else "uniform"  # by examples, where the aggregator takes weights
        work = client.local_sgd(_loss, optax.sgd(step_size), client.work(num_steps=1, weighting=weighting))
        return federated(sampler, work, aggregator, server.optimizer(optax.sgd(1.0)), mesh=None)

    def variance(
        self,
        key,
        cohort: int,
        sampler: Sampler,
        estimator: str,
        num_rounds: int,
        part: str,
        aggregator: Aggregator | None = None,
        weighted: bool = False,
        **law: Any,
    ) -> Comparison:
        """The mean squared distance of the aggregate from its own mean, over independent rounds."""
        aggregator = aggregation.mean(weighting="uniform") if aggregator is None else aggregator
        predicted = theory.design_variance(
            sampler.design, self.values, self.weights if weighted else None, estimator=estimator, **law
        )
        conditions = self._conditions(part, cohort, sampler, estimator + (" by examples" if weighted else ""))
        draws = independent_runs(
            stream(key, str(conditions)),  # comparisons share no randomness
            self.algorithm(sampler, aggregator, weighted),
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
        """Variances of several samplers and aggregators, for cohorts of one expected size."""
        size, total = self.size, float(self.weights.sum())
        uniform = sampling.uniform(size, cohort)
        slots = min(size, cohort + math.ceil(8 * math.sqrt(cohort)))  # padded: cohorts are hardly ever truncated
        poisson = sampling.poisson(size, cohort / size, num_slots=slots)
        yield self.variance(key, cohort, sampling.with_replacement(size, cohort), "mean", num_rounds, "designs")
        yield self.variance(key, cohort, poisson, "fixed_mean", num_rounds, "designs", aggregation.fixed_mean(cohort),
                            denominator=cohort)  # fmt: skip
        yield self.variance(key, cohort, poisson, "mean", num_rounds, "designs", weighting="uniform")
        for sampler, estimator, aggregator in (
            (uniform, "mean", aggregation.mean()),
            (uniform, "horvitz_thompson", aggregation.horvitz_thompson(uniform.design, total)),
            (sampling.weighted(self.weights, cohort), "li_scheme_one", aggregation.li_scheme_one()),
        ):
            yield self.variance(key, cohort, sampler, estimator, num_rounds, "designs", aggregator, weighted=True)

    def tolerated(self, key, cohort: int, tolerance: float, num_rounds: int) -> Comparison:
        """The variance at the required cohort size, over the one that the tolerance allows."""
        one = self.variance(key, cohort, sampling.uniform(self.size, cohort), "mean", num_rounds, "tolerance")
        allowed = (tolerance * SIGNAL) ** 2
        return one._replace(
            quantity="variance / allowed",
            measured=one.measured / allowed,
            standard_error=one.standard_error / allowed,
            predicted=one.predicted / allowed,
        )

    def floor(self, key, cohort: int, num_rounds: int) -> Comparison:
        """The error floor of runs, as expected excess loss, beside the budget's closed form."""
        sampler = sampling.uniform(self.size, cohort)
        algorithm = self.algorithm(sampler, aggregation.mean(weighting="uniform"), step_size=FLOOR_STEP_SIZE)
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
        budget = theory.budget(
            hessians, values, step_size=FLOOR_STEP_SIZE, design=sampler.design, denominator="realised"
        )
        conditions = self._conditions("final loss", cohort, sampler, "mean")
        return measured(conditions, "excess loss", draws["squared_error"] / 2, budget.total, resolution=1e-11)
