"""Partitioners of a table's rows among simulated clients, by name: `partition = {name = "dirichlet", ...}` in a config.

Each is a function of `population` whose labels come later, when the table is read. Who holds a row by nature needs no
partitioner: `client` names the column of ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def _of_sizes(divide: Callable[[int], partition.Partition], alpha: float | None, seed: int) -> Partitioner:
    """Returns the partitioner whose clients have the sizes of another one.

    Args:
      divide: number of rows -> a partition, whose labels are IID.
      alpha: labels are skewed as in `population.dirichlet_of_sizes`. None keeps the partition as it is.
      seed: of the skewed labels.
    """

    def skewed(labels: np.ndarray) -> partition.Partition:
        parts = divide(len(labels))
        return parts if alpha is None else partition.dirichlet_of_sizes(labels, parts.sizes, alpha, seed=seed)

    return Partitioner(skewed)


@validate.named_arguments
def power_law_sizes(
    *,
    num_clients: PositiveInt,
    exponent: Annotated[float, Number(1, open_low=True)] = 2.0,
    min_examples: NonNegativeInt = 1,
    alpha: Annotated[float, Number(0, open_low=True)] | None = None,
    seed: NonNegativeInt = 0,
) -> Partitioner:
    """Clients have sizes drawn from a power law; see `population.quantity_power_law`.

    Args:
      num_clients, exponent, min_examples, seed: as in `population.quantity_power_law`.
      alpha: labels are skewed at these sizes, as in `population.dirichlet_of_sizes`. For None they stay IID.

    >>> int(power_law_sizes(num_clients=2).divide(np.zeros(7)).sizes.sum())
    7
    """
    options = {"exponent": exponent, "min_examples": min_examples, "seed": seed}
    return _of_sizes(lambda rows: partition.quantity_power_law(rows, num_clients, **options), alpha, seed)


@validate.named_arguments
def lognormal_sizes(
    *,
    num_clients: PositiveInt,
    sigma: NonNegative = 1.0,
    min_examples: NonNegativeInt = 1,
    alpha: Annotated[float, Number(0, open_low=True)] | None = None,
    seed: NonNegativeInt = 0,
) -> Partitioner:
    """Clients have lognormal sizes; see `population.quantity_lognormal`.

    Args:
      num_clients, sigma, min_examples, seed: as in `population.quantity_lognormal`.
      alpha: as in `power_law_sizes`.

    >>> lognormal_sizes(num_clients=4, sigma=0.0).divide(np.zeros(100)).sizes.tolist()
    [25, 25, 25, 25]
    """
    options = {"sigma": sigma, "min_examples": min_examples, "seed": seed}
    return _of_sizes(lambda rows: partition.quantity_lognormal(rows, num_clients, **options), alpha, seed)


@validate.named_arguments
def linear_sizes(
    *,
    num_clients: PositiveInt,
    min_examples: NonNegativeInt = 1,
    alpha: Annotated[float, Number(0, open_low=True)] | None = None,
    seed: NonNegativeInt = 0,
) -> Partitioner:
    """Clients have sizes in proportion to 1, 2, ..., N; see `population.quantity_linear`.

    Args:
      num_clients, min_examples, seed: as in `population.quantity_linear`.
      alpha: as in `power_law_sizes`.

    >>> linear_sizes(num_clients=3, alpha=0.1).divide(np.arange(60) % 2).sizes.tolist()
    [10, 20, 30]
    """
    options = {"min_examples": min_examples, "seed": seed}
    return _of_sizes(lambda rows: partition.quantity_linear(rows, num_clients, **options), alpha, seed)


@validate.named_arguments
def exponential_sizes(
    *,
    num_clients: PositiveInt,
    ratio: Annotated[float, Number(1)],
    min_examples: NonNegativeInt = 1,
    alpha: Annotated[float, Number(0, open_low=True)] | None = None,
    seed: NonNegativeInt = 0,
) -> Partitioner:
    """Each client has `ratio` times as many rows as the one before; see `population.quantity_exponential`.

    Args:
      num_clients, ratio, min_examples, seed: as in `population.quantity_exponential`.
      alpha: as in `power_law_sizes`.

    >>> exponential_sizes(num_clients=3, ratio=2.0).divide(np.zeros(70)).sizes.tolist()
    [10, 20, 40]
    """
    options = {"ratio": ratio, "min_examples": min_examples, "seed": seed}
    return _of_sizes(lambda rows: partition.quantity_exponential(rows, num_clients, **options), alpha, seed)


@validate.named_arguments
def given_sizes(
    *,
    sizes: Sequence[int],
    alpha: Annotated[float, Number(0, open_low=True)] | None = None,
    seed: NonNegativeInt = 0,
) -> Partitioner:
    """Client i has `sizes[i]` rows; see `population.quantity_given`.

    Args:
      sizes, seed: as in `population.quantity_given`.
      alpha: as in `power_law_sizes`.

    >>> given_sizes(sizes=[1, 2, 3], alpha=0.5).divide(np.array([0, 0, 0, 1, 1, 1])).sizes.tolist()
    [1, 2, 3]
    """
    return _of_sizes(lambda rows: partition.quantity_given(rows, sizes, seed=seed), alpha, seed)
