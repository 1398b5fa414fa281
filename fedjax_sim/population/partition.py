"""Partitioners decide which client holds which rows of a table. They run in NumPy and are deterministic in their seed.

`population.indexed` takes their results. `iid`, `dirichlet`, `dirichlet_of_sizes`, `shards`, `pathological`,
`quantity_power_law`, `quantity_lognormal`, `quantity_linear`, `quantity_exponential`, `quantity_given` and `by_group`
give every row to exactly one client
(tests/population/test_partition.py::test_partitioners_lose_and_duplicate_nothing). With `dirichlet_draws` clients may
share rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim import validate
from fedjax_sim.population.datasets.columns import NotUnderstood, read_column
from fedjax_sim.validate import Integer, NonNegative, NonNegativeInt, Number, PositiveInt


class Partition(NamedTuple):
    """A partition gives client i the rows indices[offsets[i]:offsets[i + 1]] of a table."""

    indices: np.ndarray  # [total] int32
    offsets: np.ndarray  # [N + 1] int64

    @property
    def sizes(self) -> np.ndarray:
        """[N] examples per client."""
        return np.diff(self.offsets)


@validate.named_arguments
def generator(name: str, seed: Annotated[int, Integer(0, 9223372036854775807)]) -> np.random.Generator:
    """Returns the random generator of the partitioner `name`.

    It is independent of the generators of other partitioners and of other seeds.
    """
    return np.random.default_rng([zlib.crc32(name.encode()), int(seed)])


def _labels(labels) -> tuple[np.ndarray, int]:
    """Returns the labels renumbered to 0, ..., K - 1, and K."""
    if np.ma.is_masked(labels):
        validate.fail("labels", "a class for each example", "masked ones", "Drop these rows.")
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "biu" or not len(labels):
        shown = f"{labels.dtype.name}{list(labels.shape)}"
        validate.fail("labels", "a 1-D integer array that is not empty", shown, _no_classes(labels))
    classes, inverse = np.unique(labels, return_inverse=True)
    return inverse, len(classes)


def _no_classes(labels: np.ndarray) -> str:
    """Returns why rows with these targets have no classes to divide by, and what to do, as a hint of an error.

    Args:
      labels: the targets that were refused: of any shape and dtype but [n] integers, or without rows.
    """
    if labels.dtype.kind not in "biuf" or not labels.size:
        return "One class per example, as an integer."
    is_one_hot = (
        labels.ndim == 2 and labels.shape[1] > 1 and np.isin(labels, (0, 1)).all() and (labels.sum(1) == 1).all()
    )
    if is_one_hot:
        return "One class per example, not one-hot: labels.argmax(1)."
    what = (
        "Each example has several targets" if labels.size > len(labels) else "Targets that are measured have no classes"
    )
    others = "iid, power_law_sizes and lognormal_sizes need no classes"
    return (
        f"{what}: {others}. Or state a class for each example, such as the range of its target, np.digitize(y, edges)."
    )


def _check(num_examples: int, num_clients: int, least: int, name: str) -> None:
    """Refuses fewer examples than are needed if each client is to have `least`, the caller's argument `name`."""
    validate.integer("num_examples", num_examples)
    validate.integer("num_clients", num_clients)
    if least > 0 and num_clients > num_examples:
        hint = "Each needs one. Take dirichlet_draws, whose clients share examples, or fewer clients."
        validate.fail("num_clients", f"at most the {num_examples} examples", num_clients, hint)
    if num_clients * least > num_examples:
        rule = f"at most {num_examples // num_clients} for {num_clients} clients of {num_examples} examples"
        validate.fail(name, rule, least, "Take less, fewer clients, or dirichlet_draws, whose clients share examples.")


