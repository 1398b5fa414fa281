"""How a server can treat clients of different speed, and what the order of their times says of its rounds."""

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

__all__ = ["BATCH", "OVER", "Field", "ServerMode", "field", "servers"]

EXAMPLES, BATCH = 40, 20  # of a client
DOWN, UP, LATENCY = 7e6, 2e6, 0.05  # bytes/s and seconds of everybody's link
TIERS = 4  # of FedAT: a tier's cohort and a buffer of FedBuff are of one size
OVER = 1.3  # clients invited for each that is needed: Bonawitz et al. 2019


class Field(NamedTuple):
    """Clients of the digits on devices of different speed, and what trains on them."""

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
        return self.data.train.size

    def accuracy(self, params: Any) -> Array:
        """On the test rows; traced."""
        return metrics.pooled(self.loss_fn, params, jax.tree.map(jnp.asarray, self.data.test))["accuracy"]

    def load(self, algorithm: Algorithm, steps: int) -> Load:
        """What a round of so many local steps asks of each client, [N] each."""
        work = work_of(algorithm.parts, self.params, self.data.train)
        return network.load_of(work, jnp.full(self.size, EXAMPLES), jnp.full(self.size, steps, jnp.int32))

    def ticks(self, algorithm: Algorithm, steps: int) -> np.ndarray:
        """[2, N]: the ticks that each client takes for such a round, and its joules."""
        ids = jnp.arange(self.size, dtype=jnp.int32)
        spent = self.devices.spend(jax.random.key(0), ids, self.load(algorithm, steps))
        return np.stack([np.asarray(x, np.float64) for x in (spent.total, spent.joules)])


class ServerMode(NamedTuple):
    """One way to run the federation."""

    algorithm: Algorithm
    updates: float  # of clients in a step: as many as a server's step waits for
    predicted: dict[str, float]  # of a step, exact: "seconds", "messages", "joules"
    law: float | None = None  # seconds of a step, for clients drawn from the law of the speeds
    seconds: float | None = None  # of an update, for asynchronous servers: an estimate
    staleness: float | None = None  # mean


def field(
    key: Array, *, num_clients: int, alpha: float, sigma: float, num_steps: int, learning_rate: float,
    cohort_size: int, seed: int,
) -> Field:  # fmt: skip
    """Clients with label shares from Dirichlet(alpha); speeds lognormal, so that a median client trains for 1 s."""
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
    return Field(data, devices, speed, loss_fn, model.init(key)[0], num_steps, learning_rate, cohort_size)


def servers(has: Field, deadline_share: float) -> dict[str, ServerMode]:
    """The servers by name, the first one waits for all.

    Args:
      deadline_share: of the clients, who arrive before the deadline.
    """
    m, n, tick = has.cohort_size, has.size, 1 / has.devices.ticks_per_second
    work = {"num_steps": has.num_steps, "batch_size": BATCH}
    options = {**work, "mesh": None}
    more = math.ceil(OVER * m)

    def fedavg(sampler):
        return algorithms.fedavg(has.loss_fn, sampler, optax.sgd(has.learning_rate), weighting="uniform", **options)

    everybody = sampling.with_clock(sampling.uniform(n, m), has.devices)
    waits = fedavg(everybody)
    times, joules = has.ticks(waits, has.num_steps)
    load = has.load(waits, has.num_steps)
    deadline = float(np.quantile(times, deadline_share)) * tick
    ends = math.floor(deadline / tick)
    stages = np.stack([has.ticks(waits, k)[0] for k in range(1, has.num_steps + 1)])  # [K, N]
    in_time = np.where(stages <= ends, stages, 0).max(0)  # with the most steps that arrive; 0 if not even one does
    partial = np.where(in_time > 0, in_time, ends)

    def slowest(values, k=m, drawn=m):
        return theory.sampled_order_statistic(values, k, drawn) * tick

    made = {
        "waits for all": ServerMode(
            waits, m, {"seconds": slowest(times), "messages": m, "joules": m * float(joules.mean())},
            _by_law(has, load, m, m),
        ),
        "deadline, dropped": ServerMode(
            fedavg(sampling.with_deadline(everybody, deadline)), m,
            {"seconds": slowest(np.minimum(times, ends)), "messages": m * float((times <= ends).mean())},
        ),
        "deadline, partial": ServerMode(
            fedavg(sampling.with_deadline(everybody, deadline, late="partial")), m,
            {"seconds": slowest(partial), "messages": m * float((in_time > 0).mean())},
        ),
        "130 % invited": ServerMode(
            fedavg(sampling.with_over_selection(sampling.with_clock(sampling.uniform(n, more), has.devices), m)), m,
            {"seconds": slowest(times, m, more), "messages": m}, _by_law(has, load, m, more),
        ),
    }  # fmt: skip
    fly = {"population_size": n, "concurrency": m, "max_staleness": 1000, **options}
    buffer, block = max(m // 4, 1), max(math.isqrt(m), 1)
    fedbuff = algorithms.fedbuff(has.loss_fn, has.devices, optax.sgd(has.learning_rate), buffer_size=buffer, **fly)
    fedasync = algorithms.fedasync(
        has.loss_fn, has.devices, optax.sgd(has.learning_rate), arrivals_per_step=block, **fly
    )
    for name, one, size, most in (("FedBuff", fedbuff, buffer, buffer), ("FedAsync", fedasync, 1, block)):
        gap, flying = theory.expected_staleness(m, size), _updates_per_tick(has.ticks(one, has.num_steps)[0], m)
        made[name] = ServerMode(one, most, {}, None, tick / flying, gap)
    each = m // TIERS
    fedat = algorithms.fedat(
        has.loss_fn, has.devices, optax.sgd(has.learning_rate), population_size=n, num_tiers=TIERS,
        clients_per_tier=each, weighting="uniform", **options,
    )  # fmt: skip
    tiers = np.array_split(np.sort(has.ticks(fedat, has.num_steps)[0]), TIERS)
    pace = sum(each / slowest(times, each, each) for times in tiers)
    made["FedAT"] = ServerMode(fedat, each, {}, None, 1 / pace, theory.expected_staleness(TIERS))
    return made


def _by_law(has: Field, load: Load, k: int, m: int) -> float:
    """Seconds until the k-th of m clients, whose speeds are drawn from the law instead of the population."""
    flops, down, up = (float(x[0]) for x in load)
    links = 2 * LATENCY + down / DOWN + up / UP
    return theory.expected_order_statistic(k, m, lambda u: links + flops / has.speed.quantile(1 - u))


def _updates_per_tick(times: np.ndarray, count: int) -> float:
    """Updates in a tick, in the long run, of `count` clients in flight, each followed by one of the others.

    Client i is in flight a share a t_i / (1 + a t_i) of the time, with a such that these shares add up to `count`: as
    if clients were in flight independently, which is close where N is large.
    """
    low, high = 0.0, count / times.min()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (middle * times / (1 + middle * times)).sum() < count else (low, middle)
    return float((low / (1 + low * times)).sum())
