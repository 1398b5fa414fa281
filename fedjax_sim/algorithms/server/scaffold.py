"""SCAFFOLD: control variates of clients and server take the drift out of local training."""

from __future__ import annotations

from collections.abc import Callable

import optax
from jax.sharding import Mesh

from fedjax_sim import aggregation, client, engine, server, validate
from fedjax_sim.round.compatibility import check_distinct
from fedjax_sim.round.federated import federated
from fedjax_sim.types import Algorithm, Sampler, UpdateTransform

__all__ = ["population_weight", "scaffold"]


def population_weight(sampler: Sampler, weighting: str, total_weight: float | None) -> float:
    """W, the sum of all clients' weights."""
    if weighting == "uniform":
        if total_weight is not None:
            validate.fail("total_weight", "none with weighting='uniform'", total_weight, "It is the number of clients.")
        return float(sampler.design.population_size)
    if total_weight is None:
        validate.fail("total_weight", "the sum of all clients' weights", None, "weighting='examples' needs it.")
    validate.positive("total_weight", total_weight)
    return total_weight


@validate.named_arguments
def scaffold(
    loss_fn: Callable,
    sampler: Sampler,
    *,
    learning_rate: float = 0.1,
    server_learning_rate: float = 1.0,
    option: int = 2,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    batch_size: int | None = None,
    weighting: str = "uniform",
    shuffle: bool = True,
    total_weight: float | None = None,
    transform: UpdateTransform | None = None,
    downlink: UpdateTransform | None = None,
    nonfinite: str = "drop",
    plan: engine.Plan | None = None,
    mesh: Mesh | str | None = "all",
) -> Algorithm:
    """Stochastic controlled averaging: control variates correct the clients' drift in local training.

    Every client keeps a control variate as large as the model; for many clients see `engine.client_memory`.

    Args:
      learning_rate, option: of `client.scaffold`.
      server_learning_rate: the paper's eta_g, positive.
      num_steps, num_epochs, batch_size, shuffle: as in `client.work`.
      weighting: "uniform", the paper's, minimises sum_i f_i / N; "examples" minimises sum_i n_i f_i / n.
      total_weight: W, the sum of the weights that all clients would report; only for "examples". It is not checked,
        because a client's weight may come from its loss: a wrong number moves the fixed point, or diverges.
      Others as in `federated`.

    Raises: ValueError for a sampler with replacement, and for options out of range.

    Guarantees: matches a NumPy transcription of the paper (tests/oracles/test_scaffold.py::test_matches_the_paper);
    converges to the optimum where FedAvg does not (::test_no_client_drift); with all control variates at zero, as in
    the first round, it is FedAvg (::test_first_round_is_fedavg).

    References: Karimireddy et al. 2020 (SCAFFOLD), algorithm 1.
    """
    validate.positive("server_learning_rate", server_learning_rate)
    check_distinct(sampler, "A client drawn twice would move c twice and its own c_i once.")
    local = client.work(
        num_steps=num_steps, num_epochs=num_epochs, batch_size=batch_size, weighting=weighting, shuffle=shuffle
    )
    work = client.scaffold(loss_fn, learning_rate, local, option=option)
    population_sum = aggregation.keep_old(population_weight(sampler, weighting, total_weight))
    rule = aggregation.by_part({"params": aggregation.mean(), "control": population_sum})
    step = server.control_variates(server.optimizer(optax.sgd(server_learning_rate)))
    return federated(sampler, work, rule, step, transform, downlink=downlink, nonfinite=nonfinite, plan=plan, mesh=mesh)