def _offsets(sizes: np.ndarray) -> np.ndarray:
    """Returns where each client's rows begin, [N + 1], from the clients' sizes [N]."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def from_owner(owner: np.ndarray, num_clients: int) -> Partition:
    """Returns the partition in which example j belongs to client owner[j]. Rows of a client stay in order."""
    indices = np.argsort(owner, kind="stable").astype(np.int32)
    return Partition(indices, _offsets(np.bincount(owner, minlength=num_clients)))


def with_minimum(sizes: np.ndarray, minimum: int) -> np.ndarray:
    """Raises small sizes to `minimum` and keeps the sum. The missing examples are taken from the largest clients.

    The largest clients are all cut to one common level.

    Args:
      sizes: [N] integers >= 0, whose sum is at least N times `minimum`.
      minimum: of each client's examples.

    Returns: [N] integers, at least `minimum` each.

    >>> with_minimum(np.array([0, 2, 10]), 2).tolist()
    [2, 2, 8]
    """
    missing = int(np.maximum(minimum - sizes, 0).sum())
    if missing == 0:
        return sizes
    largest = np.sort(sizes)[::-1]
    # Entry k - 1 is the level if the k largest clients alone gave. It is the right one if the next client lies below.
    levels = (np.cumsum(largest) - missing) / np.arange(1, len(sizes) + 1)
    level = int(np.ceil(levels[np.argmax(levels >= np.append(largest[1:], -np.inf))]))
    lowered = np.minimum(sizes, level)
    # The level was rounded up, so some clients at the level give one example more.
    still_missing = missing - int((sizes - lowered).sum())
    lowered[np.flatnonzero(lowered == level)[:still_missing]] -= 1
    return np.maximum(lowered, minimum)


def apportioned(weights: np.ndarray, total: int) -> np.ndarray:
    """Returns integers in proportion to `weights` that add up to `total`, by the method of largest remainders.

    >>> apportioned(np.array([1.0, 1.0, 2.0]), 7).tolist()
    [2, 2, 3]
    """
    shares = weights * (total / weights.sum())
    sizes = np.floor(shares).astype(np.int64)
    largest_remainders = np.argsort(sizes - shares, kind="stable")[: total - int(sizes.sum())]
    sizes[largest_remainders] += 1
    return sizes


def iid(num_examples: int, num_clients: int, *, seed: int) -> Partition:
    """Examples are given to clients at random, and the clients' sizes differ by one at most.

    Args:
      num_examples: rows of the table, at least one per client.
      num_clients: N.
      seed: of the partition.

    >>> iid(7, 3, seed=0).sizes.tolist()
    [3, 2, 2]
    """
    _check(num_examples, num_clients, 1, "num_clients")
    sizes = np.full(num_clients, num_examples // num_clients)
    sizes[: num_examples % num_clients] += 1
    return Partition(generator("iid", seed).permutation(num_examples).astype(np.int32), _offsets(sizes))


@validate.named_arguments
def dirichlet(
    labels: ArrayLike,
    num_clients: int,
    alpha: Annotated[float, Number(0, open_low=True)],
    *,
    min_examples: NonNegativeInt = 1,
    seed: int,
) -> Partition:
    """Clients have skewed labels: every class is divided among the clients in Dirichlet(alpha) proportions.

    A client below the minimum then receives random examples of the largest clients. This takes one pass and never a
    retry.

    Args:
      labels: [examples] integer classes.
      num_clients: N.
      alpha: concentration > 0. Towards 0 each class belongs to one client, towards infinity the split is even.
      min_examples: the least number of examples of a client, at most examples / N.
      seed: of the partition.

    Raises: ValueError for a minimum above examples / N, and for labels that are not a list of integers.

    Guarantees: before the minimum acts, a client's share of a class has mean 1/N and variance
      (1/N)(1 - 1/N)/(N alpha + 1) (tests/population/test_partition.py::test_dirichlet_shares_follow_the_law). Every
      client has a row of a class equally often, also of one with fewer rows than there are clients
      (::test_small_classes_go_to_all_clients).
    References: Yurochkin et al. 2019, section 4; Hsu, Qi, Brown 2019, section 3.

    >>> bool((dirichlet([0, 1] * 50, 4, 0.1, min_examples=5, seed=0).sizes >= 5).all())
    True
    """
    labels, _ = _labels(labels)
    _check(len(labels), num_clients, min_examples, "min_examples")
    rng = generator("dirichlet", seed)
    starts = generator("dirichlet starts", seed)
    owner = np.empty(len(labels), np.int64)
    # The rows of each class are divided separately, by shares of their own.
    by_class = np.argsort(labels, kind="stable")
    for rows in np.split(by_class, np.cumsum(np.bincount(labels))[:-1]):
        rows = rng.permutation(rows)
        shares = rng.dirichlet(np.full(num_clients, float(alpha)))
        # Rounding the cumulative shares, rather than each share, gives every row of the class away exactly once. They
        # are rounded from a random start. Otherwise small classes, with fewer rows than clients, would all be given to
        # the same clients.
        cuts = np.floor(np.cumsum(shares)[:-1] * len(rows) + starts.random()).astype(np.int64)
        owner[rows] = np.searchsorted(cuts, np.arange(len(rows)), side="right")
    sizes = np.bincount(owner, minlength=num_clients)
    change = with_minimum(sizes, min_examples) - sizes
    if change.any():
        rows = rng.permutation(len(owner))
        rows = rows[np.argsort(owner[rows], kind="stable")]  # by owner, and in random order within an owner
        # An owner whose size falls by k gives the first k of its rows.
        rank = np.arange(len(rows)) - _offsets(sizes)[owner[rows]]
        moved_rows = rng.permutation(rows[rank < -change[owner[rows]]])
        owner[moved_rows] = np.repeat(np.arange(num_clients), np.maximum(change, 0))
    return from_owner(owner, num_clients)


@validate.named_arguments
def shards(labels: ArrayLike, num_clients: int, shards_per_client: PositiveInt = 2, *, seed: int) -> Partition:
    """Clients have skewed labels: examples are sorted by class and cut into shards, of which each client gets a few.

    Args:
      labels: [examples] integer classes.
      num_clients: N.
      shards_per_client: how many shards each client gets. Sizes of shards differ by one example at most.
      seed: of the order within a class, and of the assignment of shards to clients.
    References: McMahan et al. 2017, section 3 (200 shards, 2 for each of 100 clients).

    >>> shards([0, 0, 1, 1, 2, 2], 3, 1, seed=0).sizes.tolist()
    [2, 2, 2]
    """
    labels, _ = _labels(labels)
    _check(len(labels), num_clients, shards_per_client, "shards_per_client")
    rng = generator("shards", seed)
    num_shards = num_clients * shards_per_client
    rows = rng.permutation(len(labels))
    rows = rows[np.argsort(labels[rows], kind="stable")]  # by class, and in random order within a class
    # Shard numbers of the sorted rows, in blocks whose sizes differ by one at most.
    shard = np.arange(len(rows)) * num_shards // len(rows)
    owner = np.empty(len(rows), np.int64)
    owner[rows] = rng.permutation(num_shards)[shard] // shards_per_client
    return from_owner(owner, num_clients)


@validate.named_arguments
def pathological(
    labels: ArrayLike, num_clients: PositiveInt, classes_per_client: PositiveInt = 2, *, seed: int
) -> Partition:
    """Clients have rows of exactly `classes_per_client` classes each.

    Clients choose one after the other, in a random order: each takes the classes that the fewest clients have so far,
    and ties are broken at random. The rows of a class are then divided evenly among the clients that have it.

    Args:
      labels: [examples] integer classes.
      num_clients: N.
      classes_per_client: c, at most the number of classes K. There must be N c >= K places, so that no class is left.
      seed: of the choice of classes, and of the assignment of rows to clients.

    Raises: ValueError for too many classes a client, for too few clients to hold all classes, and for a class with
      fewer rows than clients that have it.

    Guarantees: a client has rows of exactly c classes, the numbers of clients that have a class differ by one at most,
      and so do the numbers of rows that they have of it
      (tests/population/test_partition.py::test_pathological_clients_have_their_classes).
    References: McMahan et al. 2017, section 3, describes the split; there, shards of equal size approximate it.

    >>> pathological([0, 0, 1, 1, 2, 2], 3, 2, seed=0).sizes.tolist()
    [2, 2, 2]
    """
    labels, num_classes = _labels(labels)
    _check(len(labels), num_clients, classes_per_client, "classes_per_client")
    if classes_per_client > num_classes:
        validate.fail("classes_per_client", f"at most the {num_classes} classes", classes_per_client)
    if num_clients * classes_per_client < num_classes:
        rule = f"clients with places for all {num_classes} classes"
        validate.fail("num_clients", rule, num_clients, "Take more clients, or more classes per client.")
    rng = generator("pathological", seed)
    num_owners = np.zeros(num_classes, np.int64)
    has_class = np.zeros((num_clients, num_classes), bool)
    for client in rng.permutation(num_clients):
        chosen = np.lexsort((rng.random(num_classes), num_owners))[:classes_per_client]
        has_class[client, chosen] = True
        num_owners[chosen] += 1
    owner = np.empty(len(labels), np.int64)
    by_class = np.argsort(labels, kind="stable")
    for label, rows in enumerate(np.split(by_class, np.cumsum(np.bincount(labels))[:-1])):
        owners = rng.permutation(np.flatnonzero(has_class[:, label]))
        if len(rows) < len(owners):
            rule = f"at least {len(owners)} rows of each class, one for each client that has it"
            validate.fail("labels", rule, f"{len(rows)} rows of class {label}", "Take fewer clients.")
        owner[rng.permutation(rows)] = owners[np.arange(len(rows)) % len(owners)]
    return from_owner(owner, num_clients)


def _by_weight(rng, weights: np.ndarray, num_examples: int, min_examples: int) -> Partition:
    """Gives random examples to clients whose sizes are in proportion to `weights` [N]."""
    sizes = with_minimum(apportioned(weights, num_examples), min_examples)
    return Partition(rng.permutation(num_examples).astype(np.int32), _offsets(sizes))


@validate.named_arguments
def quantity_power_law(
    num_examples: int,
    num_clients: int,
    *,
    exponent: Annotated[float, Number(1, open_low=True)] = 2.0,
    min_examples: NonNegativeInt = 1,
    seed: int,
) -> Partition:
    """Clients have sizes in proportion to draws from a power law, and their labels stay IID.

    The density of a draw s is proportional to s^-exponent on [1, inf).

    Args:
      num_examples, num_clients: of the whole partition.
      exponent: > 1. The tail is heavier the nearer the exponent is to 1.
      min_examples: the least number of examples of a client. Missing examples are taken from the largest clients.
      seed: of the sizes, and of the assignment of rows to clients.
    Guarantees: log(size / smallest) is exponential with mean 1/(exponent - 1), up to rounding
      (tests/population/test_partition.py::test_quantity_laws).
    References: Li et al. 2020 (FedProx), section 5.1.

    >>> int(quantity_power_law(1000, 10, exponent=1.5, seed=0).sizes.sum())
    1000
    """
    _check(num_examples, num_clients, min_examples, "min_examples")
    rng = generator("quantity_power_law", seed)
    logs = rng.standard_exponential(num_clients) / (exponent - 1)
    # Only proportions matter, so the largest logarithm is subtracted. Otherwise exp could overflow for an exponent
    # near 1.
    return _by_weight(rng, np.exp(logs - logs.max()), num_examples, min_examples)


@validate.named_arguments
def quantity_lognormal(
    num_examples: int, num_clients: int, *, sigma: NonNegative = 1.0, min_examples: NonNegativeInt = 1, seed: int
) -> Partition:
    """Clients have sizes in proportion to lognormal draws, and their labels stay IID.

    Args:
      num_examples, num_clients: of the whole partition.
      sigma: standard deviation of the log size, >= 0.
      min_examples: the least number of examples of a client. Missing examples are taken from the largest clients.
      seed: of the sizes, and of the assignment of rows to clients.
    Guarantees: log sizes have standard deviation sigma, up to rounding
      (tests/population/test_partition.py::test_quantity_laws).

    >>> quantity_lognormal(100, 4, sigma=0.0, seed=0).sizes.tolist()
    [25, 25, 25, 25]
    """
    _check(num_examples, num_clients, min_examples, "min_examples")
    rng = generator("quantity_lognormal", seed)
    logs = sigma * rng.standard_normal(num_clients)  # the largest is subtracted, as in `quantity_power_law`
    return _by_weight(rng, np.exp(logs - logs.max()), num_examples, min_examples)


@validate.named_arguments
def quantity_linear(num_examples: int, num_clients: int, *, min_examples: NonNegativeInt = 1, seed: int) -> Partition:
    """Clients have sizes in proportion to 1, 2, ..., N, and their labels stay IID.

    Args:
      num_examples, num_clients: of the whole partition.
      min_examples: the least number of examples of a client. Missing examples are taken from the largest clients.
      seed: of the assignment of rows to clients. Sizes do not depend on it.

    Guarantees: sizes are the proportions, up to rounding by largest remainders
      (tests/population/test_partition.py::test_sizes_are_as_asked).

    >>> quantity_linear(60, 3, seed=0).sizes.tolist()
    [10, 20, 30]
    """
    _check(num_examples, num_clients, min_examples, "min_examples")
    weights = np.arange(1.0, num_clients + 1)
    return _by_weight(generator("quantity_linear", seed), weights, num_examples, min_examples)


@validate.named_arguments
def quantity_exponential(
    num_examples: int,
    num_clients: int,
    *,
    ratio: Annotated[float, Number(1)],
    min_examples: NonNegativeInt = 1,
    seed: int,
) -> Partition:
    """Clients have sizes in proportion to 1, r, ..., r^(N - 1), and their labels stay IID.

    Args:
      num_examples, num_clients: of the whole partition.
      ratio: r >= 1, how many times as many examples client i + 1 has as client i. 1 gives equal sizes.
      min_examples: the least number of examples of a client. Missing examples are taken from the largest clients.
      seed: of the assignment of rows to clients. Sizes do not depend on it.

    Guarantees: sizes are the proportions, up to rounding by largest remainders
      (tests/population/test_partition.py::test_sizes_are_as_asked).

    >>> quantity_exponential(70, 3, ratio=2.0, seed=0).sizes.tolist()
    [10, 20, 40]
    """
    _check(num_examples, num_clients, min_examples, "min_examples")
    logs = np.log(ratio) * np.arange(1 - num_clients, 1)  # the largest is 0, so that no power overflows
    return _by_weight(generator("quantity_exponential", seed), np.exp(logs), num_examples, min_examples)


@validate.named_arguments
def quantity_given(num_examples: int, sizes: Sequence[int], *, seed: int) -> Partition:
    """Client i has `sizes[i]` random rows, so that labels stay IID.

    Args:
      num_examples: rows of the table.
      sizes: each client's number of rows. They add up to all rows.
      seed: of the assignment of rows to clients.

    Raises: ValueError for sizes that do not add up to the rows.

    Guarantees: sizes are exactly those given (tests/population/test_partition.py::test_sizes_are_as_asked).

    >>> quantity_given(6, [1, 2, 3], seed=0).sizes.tolist()
    [1, 2, 3]
    """
    counts = _sizes_of(sizes, num_examples)
    return Partition(generator("quantity_given", seed).permutation(num_examples).astype(np.int32), _offsets(counts))


def _sizes_of(sizes: Sequence[int] | np.ndarray, num_examples: int) -> np.ndarray:
    """Returns the clients' sizes [N], which must add up to the rows of the table."""
    if not len(sizes):
        validate.fail("sizes", "a size for each client", [])
    for i, size in enumerate(sizes):
        validate.integer(f"sizes[{i}]", size, 0)
    counts = np.array(sizes, np.int64)
    if counts.sum() != num_examples:
        hint = "Every row has one client: change a size, or leave rows out of the table."
        validate.fail("sizes", f"sizes that add up to the {num_examples:,} rows", f"a sum of {counts.sum():,}", hint)
    return counts


