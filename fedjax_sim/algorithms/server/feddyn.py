"""FedDyn: each client learns a linear term that moves the minimum of its objective to the global minimum."""

from __future__ import annotations

from typing import Annotated, Unpack

import jax
import optax

from fedjax_sim import aggregation, client, server, validate
from fedjax_sim.algorithms.server.scaffold import population_weight
from fedjax_sim.round.compatibility import check_distinct
from fedjax_sim.round.federated import federated
from fedjax_sim.round.options import RecipeOptions
from fedjax_sim.types import Aggregator, Algorithm, Sampler
from fedjax_sim.validate import FromData, LossFn


@validate.named_arguments
def feddyn(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    coefficient: float = 0.1,
    total_weight: Annotated[float | None, FromData("total_weight")] = None,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Makes FedDyn: a linear term in each client's objective is updated until all objectives share the global minimum.

    Every client keeps a vector as large as the model; for many clients see `engine.client_memory`.

    Args:
      loss_fn, sampler: as in `fedavg`.
      optimizer: the clients' optimizer; `num_steps`, `num_epochs`, `batch_size`, `shuffle` as in `client.work`.
      coefficient: the paper's alpha, of the order of the loss's curvature. With a smaller coefficient the model may
        oscillate or diverge.
      weighting: "examples", the default, minimises sum_i n_i f_i / n; "uniform", the paper's, sum_i f_i / N.
      total_weight: W, the sum of the weights that all clients would report, for "examples"; None for "uniform". It is
        not checked, because a client's weight may come from its loss: a wrong number moves the fixed point, or
        diverges.
      Others as in `federated`.

    Raises: ValueError for a sampler with replacement, and for options out of range.

    Guarantees: matches a NumPy transcription of the paper (tests/oracles/test_feddyn.py::test_matches_the_paper); with
    any number of full-batch steps it converges to the optimum of heterogeneous quadratics, with full or partial
    participation (::test_reaches_the_optimum). The paper's proof needs local problems solved exactly. Under a lossy
    transform the server's h no longer equals the clients' mean, which moves the fixed point for good.

    References: Acar et al. 2021 (FedDyn), algorithm 1.
    """
    check_distinct(sampler, "A client drawn twice would move h twice and its own h_i once.")
    work, round_options = client.local_work(options)
    local = client.dynamic(loss_fn, optimizer, coefficient, work)
    rule = _both_means(population_weight(sampler, work, total_weight))
    step = server.dynamic(server.optimizer(optax.sgd(1.0)), coefficient)
    return federated(sampler, local, rule, step, **round_options)


def _both_means(total_weight: float) -> Aggregator:
    """Makes two means of the updates: over the cohort, and over the population, where absent clients count as zero.

    Args:
      total_weight: W, the sum of the weights of all clients.
    """
    rule = aggregation.mean()

    def finalize(key, cohort, carry):
        update, metrics = rule.finalize(key, cohort, carry)
        cohort_share = metrics["total_weight"] * (1 / total_weight)  # of the population's weight
        population_mean = jax.tree.map(lambda x: x * cohort_share.astype(x.dtype), update)
        return {"cohort": update, "population": population_mean}, metrics

    return rule._replace(finalize=finalize)
