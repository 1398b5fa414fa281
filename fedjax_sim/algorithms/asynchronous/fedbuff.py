"""FedBuff: the server takes a step whenever K updates have arrived, and clients who train do not wait for it."""

from __future__ import annotations

from typing import Literal, Unpack

import optax

from fedjax_sim import aggregation, client, server, validate
from fedjax_sim.algorithms.asynchronous.asynchronous import BufferOptions, asynchronous
from fedjax_sim.round.options import FederatedOptions
from fedjax_sim.types import Aggregator, Algorithm, Devices
from fedjax_sim.validate import LossFn, PopulationSize


class FedBuffOptions(client.LocalSteps, FederatedOptions, BufferOptions, total=False):
    """The options of `client.work`, of `federated` and of a buffer."""


@validate.named_arguments
def fedbuff(
    loss_fn: LossFn,
    devices: Devices,
    optimizer: optax.GradientTransformation,
    *,
    population_size: PopulationSize,
    server_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
    weighting: Literal["examples", "uniform"] = "uniform",
    **options: Unpack[FedBuffOptions],
) -> Algorithm:
    """Makes FedBuff: the server takes a step with the mean of the first K updates that arrive.

    An update counts less the staler it is.

    Args:
      loss_fn: as in `client.local_sgd`.
      devices, population_size, concurrency, buffer_size, staleness, max_staleness, refill, hazard: as in
        `asynchronous`.
      optimizer: the clients' optimizer; `num_steps`, `num_epochs`, `batch_size`, `shuffle` as in `client.work`.
      weighting: as in `client.work`. Its default is "uniform", because fast clients arrive more often: "examples" is
        refused unless the aggregator takes no weights.
      server_optimizer: any optax transformation; SGD with rate 1 by default. Its rate is the paper's eta_g.
      aggregator: the mean of the K updates by default.
      transform, downlink, nonfinite, plan, mesh: as in `asynchronous`.

    Guarantees: the models equal those of an event loop in NumPy up to rounding
    (tests/algorithms/asynchronous/test_asynchronous.py::test_fedbuff_is_the_event_loop), and the other guarantees of
    `asynchronous` hold, since it makes the algorithm.

    References: Nguyen et al. 2022 (FedBuff), algorithm 1.
    """
    work, buffer_options = client.local_work({**options, "weighting": weighting})
    local = client.local_sgd(loss_fn, optimizer, work)
    rule = aggregation.mean(weighting="uniform") if aggregator is None else aggregator
    step = server.optimizer(optax.sgd(1.0) if server_optimizer is None else server_optimizer)
    return asynchronous(devices, local, rule, step, population_size=population_size, **buffer_options)