@validate.named_arguments
def dirichlet_of_sizes(
    labels: ArrayLike,
    sizes: Sequence[int] | np.ndarray,
    alpha: Annotated[float, Number(0, open_low=True)],
    *,
    seed: int,
) -> Partition:
    """Clients have given sizes and skewed labels, and every row belongs to one client.

    Client i has label shares p_i ~ Dirichlet(alpha, ..., alpha) over the K classes present. In a random order of
    clients, each draws its n_i rows one after the other without replacement: a class from p_i, and a row of it that is
    left. Once no row of a class is left, p_i is divided by what the other classes have of it. So clients that come late
    have what others left, and their shares are less skewed, or skewed in another way, than p_i.

    Args:
      labels: [examples] integer classes.
      sizes: n_i, each client's number of rows, such as `quantity_power_law(...).sizes`. They add up to all rows.
      alpha: concentration > 0 per class. Towards 0 a client has as few classes as are left, towards infinity the same
        share of each.
      seed: of the shares, the order of the clients and the rows.

    Raises: ValueError for sizes that do not add up to the rows, and for labels that are not a list of integers.

    Guarantees: sizes are exactly those given, and no row is lost or shared
      (tests/population/test_partition.py::test_dirichlet_of_sizes_keeps_sizes_and_rows). While no class runs out, a
      client's share of a class has mean 1/K and variance (1/K)(1 - 1/K)(n_i + K alpha)/(n_i (1 + K alpha))
      (::test_dirichlet_of_sizes_follows_the_law).
    References: Hsu, Qi, Brown 2019, section 3; Acar et al. 2021, appendix 1.1.

    >>> dirichlet_of_sizes([0, 1, 0, 1, 0, 1], [1, 2, 3], 0.1, seed=0).sizes.tolist()
    [1, 2, 3]
    """
    labels, num_classes = _labels(labels)
    counts = _sizes_of(sizes, len(labels))
    rng = generator("dirichlet_of_sizes", seed)
    rows = rng.permutation(len(labels))
    rows = rows[np.argsort(labels[rows], kind="stable")]  # by class, and in random order within a class
    left = np.bincount(labels, minlength=num_classes)
    next_row = _offsets(left)[:-1]
    owner = np.empty(len(labels), np.int64)
    for client in rng.permutation(len(counts)):
        shares = rng.dirichlet(np.full(num_classes, float(alpha)))
        taken = np.zeros(num_classes, np.int64)
        while missing := int(counts[client] - taken.sum()):
            free = left - taken
            weights = np.where(free > 0, shares, 0.0)
            if not weights.sum() > 0:  # shares of exactly 0, for a small alpha: the rows that are left are alike
                weights = free.astype(float)
            # What a class cannot give is drawn again among others, as if each row had been drawn after the other.
            taken += np.minimum(rng.multinomial(missing, weights / weights.sum()), free)
        for label in np.flatnonzero(taken):
            owner[rows[next_row[label] : next_row[label] + taken[label]]] = client
        next_row += taken
        left -= taken
    return from_owner(owner, len(counts))


