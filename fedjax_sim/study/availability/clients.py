"""Clients who come and go, on simulated time: long runs of FedAvg beside their closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import aggregation, client, network, population, sampling, server
from fedjax_sim.algorithms import federated
from fedjax_sim.prng import stream
from fedjax_sim.study.availability import laws
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.study.quadratic_settings import Problem
from fedjax_sim.types import Aggregator, Algorithm, Availability, Devices, Sampler, Spent

__all__ = ["DAYS", "QuadraticFedAvg", "correlated", "day", "day_rows", "persistence_rows", "rate_rows", "rates_of"]

SLOT = 60  # seconds: of a round, and of a slot of availability
HOUR, DAY = 3600, 86_400
RATES = (0.15, 0.95)  # of clients who are there by chance
LEFT = 1e-9  # of the way from the start, and of the dependence between looks
DAYS = 12
HOURS = (0, 4, 8, 12, 16, 20)  # that are compared
ROUNDING = 1e-5


class QuadraticFedAvg:
    """FedAvg over quadratics of curvature 1."""

    def __init__(self, num_steps: int, step_size: float):
        self.num_steps, self.step_size = num_steps, step_size
        self.s = laws.round_contraction(num_steps, step_size)
        self.between = max(1, math.ceil(math.log(LEFT) / math.log(1 - self.s)))  # rounds between two looks

    def algorithm(self, sampler: Sampler, aggregator: Aggregator, weighting: str = "uniform") -> Algorithm:
        work = client.work(num_steps=self.num_steps, weighting=weighting)
        local = client.local_sgd(population.quadratic_loss, optax.sgd(self.step_size), work)
        return federated(sampler, local, aggregator, server.optimizer(optax.sgd(1.0)), mesh=None)

    def looks(self, made: Algorithm, dimension: int, number: int, between: int) -> Callable:
        """(key, centers [N, d]) -> [number, d], the models after each `between` rounds of one long run from zero.

        The first look is left out.
        """

        @jax.jit
        def run(key, people):
            def one(t, state):
                return made.step(jax.random.fold_in(key, t), state, people)[0]

            def look(state, i):
                state = jax.lax.fori_loop(i * between, (i + 1) * between, one, state)
                return state, made.params(state)["w"]

            state = made.init(key, {"w": jnp.zeros(dimension)}, people)
            return jax.lax.scan(look, state, jnp.arange(number + 1))[1]

        def found(key, centers):
            size = len(centers)
            people = Problem(np.broadcast_to(np.eye(dimension), (size, dimension, dimension)), centers).clients()
            return np.asarray(run(key, people), np.float64)[1:]

        return found


def timeless(size: int, availability: Availability) -> Devices:
    """Devices that take no time, so that a round lasts as long as the server's overhead."""

    def spend(key, ids, load):
        return Spent(*(jnp.zeros(ids.shape, jnp.int32),) * 3, jnp.zeros(ids.shape))

    return Devices(size, spend, availability)


def _clocked(size: int, availability: Availability, seconds: int) -> Sampler:
    devices = timeless(size, availability)
    return sampling.with_clock(sampling.full(size), devices, overhead_seconds=float(seconds), idle_seconds=1.0)


def by_chance(seed: int) -> Availability:
    """Clients with a chance of their own in each round."""
    return network.bernoulli(network.uniform(*RATES), slot_seconds=SLOT, seed=seed)


def rates_of(size: int, seed: int) -> np.ndarray:
    """[N] float64, the clients' chances."""
    return by_chance(seed).rate(np.arange(size))


def correlated(rates: np.ndarray, correlation: float, dimension: int, seed: int) -> np.ndarray:
    """[N, d] optima of unit variance a coordinate, whose first has this correlation with the rates, exactly."""
    rng = np.random.default_rng([seed, 7])
    noise = rng.normal(size=(len(rates), dimension))
    basis, _ = np.linalg.qr(np.column_stack([np.ones_like(rates), rates, noise])[:, : min(len(rates), 2 + dimension)])
    along = basis[:, 1] * np.sign(basis[:, 1] @ rates)
    others = basis[:, 2 : 2 + dimension]
    others[:, 0] = correlation * along + math.sqrt(1 - correlation**2) * others[:, 0]
    return others * math.sqrt(len(rates)) + 1.0


