"""Vertical federations: the same individuals, whose features are split by columns over parties."""

from __future__ import annotations

import hashlib
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

__all__ = ["joined", "with_parties"]

WAYS = ("exact", "keyed", "diffie_hellman", "similar")
MISSING = ("drop", "zeros")
MOST_CLIENTS = 10_000  # each client's rows are aligned on the host
LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyz"))


@validate.named_arguments
def joined(
    features: Sequence[np.ndarray], y: np.ndarray, alignment: Alignment, *, missing: Literal["drop", "zeros"] = "drop"
) -> dict[str, Any]:
    """The parties' rows in one order, that of party 0, as each party has them after alignment.

    Args:
      features: of each party, [n_p, d_p], one column too is a table; y: [n_0], the labels of party 0.
      alignment: of their rows.
      missing: "drop" leaves out whom a party does not know; "zeros" keeps all of party 0's rows, with zeros (the mean,
        of standardised columns) where a party has none. Each party knows which rows it filled.

    Returns: {"x": P arrays [n, d_p], "y": [n]}.

    Raises: ValueError for what is no table, for other rows of party 0 or labels than were aligned, and for tables of
      others that are shorter than the alignment's rows.

    Guarantees: row k of every party is the same individual (tests/population/vertical/test_vertical.py::test_joined);
    whom a party lacks has zeros there (::test_missing_overlap).

    >>> from fedjax_sim.population import align_exact
    >>> found = align_exact([["ann", "bob"], ["bob", "ann"]])
    >>> joined([np.eye(2), np.array([[7.0], [8.0]])], np.array([0, 1]), found)["x"][1].tolist()
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
    x = tuple(
        np.where(r[:, None] >= 0, part[r], 0).astype(part.dtype) for part, r in zip(features, rows.T, strict=True)
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
    """The data set whose columns are split over parties, whose tables are first aligned; party 0 has the labels.

    Every training client becomes a consortium of P parties: with one client learning is vertical, with several, such as
    hospitals, horizontal and vertical. Party 0 has all of a client's rows; each other one has a random share of them,
    in an order of its own, and finds its partners' rows by what it calls them.

    Args:
      data: features [d] and a label each.
      num_parties: P in [2, d], with about equally many neighbouring columns each.
      widths: in the place of `num_parties`, how many columns each party has, in order; they add up to d.
      overlap: in (0, 1], the share of rows that each further party knows, drawn for each party by itself.
      alignment: "exact", "keyed" or "diffie_hellman", by ids; "similar", by made-up names and dates of birth; a share
        `typo_rate` of the further parties' records has a wrong letter, and pairs are linked from `threshold` on.
      missing: "drop" or "zeros", as in `joined`.
      threshold, typo_rate: for "similar", in (0, 1] and [0, 1].
      seed: of rows, orders and names.

    Returns: the same data set with other `train`, and `columns`. x stays [n, d], the parties' columns side by side, so
    that other models train on the same aligned rows; test sets are unchanged.

    Raises: TypeError for what is no `FederatedData`; ValueError, TypeError for options out of range, for data without
    columns, for poisoned clients, and where the parties share nobody.

    Guarantees: with ids, rows are those of the data, each with its own label
    (tests/population/vertical/test_vertical.py:: test_rows_stay_whole); with typing errors some are not, or are not
    found (::test_typing_errors_cost_rows).

    >>> from fedjax_sim.population import breast_cancer
    >>> data = with_parties(breast_cancer(num_clients=1, partition="iid"), num_parties=4, overlap=0.9)
    >>> data.columns, 0.6 < int(data.train.sizes[0]) / 455 < 0.85
    ((8, 8, 7, 7), True)
    """
    columns = _checked_columns(data, num_parties, widths)
    if typo_rate and alignment != "similar":
        validate.fail("typo_rate", "0 with ids: only names have errors", typo_rate, "Take alignment = 'similar'.")
    validate.integer("data.train.size", data.train.size, 1, MOST_CLIENTS)
    clients, edges = [], np.cumsum(columns)[:-1]
    for id in range(data.train.size):
        held = data.train.client(jnp.int32(id))
        mask = np.asarray(held.mask)
        whole = jax.tree.map(lambda leaf, mask=mask: np.asarray(leaf)[mask], held.examples)
        rng = generator(f"parties of {id}", seed)
        if not len(whole["y"]):
            clients.append(whole)
            continue
        kept = [np.arange(len(whole["y"]))]
        for _ in columns[1:]:
            kept.append(rng.permutation(len(kept[0]))[: max(1, round(overlap * len(kept[0])))])
        found = _aligned(alignment, kept, rng, threshold, typo_rate)
        parts = [part[rows] for part, rows in zip(np.split(whole["x"], edges, axis=1), kept, strict=True)]
        rows = joined(parts, whole["y"], found, missing=missing)
        clients.append({"x": np.concatenate(rows["x"], axis=1), "y": rows["y"]})
    return data._replace(train=from_clients(clients), columns=columns)


def _checked_columns(data: FederatedData, num_parties: int, widths: Sequence[int] | None) -> tuple[int, ...]:
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
    way: str, kept: Sequence[np.ndarray], rng: np.random.Generator, threshold: float, typo_rate: float
) -> Alignment:
    """The alignment of parties who know these rows."""
    key = hashlib.sha256(rng.bytes(32)).digest()
    if way == "similar":
        tables = _people(kept, rng, typo_rate)
        return align_similar(tables, key, threshold=threshold)
    ids = [[f"person {row}" for row in rows] for rows in kept]
    if way == "keyed":
        return align_keyed(ids, key)
    return align_exact(ids) if way == "exact" else align_diffie_hellman(ids)


def _people(kept: Sequence[np.ndarray], rng: np.random.Generator, typo_rate: float) -> list[list[tuple[str, ...]]]:
    """Names and dates of birth of the rows, as each party wrote them down."""
    number = len(kept[0])
    names = rng.choice(LETTERS, (number, 14))
    births = [
        f"{year}-{day:03d}"
        for year, day in zip(rng.integers(1930, 2010, number), rng.integers(1, 366, number), strict=True)
    ]
    tables = []
    for p, rows in enumerate(kept):
        written = names[rows]
        if p:
            wrong = rng.random(len(rows)) < typo_rate
            places, letters = rng.integers(0, 14, len(rows)), rng.integers(1, 26, len(rows))
            old = np.searchsorted(LETTERS, written[np.arange(len(rows)), places])
            changed = written.copy()
            changed[np.arange(len(rows)), places] = LETTERS[(old + letters) % 26]
            written = np.where(wrong[:, None], changed, written)
        tables.append(
            [("".join(name[:6]), "".join(name[6:]), births[row]) for name, row in zip(written, rows, strict=True)]
        )
    return tables
