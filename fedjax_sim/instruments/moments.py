"""Computes mean and variance of all clients' updates from one model, without storing the updates."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import aggregation, sampling, server, transform, tree
from fedjax_sim.round.round import aggregate, collect, initial_state, invite
from fedjax_sim.types import Array, ClientUpdate, Mean, Population, PyTree, Sampler, Star

# Clients of a pilot. Its mean update is subtracted from all updates, so that their squares do not cancel.
PILOT = 1000


class Moments(NamedTuple):
    """Moments of the updates u_i of all N clients; each client counts once."""

    size: int  # N
    mean: PyTree  # mean update
    variance: float  # (1/N) sum |u_i - mean|^2: divisor N, summed over coordinates


def population_moments(key: Array, client: ClientUpdate, params: PyTree, population: Population) -> Moments:
    """Computes the mean and the variance of all clients' updates, without storing the updates.

    It runs one round with full participation, after one round of a pilot cohort. Memory does not grow with N times d.

    Args:
      key: the key of the clients' own randomness; with full local batches nothing depends on it.
      client: a stateless client.
      params: the model that the clients are sent.
      population: all clients.

    Returns: `Moments`.

    Raises: FloatingPointError if a client's update is not finite: the population then has no variance.

    Guarantees: the moments agree with float64 NumPy over all clients' updates
    (tests/instruments/test_runs.py::test_population_moments).
    """
    size = population.size
    pilot = sampling.uniform(size, min(PILOT, size))
    center, _ = _pass(key, pilot, client, params, population, center=tree.zeros_like(params))
    mean, squared = _pass(key, sampling.full(size), client, params, population, center=center)
    # |u - mean|^2 averages to |u - center|^2 minus |mean - center|^2.
    return Moments(size, mean, max(squared - _squared_distance(mean, center), 0.0))


def _squared_distance(first: PyTree, second: PyTree) -> float:
    """Returns the squared distance of two models, in float64."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return sum(float(np.sum((np.asarray(x, np.float64) - np.asarray(y, np.float64)) ** 2)) for x, y in pairs)


def _pass(
    key: Array, sampler: Sampler, client: ClientUpdate, params: PyTree, population: Population, *, center: PyTree
) -> tuple[PyTree, float]:
    """Runs one round, in which each client of the cohort counts once: mean u_i, and mean |u_i - center|^2.

    Args:
      key: of the round.
      sampler: of the cohort.
      client: a stateless client, whose update is u_i.
      params: the model that the clients are sent.
      population: all clients.
      center: a pytree like params.

    Returns: (the mean update, a pytree like params on the host; the mean of the squared distances, summed over
      coordinates in float32).

    Raises: FloatingPointError if a client's update is not finite.
    """

    def apply(key, broadcast, state, data):
        report, state = client.apply(key, broadcast, state, data)
        squared = [jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(tree.subtract(report.update, center))]
        return report._replace(metrics={"squared_distance": Mean(jnp.asarray(sum(squared)), jnp.ones(()))}), state

    aggregator = aggregation.mean(weighting="uniform")
    replacement = server.replacement()
    star = Star(sampler, client._replace(apply=apply), aggregator, replacement, transform.identity())

    @jax.jit
    def mean_update(state, population):
        cohort, _ = invite(star, key, state)
        gathered = collect(star, key, cohort, state, population)
        return aggregate(star, key, cohort, gathered, state), gathered.num_arrived, gathered.num_dropped

    round_result = jax.device_get(mean_update(initial_state(star, params, population), population))
    result, num_arrived, num_dropped = round_result
    if num_dropped or not num_arrived:
        raise FloatingPointError(
            f"{num_dropped} updates were not finite and {num_arrived} were: lower the learning rate."
        )
    squared = result.means["squared_distance"]
    return result.update, float(squared.total / squared.weight)