def rate_rows(
    work: QuadraticFedAvg, size: int, dimension: int, correlations: Sequence[float], num_looks: int, seed: int
) -> Iterator[Comparison]:
    """Each client is there with a chance of its own: the mean, and Horvitz-Thompson with the known rates."""
    there, rates = by_chance(seed), rates_of(size, seed)
    known = sampling.with_response_rates(sampling.full(size), rates.tolist())
    ways = {
        "mean": (laws.naive, work.algorithm(_clocked(size, there, SLOT), aggregation.mean(weighting="uniform"))),
        "corrected": (
            laws.corrected,
            work.algorithm(known, aggregation.horvitz_thompson(known.design, float(size)), "examples"),
        ),
    }
    looks = {way: work.looks(made, dimension, num_looks, work.between) for way, (_, made) in ways.items()}
    for correlation in correlations:
        centers = correlated(rates, correlation, dimension, seed)
        for way, (law, _) in ways.items():
            predicted, optimum = law(centers, rates, work.s), centers.mean(0)
            key = stream(jax.random.key(seed), f"availability {correlation} {way}")
            found = looks[way](key, centers)
            conditions = {"part": "by client", "correlation": correlation, "aggregate": way}
            yield measured(
                conditions, "bias", (found - optimum)[:, 0], float((predicted.mean - optimum)[0]), resolution=ROUNDING
            )
            excess = ((found - optimum) ** 2).sum(1) / 2
            yield measured(conditions, "excess loss", excess, predicted.excess(optimum), resolution=ROUNDING)


def persistence_rows(
    work: QuadraticFedAvg, size: int, dimension: int, stays: Sequence[float], num_looks: int, seed: int
) -> Iterator[Comparison]:
    """Clients are there half of the time, for some rounds on end, whatever their data."""
    for rounds in stays:
        there = network.markov(rounds * SLOT, rounds * SLOT, slot_seconds=SLOT, seed=seed)
        made = work.algorithm(_clocked(size, there, SLOT), aggregation.mean(weighting="uniform"))
        centers = correlated(rates_of(size, seed), 0.0, dimension, seed)
        predicted, optimum = laws.persistent(centers, 1 / rounds, 1 / rounds, work.s), centers.mean(0)
        key = stream(jax.random.key(seed), f"persistence {rounds}")
        # looks are as far apart as the chain remembers, too
        forgets = 1 if rounds <= 2 else math.ceil(math.log(1e-4) / math.log(1 - 2 / rounds))
        found = work.looks(made, dimension, num_looks, work.between + forgets)(key, centers)
        conditions = {"part": "for a while", "stay": rounds}
        yield measured(conditions, "bias", (found - optimum)[:, 0], float((predicted.mean - optimum)[0]),
                       kind="leading order", resolution=ROUNDING)  # fmt: skip
        excess = ((found - optimum) ** 2).sum(1) / 2
        yield measured(conditions, "excess loss", excess, predicted.excess(optimum), kind="leading order",
                       resolution=ROUNDING)  # fmt: skip


def day(size: int, share: float, seed: int) -> tuple[Availability, np.ndarray, np.ndarray]:
    """(When clients are there, [24, N] who is at each hour, [N, 2] their optima on a circle by their time zone)."""
    window = network.daily_window(share, seed=seed)
    there = np.stack([window.at(jnp.arange(size), jnp.int32(hour * HOUR)) for hour in range(24)])
    begins = np.argmax(there & ~np.roll(there, 1, 0), 0)
    angle = 2 * math.pi * begins / 24
    return window, there, np.stack([np.cos(angle), np.sin(angle)], 1)


def day_rows(work: QuadraticFedAvg, size: int, share: float, seed: int) -> Iterator[Comparison]:
    """Clients are there in their night, and have data of their zone: training around the clock, or at one hour only."""
    window, there, centers = day(size, share, seed)
    optimum = centers.mean(0)
    for training, seconds in (("around the clock", HOUR), ("at one hour", DAY)):
        made = work.algorithm(_clocked(size, window, seconds), aggregation.mean(weighting="uniform"))
        number = 24 * DAYS if seconds == HOUR else 40
        found = work.looks(made, 2, number, 1)(jax.random.key(seed), centers)
        if seconds == HOUR:
            path = laws.daily(centers, there, work.s, DAYS)
            at = {hour: (found[24 * (DAYS - 1) + hour - 2], path[hour]) for hour in HOURS}
        else:
            at = {0: (found[-1], laws.daily(centers, there[:1], work.s, number + 2)[0])}  # after number + 1 rounds
        for hour, (model, expected) in at.items():
            conditions = {"part": "by hour", "training": training, "step_size": work.step_size, "hour": hour}
            distances = (float(np.linalg.norm(x - optimum)) for x in (model, expected))
            yield measured(conditions, "distance to the optimum", next(distances), next(distances), resolution=1e-4)
