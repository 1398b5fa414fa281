"""Partitioners of a table's rows among simulated clients, by name: `partition = {name = "dirichlet", ...}` in a config.

Each is a function of `population` whose labels come later, when the table is read. Who holds a row by nature needs no
partitioner: `client` names the column of ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.population import partition
from fedjax_sim.validate import NonNegative, NonNegativeInt, Number, PositiveInt


class Partitioner(NamedTuple):
    """A partitioner assigns the rows of a table to clients: labels [rows] -> `population.Partition`."""

    divide: Callable[[np.ndarray], partition.Partition]


@validate.named_arguments
def iid(*, num_clients: PositiveInt, seed: NonNegativeInt = 0) -> Partitioner:
    """Rows are given to clients at random, and sizes differ by one at most; see `population.iid`.

    >>> iid(num_clients=3).divide(np.zeros(7)).sizes.tolist()
    [3, 2, 2]
    """
    return Partitioner(lambda labels: partition.iid(len(labels), num_clients, seed=seed))


@validate.named_arguments
def dirichlet(
    *,
    num_clients: PositiveInt,
    alpha: Annotated[float, Number(0, open_low=True)],
    min_examples: NonNegativeInt = 1,
    seed: NonNegativeInt = 0,
) -> Partitioner:
    """Every class is divided among the clients in Dirichlet(alpha) proportions; see `population.dirichlet`.

    >>> int(dirichlet(num_clients=2, alpha=0.5).divide(np.array([0, 0, 1, 1])).sizes.sum())
    4
    """
    options = {"min_examples": min_examples, "seed": seed}
    return Partitioner(lambda labels: partition.dirichlet(labels, num_clients, alpha, **options))


@validate.named_arguments
def dirichlet_draws(
    *,
    num_clients: PositiveInt,
    alpha: Annotated[float, Number(0, open_low=True)],
    min_examples: PositiveInt = 20,
    max_examples: PositiveInt = 60,
    seed: NonNegativeInt = 0,
) -> Partitioner:
    """Clients draw rows with replacement, by Dirichlet(alpha) shares of labels; see `population.dirichlet_draws`.

    There may be more clients than rows, and clients may share rows.

    Args:
      num_clients, alpha, min_examples, max_examples, seed: as in `population.dirichlet_draws`.

    >>> dirichlet_draws(num_clients=5, alpha=0.5).divide(np.array([0, 1])).sizes.shape
    (5,)
    """
    options = {"min_examples": min_examples, "max_examples": max_examples, "seed": seed}
    return Partitioner(lambda labels: partition.dirichlet_draws(labels, num_clients, alpha, **options))


@validate.named_arguments
def shards(*, num_clients: PositiveInt, shards_per_client: PositiveInt = 2, seed: NonNegativeInt = 0) -> Partitioner:
    """Rows are sorted by class and cut into shards, of which each client gets a few; see `population.shards`.

    >>> shards(num_clients=3, shards_per_client=1).divide(np.array([0, 0, 1, 1, 2, 2])).sizes.tolist()
    [2, 2, 2]
    """
    return Partitioner(lambda labels: partition.shards(labels, num_clients, shards_per_client, seed=seed))


@validate.named_arguments
def pathological(
    *, num_clients: PositiveInt, classes_per_client: PositiveInt = 2, seed: NonNegativeInt = 0
) -> Partitioner:
    """Clients have rows of exactly `classes_per_client` classes each; see `population.pathological`.

    >>> pathological(num_clients=3).divide(np.array([0, 0, 1, 1, 2, 2])).sizes.tolist()
    [2, 2, 2]
    """
    return Partitioner(lambda labels: partition.pathological(labels, num_clients, classes_per_client, seed=seed))


@validate.named_arguments
def power_law_sizes(
    *,
    num_clients: PositiveInt,
    exponent: Annotated[float, Number(1, open_low=True)] = 2.0,
    min_examples: NonNegativeInt = 1,
    seed: NonNegativeInt = 0,
) -> Partitioner:
    """Clients have sizes drawn from a power law, and their labels stay IID; see `population.quantity_power_law`.

    Args:
      num_clients, exponent, min_examples, seed: as in `population.quantity_power_law`.

    >>> int(power_law_sizes(num_clients=2).divide(np.zeros(7)).sizes.sum())
    7
    """
    return Partitioner(
        lambda labels: partition.quantity_power_law(
            len(labels), num_clients, exponent=exponent, min_examples=min_examples, seed=seed
        )
    )


@validate.named_arguments
def lognormal_sizes(
    *,
    num_clients: PositiveInt,
    sigma: NonNegative = 1.0,
    min_examples: NonNegativeInt = 1,
    seed: NonNegativeInt = 0,
) -> Partitioner:
    """Clients have lognormal sizes, and their labels stay IID; see `population.quantity_lognormal`.

    Args:
      num_clients, sigma, min_examples, seed: as in `population.quantity_lognormal`.

    >>> lognormal_sizes(num_clients=4, sigma=0.0).divide(np.zeros(100)).sizes.tolist()
    [25, 25, 25, 25]
    """
    return Partitioner(
        lambda labels: partition.quantity_lognormal(
            len(labels), num_clients, sigma=sigma, min_examples=min_examples, seed=seed
        )
    )
