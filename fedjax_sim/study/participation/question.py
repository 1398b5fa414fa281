"""This study measures how the variance of a round's aggregate, and the error floor, fall with participation."""

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
from fedjax_sim.study.findings import FEW, Comparison, Findings, least_runs, measured, rows_of
from fedjax_sim.study.participation.claims import participation_claims
from fedjax_sim.study.participation.clients import SIGNAL, SPREAD, WeightedClients
from fedjax_sim.study.participation.figure import participation_figure
from fedjax_sim.validate import Integer, NonNegativeInt, Number, PositiveInt

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
    """How many clients must take part? Measures variance and final loss against the participation rate m/N.

    There are two kinds of clients. The first hold vectors u_i, with quadratic risks |w - u_i|^2 / 2; the vectors are
    correlated with the clients' numbers of examples. The second train an MLP on digits: the updates of all clients
    are computed once, and the variance of cohorts' means is compared with their variance.

    Args:
      population_sizes: N.
      rates: participation rates m/N.
      largest_cohort: cohorts of more clients are left out.
      dimension: d of the vectors.
      num_rounds: independent rounds behind each variance.
      tolerance: alpha: the standard deviation of the cohort's mean may be alpha |mean|.
      compare_samplers: whether other samplers and aggregators are measured too. This is done for the N nearest to 100,
        if that N is at least 50.
      model_clients: N of the digits; 0 leaves them out.
      model_rounds: rounds behind each variance on the digits.
      seed: decides everything.

    Returns: `Findings`; variances are traces of covariances.

    Guarantees: every prediction lies in its interval (tests/study/test_participation.py::test_predictions_hold). A
    formula for an infinite population does not (::test_it_can_tell_a_wrong_formula).

    References: Cochran 1977, chapters 2 and 6; Li et al. 2020 (FedAvg on non-IID data), section 3.3.
    """
    for name, values in (("population_sizes", population_sizes), ("rates", rates)):
        validate.sequence(name, values)
    for size in population_sizes:
        validate.integer("population_sizes", size, 2)
    for rate in rates:
        validate.in_range("rates", rate, 0, 1, open_low=True)
    validate.integer("num_rounds", num_rounds, max(100, least_runs(dimension)), hint=FEW)
    key = jax.random.key(seed)
    clients_by_size = {size: WeightedClients(size, dimension, seed) for size in sorted(set(population_sizes))}
    comparisons: list[Comparison] = []
    for size, clients in clients_by_size.items():
        cohorts = sorted({max(1, round(rate * size)) for rate in rates})
        for cohort in (m for m in cohorts if m <= largest_cohort):
            sampler = sampling.uniform(size, cohort)
            comparisons.append(clients.variance(key, cohort, sampler, "mean", num_rounds=num_rounds, part="variance"))
    # Samplers and floors are compared at one size only. About 100 is large enough for a cohort of ten and small enough
    # for the finite population correction to show.
    middle_size = min(clients_by_size, key=lambda size: abs(size - 100))
    cohort = max(5, middle_size // 10)
    if compare_samplers and middle_size >= 50 and cohort <= largest_cohort:
        comparisons += clients_by_size[middle_size].designs(key, cohort, num_rounds)
    required = {size: theory.required_cohort_size(size, _ratio(tolerance)) for size in clients_by_size}
    for size, cohort in required.items():
        # With everybody in the cohort there is no variance to measure.
        if cohort < min(size, largest_cohort):
            comparisons.append(clients_by_size[size].tolerated(key, cohort, tolerance, num_rounds))
    cohorts = sorted({max(1, round(rate * middle_size)) for rate in rates if rate > 0.01})
    for cohort in (m for m in cohorts if m <= largest_cohort):
        comparisons.append(clients_by_size[middle_size].floor(key, cohort, num_rounds))
    if model_clients:
        comparisons += _digits(key, model_clients, model_rounds, seed)
    options = {
        "population_sizes": list(population_sizes), "rates": list(rates), "largest_cohort": largest_cohort,
        "dimension": dimension, "num_rounds": num_rounds, "tolerance": tolerance,
        "compare_samplers": compare_samplers, "model_clients": model_clients,
        "model_rounds": model_rounds, "seed": seed,
    }  # fmt: skip
    rows = rows_of(comparisons)
    return Findings(
        name="participation",
        question=QUESTION,
        comparisons=comparisons,
        claims=list(participation_claims(rows, options)),
        figure=partial(participation_figure, rows, options),
        options=options,
    )


def _ratio(tolerance: float) -> Any:
    """Returns the ratio of noise to signal that `theory.required_cohort_size` takes, for the vectors of this study."""
    return theory.noise_to_signal_ratio(SPREAD**2, SIGNAL, tolerance)


def _digits(key, size: int, num_rounds: int, seed: int) -> Iterator[Comparison]:
    """Compares the variance of cohorts' mean updates with a prediction from the updates of all clients, for an MLP.

    The prediction is (sigma^2 / m) (N - m) / (N - 1), with sigma^2 = (1/N) sum |u_i - mean|^2 of the N updates u_i.

    Args:
      key: the random key of model and rounds.
      size: N.
      num_rounds: R independent rounds behind each variance, all from the same model.
      seed: decides the clients' data.

    Yields: a comparison for each m of 10 and 100 that is below N.
    """
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
        # A run is one round from the same model, which moves it by the cohort's mean update. Its expectation is the
        # mean over all clients, so the mean squared distance from there is the variance.
        expected_model = jax.tree.map(jnp.add, params, moments.mean)
        draws = independent_runs(
            stream(key, f"digits {cohort}"), algorithm, params, data.train, num_rounds,
            evaluation=squared_distance(expected_model),
        )  # fmt: skip
        predicted = theory.cohort_mean_variance(moments.variance, size, cohort)
        conditions = {"part": "digits MLP", "population_size": size, "cohort_size": cohort, "sampler": "uniform",
                      "estimator": "mean"}  # fmt: skip
        yield measured(conditions, "variance", draws["squared_error"], predicted)
