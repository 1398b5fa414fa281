"""In a vertical federation several parties hold different features (columns) of the same individuals."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.federated_data import FederatedData
from fedjax_sim.population.partition import generator
from fedjax_sim.population.population import from_clients
from fedjax_sim.population.vertical.private_set_intersection import (
    Alignment,
    align_diffie_hellman,
    align_exact,
    align_keyed,
)
from fedjax_sim.population.vertical.record_linkage import align_similar
from fedjax_sim.validate import NonNegativeInt, PositiveShare, Share

ALIGNMENTS = ("exact", "keyed", "diffie_hellman", "similar")
MISSING_ROWS = ("drop", "zeros")
MOST_CLIENTS = 10_000  # each client's rows are aligned on the host
LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyz"))


@validate.named_arguments
def joined(
    features: Sequence[np.ndarray], y: np.ndarray, alignment: Alignment, *, missing: Literal["drop", "zeros"] = "drop"
) -> dict[str, Any]:
    """Puts the rows of all parties in one order, the order of party 0, so that they can be trained on.

    Args:
      features: the table of each party, [n_p, d_p]. A single column must be a table [n_p, 1].
      y: [n_0], the labels of party 0.
      alignment: of the parties' rows.
      missing: "drop" leaves out individuals whom some party does not have. "zeros" keeps all rows of party 0, and a
        party without a row has zeros there. In standardised columns zero is the mean. Each party knows which of its
        rows were filled.

    Returns: {"x": P arrays [n, d_p], "y": [n]}.

    Raises: ValueError for features that are not a table, or if a table is shorter than its aligned rows need.
      ValueError also if party 0 or the labels have another number of rows than was aligned.

    Guarantees: row k of every party is the same individual (tests/population/vertical/test_vertical.py::test_joined).
    An individual whom a party lacks has zeros there (::test_missing_overlap).

    >>> from fedjax_sim.population import align_exact
    >>> alignment = align_exact([["ann", "bob"], ["bob", "ann"]])
    >>> joined([np.eye(2), np.array([[7.0], [8.0]])], np.array([0, 1]), alignment)["x"][1].tolist()
    [[8.0], [7.0]]
    """
    validate.part("alignment", alignment, Alignment)
    if not isinstance(features, (list, tuple)):
        validate.fail("features", "a list of tables, one for each party", type(features).__name__, error=TypeError)
    features = [np.asarray(part) for part in features]
    rows = alignment.rows if missing == "drop" else alignment.links
    if len(features) != rows.shape[1]:
        validate.fail("features", f"a table for each of {rows.shape[1]} parties", len(features))
    for p, part in enumerate(features):
        if part.ndim != 2:
            validate.fail(f"features[{p}]", "a table [n, d]", part.shape, "One column is a table too: x[:, None].")
        if part.dtype.kind not in "fiub":
            validate.fail(f"features[{p}]", "numbers", part.dtype.name, "Encode words as numbers first.")
        if not np.isfinite(part).all():
            validate.fail(f"features[{p}]", "finite numbers", "NaN or infinity", "Impute or drop those rows first.")
        if len(part) <= rows[:, p].max():
            validate.fail(f"features[{p}]", f"more than {rows[:, p].max()} rows, as the alignment says", len(part))
    for name, part in (("features[0]", features[0]), ("y", np.asarray(y))):
        if part.shape[:1] != alignment.links.shape[:1]:
            validate.fail(name, f"the {len(alignment.links)} rows that were aligned", part.shape)
    # The row -1 of a missing individual reads some other row, and np.where then replaces it by zeros.
    x = tuple(
        np.where(party_rows[:, None] >= 0, part[party_rows], 0).astype(part.dtype)
        for part, party_rows in zip(features, rows.T, strict=True)
    )
    return {"x": x, "y": np.asarray(y)[rows[:, 0]]}


@validate.named_arguments
def with_parties(
    data: FederatedData,
    *,
    num_parties: int = 2,
    widths: Sequence[int] | None = None,
    overlap: PositiveShare = 1.0,
    alignment: Literal["exact", "keyed", "diffie_hellman", "similar"] = "exact",
    missing: Literal["drop", "zeros"] = "drop",
    threshold: PositiveShare = 0.8,
    typo_rate: Share = 0.0,
    seed: NonNegativeInt = 0,
) -> FederatedData:
    """Splits the columns of a data set over parties and aligns the parties' tables. Party 0 holds the labels.

    Every training client becomes a consortium of P parties. With one client the federation is vertical. With several
    clients, such as hospitals, it is both horizontal and vertical. Party 0 has all rows of a client. Each other party
    has a random share of these rows, in an order of its own. The parties then find their common rows by ids or names.

    Args:
      data: features [d] and a label for each example.
      num_parties: P in [2, d]. Each party has about equally many neighbouring columns.
      widths: the number of columns of each party, in order, instead of `num_parties`. They add up to d.
      overlap: in (0, 1], the share of a client's rows that each other party has, rounded up or down at random, and at
        least one row. It is drawn for each party independently.
      alignment: how the parties find common rows. "exact", "keyed" and "diffie_hellman" compare ids. "similar" compares
        generated names and dates of birth.
      missing: "drop" or "zeros", as in `joined`.
      threshold: for "similar", the least similarity of a pair that is linked, in (0, 1].
      typo_rate: for "similar", the share of the records of parties 1, 2, ... with a wrong letter, in [0, 1].
      seed: of rows, orders and names.

    Returns: the same data set with another `train`, and with `columns`. x stays one array [n, d], the parties' columns
    side by side, so that any other model can train on the same aligned rows. Test sets are unchanged.

    Raises: TypeError if `data` is not a `FederatedData`. ValueError or TypeError for options out of range, for data
    without columns, for poisoned clients, and if the parties have no individual in common.

    Guarantees: with ids every aligned row is a row of the data, with its own label
    (tests/population/vertical/test_vertical.py:: test_rows_stay_whole). With typing errors some rows mix two
    individuals, and some are not found (::test_typing_errors_cost_rows).

    >>> from fedjax_sim.population import breast_cancer
    >>> data = with_parties(breast_cancer(num_clients=1, partition="iid"), num_parties=4, overlap=0.9)
    >>> data.columns, 0.6 < int(data.train.sizes[0]) / 455 < 0.85
    ((8, 8, 7, 7), True)
    """
    columns = _checked_columns(data, num_parties, widths)
    if typo_rate and alignment != "similar":
        validate.fail("typo_rate", "0 with ids: only names have errors", typo_rate, "Take alignment = 'similar'.")
    validate.integer("data.train.size", data.train.size, 1, MOST_CLIENTS)
    clients = []
    column_borders = np.cumsum(columns)[:-1]
    for id in range(data.train.size):
        client = data.train.client(jnp.int32(id))
        mask = np.asarray(client.mask)
        examples = jax.tree.map(lambda leaf, mask=mask: np.asarray(leaf)[mask], client.examples)
        rng = generator(f"parties of {id}", seed)
        # There is nobody to align at a client without rows, and an empty overlap would be refused.
        if not len(examples["y"]):
            clients.append(examples)
            continue
        # The client's rows that each party has, in the order of that party's table.
        party_rows = [np.arange(len(examples["y"]))]
        for _ in columns[1:]:
            share = validate.as_written(overlap) * len(party_rows[0])
            num_rows = math.floor(share)
            num_rows += bool(share % 1) and bool(rng.random() < share % 1)
            num_rows = max(1, num_rows)  # a table without rows cannot be aligned
            party_rows.append(rng.permutation(len(party_rows[0]))[:num_rows])
        party_alignment = _aligned(alignment, party_rows, rng, threshold, typo_rate)
        party_columns = np.split(examples["x"], column_borders, axis=1)
        tables = [part[rows] for part, rows in zip(party_columns, party_rows, strict=True)]
        aligned = joined(tables, examples["y"], party_alignment, missing=missing)
        clients.append({"x": np.concatenate(aligned["x"], axis=1), "y": aligned["y"]})
    return data._replace(train=from_clients(clients, learned=data.learned), columns=columns)


def _checked_columns(data: FederatedData, num_parties: int, widths: Sequence[int] | None) -> tuple[int, ...]:
    """Returns the number of columns of each party, after checks of the data and of the options.

    Args:
      data: with features [d] and labels, which nobody has split or poisoned.
      num_parties: P in [2, d]; the parties' numbers of columns then differ by one at most. It is not read beside
        `widths`.
      widths: the parties' numbers of columns, >= 1 each, which add up to d; None for equal parts.

    Returns: P >= 2 numbers that add up to d.

    Raises: TypeError if `data` is not a `FederatedData`; ValueError or TypeError for the others.
    """
    if not isinstance(data, FederatedData):
        validate.fail("data", "a FederatedData", type(data).__name__, "population.breast_cancer(), say.", TypeError)
    if len(data.input_shape) != 1 or data.task not in ("binary", "classification", "regression"):
        validate.fail(
            "data", "features in columns, with labels", (data.task, data.input_shape), "Flatten images first."
        )
    if data.columns is not None or data.poisons or data.local_test is not None:
        hint = "Split the columns first, and wrap the result."
        validate.fail("data", "clean rows that nobody split, and no local test", data.name, hint)
    width = data.input_shape[0]
    if widths is None:
        validate.integer("num_parties", num_parties, 2, width, hint=f"There are {width} columns.")
        return tuple(len(part) for part in np.array_split(np.arange(width), num_parties))
    validate.sequence("widths", widths, least=2)
    for number in widths:
        validate.integer("widths", number)
    if sum(widths) != width:
        validate.fail("widths", f"numbers that add up to the {width} features", list(widths))
    return tuple(int(number) for number in widths)


def _aligned(
    way: str, party_rows: Sequence[np.ndarray], rng: np.random.Generator, threshold: float, typo_rate: float
) -> Alignment:
    """Aligns parties that have these rows of a client, by the method `way`."""
    # The common secret of the parties, for the two methods that need one.
    key = hashlib.sha256(rng.bytes(32)).digest()
    if way == "similar":
        tables = _people(party_rows, rng, typo_rate)
        return align_similar(tables, key, threshold=threshold)
    ids = [[f"person {row}" for row in rows] for rows in party_rows]
    if way == "keyed":
        return align_keyed(ids, key)
    return align_exact(ids) if way == "exact" else align_diffie_hellman(ids)


def _people(
    party_rows: Sequence[np.ndarray], rng: np.random.Generator, typo_rate: float
) -> list[list[tuple[str, ...]]]:
    """Draws a first name, a last name and a date of birth for each person, as each party wrote them down.

    Args:
      party_rows: for each party, the numbers of the people of its rows. Party 0 has a row of every person.
      rng: draws people and typing errors.
      typo_rate: the probability that a row of another party has one wrong letter in its names.

    Returns: for each party, (first name, last name, date of birth) of each row.
    """
    num_people = len(party_rows[0])
    names = rng.choice(LETTERS, (num_people, 14))  # 6 letters of the first name, 8 of the last
    births = [
        f"{year}-{day:03d}"
        for year, day in zip(rng.integers(1930, 2010, num_people), rng.integers(1, 366, num_people), strict=True)
    ]
    tables = []
    for party, rows in enumerate(party_rows):
        written = names[rows]
        if party:  # party 0 makes no typing errors
            has_typo = rng.random(len(rows)) < typo_rate
            places = rng.integers(0, 14, len(rows))
            shifts = rng.integers(1, 26, len(rows))  # never 0, so the letter does change
            letters = np.searchsorted(LETTERS, written[np.arange(len(rows)), places])
            changed = written.copy()
            changed[np.arange(len(rows)), places] = LETTERS[(letters + shifts) % 26]
            written = np.where(has_typo[:, None], changed, written)
        tables.append(
            [("".join(name[:6]), "".join(name[6:]), births[row]) for name, row in zip(written, rows, strict=True)]
        )
    return tables
