"""Shares of rows as whole numbers of rows. No client, no label and no size of client is favoured by the rounding.

A share of a few rows is no whole number: a quarter of 3 rows is 0 or 1. If every client rounded it in the same way, a
share of all rows would be far from the one asked, and labels that are rare at each client would never be chosen. So
shares of many clients are rounded up or down at random, and their mean is the share.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.types import Array, Learned

SplitKind = Literal["together", "by_client"]  # how clients' test rows are drawn: see `client_split` and `own_split`

LARGEST_DENOMINATOR = 1 << 15  # products of two such numbers fit into int32


def stratified_split(
    labels: np.ndarray, test_fraction: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Splits the rows of one table at random, with `test_fraction` of the rows, and of every class, in the test set.

    Args:
      labels: [rows] classes.
      test_fraction: in (0, 1).
      rng: draws the test rows.

    Returns: the numbers of the training rows and those of the test rows, integers in [0, rows), both sorted.

    Guarantees: the number of test rows is the share of all rows, rounded, and each class has its share of them, up to
    less than one row: largest remainders, with ties at random (tests/population/test_splits.py::test_one_table).
    """
    total = _num_test(len(labels), test_fraction)
    classes = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    counts, remainders = np.divmod(np.array([len(rows) for rows in classes]) * total, len(labels))
    largest_remainders = np.lexsort((rng.random(len(classes)), -remainders))[: total - int(counts.sum())]
    counts[largest_remainders] += 1
    test = np.concatenate([rows[:count] for rows, count in zip(classes, counts, strict=True)])
    return np.setdiff1d(np.arange(len(labels)), test), np.sort(test)


