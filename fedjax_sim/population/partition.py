"""Which client holds which rows of a table: seeded partitioners in NumPy, whose results `population.indexed` takes.

`iid`, `dirichlet`, `shards`, `quantity_power_law`, `quantity_lognormal` and `by_group` give every row to exactly one
client (tests/population/test_partition.py::test_partitioners_lose_and_duplicate_nothing). With `dirichlet_draws`
clients may share rows.
"""

from __future__ import annotations

import zlib
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim import validate
from fedjax_sim.validate import Integer, NonNegative, NonNegativeInt, Number, PositiveInt

__all__ = [
    "Partition",
    "apportioned",
    "by_group",
    "dirichlet",
    "dirichlet_draws",
    "generator",
    "iid",
    "quantity_lognormal",
    "quantity_power_law",
    "shards",
    "with_minimum",
]


class Partition(NamedTuple):
    """Client i holds rows indices[offsets[i]:offsets[i + 1]] of a table."""

    indices: np.ndarray  # [total] int32
    offsets: np.ndarray  # [N + 1] int64

    @property
    def sizes(self) -> np.ndarray:
        """[N] examples per client."""
        return np.diff(self.offsets)


@validate.named_arguments
def generator(name: str, seed: Annotated[int, Integer(0, 9223372036854775807)]) -> np.random.Generator:
    """The random generator of the partitioner `name`: independent of those of other partitioners and other seeds."""
    return np.random.default_rng([zlib.crc32(name.encode()), int(seed)])


def _labels(labels) -> tuple[np.ndarray, int]:
    """Labels renumbered to 0..K-1, and K."""
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "biu" or not len(labels):
        shown = f"{labels.dtype.name}{list(labels.shape)}"
        validate.fail("labels", "a 1-D integer array that is not empty", shown, "One class per example, not one-hot.")
    classes, inverse = np.unique(labels, return_inverse=True)
    return inverse, len(classes)


def _check(num_examples: int, num_clients: int, least: int, name: str) -> None:
    """Refuses fewer examples than so many clients need, if each is to have the `least`, an argument of this name."""
    validate.integer("num_examples", num_examples)
    validate.integer("num_clients", num_clients)
    if least > 0 and num_clients > num_examples:
        hint = "Each needs one. Take dirichlet_draws, whose clients share examples, or fewer clients."
        validate.fail("num_clients", f"at most the {num_examples} examples", num_clients, hint)
    if num_clients * least > num_examples:
        rule = f"at most {num_examples // num_clients} for {num_clients} clients of {num_examples} examples"
        validate.fail(name, rule, least, "Take less, fewer clients, or dirichlet_draws, whose clients share examples.")


