"""FedAvg with another server step: momentum, the adaptive rules of FedOpt, or FedExP's extrapolation."""

from __future__ import annotations

from typing import Unpack

import optax

from fedjax_sim import aggregation, client, server, validate
from fedjax_sim.algorithms.server.fedavg import fedavg
from fedjax_sim.round.federated import federated
from fedjax_sim.round.options import AveragingOptions, RecipeOptions
from fedjax_sim.types import Algorithm, Sampler
from fedjax_sim.validate import LossFn, Positive, ShareBelowOne


@validate.named_arguments
def fedavgm(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    server_learning_rate: Positive = 1.0,
    momentum: ShareBelowOne = 0.9,
    nesterov: bool = False,
    **options: Unpack[AveragingOptions],
) -> Algorithm:
    """Makes FedAvgM: FedAvg with momentum at the server.

    The server's step is v <- momentum v + Delta; w <- w + rate v, where Delta is the clients' mean update.

    Args:
      loss_fn, sampler, optimizer: as in `fedavg`.
      server_learning_rate: the rate, positive.
      momentum: in [0, 1).
      nesterov: Nesterov's momentum.
      num_steps, num_epochs, batch_size, weighting, shuffle: as in `client.work`.
      aggregator: `aggregation.mean()` by default.
      transform, downlink, nonfinite, plan, mesh: as in `federated`.

    Guarantees: the server's steps equal this recurrence up to rounding, and with Nesterov's momentum w <- w + rate
    (Delta + momentum v) (tests/server/test_optimizer.py::test_momentum_matches_its_recurrence).

    References: Hsu, Qi and Brown 2019, section 4.
    """
    step = optax.sgd(server_learning_rate, momentum=momentum, nesterov=nesterov)
    return fedavg(loss_fn, sampler, optimizer, server_optimizer=step, **options)


@validate.named_arguments
def fedadagrad(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    server_learning_rate: Positive = 0.1,
    adaptivity: float = 1e-3,
    **options: Unpack[AveragingOptions],
) -> Algorithm:
    """Makes FedAdagrad: FedAvg with Adagrad at the server, as Reddi et al. write it, with a first decay of 0.

    Args:
      loss_fn, sampler, optimizer: as in `fedavg`.
      server_learning_rate, adaptivity: as in `server.adaptive`, which says how optax's Adagrad differs.
      num_steps, num_epochs, batch_size, weighting, shuffle: as in `client.work`.
      aggregator: `aggregation.mean()` by default.
      transform, downlink, nonfinite, plan, mesh: as in `federated`.

    References: Reddi et al. 2021, algorithm 2; its mean is the plain one, `weighting="uniform"`.
    """
    step = server.adaptive("adagrad", server_learning_rate, first_decay=0.0, adaptivity=adaptivity)
    return fedavg(loss_fn, sampler, optimizer, server_optimizer=step, **options)


@validate.named_arguments
def fedadam(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    server_learning_rate: Positive = 0.01,
    first_decay: float = 0.9,
    second_decay: float = 0.99,
    adaptivity: float = 1e-3,
    **options: Unpack[AveragingOptions],
) -> Algorithm:
    """Makes FedAdam: FedAvg with Adam at the server, as Reddi et al. write it, without correction of the moments' bias.

    Args:
      loss_fn, sampler, optimizer: as in `fedavg`.
      server_learning_rate, first_decay, second_decay, adaptivity: as in `server.adaptive`, which says how optax's Adam
        differs.
      num_steps, num_epochs, batch_size, weighting, shuffle: as in `client.work`.
      aggregator: `aggregation.mean()` by default.
      transform, downlink, nonfinite, plan, mesh: as in `federated`.

    References: Reddi et al. 2021, algorithm 2; its mean is the plain one, `weighting="uniform"`.
    """
    step = server.adaptive(
        "adam", server_learning_rate, first_decay=first_decay, second_decay=second_decay, adaptivity=adaptivity
    )
    return fedavg(loss_fn, sampler, optimizer, server_optimizer=step, **options)


@validate.named_arguments
def fedyogi(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    server_learning_rate: Positive = 0.01,
    first_decay: float = 0.9,
    second_decay: float = 0.99,
    adaptivity: float = 1e-3,
    **options: Unpack[AveragingOptions],
) -> Algorithm:
    """Makes FedYogi: FedAvg with Yogi at the server, as Reddi et al. write it.

    Args:
      loss_fn, sampler, optimizer: as in `fedavg`.
      server_learning_rate, first_decay, second_decay, adaptivity: as in `server.adaptive`, which says how optax's Yogi
        differs.
      num_steps, num_epochs, batch_size, weighting, shuffle: as in `client.work`.
      aggregator: `aggregation.mean()` by default.
      transform, downlink, nonfinite, plan, mesh: as in `federated`.

    References: Reddi et al. 2021, algorithm 2; its mean is the plain one, `weighting="uniform"`.
    """
    step = server.adaptive(
        "yogi", server_learning_rate, first_decay=first_decay, second_decay=second_decay, adaptivity=adaptivity
    )
    return fedavg(loss_fn, sampler, optimizer, server_optimizer=step, **options)


@validate.named_arguments
def fedexp(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    epsilon: float = 1e-3,
    average_last: bool = True,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Makes FedExP: FedAvg whose server step is longer the more the clients' updates differ.

    It needs no further communication.

    Args:
      loss_fn, sampler: as in `fedavg`.
      optimizer: the clients' optimizer; `num_steps`, `num_epochs`, `batch_size`, `shuffle` as in `client.work`.
      epsilon: of `aggregation.extrapolated`. It is absolute: if it is far above the squared norms of the updates, no
        step is extrapolated.
      average_last: True evaluates the mean of the last two models, as the paper does; training is the same either way.
      weighting: "uniform" is the paper's.
      transform, downlink, nonfinite, plan, mesh: as in `federated`.

    Guarantees: matches the paper in NumPy (tests/oracles/test_fedexp.py::test_matches_the_paper); on clients that share
    a minimum it converges in fewer rounds than FedAvg (::test_fewer_rounds_than_fedavg).

    References: Jhunjhunwala, Wang and Joshi 2023 (FedExP), algorithm 1.
    """
    work, round_options = client.local_work(options)
    local = client.local_sgd(loss_fn, optimizer, work)
    rule = aggregation.extrapolated(epsilon=epsilon)
    step = server.optimizer(optax.sgd(1.0))
    step = server.last_two(step) if average_last else step
    return federated(sampler, local, rule, step, **round_options)
