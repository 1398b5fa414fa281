"""This module defines sensors on a slow radio that fit a common vector, and measures what rounds of them cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import algorithms, network, population, sampling, theory, transform
from fedjax_sim.instruments.client_costs import client_costs
from fedjax_sim.instruments.runs import independent_runs
from fedjax_sim.prng import normal, random_bits, stream
from fedjax_sim.types import Algorithm, Array, ClientData, ParamsKind, Population, PyTree

STEP_SIZE = 0.1
NUM_STEPS = 2
GRADIENT_NOISE = 1.0  # standard deviation of a coordinate of a local gradient
START_DISTANCE = 4.0  # distance of the start in each coordinate, in standard deviations of the clients' optima
# The quantiser's range holds the first updates: their mean, and four standard deviations.
RANGE = 1.8
DOWN, UP, LATENCY = 256.0, 64.0, 0.05  # bytes/s and seconds of a message
COMPUTE_WATTS, RADIO_WATTS = 0.2, 0.5
BATCH = 50  # runs under one vmap
UNITS = ("bytes", "joules", "seconds")


def _loss(params, examples, key):
    """Returns |w - x|^2 / 2 for each example, with noise on its gradient that is new in every step."""
    tilt = GRADIENT_NOISE * normal(key, params["w"].shape)  # the gradient of tilt . w
    return {"loss": 0.5 * jnp.sum((params["w"][None] - examples["x"]) ** 2, -1) + tilt @ params["w"]}


def _client(parameters: Any, id: Array) -> ClientData:
    """Returns the data of client `id`: one example, its optimum."""
    return ClientData({"x": parameters["centers"][id][None]}, jnp.ones(1, bool))


class _Shuffled(NamedTuple):
    """The state of runs whose clients have the devices of others."""

    federation: PyTree
    order: Array  # [N] int32, the owner of the data on each device
    is_new: Array  # [] bool, before the first round
    spent: dict[str, Array]  # by unit, [] float32


class Sensors:
    """N clients with optima u_i, risks |w - u_i|^2 / 2, noisy gradients, and devices of lognormal speed."""

    def __init__(self, num_clients: int, dimension: int, speed_sigma: float, seed: int):
        """Draws optima and devices.

        Args:
          num_clients: N.
          dimension: d.
          speed_sigma: sigma of the lognormal speeds; the median client trains for 1 s.
          seed: decides optima and speeds.
        """
        rng = np.random.default_rng([seed, num_clients])
        self.size = num_clients
        self.centers = np.clip(rng.normal(size=(num_clients, dimension)), -3, 3).astype(np.float32)
        self.mean = self.centers.astype(np.float64).mean(0)
        self.params = {"w": jnp.asarray(self.mean + START_DISTANCE, jnp.float32)}
        self.problem = theory.SharedQuadratics(
            population_size=num_clients,
            dimension=dimension,
            strong_convexity=1.0,
            step_size=STEP_SIZE,
            num_steps=NUM_STEPS,
            start=float(((np.asarray(self.params["w"], np.float64) - self.mean) ** 2).sum()),
            heterogeneity=float(((self.centers - self.mean) ** 2).sum() / num_clients),
            gradient_noise=GRADIENT_NOISE**2,
            range=RANGE,
        )
        # Operations of the local work: what a device of speed 1 would take.
        alike = network.heterogeneous(num_clients, speed=1.0, bandwidth_down=DOWN, bandwidth_up=UP)
        work = client_costs(self._clocked(alike, 1, 0), self.params, self.clients(self.centers))
        self.devices = network.heterogeneous(
            num_clients, speed=network.lognormal(float(work.seconds[1].mean()), speed_sigma), bandwidth_down=DOWN,
            bandwidth_up=UP, latency=LATENCY, seed=seed, compute_watts=COMPUTE_WATTS, radio_watts=RADIO_WATTS,
        )  # fmt: skip

    def clients(self, centers: Any) -> Population:
        """Makes the population whose client i has the optimum `centers[i]`."""
        return population.generated(self.size, _client, {"centers": jnp.asarray(centers, jnp.float32)})

    def _clocked(self, devices: Any, cohort_size: int, bits: int, deadline: float | None = None) -> Algorithm:
        """Makes FedAvg of uniform cohorts on these devices."""
        sampler = sampling.with_clock(sampling.uniform(self.size, cohort_size), devices)
        if deadline is not None:
            sampler = sampling.with_deadline(sampler, deadline)
        quantiser = transform.quantize(bits, range=RANGE) if bits else transform.identity()
        return algorithms.fedavg(_loss, sampler, optax.sgd(STEP_SIZE), num_steps=NUM_STEPS,
                                 weighting="uniform", transform=quantiser, mesh=None)  # fmt: skip

    def costs(self, bits: int) -> theory.ClientCosts:
        """Returns what a round costs each client with messages of this many bits a number; 0 sends floats."""
        return client_costs(self._clocked(self.devices, 1, bits), self.params, self.clients(self.centers))

    def runs(self, key: Array, choice: theory.Choice, rounds: Sequence[int], num_runs: int) -> dict[str, np.ndarray]:
        """Runs a choice many times; in each run the devices are dealt anew to the owners of the data.

        Args:
          key: the random key of all runs.
          choice: cohort, deadline and bits.
          rounds: rounds after which the model is compared with the optimum, rising.
          num_runs: R.

        Returns: [R, rounds] of "squared_distance", and of each unit that was spent until then.
        """
        algorithm = self._clocked(self.devices, choice.cohort_size, choice.bits or 0, choice.deadline)
        mean = jnp.asarray(self.mean, jnp.float32)

        def evaluation(state):
            return {"squared_distance": jnp.sum((algorithm.params(state.federation)["w"] - mean) ** 2)} | state.spent

        return independent_runs(key, self._dealt(algorithm), self.params, jnp.asarray(self.centers), num_runs,
                                evaluation=evaluation, rounds=rounds, batch=BATCH)  # fmt: skip

    def _dealt(self, algorithm: Algorithm) -> Algorithm:
        """Wraps an algorithm: devices are dealt to clients before the first round, and spending is summed up.

        Args:
          algorithm: one on `devices` over the population that `clients` makes. Its info tells the bytes, joules and
            seconds of a round.

        Returns: an algorithm whose population is the optima [N, d], in the order of `centers`. Its state is a
          `_Shuffled`, and its params are the whole state. Spending is in float32.
        """

        def init(key, params, centers):
            federation = algorithm.init(key, params, self.clients(centers))
            nothing = {f"{unit}_spent": jnp.float32(0) for unit in UNITS}
            return _Shuffled(federation, jnp.arange(self.size, dtype=jnp.int32), jnp.array(True), nothing)

        def step(key, state, centers):
            # All runs start from one state, so that the order follows from the key of the first round.
            dealt = jnp.argsort(random_bits(stream(key, "devices of others"), self.size)).astype(jnp.int32)
            order = jnp.where(state.is_new, dealt, state.order)
            federation, info = algorithm.step(key, state.federation, self.clients(centers[order]))
            counts = [info[f"{way}_bytes"] for way in ("uplink", "downlink")]
            # A message has fewer than 2^32 bytes: the low word is its size.
            sizes = [count.number.astype(jnp.float32) * count.unit[1].astype(jnp.float32) for count in counts]
            amounts = {"bytes": sum(sizes), "joules": info["joules"], "seconds": info["round_seconds"]}
            spent = {f"{unit}_spent": state.spent[f"{unit}_spent"] + amount for unit, amount in amounts.items()}
            return _Shuffled(federation, order, jnp.array(False), spent), info

        return Algorithm(init, step, lambda state: state, params_kind=ParamsKind.MODEL)

    def deadline(self, share: float) -> float:
        """Returns the deadline before which this share of the clients arrives with floats, in seconds."""
        seconds = np.sort(self.costs(0).seconds.sum(0))
        # A sum of floats may lie below its whole ticks, at which this client would be late.
        per_second = self.devices.ticks_per_second
        return round(float(seconds[math.ceil(share * self.size) - 1]) * per_second) / per_second
