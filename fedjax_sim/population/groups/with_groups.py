"""This module chooses which clients share a group, such as an edge server: by id, at random, by size or by labels."""

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
from fedjax_sim.population.records import with_record
from fedjax_sim.types import Learned, Population
from fedjax_sim.validate import NonNegativeInt

GROUP_ORDERS = ("order", "random", "size", "labels")
MOST_NAMED = 3  # clients that name a group


@validate.named_arguments
def with_groups(
    data: FederatedData,
    *,
    num_groups: int | None = None,
    by: Literal["order", "random", "size", "labels"] = "order",
    groups: Sequence[int] | None = None,
    seed: NonNegativeInt = 0,
) -> FederatedData:
    """The training clients become groups of clients, for a hierarchy. Other algorithms see a group's pooled rows.

    Args:
      data: any data set of N clients.
      num_groups: G in [1, N]; None beside `groups`.
      by: how clients are grouped.
        "order": neighbouring ids, such as sites that are listed one after the other.
        "random": at random.
        "size": similar numbers of examples.
        "labels": similar shares of labels, by k-means. It needs the task "binary" or "classification".
        With "labels" groups have unequal sizes. Otherwise their sizes differ by one client at most. Beside noise "size"
      and "labels" are refused, since one client's rows can change the groups of all others.
      groups: [N] the group of each client, instead of `num_groups` and `by`.
      seed: of "random" and "labels".

    Returns: the same data set with `population.Grouped` clients. A group's local test has the rows of its clients, its
    name lists the first three of them, and other test sets are unchanged. Wrappers that are applied afterwards change a
    group's pooled rows, so a hierarchy refuses them. In the config of a hierarchy the groups go around all other
    wrappers, wherever the table stands.

    Raises: ValueError or TypeError for options out of range, for both or neither of `num_groups` and `groups`, and for
    groups without a client.

    Guarantees: every client is in one group, together with similar clients
    (tests/population/groups/test_groups.py::test_ways_to_group, ::test_groups_by_labels), and so are their local tests
    (::test_a_group_has_its_clients_local_tests). In the config of a hierarchy the groups are outermost
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
    assert num_groups is not None, "one of the two is given"
    size = data.train.size
    validate.integer("num_groups", num_groups, 1, size)
    if by in ("labels", "size"):
        effect = "move every other client to another group"
        instead = 'with_groups.groups = [...], or with_groups.by = "order" or "random"'
        record = Learned(f"the groups by {by}", (), effect, instead)
        data = data._replace(train=with_record(data.train, record))
    if by == "labels":
        group_of_client = _groups_by_labels(data, num_groups, seed)
    else:
        if by == "size":
            visitable(data.train)
        # The clients are ordered in one of three ways, and neighbours in that order share a group.
        order = {
            "order": lambda: np.arange(size),
            "random": lambda: generator("groups", seed).permutation(size),
            "size": lambda: np.argsort(np.asarray(sizes_of(data.train)), kind="stable"),
        }[by]()
        group_of_client = np.empty(size, np.int64)
        for group, members in enumerate(np.array_split(order, num_groups)):
            group_of_client[members] = group
    return _grouped(data, group_of_client)


def _grouped(data: FederatedData, groups: np.ndarray) -> FederatedData:
    """Groups the training clients and their local tests, whose ids are the same, alike."""
    local_test = None if data.local_test is None else grouped(data.local_test, groups)
    names = None if data.client_names is None else _names_of_groups(data.client_names, groups)
    return data._replace(train=grouped(data.train, groups), local_test=local_test, client_names=names)


def _names_of_groups(names: Sequence[str], groups: np.ndarray) -> tuple[str, ...]:
    """Returns a name for each group: those of its first clients, which no other group has."""
    members: list[list[str]] = [[] for _ in range(int(groups.max()) + 1)]
    for name, group in zip(names, groups.tolist(), strict=True):
        members[group].append(name)
    return tuple(
        " + ".join(of_group[:MOST_NAMED]) + (f" + {more:,} more" if (more := len(of_group) - MOST_NAMED) > 0 else "")
        for of_group in members
    )


def counts_of_labels_in_range(population: Population, num_labels: int) -> np.ndarray:
    """Counts how many examples of each label every client holds, [N, K] int64.

    Labels are read from `y`. Labels of K or more are not counted. Negative labels, such as the padding label -1, must
    not occur among valid rows: as indices they count from the end.

    Args:
      population: of N clients whose examples have an integer `y`.
      num_labels: K.

    >>> from fedjax_sim.population import stored
    >>> counts_of_labels_in_range(stored({"y": np.array([0, 2, 2])}, [0, 1, 3]), 3).tolist()
    [[1, 0, 0], [0, 0, 2]]
    """
    visitable(population)

    def count(id):
        data = population.client(id)
        # Padding gets the label K, which "drop" ignores.
        labels = jnp.where(data.mask, data.examples["y"].astype(jnp.int32), num_labels)
        return jnp.zeros(num_labels, jnp.int32).at[labels].add(1, mode="drop")

    ids = jnp.arange(population.size, dtype=jnp.int32)
    counts = jax.lax.map(count, ids, batch_size=min(population.size, 4096))
    return np.asarray(counts, np.int64)


def _groups_by_labels(data: FederatedData, num_groups: int, seed: int) -> np.ndarray:
    """Returns the group of each client, such that clients of a group have similar shares of labels.

    The groups are clusters of k-means over the clients' shares, [N, K]. A client without examples has shares of 0.

    Args:
      data: of the task "binary" or "classification", with at most 2^24 clients.
      num_groups: at most the number of different shares.
      seed: of k-means.

    Returns: [N] integers in [0, G), G <= num_groups. Every group has a client.

    Raises: ValueError for another task, and for more groups than different shares.
    """
    from sklearn.cluster import KMeans  # takes a second to import

    if data.task not in ("binary", "classification"):
        hint = "Take by='order', 'random' or 'size', or give the groups."
        validate.fail("by", f"another way for the task {data.task!r}", "labels", hint)
    counts = counts_of_labels_in_range(data.train, max(2, data.num_outputs))
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    distinct = len(np.unique(shares, axis=0))
    validate.integer("num_groups", num_groups, 1, distinct, hint=f"There are {distinct} different shares of labels.")
    # scikit-learn states no types, so that type checkers read those of its defaults: n_init is "auto" by default.
    means = KMeans(num_groups, n_init=4, random_state=seed % 2**32)  # pyright: ignore[reportArgumentType]
    clusters = means.fit_predict(shares)
    # k-means may leave a cluster empty, so the groups are renumbered without gaps.
    return np.unique(clusters, return_inverse=True)[1]