def _plain(groups: ArrayLike) -> np.ndarray:
    """Returns ids as an array, and refuses those that are missing."""
    if isinstance(groups, np.ndarray) and not isinstance(groups, np.ma.MaskedArray) and groups.dtype.kind in "biuSU":
        return groups
    try:
        column = read_column(groups)
    except (NotUnderstood, TypeError):
        return np.asarray(groups)  # of another dtype
    if column.is_missing.any():
        row = int(np.argmax(column.is_missing))
        validate.fail(f"groups[{row}]", "an id", "none", "Drop the row, or give it an id.")
    return column.values.astype(str) if column.is_text else column.values


def by_group(groups: ArrayLike) -> Partition:
    """Each distinct id (writer, hospital, user) is one client, in sorted order of the ids: the natural partition.

    Args:
      groups: [examples] integers or strings, the id to which each example belongs, in an array, a list or a column of
        a frame. None may be missing.

    >>> by_group(["b", "a", "b"]).indices.tolist()
    [1, 0, 2]
    """
    groups = _plain(groups)
    if groups.ndim != 1 or not len(groups) or groups.dtype.kind not in "biuSU":
        shown = f"{groups.dtype.name}{list(groups.shape)}"
        validate.fail("groups", "a 1-D array of integers or strings, one per example", shown)
    names, owner = np.unique(groups, return_inverse=True)
    return from_owner(owner, len(names))


