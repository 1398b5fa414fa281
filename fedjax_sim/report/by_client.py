"""The results of each client of a run: `by_client.csv` in the run's folder, and the rows that pages are made of."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.files.regular_files import content_of
from fedjax_sim.files.text_files import csv_text
from fedjax_sim.metrics.evaluation import MOST_LISTED
from fedjax_sim.population.protocol import sizes_of
from fedjax_sim.report.numbers import is_better_low
from fedjax_sim.running import checksums
from fedjax_sim.running.log import plain

BY_CLIENT = "by_client.csv"
CLIENT_COLUMNS = ("client", "held_out_client", "name")  # columns that say who it is
COUNTS = ("training_rows", "held_out_rows", "local_test_rows")
# Groups of results, those first that tell the most about a client: of the model that it would use, on its own rows.
RESULT_GROUPS = ("owner", "personal", "local_test", "held_out", "newcomer")

Row = dict[str, Any]


def client_rows(data: Any, results: Mapping[str, Mapping[str, np.ma.MaskedArray]]) -> list[Row]:
    """Returns the results of each client with its name, and with its numbers of training rows and of test rows.

    Args:
      data: a `population.FederatedData`.
      results: `History.by_client` of a run on it.

    Returns: a row for each training client, if there are at most 1,000 and some have results. It holds the results on
      the client's `local_test`, and those of the held-out client of its name. Held-out clients of no such name have
      rows of their own behind. A number that a client does not have is None.

    Raises: ValueError for names that are not one for each client.

    Guarantees: each number is beside its own client (tests/report/test_by_client.py::test_rows_of_clients).
    """
    names = _checked("client_names", data.client_names, data.train)
    held_out_names = _checked("held_out_names", data.held_out_names, data.held_out)
    held_out = results.get("held_out")
    num_held_out = 0 if held_out is None else data.held_out.size
    # A name that two clients share says nothing about who is who.
    are_unique = all(len(set(given)) == len(given) for given in (names or (), held_out_names or ()))
    id_of = {name: id for id, name in enumerate(names or ())} if are_unique else {}
    owners: list[int | None] = [None] * num_held_out
    if held_out_names:
        owners = [id_of.get(name) for name in held_out_names[:num_held_out]]
    groups = ("owner", "local_test", "personal", "newcomer")
    own_results = {group: results[group] for group in groups if group in results}
    are_listed = data.train.size <= MOST_LISTED and (bool(own_results) or any(id is not None for id in owners))
    rows: list[Row] = []
    are_counted = are_listed or any(id is not None for id in owners)
    training_rows = np.asarray(sizes_of(data.train)).tolist() if are_counted else []
    for id in range(data.train.size) if are_listed else ():
        rows.append({"client": id, "name": names and names[id], "training_rows": training_rows[id]})
    if are_listed and own_results:
        _add(rows, {"local_test_rows": sizes_of(data.local_test)}, own_results)
    of_held_out: list[Row] = []
    for id, owner in enumerate(owners):
        row = rows[owner] if are_listed and owner is not None else {}
        row |= {"held_out_client": id}
        if not (are_listed and owner is not None):
            row |= {"client": owner, "name": held_out_names and held_out_names[id]}
            row |= {} if owner is None else {"training_rows": training_rows[owner]}
            rows.append(row)
        of_held_out.append(row)
    if held_out is not None and of_held_out:
        _add(of_held_out, {"held_out_rows": sizes_of(data.held_out)}, {"held_out": held_out})
    metrics = [metric for group in RESULT_GROUPS for metric in results.get(group, ())]
    columns = [*CLIENT_COLUMNS, *COUNTS, *metrics]
    present_columns = {column for row in rows for column in row}
    return [
        {column: row.get(column) for column in columns if column in present_columns or column in CLIENT_COLUMNS}
        for row in rows
    ]


def _checked(field: str, names: Sequence[str] | None, population: Any) -> Sequence[str] | None:
    """Returns the names of a population's clients, after checking that there is one for each."""
    size = 0 if population is None else population.size
    if names is not None and len(names) != size:
        hint = f"Where another population takes the place of the first: _replace(..., {field}=None)."
        validate.fail(f"data.{field}", f"a name for each of {size:,} clients", f"{len(names):,} names", hint)
    return names


