"""How many clients must take part? Variance of a round's aggregate, and the error floor, against participation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import aggregation, client, models, population, sampling, server, theory, validate
from fedjax_sim.algorithms import federated
from fedjax_sim.instruments.moments import population_moments
from fedjax_sim.instruments.runs import independent_runs, squared_distance
from fedjax_sim.prng import stream
from fedjax_sim.study.findings import FEW, Comparison, Findings, least_runs, measured
from fedjax_sim.study.participation.clients import FLOOR_STEP_SIZE, SIGNAL, SPREAD, WeightedClients
from fedjax_sim.study.participation.figure import participation_figure
from fedjax_sim.study.participation.reading import participation_reading
from fedjax_sim.validate import Integer, NonNegativeInt, Number, PositiveInt

__all__ = ["participation"]

QUESTION = "How many clients must take part in a round?"


@validate.named_arguments
def participation(
    *,
    population_sizes: Sequence[int] = (10, 100, 10_000, 1_000_000),
    rates: Sequence[float] = (0.001, 0.01, 0.1, 0.5, 0.9, 1.0),
    largest_cohort: PositiveInt = 5_000,
    dimension: Annotated[int, Integer(1, 40)] = 8,
    num_rounds: int = 3000,
    tolerance: Annotated[float, Number(0.0001, 100)] = 0.05,
    compare_samplers: bool = True,
    model_clients: NonNegativeInt = 20_000,
    model_rounds: Annotated[int, Integer(50)] = 400,
    seed: NonNegativeInt = 0,
) -> Findings:
    """How many clients must take part? Variance and final loss against m/N, with and without the finite population.

    Clients hold vectors u_i (quadratic risks |w - u_i|^2 / 2), correlated with their number of examples; then the
    digits' MLP, whose updates are summed over all clients once; the variance of cohorts is compared with that.

    Args:
      population_sizes: N. rates: m/N; cohorts of more than `largest_cohort` clients are left out.
      dimension: d of the vectors.
      num_rounds: independent rounds behind each variance.
      tolerance: alpha: the standard deviation of the cohort's mean may be alpha |mean|.
      compare_samplers: whether other samplers and aggregators are measured too, for the N nearest to 100 (if 50 at
        least).
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
    validate.integer("num_rounds", num_rounds, max(100, least_runs(dimension)), hint=FEW)
    key = jax.random.key(seed)
    clients = {size: WeightedClients(size, dimension, seed) for size in sorted(set(population_sizes))}
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
    reading = list(participation_reading(found, required, tolerance))
    figure = partial(participation_figure, found, tolerance, signal=SIGNAL, spread=SPREAD, step_size=FLOOR_STEP_SIZE)
    return Findings("participation", QUESTION, found, reading, figure, options)


def _ratio(tolerance: float) -> Any:
    return theory.noise_to_signal_ratio(SPREAD**2, SIGNAL, tolerance)


def _digits(key, size: int, num_rounds: int, seed: int) -> Iterator[Comparison]:
    """The digits' MLP: the variance of all clients' updates, computed once, and that of cohorts' means beside it."""
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