def _offsets(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def _from_owner(owner: np.ndarray, num_clients: int) -> Partition:
    """The partition in which example j belongs to client owner[j]; rows of a client stay in order."""
    indices = np.argsort(owner, kind="stable").astype(np.int32)
    return Partition(indices, _offsets(np.bincount(owner, minlength=num_clients)))


def with_minimum(sizes: np.ndarray, minimum: int) -> np.ndarray:
    """Sizes of the same sum, none below `minimum`: what is missing comes off the largest, which are cut to one level.

    >>> with_minimum(np.array([0, 2, 10]), 2).tolist()
    [2, 2, 8]
    """
    missing = int(np.maximum(minimum - sizes, 0).sum())
    if missing == 0:
        return sizes
    largest = np.sort(sizes)[::-1]
    level = (np.cumsum(largest) - missing) / np.arange(1, len(sizes) + 1)  # if the k largest alone gave
    level = int(np.ceil(level[np.argmax(level >= np.append(largest[1:], -np.inf))]))
    lowered = np.minimum(sizes, level)
    rest = missing - int((sizes - lowered).sum())  # the level rounded up: some at it give one more
    lowered[np.flatnonzero(lowered == level)[:rest]] -= 1
    return np.maximum(lowered, minimum)


def apportioned(weights: np.ndarray, total: int) -> np.ndarray:
    """Integers in proportion to `weights` that add up to `total`, by the method of largest remainders.

    >>> apportioned(np.array([1.0, 1.0, 2.0]), 7).tolist()
    [2, 2, 3]
    """
    shares = weights * (total / weights.sum())
    sizes = np.floor(shares).astype(np.int64)
    sizes[np.argsort(sizes - shares, kind="stable")[: total - int(sizes.sum())]] += 1
    return sizes


def iid(num_examples: int, num_clients: int, *, seed: int) -> Partition:
    """Examples dealt at random; sizes differ by one at most.

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
    """Label skew: every class is cut among the clients in Dirichlet(alpha) proportions.

    Clients below the minimum are filled with random examples of the largest clients: one pass, never a retry.

    Args:
      labels: [examples] integer classes.
      num_clients: N.
      alpha: concentration > 0; towards 0 a class has one owner, towards infinity the split is even.
      min_examples: the least number of examples of a client; at most examples / N.
      seed: of the partition.
    Raises: ValueError for an infeasible minimum.
    Guarantees: before the minimum acts, a client's share of a class has mean 1/N and variance
      (1/N)(1 - 1/N)/(N alpha + 1) (tests/population/test_partition.py::test_dirichlet_shares_follow_the_law).
    References: Yurochkin et al. 2019, section 4; Hsu, Qi, Brown 2019, section 3.

    >>> bool((dirichlet([0, 1] * 50, 4, 0.1, min_examples=5, seed=0).sizes >= 5).all())
    True
    """
    labels, _ = _labels(labels)
    _check(len(labels), num_clients, min_examples, "min_examples")
    rng = generator("dirichlet", seed)
    owner = np.empty(len(labels), np.int64)
    by_class = np.argsort(labels, kind="stable")
    for rows in np.split(by_class, np.cumsum(np.bincount(labels))[:-1]):
        rows = rng.permutation(rows)
        shares = rng.dirichlet(np.full(num_clients, float(alpha)))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(rows)).astype(np.int64)
        owner[rows] = np.searchsorted(cuts, np.arange(len(rows)), side="right")
    sizes = np.bincount(owner, minlength=num_clients)
    change = with_minimum(sizes, min_examples) - sizes
    if change.any():
        rows = rng.permutation(len(owner))
        rows = rows[np.argsort(owner[rows], kind="stable")]  # by owner, in random order
        rank = np.arange(len(rows)) - _offsets(sizes)[owner[rows]]
        given = rng.permutation(rows[rank < -change[owner[rows]]])
        owner[given] = np.repeat(np.arange(num_clients), np.maximum(change, 0))
    return _from_owner(owner, num_clients)


@validate.named_arguments
def shards(labels: ArrayLike, num_clients: int, shards_per_client: PositiveInt = 2, *, seed: int) -> Partition:
    """Label skew: examples sorted by class, cut into equal shards, a few shards dealt to each client.

    Args:
      labels: [examples] integer classes.
      num_clients: N.
      shards_per_client: shards of equal size (to one example) that each client is dealt.
      seed: of the order within a class, and of who gets which shards.
    References: McMahan et al. 2017, section 3 (200 shards, 2 for each of 100 clients).

    >>> shards([0, 0, 1, 1, 2, 2], 3, 1, seed=0).sizes.tolist()
    [2, 2, 2]
    """
    labels, _ = _labels(labels)
    _check(len(labels), num_clients, shards_per_client, "shards_per_client")
    rng = generator("shards", seed)
    num_shards = num_clients * shards_per_client
    rows = rng.permutation(len(labels))
    rows = rows[np.argsort(labels[rows], kind="stable")]
    shard = np.arange(len(rows)) * num_shards // len(rows)
    owner = np.empty(len(rows), np.int64)
    owner[rows] = rng.permutation(num_shards)[shard] // shards_per_client
    return _from_owner(owner, num_clients)


def _by_weight(rng, weights: np.ndarray, num_examples: int, min_examples: int) -> Partition:
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
    """Size skew: sizes in proportion to draws of density proportional to s^-exponent on [1, inf); labels stay IID.

    Args:
      num_examples, num_clients: of the whole partition.
      exponent: > 1; nearer to 1 the tail is heavier.
      min_examples: the least number of examples of a client; what is missing is taken from the largest clients.
      seed: of the sizes, and of who holds which rows.
    Guarantees: log(size / smallest) is exponential with mean 1/(exponent - 1), up to rounding
      (tests/population/test_partition.py::test_quantity_laws).
    References: Li et al. 2020 (FedProx), section 5.1.

    >>> int(quantity_power_law(1000, 10, exponent=1.5, seed=0).sizes.sum())
    1000
    """
    _check(num_examples, num_clients, min_examples, "min_examples")
    rng = generator("quantity_power_law", seed)
    logs = rng.standard_exponential(num_clients) / (exponent - 1)
    return _by_weight(rng, np.exp(logs - logs.max()), num_examples, min_examples)


@validate.named_arguments
def quantity_lognormal(
    num_examples: int, num_clients: int, *, sigma: NonNegative = 1.0, min_examples: NonNegativeInt = 1, seed: int
) -> Partition:
    """Size skew: sizes in proportion to lognormal draws; labels stay IID.

    Args:
      num_examples, num_clients: of the whole partition.
      sigma: standard deviation of the log size, >= 0.
      min_examples: the least number of examples of a client; what is missing is taken from the largest clients.
      seed: of the sizes, and of who holds which rows.
    Guarantees: log sizes have standard deviation sigma, up to rounding
      (tests/population/test_partition.py::test_quantity_laws).

    >>> quantity_lognormal(100, 4, sigma=0.0, seed=0).sizes.tolist()
    [25, 25, 25, 25]
    """
    _check(num_examples, num_clients, min_examples, "min_examples")
    rng = generator("quantity_lognormal", seed)
    logs = sigma * rng.standard_normal(num_clients)
    return _by_weight(rng, np.exp(logs - logs.max()), num_examples, min_examples)


def by_group(groups: ArrayLike) -> Partition:
    """The natural partition: one client per distinct id (writer, hospital, user), in sorted order of the ids.

    >>> by_group(["b", "a", "b"]).indices.tolist()
    [1, 0, 2]
    """
    groups = np.asarray(groups)
    if groups.ndim != 1 or not len(groups) or groups.dtype.kind not in "biuSU":
        shown = f"{groups.dtype.name}{list(groups.shape)}"
        validate.fail("groups", "a 1-D array of integers or strings, one per example", shown)
    names, owner = np.unique(groups, return_inverse=True)
    return _from_owner(owner, len(names))


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
    """Label skew without a partition: each client draws its own label shares, its size, and rows of one shared table.

    Client i draws p ~ Dirichlet(alpha, ..., alpha) over the K classes present, n uniform in
    {min_examples, ..., max_examples}, and n rows with replacement: a class from p, then a row of that class. Rows may
    be shared between clients, occur twice, or not at all. 100,000 clients of 40 rows take about a second.

    Args:
      labels: [rows] integer classes of the table.
      num_clients: N; may exceed the number of rows.
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
    step = max(1, (1 << 20) // max(num_classes, max_examples))  # clients at a time: bounded memory
    for first in range(0, num_clients, step):
        last = min(first + step, num_clients)
        mixes = rng.dirichlet(np.full(num_classes, float(alpha)), last - first)
        counts = rng.multinomial(sizes[first:last], mixes)
        classes = np.repeat(np.tile(np.arange(num_classes), last - first), counts.reshape(-1))
        rows = (rng.random(len(classes)) * class_sizes[classes]).astype(np.int64)
        indices[offsets[first] : offsets[last]] = by_class[class_starts[classes] + rows]
    return Partition(indices, offsets)