def _add(rows: Sequence[Row], counts: Mapping[str, Any], results: Mapping[str, Mapping]) -> None:
    """Adds columns [N] to N rows: counts, and the metrics of groups of results; a masked value is None."""
    for name, values in counts.items():
        for row, number in zip(rows, np.asarray(values).tolist(), strict=True):
            row[name] = number
    for metrics in results.values():
        for name, values in metrics.items():
            are_present = ~np.ma.getmaskarray(values)
            for row, number, is_present in zip(rows, plain(values.data), are_present, strict=True):
                row[name] = number if is_present else None


def by_client_csv(rows: Sequence[Row]) -> str:
    """Returns the rows as CSV. The cell of a number that does not exist is empty; one that is not finite is `nan`, say.

    >>> rows = [{"client": 0, "name": "Ghent", "held_out_loss": 0.5}, {"client": 1, "name": "Mons"}]
    >>> by_client_csv(rows).splitlines()
    ['client,name,held_out_loss', '0,Ghent,0.5', '1,Mons,']
    """
    return csv_text(list(rows[0]), rows)


def read_by_client(folder: Path) -> list[Row]:
    """Returns the rows of a run's `by_client.csv`; [] without the file, and for a file that holds something else.

    Numbers are read as floats, ids and counts as integers; an empty cell is None.

    Args:
      folder: of the run.

    Raises: CheckpointError if the file is not as the run wrote it.
    """
    checksums.check_files(folder, [BY_CLIENT])
    try:
        text = content_of(folder / BY_CLIENT).decode()
        rows = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
        return [
            {name: _value(name, cell) for name, cell in row.items()} for row in rows if {*CLIENT_COLUMNS} <= row.keys()
        ]
    except (OSError, ValueError, csv.Error):
        return []


def _value(name: str, cell: Any) -> Any:
    """Returns the content of a cell.

    Raises: ValueError for a text in a column of numbers, and for a line of another length than the first.
    """
    if not isinstance(name, str) or not isinstance(cell, str):
        raise ValueError("a line of another length")
    if name == "name" or not cell:
        return cell or None
    return int(cell) if name in (*CLIENT_COLUMNS, *COUNTS) else float(cell)


def metric_columns(rows: Sequence[Row]) -> list[str]:
    """Returns the names of the columns that are results."""
    return [name for name in rows[0] if name not in (*CLIENT_COLUMNS, *COUNTS)] if rows else []


def main_metric(rows: Sequence[Row]) -> str:
    """Returns the metric by which clients are sorted, of those that the most clients have.

    It is an accuracy before a loss, and that of the models that owners would use before that of the global one.

    >>> main_metric([{"name": "a", "held_out_loss": 0.1, "local_test_accuracy": 0.5, "personal_accuracy": None}])
    'local_test_accuracy'
    """
    counts = {name: sum(row.get(name) is not None for row in rows) for name in metric_columns(rows)}
    most = [name for name in counts if counts[name] == max(counts.values())]
    preferred = [f"{group}_{metric}" for metric in ("accuracy", "loss") for group in RESULT_GROUPS]
    return next((name for name in preferred if name in most), most[0])


def from_worst(rows: Sequence[Row], metric: str) -> list[Row]:
    """Returns the rows from the worst result to the best, as `is_better_low` says.

    A result that is not finite comes first, and clients without a result last.
    """
    sign = -1 if is_better_low(metric) else 1

    def place(row: Row) -> tuple[int, float]:
        result = row.get(metric)
        if result is None:
            return 2, 0.0
        return (1, sign * result) if math.isfinite(result) else (0, 0.0)

    return sorted(rows, key=place)


def shown_client(row: Row) -> str:
    """Returns what a reader calls a client: its name, or else its number.

    >>> shown_client({"name": "Ghent", "client": 3}), shown_client({"client": 3}), shown_client({"held_out_client": 2})
    ('Ghent', 'client 3', 'held-out client 2')
    """
    if row.get("name"):
        return str(row["name"])
    return f"client {row['client']}" if row.get("client") is not None else f"held-out client {row['held_out_client']}"
