"""Which clients share a group, such as an edge server: in the order of their ids, at random, by size or by labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.federated_data import FederatedData
from fedjax_sim.population.groups.grouped import grouped
from fedjax_sim.population.partition import generator
from fedjax_sim.population.protocol import sizes_of, visitable
from fedjax_sim.types import Population
from fedjax_sim.validate import NonNegativeInt

__all__ = ["counts_of_labels_in_range", "with_groups"]

WAYS = ("order", "random", "size", "labels")


@validate.named_arguments
def with_groups(
    data: FederatedData,
    *,
    num_groups: int | None = None,
    by: Literal["order", "random", "size", "labels"] = "order",
    groups: Sequence[int] | None = None,
    seed: NonNegativeInt = 0,
) -> FederatedData:
    """The data set whose training clients are groups of clients, for a hierarchy; for others a group pools its rows.

    Args:
      data: any data set of N clients.
      num_groups: G in [1, N].
      by: "order": clients of neighbouring ids, such as sites that are listed one after the other; "random"; "size":
        of like numbers of examples; "labels": k-means of the clients' shares of labels, which makes groups of unequal
        size and needs the task "binary" or "classification". The first three differ by one client at most.
      groups: [N] the group of each client, in the place of `num_groups` and `by`.
      seed: of "random" and "labels".

    Returns: the same data set with `population.Grouped` clients; a group's local test has its clients' rows, other test
    sets are unchanged. Wrappers that are applied afterwards change a group's pooled rows, and a hierarchy refuses them;
    in a config of a hierarchy the groups go around all other wrappers, wherever the table stands.

    Raises: ValueError, TypeError for options out of range, for more than one way or none, and for groups without a
    client.

    Guarantees: every client is in one group, like ones together
    (tests/population/groups/test_groups.py::test_ways_to_group, ::test_groups_by_labels), their local tests too
    (::test_a_group_has_its_clients_local_tests); in a hierarchy's config they are outermost
    (tests/laws/test_wrappers.py::test_groups_go_around_all_others_in_a_hierarchy).

    >>> from fedjax_sim.population import synthetic_images
    >>> data = with_groups(synthetic_images(num_clients=10, examples_per_client=20), num_groups=4)
    >>> data.train.size, data.train.counts.tolist()
    (4, [3, 3, 2, 2])
    """
    if (num_groups is None) == (groups is None):
        validate.fail("num_groups, groups", "exactly one of the two", (num_groups, groups))
    if groups is not None:
        return _grouped(data, np.asarray(groups))
    size = data.train.size
    validate.integer("num_groups", num_groups, 1, size)
    if by == "labels":
        found = _alike(data, num_groups, seed)
    else:
        if by == "size":
            visitable(data.train)
        order = {
            "order": lambda: np.arange(size),
            "random": lambda: generator("groups", seed).permutation(size),
            "size": lambda: np.argsort(np.asarray(sizes_of(data.train)), kind="stable"),
        }[by]()
        found = np.empty(size, np.int64)
        for group, members in enumerate(np.array_split(order, num_groups)):
            found[members] = group
    return _grouped(data, found)


def _grouped(data: FederatedData, groups: np.ndarray) -> FederatedData:
    own = None if data.local_test is None else grouped(data.local_test, groups)
    return data._replace(train=grouped(data.train, groups), local_test=own)


def counts_of_labels_in_range(population: Population, num_labels: int) -> np.ndarray:
    """[N, K] int64: how many examples of each label a client holds, in `y`; labels outside of [0, K) are left out.

    >>> from fedjax_sim.population import stored
    >>> counts_of_labels_in_range(stored({"y": np.array([0, 2, 2])}, [0, 1, 3]), 3).tolist()
    [[1, 0, 0], [0, 0, 2]]
    """
    visitable(population)

    def count(id):
        data = population.client(id)
        labels = jnp.where(data.mask, data.examples["y"].astype(jnp.int32), num_labels)
        return jnp.zeros(num_labels, jnp.int32).at[labels].add(1, mode="drop")

    ids = jnp.arange(population.size, dtype=jnp.int32)
    counts = jax.lax.map(count, ids, batch_size=min(population.size, 4096))
    return np.asarray(counts, np.int64)


def _alike(data: FederatedData, num_groups: int, seed: int) -> np.ndarray:
    """[N] groups of clients with like shares of labels."""
    from sklearn.cluster import KMeans  # takes a second to import

    if data.task not in ("binary", "classification"):
        hint = "Take by='order', 'random' or 'size', or give the groups."
        validate.fail("by", f"another way for the task {data.task!r}", "labels", hint)
    counts = counts_of_labels_in_range(data.train, max(2, data.num_outputs))
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    distinct = len(np.unique(shares, axis=0))
    validate.integer("num_groups", num_groups, 1, distinct, hint=f"There are {distinct} different shares of labels.")
    found = KMeans(num_groups, n_init=4, random_state=seed % 2**32).fit_predict(shares)
    return np.unique(found, return_inverse=True)[1]