@validate.named_arguments
def dirichlet_draws(
    labels: ArrayLike,
    num_clients: PositiveInt,
    alpha: Annotated[float, Number(0, open_low=True)],
    *,
    min_examples: PositiveInt,
    max_examples: int,
    seed: int,
) -> Partition:
    """Clients have skewed labels, and draw their rows from one shared table independently of each other.

    Client i draws label shares p ~ Dirichlet(alpha, ..., alpha) over the K classes present, and a size n uniform in
    {min_examples, ..., max_examples}. It then draws n rows with replacement: a class from p, and a row of that class.
    So a row may be shared between clients, occur twice, or not occur at all. 100,000 clients of 40 rows take about a
    second.

    Args:
      labels: [rows] integer classes of the table.
      num_clients: N, which may exceed the number of rows.
      alpha: concentration > 0 per class.
      min_examples, max_examples: bounds of n, at least 1.
      seed: of everything.
    Guarantees: a class's share has mean 1/K and variance (1/K)(1 - 1/K)(n + K alpha)/(n (1 + K alpha)) at fixed n
      (tests/population/test_partition.py::test_dirichlet_draws_follow_the_law).
    References: Hsu, Qi, Brown 2019, section 3 (there with alpha times a prior).

    >>> population = dirichlet_draws([0, 1, 2, 0, 1, 2], 5, 0.5, min_examples=2, max_examples=4, seed=0)
    >>> len(population.sizes), bool((population.sizes >= 2).all())
    (5, True)
    """
    labels, num_classes = _labels(labels)
    validate.integer("max_examples", max_examples, min_examples)
    hint = "Index rows are int32: fewer clients or examples."
    validate.integer("rows drawn", num_clients * max_examples, hint=hint)
    rng = generator("dirichlet_draws", seed)
    sizes = rng.integers(min_examples, max_examples, num_clients, endpoint=True)
    offsets = _offsets(sizes)
    by_class = np.argsort(labels, kind="stable").astype(np.int32)
    class_sizes = np.bincount(labels)
    class_starts = _offsets(class_sizes)[:-1]
    indices = np.empty(offsets[-1], np.int32)
    # So many clients are drawn at a time that memory is bounded. The step takes part in the results: it decides in
    # which order the generator is used.
    step = max(1, (1 << 20) // max(num_classes, max_examples))
    for first in range(0, num_clients, step):
        last = min(first + step, num_clients)
        mixes = rng.dirichlet(np.full(num_classes, float(alpha)), last - first)
        # Counts of classes are drawn first, which is the same as drawing the class of each row independently.
        counts = rng.multinomial(sizes[first:last], mixes)
        classes = np.repeat(np.tile(np.arange(num_classes), last - first), counts.reshape(-1))
        rows = (rng.random(len(classes)) * class_sizes[classes]).astype(np.int64)
        indices[offsets[first] : offsets[last]] = by_class[class_starts[classes] + rows]
    return Partition(indices, offsets)