def client_split(labels: np.ndarray, clients: np.ndarray, test_fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Draws the test rows of a table whose rows belong to clients, [rows] bool.

    Args:
      labels: [rows] classes, equal where there are none.
      clients: [rows] ids of the clients.
      test_fraction: in (0, 1).
      rng: draws the test rows.

    Guarantees: The number of test rows is the share of all rows, rounded. Each client, and each label of a client, has
      its share of them, rounded up or down (tests/population/test_splits.py::test_every_client_has_its_share).
      Every row is a test row with the same probability, so labels of test rows are those of rows, however few rows
      clients have (tests/population/test_splits.py::test_test_rows_have_the_labels_of_rows).
    """
    if not len(labels):
        return np.zeros(0, bool)
    _, client, sizes = np.unique(clients, return_inverse=True, return_counts=True)
    _, label = np.unique(labels, return_inverse=True)
    _, cell = np.unique(client * (label.max() + 1) + label, return_inverse=True)
    # Rows of a client stand together, and in them rows of a label, both in a random order.
    order = np.lexsort((rng.random(len(labels)), rng.permutation(cell.max() + 1)[cell], client))
    place = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    # Systematic sampling: rows are as long as their probability, and those that hold a whole number of a line that
    # begins at a random point are test rows. Where it begins at a client decides whether the client rounds up.
    num_rows = len(labels)
    total = _num_test(num_rows, test_fraction)
    whole, rest = np.divmod(sizes * total, num_rows)
    rounds_up = counts_of_clients(sizes, test_fraction, rng) > whole
    starts = np.where(
        rounds_up, num_rows - rest + rng.integers(0, np.maximum(rest, 1)), rng.integers(0, num_rows - rest)
    )
    start = np.repeat(starts, sizes)
    is_test = np.zeros(num_rows, bool)
    is_test[order] = (place * total + start) // num_rows < ((place + 1) * total + start) // num_rows
    return is_test


def counts_of_clients(sizes: np.ndarray, test_fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Draws how many rows of each client are test rows, [N] int64.

    They add up to the share of all rows, rounded. A client's number is its share, rounded up or down, and its mean is
    in proportion to the client's size.

    Args:
      sizes: [N] rows of the clients.
      test_fraction: in (0, 1).
      rng: draws who rounds up.

    Guarantees: tests/population/test_splits.py::test_every_client_has_its_share.

    >>> int(counts_of_clients(np.full(8, 3), 0.25, np.random.default_rng(0)).sum())
    6
    """
    num_rows = int(np.sum(sizes))
    total = _num_test(num_rows, test_fraction)
    if not num_rows:
        return np.zeros(len(sizes), np.int64)
    # Systematic sampling: the clients' shares are laid on a line in a random order, and counted between whole numbers.
    order = rng.permutation(len(sizes))
    ends = (np.cumsum(sizes[order]) * total + rng.integers(num_rows)) // num_rows
    counts = np.empty(len(sizes), np.int64)
    counts[order] = np.diff(ends, prepend=0)
    return counts


def own_split(size: int, client: str, test_fraction: float, seed: int) -> np.ndarray:
    """Draws the test rows of one client, [size] bool, whatever other clients there are.

    Their number is the share of the client's rows, rounded up or down at random, and each row is equally likely to be
    among them. So all rows have the same probability, but the number of test rows of all clients varies.

    Args:
      size: rows of the client.
      client: its id, which with the seed decides the draw.
      test_fraction: in (0, 1).
      seed: of the split.

    Guarantees: tests/privacy/test_preparation.py::test_one_client_more, and the mean is the share
    (tests/population/test_splits.py::test_a_client_draws_its_own_rows).
    """
    validate.in_range("test_fraction", test_fraction, 0, 1, open_low=True, open_high=True)
    rng = np.random.default_rng([seed, *hashlib.sha256(client.encode()).digest()])
    count = int(validate.as_written(test_fraction) * size + validate.as_written(rng.random()))
    return np.isin(np.arange(size), rng.permutation(size)[:count])


def split_learned(split: SplitKind) -> tuple[Learned, ...]:
    """Returns the record that one client changes which rows of the others are test rows, unless each draws its own.

    One row more then changes the draw of its client alone, which counts where single records are to be hidden.
    """
    if split == "by_client":
        effect = "change which other rows of its client are trained on"
        return (
            Learned(
                "the choice of each client's test rows", (), effect, 'test_file = "...", if it reads one', unit="record"
            ),
        )
    effect = "change which rows of every other client are trained on"
    return (Learned("the choice of test rows", (), effect, 'split = "by_client", or test rows of their own'),)


def site_splits(
    labels: dict[str, np.ndarray], test_fraction: float, seed: int, split: SplitKind
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the numbers of the training rows and of the test rows of each client.

    Args:
      labels: client id -> [rows] classes, equal where there are none.
      test_fraction, seed: of the split.
      split: "together" for `client_split`, "by_client" for `own_split`.

    Returns: client id -> (training rows, test rows), integers in [0, rows), both sorted.
    """
    sizes = {id: len(part) for id, part in labels.items()}
    if split == "by_client":
        parts = [own_split(size, id, test_fraction, seed) for id, size in sizes.items()]
    else:
        places = np.repeat(np.arange(len(sizes)), list(sizes.values()))
        rng = np.random.default_rng(seed)
        is_test = client_split(np.concatenate(list(labels.values())), places, test_fraction, rng)
        parts = np.split(is_test, np.cumsum(list(sizes.values()))[:-1])
    return {id: (np.flatnonzero(~part), np.flatnonzero(part)) for id, part in zip(sizes, parts, strict=True)}


def _num_test(num_rows: int, test_fraction: float) -> int:
    """Returns a share of all rows, rounded."""
    validate.in_range("test_fraction", test_fraction, 0, 1, open_low=True, open_high=True)
    return round(validate.as_written(test_fraction) * num_rows)


def ratio_of(name: str, share: float) -> np.ndarray:
    """Returns (numerator, denominator) of a share in (0, 1], as its decimals read, [2] int32, for `rounded_at_random`.

    A share that needs a denominator above 2^15 becomes the nearest that does not.

    Args:
      name: the argument's name, for the error.
      share: in (0, 1].

    >>> ratio_of("rows", 0.2).tolist()
    [1, 5]
    """
    ratio = validate.as_written(share).limit_denominator(LARGEST_DENOMINATOR)
    if not ratio or (ratio == 1 and share < 1):
        rule = f"a share of at least 1 / {LARGEST_DENOMINATOR:,}, and of at most 1 less that, or 1"
        validate.fail(name, rule, share)
    return np.array([ratio.numerator, ratio.denominator], np.int32)


def rounded_at_random(key: Array, number: Array, ratio: Array) -> Array:
    """Returns a share of a number, rounded up or down at random so that the mean is the share, [] int32, traceable.

    Args:
      key: of the draw.
      number: [] int32, >= 0.
      ratio: [2] int32 of `ratio_of`.

    Guarantees: a share that is a whole number is exact, and the mean is the share
    (tests/population/test_splits.py::test_rounded_at_random).

    >>> int(rounded_at_random(jax.random.key(0), 20, ratio_of("rows", 0.2)))
    4
    """
    numerator, denominator = jnp.asarray(ratio, jnp.int32)
    number = jnp.asarray(number, jnp.int32)
    start = jax.lax.rem(jax.random.bits(key, (), jnp.uint32), denominator.astype(jnp.uint32)).astype(jnp.int32)
    rest = jax.lax.rem(number, denominator)
    return jax.lax.div(number, denominator) * numerator + jax.lax.div(rest * numerator + start, denominator)
