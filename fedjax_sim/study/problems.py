"""The smallest problem of the studies, clients that hold vectors, and several algorithms as one program."""

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
from fedjax_sim.types import Aggregator, Algorithm, Array, Population, Sampler, UpdateTransform

__all__ = ["Vectors", "side_by_side"]


def _loss(params, examples, key):
    return {"loss": 0.5 * jnp.sum((params["w"][None] - examples["x"]) ** 2, -1)}


class Vectors:
    """N clients with risks |w - u_i|^2 / 2: one step of size eta from w makes the update eta (u_i - w).

    A round with step size 1 from w = 0 releases the mean of the u_i; rounds with eta < 1 contract by 1 - eta.
    """

    def __init__(self, values: Any):
        self.values = np.asarray(values, np.float32)
        self.size, self.dimension = self.values.shape
        self.mean = self.values.astype(np.float64).mean(0)
        self.zero = {"w": jnp.zeros(self.dimension)}

    @property
    def population(self) -> Population:
        """One example a client."""
        return population.indexed({"x": self.values}, (np.arange(self.size, dtype=np.int32), np.arange(self.size + 1)))

    def algorithm(
        self,
        update_transform: UpdateTransform | None = None,
        *,
        sampler: Sampler | None = None,
        aggregator: Aggregator | None = None,
        step_size: Any = 1.0,
    ) -> Algorithm:
        """One local step a round, and the sum of the transformed updates over the cohort's size.

        Args:
          update_transform: of every update; None sends it as it is.
          sampler: None takes all clients.
          aggregator: None divides by the number of slots.
          step_size: eta; it may be traced.
        """
        sampler = sampling.full(self.size) if sampler is None else sampler
        aggregator = aggregation.fixed_mean(sampler.num_slots) if aggregator is None else aggregator
        work = client.local_sgd(_loss, optax.sgd(step_size), client.work(num_steps=1, weighting="uniform"))
        change = transform.identity() if update_transform is None else update_transform
        return federated(sampler, work, aggregator, server.optimizer(optax.sgd(1.0)), transform=change, mesh=None)

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
        """Squared distances of independent runs from the clients' mean.

        Args:
          start: [d] where runs begin; zero by default.
          batch: runs under one vmap.

        Returns: [R] or [R, rounds], with a last axis for the rows of `side_by_side`.
        """
        mean = jnp.asarray(self.mean, jnp.float32)

        def distance(params):
            return {"error": jnp.sum((params["w"] - jnp.broadcast_to(mean, params["w"].shape)) ** 2, -1)}

        params = self.zero if start is None else {"w": jnp.asarray(start, jnp.float32)}
        found = independent_runs(
            key, algorithm, params, self.population, num_runs, evaluation=distance, rounds=rounds, batch=batch
        )
        return found["error"]


def side_by_side(make: Callable[..., Algorithm], values: Mapping[str, Sequence[float]]) -> Algorithm:
    """Several algorithms that differ in numbers only, as one: its model has a row for each, with randomness of its own.

    Args:
      make: (**numbers) -> Algorithm, called with traced numbers.
      values: V numbers for each name.

    Returns: an algorithm whose `params` have a leading axis V.

    Guarantees: row i is the algorithm of the i-th values alone, under fold_in(key, i)
    (tests/study/test_problems.py::test_side_by_side).

    >>> clients = Vectors([[1.0], [3.0]])
    >>> both = side_by_side(lambda eta: clients.algorithm(step_size=eta), {"eta": [0.5, 1.0]})
    >>> state = both.init(jax.random.key(0), clients.zero, clients.population)
    >>> both.params(both.step(jax.random.key(0), state, clients.population)[0])["w"].tolist()
    [[1.0], [2.0]]
    """
    rows = {name: jnp.asarray(column, jnp.float32) for name, column in values.items()}
    (count,) = {len(column) for column in rows.values()}

    def over(one: Callable, *args: Any) -> Any:
        return jax.vmap(one)(rows, jnp.arange(count), *args)

    def init(key, params, population):
        return over(lambda row, i: make(**row).init(jax.random.fold_in(key, i), params, population))

    @jax.jit  # traced once, however often loops around it are
    def step(key, states, population):
        def one(row, i, state):
            return make(**row).step(jax.random.fold_in(key, i), state, population)

        states, info = over(one, states)
        return states, {name: info[name].sum() for name in ("dropped_clients", "skipped_rounds") if name in info}

    def params(states):
        return over(lambda row, i, state: make(**row).params(state), states)

    return Algorithm(init, step, params)
