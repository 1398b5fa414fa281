"""This module defines servers that treat slow clients in different ways, and predicts the time of their rounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import algorithms, metrics, models, network, population, sampling, theory
from fedjax_sim.round.costs import work_of
from fedjax_sim.types import Algorithm, Array, Devices, Load

EXAMPLES = 40  # that each client has
BATCH = 20  # examples in a minibatch
DOWN, UP, LATENCY = 7e6, 2e6, 0.05  # bytes/s down and up, and seconds, of every client's link
TIERS = 4  # of FedAT: the cohort of a tier is as large as FedBuff's buffer
OVER = 1.3  # clients invited for each that is needed: Bonawitz et al. 2019


class Field(NamedTuple):
    """Clients of the digits on devices of different speed, with their model and local training.

    Fields:
      data: the clients' examples and the test set.
      devices: the clients' devices; a client's times are the same in every round.
      speed: the distribution that the devices' speeds were drawn from.
      loss_fn: the training loss.
      params: the first model.
      num_steps: K local steps.
      learning_rate: the learning rate of local steps.
      cohort_size: m.
    """

    data: Any
    devices: Devices
    speed: network.Distribution
    loss_fn: Callable
    params: Any
    num_steps: int
    learning_rate: float
    cohort_size: int

    @property
    def size(self) -> int:
        """The number of clients N."""
        return self.data.train.size

    def accuracy(self, params: Any) -> Array:
        """Returns the accuracy of a model on the test set; it can be traced."""
        return metrics.pooled(self.loss_fn, params, jax.tree.map(jnp.asarray, self.data.test))["accuracy"]

    def load(self, algorithm: Algorithm, steps: int) -> Load:
        """Returns the work that a round asks of each client: operations and bytes, [N] each.

        Args:
          algorithm: decides what is sent and received.
          steps: local steps of the round.
        """
        assert algorithm.parts is not None, "each server has one star"
        work = work_of(algorithm.parts, self.params, self.data.train)
        return network.load_of(work, jnp.full(self.size, EXAMPLES), jnp.full(self.size, steps, jnp.int32))

    def ticks(self, algorithm: Algorithm, steps: int) -> np.ndarray:
        """Returns the ticks and the joules that a round takes of each client, [2, N].

        Args:
          algorithm: decides what is sent and received.
          steps: local steps of the round.
        """
        ids = jnp.arange(self.size, dtype=jnp.int32)
        # The key does not matter: a client's time is a pure function of its id.
        spent = self.devices.spend(jax.random.key(0), ids, self.load(algorithm, steps))
        return np.stack([np.asarray(x, np.float64) for x in (spent.total, spent.joules)])


class ServerMode(NamedTuple):
    """A way to run the federation, with predictions of the time of a step.

    Fields:
      algorithm: the server and its clients.
      updates: the number of updates that a server's step waits for.
      predicted: exact predictions for a step of a synchronous server: "seconds", "messages", "joules".
      law: predicted seconds of a step for an infinite population, whose speeds follow the distribution itself.
      seconds: estimated seconds for each update of an asynchronous server.
      staleness: predicted mean staleness of an asynchronous server's updates, in versions.
    """

    algorithm: Algorithm
    updates: float
    predicted: dict[str, float]
    law: float | None = None
    seconds: float | None = None
    staleness: float | None = None


def field(
    key: Array, *, num_clients: int, alpha: float, sigma: float, num_steps: int, learning_rate: float,
    cohort_size: int, seed: int,
) -> Field:  # fmt: skip
    """Makes clients with Dirichlet label shares and lognormal speeds.

    Args:
      key: the random key of the first model.
      num_clients: N.
      alpha: the parameter of the label shares; small values give unlike clients.
      sigma: standard deviation of the logarithm of the speeds; the median client trains for 1 s.
      num_steps: K local steps.
      learning_rate: the learning rate of local steps.
      cohort_size: m.
      seed: decides data and speeds.
    """
    data = population.digits(
        num_clients=num_clients, alpha=alpha, min_examples=EXAMPLES, max_examples=EXAMPLES, held_out_clients=0,
        seed=seed,
    )  # fmt: skip
    model = models.linear(input_shape=data.input_shape, num_outputs=data.num_outputs)
    speed = network.lognormal(55_000.0 * num_steps, sigma)  # 55,000 operations a step of a batch of 20
    devices = network.heterogeneous(
        num_clients, speed=speed, bandwidth_down=DOWN, bandwidth_up=UP, latency=LATENCY, compute_watts=4.0,
        radio_watts=1.0, seed=seed,
    )  # fmt: skip
    loss_fn = models.supervised(model, models.default_loss(data.task))
    return Field(
        data=data,
        devices=devices,
        speed=speed,
        loss_fn=loss_fn,
        params=model.init(key)[0],
        num_steps=num_steps,
        learning_rate=learning_rate,
        cohort_size=cohort_size,
    )


def servers(has: Field, deadline_share: float) -> dict[str, ServerMode]:
    """Makes the servers, by name; the first one waits for all clients.

    Args:
      has: the clients.
      deadline_share: the share of the clients that finish before the deadline.
    """
    m = has.cohort_size
    n = has.size
    tick = 1 / has.devices.ticks_per_second
    options = {"num_steps": has.num_steps, "batch_size": BATCH, "mesh": None}
    num_invited = math.ceil(OVER * m)

    def fedavg(sampler):
        return algorithms.fedavg(has.loss_fn, sampler, optax.sgd(has.learning_rate), weighting="uniform", **options)

    cohort_sampler = sampling.with_clock(sampling.uniform(n, m), has.devices)
    waiting = fedavg(cohort_sampler)
    times, joules = has.ticks(waiting, has.num_steps)
    load = has.load(waiting, has.num_steps)
    deadline = float(np.quantile(times, deadline_share)) * tick
    deadline_ticks = math.floor(deadline / tick)
    # Partial work: a client sends the most steps with which it arrives in time. `partial_times` is its arrival with
    # these steps, and 0 if not even one step arrives; the round then lasts until the deadline.
    times_by_steps = np.stack([has.ticks(waiting, k)[0] for k in range(1, has.num_steps + 1)])  # [K, N]
    partial_times = np.where(times_by_steps <= deadline_ticks, times_by_steps, 0).max(0)
    partial_ends = np.where(partial_times > 0, partial_times, deadline_ticks)

    def slowest(values, k=m, drawn=m):
        """Returns the expected seconds of the k-th of `drawn` clients from the population."""
        return theory.sampled_order_statistic(values, k, drawn) * tick

    over_selecting = sampling.with_over_selection(sampling.with_clock(sampling.uniform(n, num_invited), has.devices), m)
    modes = {
        "waits for all": ServerMode(
            algorithm=waiting, updates=m,
            predicted={"seconds": slowest(times), "messages": m, "joules": m * float(joules.mean())},
            law=_by_law(has, load, m, m),
        ),
        "deadline, dropped": ServerMode(
            algorithm=fedavg(sampling.with_deadline(cohort_sampler, deadline)), updates=m,
            predicted={
                "seconds": slowest(np.minimum(times, deadline_ticks)),
                "messages": m * float((times <= deadline_ticks).mean()),
            },
        ),
        "deadline, partial": ServerMode(
            algorithm=fedavg(sampling.with_deadline(cohort_sampler, deadline, late="partial")), updates=m,
            predicted={"seconds": slowest(partial_ends), "messages": m * float((partial_times > 0).mean())},
        ),
        "130 % invited": ServerMode(
            algorithm=fedavg(over_selecting), updates=m,
            predicted={"seconds": slowest(times, m, num_invited), "messages": m},
            law=_by_law(has, load, m, num_invited),
        ),
    }  # fmt: skip
    asynchronous_options = {"population_size": n, "concurrency": m, "max_staleness": 1000, **options}
    buffer_size = max(m // 4, 1)
    # FedAsync changes the model with every arrival; a step of the simulation handles several arrivals in their order.
    arrivals_per_step = max(math.isqrt(m), 1)
    fedbuff = algorithms.fedbuff(
        has.loss_fn, has.devices, optax.sgd(has.learning_rate), buffer_size=buffer_size, **asynchronous_options
    )
    fedasync = algorithms.fedasync(
        has.loss_fn,
        has.devices,
        optax.sgd(has.learning_rate),
        arrivals_per_step=arrivals_per_step,
        **asynchronous_options,
    )
    for name, algorithm, updates_per_version, updates_per_step in (
        ("FedBuff", fedbuff, buffer_size, buffer_size),
        ("FedAsync", fedasync, 1, arrivals_per_step),
    ):
        staleness = theory.expected_staleness(m, updates_per_version)
        updates_per_tick = _updates_per_tick(has.ticks(algorithm, has.num_steps)[0], m)
        modes[name] = ServerMode(
            algorithm=algorithm,
            updates=updates_per_step,
            predicted={},
            law=None,
            seconds=tick / updates_per_tick,
            staleness=staleness,
        )
    tier_cohort = m // TIERS
    fedat = algorithms.fedat(
        has.loss_fn, has.devices, optax.sgd(has.learning_rate), population_size=n, num_tiers=TIERS,
        clients_per_tier=tier_cohort, weighting="uniform", **options,
    )  # fmt: skip
    tier_times = np.array_split(np.sort(has.ticks(fedat, has.num_steps)[0]), TIERS)
    # Tiers run side by side, so their rates add up.
    updates_per_second = sum(tier_cohort / slowest(times, tier_cohort, tier_cohort) for times in tier_times)
    modes["FedAT"] = ServerMode(
        algorithm=fedat,
        updates=tier_cohort,
        predicted={},
        law=None,
        seconds=1 / updates_per_second,
        staleness=theory.expected_staleness(TIERS),
    )
    return modes


def _by_law(has: Field, load: Load, k: int, m: int) -> float:
    """Returns the expected seconds until the k-th of m clients whose speeds are drawn from the distribution itself."""
    flops, down, up = (float(x[0]) for x in load)  # the load is the same for every client
    link_seconds = 2 * LATENCY + down / DOWN + up / UP
    # A client is slow where its speed is low, hence the quantile at 1 - u.
    return theory.expected_order_statistic(k, m, lambda u: link_seconds + flops / has.speed.quantile(1 - u))


def _updates_per_tick(times: np.ndarray, count: int) -> float:
    """Returns the updates in a tick, in the long run, when `count` clients are always in flight.

    An arrived client is replaced by another. Client i is in flight a share a t_i / (1 + a t_i) of the time, and the
    shares add up to `count`, which determines a. This treats clients as independent, which is close where N is large.

    Args:
      times: [N] t_i, ticks that a client is in flight.
      count: clients in flight.
    """
    # The shares rise with a, so bisection finds a.
    low, high = 0.0, count / times.min()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (middle * times / (1 + middle * times)).sum() < count else (low, middle)
    return float((low / (1 + low * times)).sum())
