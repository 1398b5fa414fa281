"""This module measures which optimum FedBuff reaches when speeds differ, and staleness and delay by buffer size."""

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
from fedjax_sim.running import kept_results
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.study.staleness.gradients import WEIGHTS, gradient_fedbuff
from fedjax_sim.types import Array, Devices, Population, Spent

SLOWER = 4.0  # the mean time of slow clients over that of fast clients
SPEED_STEP = 0.2  # the server's step where speeds differ


def _exponential(means: np.ndarray) -> Devices:
    """Makes devices whose times are exponential and drawn anew for each model that a client receives.

    With exponential times the next client to arrive is independent of the past, so the mean model is exact.

    Args:
      means: [N] mean times in seconds.
    """
    ticks_per_second = 1_000_000
    seconds = jnp.asarray(means, jnp.float32)

    def spend(key, ids, load):
        # The inverse of the exponential distribution function.
        duration = whole_ticks(-seconds[ids] * jnp.log(unit_draws(key, ids)), ticks_per_second)
        return Spent(jnp.zeros_like(duration), duration, jnp.zeros_like(duration), jnp.zeros(ids.shape, jnp.float32))

    return Devices(len(means), spend, None, ticks_per_second)


def _means(
    key: Array, num_runs: int, make: Callable, data: Population, *, values: Sequence[Any], steps: int, skip: int
) -> dict[str, np.ndarray]:
    """Returns means over time of numbers in info and of the model, for many runs as one program.

    Args:
      key: the random key of all runs.
      num_runs: runs of each value.
      make: value -> algorithm.
      data: the clients.
      values: what differs between algorithms.
      steps: steps of each run.
      skip: steps at the start that are left out of the mean.

    Returns: {name: [len(values), num_runs]}; the model's first coordinate is called "w".
    """

    def single_run(key, value):
        algorithm = make(value)
        state = algorithm.init(key, {"w": jnp.full(1, 0.5)}, data)

        def advance(state, t):
            state, info = algorithm.step(jax.random.fold_in(key, t), state, data)
            names = ("round_seconds", "staleness", "delay_seconds")
            return state, {name: info[name] for name in names} | {"w": algorithm.params(state)["w"][0]}

        numbers = jax.lax.scan(advance, state, jnp.arange(steps))[1]
        return {name: x[skip:].mean() for name, x in numbers.items()}

    keys = jax.random.split(key, (len(values), num_runs))
    runs = jax.vmap(jax.vmap(single_run, in_axes=(0, None)))
    means = kept_results.call(jax.jit(runs), keys, jnp.asarray(values))
    return {name: np.asarray(x, np.float64) for name, x in means.items()}


def speeds(key: Array, clients: int, weights: Sequence[str], num_runs: int) -> Iterator[Comparison]:
    """Measures how much slow clients count in the mean model of FedBuff.

    Half of the clients are `SLOWER` times slower and have their optimum at 1; the others have it at 0. The mean model
    is therefore the weight of the slow half.

    Args:
      key: the random key of all runs.
      clients: N, all of them in flight.
      weights: names of WEIGHTS.
      num_runs: independent runs of each weight.

    Yields: for each of the weights the share of the slow half in the mean model, in [0, 1].
    """
    is_slow = np.arange(clients) >= clients // 2
    data = population.quadratic_population([1.0] * clients, is_slow.astype(float))
    mean_times = np.where(is_slow, SLOWER, 1.0)
    arrival_rates = (1 / mean_times).tolist()
    # The probability that the next client to arrive is a given slow client.
    arrival_probability = (1 / SLOWER) / (1 / mean_times).sum()
    options = {"concurrency": clients, "buffer_size": 1, "refill": "same"}
    # Staleness is geometric. An update is older than this with probability 1e-6.
    options["max_staleness"] = math.ceil(math.log(1e-6) / math.log1p(-arrival_probability))

    def make(index):
        return gradient_fedbuff(_exponential(mean_times), SPEED_STEP, 0.0, index, **options)

    indices = [list(WEIGHTS).index(name) for name in weights]
    mean_models = _means(key, num_runs, make, data, values=indices, steps=600, skip=300)["w"]
    for name, models in zip(weights, mean_models, strict=True):
        conditions = {"part": "speeds", "weights": name, "algorithm": "fedbuff", "concurrency": clients}
        predicted = float(theory.arrival_weights(arrival_rates, WEIGHTS[name], step_size=SPEED_STEP) @ is_slow)
        yield measured(conditions, "weight of the slow half", models, predicted, resolution=1e-4)


# Names in info, with the quantities of the study.
WORDS = {"staleness": "staleness, versions", "delay_seconds": "delay, seconds", "round_seconds": "seconds a version"}


def buffers(key: Array, concurrency: int, sizes: Sequence[int], num_runs: int) -> Iterator[Comparison]:
    """Measures staleness, delay and the time of a version against the buffer size, for clients with equal mean times.

    Args:
      key: the random key of all runs.
      concurrency: C clients in flight, of eight times as many.
      sizes: K.
      num_runs: independent runs of each size.

    Yields: for each buffer size the staleness in versions, the delay of an update and the time of a version in seconds.
    """
    clients = 8 * concurrency
    data = population.quadratic_population([1.0] * clients, [0.0] * clients)
    devices = _exponential(np.ones(clients))
    for size in sizes:

        def make(index, size=size):
            return gradient_fedbuff(
                devices, 0.1, 0.0, index, concurrency=concurrency, buffer_size=size, max_staleness=1000
            )

        # The first versions are left out: at the start all clients are sent work at once.
        skip = 10 + 10 * concurrency // size
        means = _means(stream(key, f"buffer {size}"), num_runs, make, data, values=[0], steps=skip + 60, skip=skip)
        predicted = {
            "staleness": theory.expected_staleness(concurrency, size),
            "delay_seconds": (size - 1) / (2 * concurrency),  # arrivals are a Poisson process of rate C
            "round_seconds": size / concurrency,
        }
        conditions = {"part": "buffers", "algorithm": "fedbuff", "buffer_size": size, "concurrency": concurrency}
        for name, value in predicted.items():
            yield measured(conditions, WORDS[name], means[name][0], value, resolution=1e-5)
