"""SCAFFOLD: control variates of clients and server remove the client drift from local training."""

from __future__ import annotations

from typing import Annotated, Unpack

import optax

from fedjax_sim import aggregation, client, server, validate
from fedjax_sim.round.compatibility import check_distinct
from fedjax_sim.round.federated import federated
from fedjax_sim.round.options import RecipeOptions
from fedjax_sim.types import Algorithm, Sampler
from fedjax_sim.validate import FromData, LossFn, Positive


def population_weight(sampler: Sampler, work: client.LocalWork, total_weight: float | None) -> float:
    """The sum W of the weights that all clients of the population would report.

    Args:
      sampler: its design states the number of clients.
      work: the clients' work, which says whether they weigh as much as their examples or 1.
      total_weight: W for weights by examples; None for uniform weights, whose sum is the number of clients.

    Raises: ValueError where `total_weight` is missing, or given for uniform weights.
    """
    if not work.weighs_examples():
        if total_weight is not None:
            validate.fail("total_weight", "none with weighting='uniform'", total_weight, "It is the number of clients.")
        return float(sampler.design.population_size)
    if total_weight is None:
        hint = "Clients count by their examples: give their number in the population. Or let clients count alike, as "
        hint += 'in the paper: weighting="uniform".'
        validate.fail("total_weight", "the sum of all clients' weights", None, hint)
    validate.positive("total_weight", total_weight)
    return total_weight


@validate.named_arguments
def scaffold(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    server_learning_rate: Positive = 1.0,
    option: int = 2,
    total_weight: Annotated[float | None, FromData("total_weight")] = None,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Makes SCAFFOLD: control variates correct the clients' drift in local training.

    Every client keeps a control variate as large as the model; for many clients see `engine.client_memory`.

    Args:
      loss_fn, sampler: as in `fedavg`.
      optimizer: the clients' optimizer, plain SGD such as `optax.sgd(0.1)`. Its rate is needed to compute the mean of
        the local steps' gradients from the client's update.
      server_learning_rate: the paper's eta_g, positive.
      option: of `client.scaffold`.
      num_steps, num_epochs, batch_size, shuffle: as in `client.work`.
      weighting: "examples", the default, minimises sum_i n_i f_i / n; "uniform", the paper's, sum_i f_i / N.
      total_weight: W, the sum of the weights that all clients would report, for "examples"; None for "uniform". It is
        not checked, because a client's weight may come from its loss: a wrong number moves the fixed point, or
        diverges.
      Others as in `federated`.

    Raises: ValueError for a sampler with replacement, and for options out of range.

    Guarantees: matches a NumPy transcription of the paper (tests/oracles/test_scaffold.py::test_matches_the_paper);
    converges to the optimum where FedAvg does not (::test_no_client_drift); with all control variates at zero, as in
    the first round, it is FedAvg (::test_first_round_is_fedavg).

    References: Karimireddy et al. 2020 (SCAFFOLD), algorithm 1.
    """
    check_distinct(sampler, "A client drawn twice would move c twice and its own c_i once.")
    learning_rate = client.plain_sgd_rate("scaffold", optimizer)
    work, round_options = client.local_work(options)
    local = client.scaffold(loss_fn, learning_rate, work, option=option)
    population_sum = aggregation.keep_old(population_weight(sampler, work, total_weight))
    rule = aggregation.by_part({"params": aggregation.mean(), "control": population_sum})
    step = server.control_variates(server.optimizer(optax.sgd(server_learning_rate)))
    return federated(sampler, local, rule, step, **round_options)
