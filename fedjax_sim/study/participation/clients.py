"""This module measures variances of aggregates and error floors for clients that hold vectors of unequal weight."""

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

SIGNAL = 1.0  # |g| of the population's mean
SPREAD = 2.0  # sigma: the root of the trace of the population's covariance, divisor N
FLOOR_STEP_SIZE = 0.5  # of the runs to the floor
FLOOR_ROUNDS = 60  # the start's error, (1 - FLOOR_STEP_SIZE)^(2 FLOOR_ROUNDS), is then negligible beside a floor
VMAPPED = 1 << 16  # bounds the clients of all rounds under one vmap together, and so the memory


def _loss(params, examples, key):
    """Returns |w - x|^2 / 2 for each example."""
    return {"loss": 0.5 * jnp.sum((params["w"][None] - examples["x"]) ** 2, -1)}


class WeightedClients:
    """N clients that hold vectors u_i and have weights (numbers of examples), with u_i correlated to the weights.

    The mean of the vectors has norm SIGNAL, and the root of the trace of their covariance is SPREAD.
    """

    def __init__(self, size: int, dimension: int, seed: int):
        """Draws the clients.

        Args:
          size: N.
          dimension: d.
          seed: decides vectors and weights, together with N.
        """
        rng = np.random.default_rng([seed, size])
        self.size = size
        self.dimension = dimension
        self.weights = np.clip(np.round(np.exp(rng.normal(3.0, 0.7, size))), 1, 200).astype(np.int64)
        values = rng.normal(size=(size, dimension))
        # Values that do not depend on the weights would hide the bias of a mean that ignores them.
        values[:, 0] += 0.7 * np.sqrt(dimension) * np.log(self.weights / 20)
        values -= values.mean(0)
        values *= SPREAD / np.sqrt((values**2).sum() / size)
        self.values = (values + SIGNAL / np.sqrt(dimension)).astype(np.float32)
        self.params = {"w": jnp.zeros(dimension)}

    def population(self, weighted: bool = False) -> Population:
        """Makes the population: each client has one example, u_i, or as many copies of it as its weight.

        Args:
          weighted: says whether clients have as many copies as their weight.
        """
        counts = self.weights if weighted else np.ones(self.size, np.int64)
        rows = np.repeat(np.arange(self.size, dtype=np.int32), counts)
        partition = population.Partition(rows, np.concatenate([[0], np.cumsum(counts)]))
        return population.indexed({"x": self.values}, partition)

    def algorithm(
        self, sampler: Sampler, aggregator: Aggregator, weighted: bool = False, step_size: float = 1.0
    ) -> Algorithm:
        """Makes an algorithm in which each client takes one local step a round.

        Args:
          sampler: draws the cohort.
          aggregator: combines the updates.
          weighted: says whether updates are weighted by the clients' numbers of examples, or uniformly.
          step_size: the size of the local step.
        """
        weighting = None if weighted else "uniform"  # None weights by examples, where the aggregator takes weights
        work = client.local_sgd(_loss, optax.sgd(step_size), client.work(num_steps=1, weighting=weighting))
        return federated(sampler, work, aggregator, server.optimizer(optax.sgd(1.0)), mesh=None)

    def variance(
        self,
        key,
        cohort: int,
        sampler: Sampler,
        estimator: str,
        *,
        num_rounds: int,
        part: str,
        aggregator: Aggregator | None = None,
        weighted: bool = False,
        **law: Any,
    ) -> Comparison:
        """Measures the variance of the aggregate: its mean squared distance from its expectation.

        Args:
          key: the random key of all rounds.
          cohort: m, for the conditions.
          sampler: draws the cohort; its design gives the prediction.
          estimator: the name of the aggregator in `theory.design_variance`.
          num_rounds: independent rounds from one model.
          part: the part of the study.
          aggregator: combines the updates; None is the uniform mean.
          weighted: says whether clients are weighted by their examples.
          **law: further arguments of `theory.design_variance`.
        """
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
            # Weighted clients have many examples each, and so need more memory.
            batch=max(1, min(200, VMAPPED // sampler.num_slots // (16 if weighted else 1))),
        )
        kind = "exact" if predicted.exact else "leading order"
        rounding = 1e-12 * SPREAD**2
        samples = draws["squared_error"]
        return measured(conditions, "variance", samples, predicted.variance, kind=kind, resolution=rounding)

    def _conditions(self, part: str, cohort: int, sampler: Sampler, estimator: str) -> dict[str, Any]:
        """Returns the conditions of a comparison; the sampler's scheme and the estimator are put in plain words."""
        scheme = sampler.design.scheme.replace("uniform_without_replacement", "uniform").replace("_", " ")
        return {"part": part, "population_size": self.size, "cohort_size": cohort, "sampler": scheme,
                "estimator": estimator.replace("_", " ")}  # fmt: skip

    def designs(self, key, cohort: int, num_rounds: int) -> Iterator[Comparison]:
        """Measures the variances of several samplers and aggregators, for cohorts of the same expected size.

        Args:
          key: the random key of all rounds.
          cohort: m, the expected cohort size.
          num_rounds: independent rounds behind each variance.

        Yields: six variances, one for each sampler with its aggregator.
        """
        size = self.size
        total_weight = float(self.weights.sum())
        uniform = sampling.uniform(size, cohort)
        # Eight standard deviations above the mean: a Poisson cohort is hardly ever cut off by the number of slots.
        num_slots = min(size, cohort + math.ceil(8 * math.sqrt(cohort)))
        poisson = sampling.poisson(size, cohort / size, num_slots=num_slots)
        yield self.variance(
            key, cohort, sampling.with_replacement(size, cohort), "mean", num_rounds=num_rounds, part="designs"
        )
        yield self.variance(
            key,
            cohort,
            poisson,
            "fixed_mean",
            num_rounds=num_rounds,
            part="designs",
            aggregator=aggregation.fixed_mean(cohort),
            denominator=cohort,
        )
        yield self.variance(key, cohort, poisson, "mean", num_rounds=num_rounds, part="designs", weighting="uniform")
        for sampler, estimator, aggregator in (
            (uniform, "mean", aggregation.mean()),
            (uniform, "horvitz_thompson", aggregation.horvitz_thompson(uniform.design, total_weight)),
            (sampling.weighted(self.weights, cohort), "li_scheme_one", aggregation.li_scheme_one()),
        ):
            yield self.variance(
                key,
                cohort,
                sampler,
                estimator,
                num_rounds=num_rounds,
                part="designs",
                aggregator=aggregator,
                weighted=True,
            )

    def tolerated(self, key, cohort: int, tolerance: float, num_rounds: int) -> Comparison:
        """Measures the variance at the required cohort size, divided by the variance that the tolerance allows.

        Args:
          key: the random key of all rounds.
          cohort: m, as `theory.required_cohort_size` gives it.
          tolerance: alpha: the standard deviation may be alpha SIGNAL.
          num_rounds: independent rounds.
        """
        comparison = self.variance(
            key, cohort, sampling.uniform(self.size, cohort), "mean", num_rounds=num_rounds, part="tolerance"
        )
        assert comparison.predicted is not None, "theory predicts the variance of a mean"
        allowed_variance = (tolerance * SIGNAL) ** 2
        return comparison._replace(
            quantity="variance / allowed",
            measured=comparison.measured / allowed_variance,
            standard_error=comparison.standard_error / allowed_variance,
            predicted=comparison.predicted / allowed_variance,
        )

    def floor(self, key, cohort: int, num_rounds: int) -> Comparison:
        """Measures the error floor of FedAvg, as expected excess loss, and predicts it by `theory.budget`.

        Args:
          key: the random key of all runs.
          cohort: m of a uniform sampler.
          num_rounds: decides the number of runs, a quarter of it or more; each has FLOOR_ROUNDS rounds.
        """
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
        # A risk |w - u_i|^2 / 2 has the identity as Hessian, and the squared distance is twice the excess loss.
        hessians = np.broadcast_to(np.eye(self.dimension), (self.size, self.dimension, self.dimension))
        budget = theory.budget(
            hessians, values, step_size=FLOOR_STEP_SIZE, design=sampler.design, denominator="realised"
        )
        conditions = self._conditions("final loss", cohort, sampler, "mean")
        return measured(conditions, "excess loss", draws["squared_error"] / 2, budget.total, resolution=1e-11)
