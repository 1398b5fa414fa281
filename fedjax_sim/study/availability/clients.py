"""This module runs FedAvg with clients that come and go in simulated time, and compares the models with theory.

Availability is a function of time and not of a run's key. Independent runs would therefore see the same clients, so a
single long run is measured at times that are far apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import aggregation, client, network, population, sampling, server
from fedjax_sim.algorithms import federated
from fedjax_sim.prng import stream
from fedjax_sim.running import kept_results
from fedjax_sim.study.availability import laws
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.study.quadratic_settings import QuadraticProblem
from fedjax_sim.types import Aggregator, Algorithm, Availability, Devices, Sampler, Spent

SLOT = 60  # seconds of a round, and of a slot of availability
HOUR, DAY = 3600, 86_400  # seconds
RATES = (0.15, 0.95)  # the range of the clients' probabilities of being available
LEFT = 1e-9  # what remains, between two measured models, of the earlier model
DAYS = 12
HOURS = (0, 4, 8, 12, 16, 20)  # that are compared
ROUNDING = 1e-5


class QuadraticFedAvg:
    """FedAvg on clients with risks |w - a_i|^2 / 2, whose curvature is 1.

    Attributes:
      num_steps: K local steps.
      step_size: eta.
      s: the share of the distance to its optimum that a client goes in a round.
      between: rounds after which the model has forgotten its past up to `LEFT`.
    """

    def __init__(self, num_steps: int, step_size: float):
        self.num_steps = num_steps
        self.step_size = step_size
        self.s = laws.round_contraction(num_steps, step_size)
        # After many local steps nothing remains: 1 - s may be zero, which has no logarithm.
        self.between = max(1, math.ceil(math.log(LEFT) / math.log(max(1 - self.s, LEFT))))

    def algorithm(
        self, sampler: Sampler, aggregator: Aggregator, weighting: Literal["examples", "uniform"] = "uniform"
    ) -> Algorithm:
        """Makes FedAvg.

        Args:
          sampler: draws the cohort.
          aggregator: combines the updates.
          weighting: how updates are weighted, by examples or uniformly.
        """
        work = client.work(num_steps=self.num_steps, weighting=weighting)
        local_training = client.local_sgd(population.quadratic_loss, optax.sgd(self.step_size), work)
        return federated(sampler, local_training, aggregator, server.optimizer(optax.sgd(1.0)), mesh=None)

    def looks(self, made: Algorithm, dimension: int, number: int, between: int) -> Callable:
        """Makes a function that runs an algorithm for a long time and returns its models at equal distances in time.

        The run starts from zero. The first model is left out, for it may still depend on the start.

        Args:
          made: the algorithm.
          dimension: d.
          number: how many models.
          between: rounds between two models.

        Returns: (key, centers [N, d]) -> models [number, d].
        """

        @jax.jit
        def run(key, people):
            def advance(t, state):
                return made.step(jax.random.fold_in(key, t), state, people)[0]

            def advance_to_next_model(state, i):
                state = jax.lax.fori_loop(i * between, (i + 1) * between, advance, state)
                return state, made.params(state)["w"]

            state = made.init(key, {"w": jnp.zeros(dimension)}, people)
            return jax.lax.scan(advance_to_next_model, state, jnp.arange(number + 1))[1]

        def models(key, centers):
            size = len(centers)
            people = QuadraticProblem(
                np.broadcast_to(np.eye(dimension), (size, dimension, dimension)), centers
            ).clients()
            return np.asarray(kept_results.call(run, key, people), np.float64)[1:]

        return models


def timeless(size: int, availability: Availability) -> Devices:
    """Makes devices that take no time, so that a round lasts as long as the server's overhead.

    Args:
      size: N.
      availability: decides when clients are available.
    """

    def spend(key, ids, load):
        no_time = jnp.zeros(ids.shape, jnp.int32)
        return Spent(no_time, no_time, no_time, jnp.zeros(ids.shape))

    return Devices(size, spend, availability)


def _clocked(size: int, availability: Availability, seconds: int) -> Sampler:
    """Makes a sampler that takes all available clients, with rounds of equal length in seconds."""
    devices = timeless(size, availability)
    return sampling.with_clock(sampling.full(size), devices, overhead_seconds=float(seconds), idle_seconds=1.0)


def by_chance(seed: int) -> Availability:
    """Makes clients that are available in each round independently, each with its own probability from `RATES`.

    Args:
      seed: decides the probabilities and the rounds in which clients are available.
    """
    return network.bernoulli(network.uniform(*RATES), slot_seconds=SLOT, seed=seed)


def rates_of(size: int, seed: int) -> np.ndarray:
    """Returns the clients' probabilities of being available under `by_chance`, [N] float64.

    Args:
      size: N.
      seed: the seed of `by_chance`.
    """
    rate = by_chance(seed).rate
    assert rate is not None, "that of `network.bernoulli` is known"
    return rate(np.arange(size))


def correlated(rates: np.ndarray, correlation: float, dimension: int, seed: int) -> np.ndarray:
    """Makes clients' optima whose first coordinate has exactly the given correlation with the clients' rates.

    Args:
      rates: [N].
      correlation: the correlation, in [0, 1].
      dimension: d, at most N - 2.
      seed: decides the optima.

    Returns: [N, d]; each coordinate has mean 1 and unit variance.
    """
    rng = np.random.default_rng([seed, 7])
    noise = rng.normal(size=(len(rates), dimension))
    # Orthogonal to the constant vector means mean zero, and orthogonal to the rates means uncorrelated.
    basis, _ = np.linalg.qr(np.column_stack([np.ones_like(rates), rates, noise])[:, : min(len(rates), 2 + dimension)])
    along_rates = basis[:, 1] * np.sign(basis[:, 1] @ rates)  # QR may flip the sign
    optima = basis[:, 2 : 2 + dimension]
    optima[:, 0] = correlation * along_rates + math.sqrt(1 - correlation**2) * optima[:, 0]
    return optima * math.sqrt(len(rates)) + 1.0


def rate_rows(
    work: QuadraticFedAvg, size: int, dimension: int, correlations: Sequence[float], *, num_looks: int, seed: int
) -> Iterator[Comparison]:
    """Measures FedAvg when each client is available with its own probability.

    The mean over available clients is compared with the Horvitz-Thompson estimator, which uses the known rates.

    Args:
      work: local training.
      size: N.
      dimension: d.
      correlations: correlations of rates and optima.
      num_looks: models behind each mean.
      seed: decides everything.

    Yields: for each correlation and each aggregate two comparisons: the bias of the first coordinate, and the excess
      loss.
    """
    availability = by_chance(seed)
    rates = rates_of(size, seed)
    # The correction needs the rates as the sampler's inclusion probabilities, so this sampler draws responses itself.
    with_known_rates = sampling.with_response_rates(sampling.full(size), rates.tolist())
    horvitz_thompson = aggregation.horvitz_thompson(with_known_rates.design, float(size))
    ways = {
        "mean": (
            laws.naive,
            work.algorithm(_clocked(size, availability, SLOT), aggregation.mean(weighting="uniform")),
        ),
        "corrected": (laws.corrected, work.algorithm(with_known_rates, horvitz_thompson, "examples")),
    }
    runs = {way: work.looks(algorithm, dimension, num_looks, work.between) for way, (_, algorithm) in ways.items()}
    for correlation in correlations:
        centers = correlated(rates, correlation, dimension, seed)
        for way, (law, _) in ways.items():
            predicted = law(centers, rates, work.s)
            optimum = centers.mean(0)
            key = stream(jax.random.key(seed), f"availability {correlation} {way}")
            models = runs[way](key, centers)
            conditions = {"part": "by client", "correlation": correlation, "aggregate": way}
            predicted_bias = float((predicted.mean - optimum)[0])
            yield measured(conditions, "bias", (models - optimum)[:, 0], predicted_bias, resolution=ROUNDING)
            excess = ((models - optimum) ** 2).sum(1) / 2
            yield measured(conditions, "excess loss", excess, predicted.excess(optimum), resolution=ROUNDING)


def persistence_rows(
    work: QuadraticFedAvg, size: int, dimension: int, stays: Sequence[float], *, num_looks: int, seed: int
) -> Iterator[Comparison]:
    """Measures FedAvg when clients stay and leave for several rounds at a time, independently of their data.

    Every client is available half of the time.

    Args:
      work: local training.
      size: N.
      dimension: d.
      stays: mean rounds of a presence and of an absence.
      num_looks: models behind each mean.
      seed: decides everything.

    Yields: for each stay two comparisons: the bias of the first coordinate, and the excess loss.
    """
    for rounds in stays:
        availability = network.markov(rounds * SLOT, rounds * SLOT, slot_seconds=SLOT, seed=seed)
        algorithm = work.algorithm(_clocked(size, availability, SLOT), aggregation.mean(weighting="uniform"))
        centers = correlated(rates_of(size, seed), 0.0, dimension, seed)
        predicted = laws.persistent(centers, 1 / rounds, 1 / rounds, work.s)
        optimum = centers.mean(0)
        key = stream(jax.random.key(seed), f"persistence {rounds}")
        # For independent models the Markov chains must be forgotten as well; their second eigenvalue is 1 - 2 / rounds.
        chain_memory = 1 if rounds <= 2 else math.ceil(math.log(1e-4) / math.log(1 - 2 / rounds))
        models = work.looks(algorithm, dimension, num_looks, work.between + chain_memory)(key, centers)
        conditions = {"part": "for a while", "stay": rounds}
        yield measured(conditions, "bias", (models - optimum)[:, 0], float((predicted.mean - optimum)[0]),
                       kind="leading order", resolution=ROUNDING)  # fmt: skip
        excess = ((models - optimum) ** 2).sum(1) / 2
        yield measured(conditions, "excess loss", excess, predicted.excess(optimum), kind="leading order",
                       resolution=ROUNDING)  # fmt: skip


def day(size: int, share: float, seed: int) -> tuple[Availability, np.ndarray, np.ndarray]:
    """Makes clients that are available for a share of the day, in different time zones.

    Args:
      size: N.
      share: the share of the day in which a client is available.
      seed: decides the clients' time zones.

    Returns: (availability, who is available at each hour [24, N], the clients' optima [N, 2]). Optima lie on the unit
      circle, at the angle of the hour in which a client's window begins.
    """
    window = network.daily_window(share, seed=seed)
    is_available = np.stack([window.at(jnp.arange(size), jnp.int32(hour * HOUR)) for hour in range(24)])
    # A window begins at the hour in which a client is available and was not an hour before.
    begins = np.argmax(is_available & ~np.roll(is_available, 1, 0), 0)
    angle = 2 * math.pi * begins / 24
    return window, is_available, np.stack([np.cos(angle), np.sin(angle)], 1)


def day_rows(work: QuadraticFedAvg, size: int, share: float, seed: int) -> Iterator[Comparison]:
    """Measures FedAvg with clients in time zones: trained around the clock with a round an hour, or once a day.

    Args:
      work: local training.
      size: N.
      share: the share of the day in which a client is available.
      seed: decides everything.

    Yields: for each training and each hour at which it is looked at, the distance of a model to the optimum.
    """
    window, is_available, centers = day(size, share, seed)
    optimum = centers.mean(0)
    for training, seconds in (("around the clock", HOUR), ("at one hour", DAY)):
        algorithm = work.algorithm(_clocked(size, window, seconds), aggregation.mean(weighting="uniform"))
        number = 24 * DAYS if seconds == HOUR else 40
        models = work.looks(algorithm, 2, number, 1)(jax.random.key(seed), centers)
        # (model, prediction) by hour. models[i] is the model after i + 2 rounds, because `looks` leaves out the first.
        if seconds == HOUR:
            path = laws.daily(centers, is_available, work.s, DAYS)
            pairs = {hour: (models[24 * (DAYS - 1) + hour - 2], path[hour]) for hour in HOURS}
        else:
            # After number + 1 rounds, all of them at hour 0.
            pairs = {0: (models[-1], laws.daily(centers, is_available[:1], work.s, number + 2)[0])}
        for hour, (model, expected) in pairs.items():
            conditions = {"part": "by hour", "training": training, "step_size": work.step_size, "hour": hour}
            distances = (float(np.linalg.norm(x - optimum)) for x in (model, expected))
            yield measured(conditions, "distance to the optimum", next(distances), next(distances), resolution=1e-4)
