"""FedBuff: the server steps whenever so many updates have arrived, and those who train do not wait for it."""

from __future__ import annotations

from collections.abc import Callable

import optax
from jax.sharding import Mesh

from fedjax_sim import aggregation, client, engine, server, validate
from fedjax_sim.algorithms.asynchronous.asynchronous import asynchronous
from fedjax_sim.network import Hazard
from fedjax_sim.types import Aggregator, Algorithm, Devices, StalenessWeight, UpdateTransform

__all__ = ["fedbuff"]


@validate.named_arguments
def fedbuff(
    loss_fn: Callable,
    devices: Devices,
    optimizer: optax.GradientTransformation,
    *,
    population_size: int,
    concurrency: int = 100,
    buffer_size: int = 10,
    staleness: StalenessWeight | None = None,
    max_staleness: int = 100,
    refill: str = "other",
    hazard: Hazard | None = None,
    server_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    batch_size: int | None = None,
    weighting: str = "uniform",
    shuffle: bool = True,
    transform: UpdateTransform | None = None,
    downlink: UpdateTransform | None = None,
    nonfinite: str = "drop",
    plan: engine.Plan | None = None,
    mesh: Mesh | str | None = "all",
) -> Algorithm:
    """FedBuff: the server averages the first K updates to arrive, each less the staler it is, and goes on.

    Args:
      devices, population_size, concurrency, buffer_size, staleness, max_staleness, refill, hazard: as in
        `asynchronous`.
      optimizer: the clients'; `num_steps`, `num_epochs`, `batch_size`, `weighting`, `shuffle` as in `client.work`.
      server_optimizer: optax; SGD with rate 1 by default, the paper's eta_g.
      aggregator: the mean of the K updates by default.

    Guarantees: as `asynchronous`.

    References: Nguyen et al. 2022 (FedBuff), algorithm 1.
    """
    work = client.work(
        num_steps=num_steps, num_epochs=num_epochs, batch_size=batch_size, weighting=weighting, shuffle=shuffle
    )
    return asynchronous(
        devices,
        client.local_sgd(loss_fn, optimizer, work),
        aggregation.mean(weighting="uniform") if aggregator is None else aggregator,
        server.optimizer(optax.sgd(1.0) if server_optimizer is None else server_optimizer),
        transform,
        population_size=population_size,
        concurrency=concurrency,
        buffer_size=buffer_size,
        staleness=staleness,
        max_staleness=max_staleness,
        refill=refill,
        hazard=hazard,
        downlink=downlink,
        nonfinite=nonfinite,
        plan=plan,
        mesh=mesh,
    )
