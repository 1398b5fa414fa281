"""This module has the simplest problem of the studies, clients that hold vectors, and runs algorithms side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import aggregation, client, population, sampling, server, transform
from fedjax_sim.algorithms import federated
from fedjax_sim.instruments.runs import independent_runs
from fedjax_sim.types import Aggregator, Algorithm, Array, ParamsKind, Population, Sampler, UpdateTransform


def _loss(params, examples, key):
    """Returns |w - x|^2 / 2 for each example; its gradient in w is w - x."""
    return {"loss": 0.5 * jnp.sum((params["w"][None] - examples["x"]) ** 2, -1)}


class Vectors:
    """N clients, each with a vector u_i and the risk |w - u_i|^2 / 2.

    A step of SGD of size eta from w makes the update eta (u_i - w). A round with step size 1 from w = 0 therefore
    releases the mean of the u_i. Rounds with eta < 1 shorten the distance to the mean by the factor 1 - eta.
    """

    def __init__(self, values: Any):
        """Stores the clients' vectors.

        Args:
          values: [N, d] u_i.
        """
        self.values = np.asarray(values, np.float32)
        self.size, self.dimension = self.values.shape
        self.mean = self.values.astype(np.float64).mean(0)
        self.zero = {"w": jnp.zeros(self.dimension)}

    @property
    def population(self) -> Population:
        """The clients as a population: client i has one example, u_i."""
        partition = population.Partition(np.arange(self.size, dtype=np.int32), np.arange(self.size + 1))
        return population.indexed({"x": self.values}, partition)

    def algorithm(
        self,
        update_transform: UpdateTransform | None = None,
        *,
        sampler: Sampler | None = None,
        aggregator: Aggregator | None = None,
        step_size: Any = 1.0,
    ) -> Algorithm:
        """Makes an algorithm in which each client takes one local step a round.

        By default the server adds the sum of the transformed updates, divided by the cohort's size.

        Args:
          update_transform: the transform of every update; None sends updates unchanged.
          sampler: draws the cohort; None takes all clients.
          aggregator: combines the messages; None divides their sum by the number of slots.
          step_size: eta; it may be traced.
        """
        sampler = sampling.full(self.size) if sampler is None else sampler
        aggregator = aggregation.fixed_mean(sampler.num_slots) if aggregator is None else aggregator
        work = client.local_sgd(_loss, optax.sgd(step_size), client.work(num_steps=1, weighting="uniform"))
        message_transform = transform.identity() if update_transform is None else update_transform
        server_step = server.optimizer(optax.sgd(1.0))  # adds the aggregate as it is
        return federated(sampler, work, aggregator, server_step, transform=message_transform, mesh=None)

    def errors(
        self,
        key: Array,
        algorithm: Algorithm,
        num_runs: int,
        rounds: int | Sequence[int] = 1,
        *,
        batch: int = 1,
        start: Any = None,
    ) -> np.ndarray:
        """Measures squared distances of independent runs from the clients' mean.

        Args:
          key: the random key of all runs.
          algorithm: what is run, such as the result of `algorithm` or of `side_by_side`.
          num_runs: R.
          rounds: how many rounds a run has, or several numbers of rounds after which the distance is measured.
          batch: runs under one vmap.
          start: [d] the first model of every run; zero by default.

        Returns: [R] or [R, rounds], with a last axis for the rows of `side_by_side`.
        """
        mean = jnp.asarray(self.mean, jnp.float32)

        def distance(params):
            # The parameters of `side_by_side` have a leading axis, which the mean must follow.
            return {"error": jnp.sum((params["w"] - jnp.broadcast_to(mean, params["w"].shape)) ** 2, -1)}

        params = self.zero if start is None else {"w": jnp.asarray(start, jnp.float32)}
        measurements = independent_runs(
            key, algorithm, params, self.population, num_runs, evaluation=distance, rounds=rounds, batch=batch
        )
        return measurements["error"]


def side_by_side(make: Callable[..., Algorithm], values: Mapping[str, Sequence[float]]) -> Algorithm:
    """Combines several algorithms that differ only in numbers into one algorithm, so that they share one program.

    The model of the combined algorithm has a row for each of them, and each row has its own randomness.

    Args:
      make: (**numbers) -> Algorithm, called with traced numbers.
      values: V numbers for each name. For example, {"eta": [0.5, 1.0]} makes two algorithms.

    Returns: an algorithm whose `params` have a leading axis V.

    Guarantees: row i is the algorithm of the i-th values alone, under fold_in(key, i)
    (tests/study/test_problems.py::test_side_by_side).

    >>> clients = Vectors([[1.0], [3.0]])
    >>> both = side_by_side(lambda eta: clients.algorithm(step_size=eta), {"eta": [0.5, 1.0]})
    >>> state = both.init(jax.random.key(0), clients.zero, clients.population)
    >>> both.params(both.step(jax.random.key(0), state, clients.population)[0])["w"].tolist()
    [[1.0], [2.0]]
    """
    # All names must have the same number of values.
    rows = {name: jnp.asarray(column, jnp.float32) for name, column in values.items()}
    (count,) = {len(column) for column in rows.values()}

    def over(function: Callable, *args: Any) -> Any:
        """Maps function(numbers of a row, row index, ...) over the rows."""
        return jax.vmap(function)(rows, jnp.arange(count), *args)

    def init(key, params, population):
        return over(lambda row, i: make(**row).init(jax.random.fold_in(key, i), params, population))

    @jax.jit  # traced once, however often loops around it are
    def step(key, states, population):
        def step_row(row, i, state):
            return make(**row).step(jax.random.fold_in(key, i), state, population)

        states, info = over(step_row, states)
        # Of all that a step reports, only these counts keep their meaning when they are summed over the rows.
        return states, {name: info[name].sum() for name in ("dropped_clients", "skipped_rounds") if name in info}

    def params(states):
        return over(lambda row, i, state: make(**row).params(state), states)

    return Algorithm(init, step, params, params_kind=ParamsKind.MODEL)
