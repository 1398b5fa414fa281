"""FedSAM: FedAvg whose clients look for flat minima."""

from __future__ import annotations

from typing import Unpack

import optax

from fedjax_sim import aggregation, client, server, validate
from fedjax_sim.round.federated import federated
from fedjax_sim.round.options import RecipeOptions
from fedjax_sim.types import Aggregator, Algorithm, Sampler
from fedjax_sim.validate import LossFn, NonNegative


@validate.named_arguments
def fedsam(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    radius: NonNegative = 0.05,
    aggregator: Aggregator | None = None,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Makes FedSAM: FedAvg whose local steps take the gradient at w + radius g / |g|, where g is that at w.

    A local step costs two gradients. Messages are FedAvg's, and so is everything that is done to them.

    Args:
      loss_fn, sampler, optimizer, aggregator: as in `fedavg`.
      radius: rho in the paper, >= 0; 0 is FedAvg. A length in the space of all parameters, whatever their scale.
      num_steps, num_epochs, batch_size, weighting, shuffle: as in `client.work`.
      transform, downlink, nonfinite, plan, mesh: as in `federated`.

    Guarantees: radius 0 is FedAvg bit for bit (tests/algorithms/server/test_fedsam.py::test_zero_is_fedavg); rounds
    match NumPy (::test_rounds_match_numpy); a step counts the operations of two gradients
    (::test_a_step_costs_two_gradients).

    References: Qu et al. 2022 (FedSAM), algorithm 1.
    """
    work, round_options = client.local_work(options)
    local = client.sharpness_aware(loss_fn, optimizer, radius, work)
    rule = aggregation.mean() if aggregator is None else aggregator
    return federated(sampler, local, rule, server.optimizer(optax.sgd(1.0)), **round_options)
