"""Clients of different speed: whose optimum FedBuff reaches; and staleness and delay against the size of its buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import population, theory
from fedjax_sim.network.devices import whole_ticks
from fedjax_sim.network.distributions import unit_draws
from fedjax_sim.prng import stream
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.study.staleness.gradients import WEIGHTS, gradient_fedbuff
from fedjax_sim.types import Array, Devices, Population, Spent

__all__ = ["SLOWER", "SPEED_STEP", "buffers", "speeds"]

SLOWER, SPEED_STEP = 4.0, 0.2  # slow clients' mean time over fast ones', and the step of these runs


def _exponential(means: np.ndarray) -> Devices:
    """Clients whose times are exponential, drawn anew for each model they are sent, with these means in seconds."""
    ticks, seconds = 1_000_000, jnp.asarray(means, jnp.float32)

    def spend(key, ids, load):
        took = whole_ticks(-seconds[ids] * jnp.log(unit_draws(key, ids)), ticks)
        return Spent(jnp.zeros_like(took), took, jnp.zeros_like(took), jnp.zeros(ids.shape, jnp.float32))

    return Devices(len(means), spend, None, ticks)


def _means(
    key: Array, num_runs: int, make: Callable, data: Population, values: Sequence[Any], steps: int, skip: int
) -> dict[str, np.ndarray]:
    """{name: [len(values), runs]} of numbers in info, and of the model, as means over all steps but the first."""

    def one(key, value):
        made = make(value)
        state = made.init(key, {"w": jnp.full(1, 0.5)}, data)

        def go(state, t):
            state, info = made.step(jax.random.fold_in(key, t), state, data)
            names = ("round_seconds", "staleness", "delay_seconds")
            return state, {name: info[name] for name in names} | {"w": made.params(state)["w"][0]}

        seen = jax.lax.scan(go, state, jnp.arange(steps))[1]
        return {name: x[skip:].mean() for name, x in seen.items()}

    keys = jax.random.split(key, (len(values), num_runs))
    runs = jax.vmap(jax.vmap(one, in_axes=(0, None)))
    return {name: np.asarray(x, np.float64) for name, x in jax.jit(runs)(keys, jnp.asarray(values)).items()}


def speeds(key: Array, clients: int, weights: Sequence[str], num_runs: int) -> Iterator[Comparison]:
    """Half of the clients are `SLOWER` times slower and have their optimum at 1, the others at 0: where models stay."""
    slow = np.arange(clients) >= clients // 2
    data = population.quadratic_population([1.0] * clients, slow.astype(float))
    means = np.where(slow, SLOWER, 1.0)
    rarest = (1 / SLOWER) / (1 / means).sum()  # probability that the next to arrive is a certain slow client
    options = {"concurrency": clients, "buffer_size": 1, "refill": "same"}
    options["max_staleness"] = math.ceil(math.log(1e-6) / math.log1p(-rarest))

    def make(index):
        return gradient_fedbuff(_exponential(means), SPEED_STEP, 0.0, index, **options)

    index = [list(WEIGHTS).index(name) for name in weights]
    found = _means(key, num_runs, make, data, index, 600, 300)["w"]
    for name, models in zip(weights, found, strict=True):
        conditions = {"part": "speeds", "weights": name, "algorithm": "fedbuff", "concurrency": clients}
        predicted = float(theory.arrival_weights(1 / means, WEIGHTS[name], step_size=SPEED_STEP) @ slow)
        yield measured(conditions, "weight of the slow half", models, predicted, resolution=1e-4)


WORDS = {"staleness": "staleness, versions", "delay_seconds": "delay, seconds", "round_seconds": "seconds a version"}


def buffers(key: Array, concurrency: int, sizes: Sequence[int], num_runs: int) -> Iterator[Comparison]:
    """Staleness, delay and time of a version against the size of the buffer, for clients of one law of times."""
    clients = 8 * concurrency
    data = population.quadratic_population([1.0] * clients, [0.0] * clients)
    devices = _exponential(np.ones(clients))
    for size in sizes:

        def make(index, size=size):
            return gradient_fedbuff(
                devices, 0.1, 0.0, index, concurrency=concurrency, buffer_size=size, max_staleness=1000
            )

        skip = 10 + 10 * concurrency // size
        found = _means(stream(key, f"buffer {size}"), num_runs, make, data, [0], skip + 60, skip)
        predicted = {
            "staleness": theory.expected_staleness(concurrency, size),
            "delay_seconds": (size - 1) / (2 * concurrency),  # arrivals are a Poisson process of rate C
            "round_seconds": size / concurrency,
        }
        conditions = {"part": "buffers", "algorithm": "fedbuff", "buffer_size": size, "concurrency": concurrency}
        for name, value in predicted.items():
            yield measured(conditions, WORDS[name], found[name][0], value, resolution=1e-5)
