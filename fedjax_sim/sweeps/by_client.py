"""Compares the results of each client between runs: by name, or by number where clients have no names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedjax_sim.report.by_client import Row, main_metric, metric_columns, shown_client
from fedjax_sim.sweeps.runs import NO_PART, LoggedRun, names_of_rows


class ClientTable(NamedTuple):
    """A row for each client and combination of options; `texts` has a row for each client."""

    names: tuple[str, ...]  # of the columns that are labels: the client
    metric: str
    rows: list[dict[str, Any]]  # of one client after the other, and of its combinations in the order of the runs

    def texts(self) -> tuple[list[str], list[list[str]]]:
        """Returns (header, rows): each client's mean over seeds in the first runs, and differences from it.

        Clients stand in the order of their differences, the largest first, in whatever direction.
        """
        clients: dict[str, list[dict]] = {}
        for row in self.rows:
            clients.setdefault(row["client"], []).append(row)
        runs = [row["run"] for row in next(iter(clients.values()))]
        header = ["client", f"{self.metric}, {runs[0]}", *(f"{run} minus the first" for run in runs[1:])]

        def largest(rows: list[dict]) -> float:
            # Runs that differ in their seeds alone are one combination, without differences.
            return max((_size(row["difference"]) for row in rows[1:]), default=-1.0)

        ordered = sorted(clients.values(), key=largest, reverse=True)
        return header, [
            [rows[0]["client"], _text(rows[0]["mean"]), *(_text(row["difference"], "+") for row in rows[1:])]
            for rows in ordered
        ]


def _size(value: float | None) -> float:
    """Returns the size of a difference; infinity for one that is not finite, and less than any for none."""
    if value is None:
        return -1.0
    return abs(value) if math.isfinite(value) else math.inf


def _text(value: float | None, sign: str = "") -> str:
    """Returns a number as a text of four digits; "" for none."""
    return "" if value is None else f"{value:{sign if value else ''}.4g}"


def clients_of_runs(
    runs: Sequence[LoggedRun], options: Sequence[str], round: int, metric: str | None
) -> ClientTable | str:
    """Returns the results of each client in several runs, and their differences from the first combination of options.

    A difference is the mean over the seeds that both combinations have, seed by seed.

    Args:
      runs: from `read_run`, at least two.
      options: the options in which they differ, as `sweep_of` finds them.
      round: the round that is compared.
      metric: a column of `by_client.csv`; any other text and None stand for the main one of those that all runs have.

    Returns: the table, or a sentence why there is none: a run without results by client or whose results are of another
      round, runs with different clients, and clients without names in runs with other data or another seed.

    Guarantees: a client is compared with itself, also where runs number clients differently
    (tests/sweeps/test_clients_of_runs.py::test_clients_are_compared_by_name), and never with another one
    (::test_what_is_not_compared).
    """
    without = [run.name for run in runs if not run.clients]
    if without:
        return f"No results by client: {', '.join(without)} {'has' if len(without) == 1 else 'have'} no by_client.csv."
    others = [run.name for run in runs if run.last_evaluated != round]
    if others:
        return f"No results by client: those of {', '.join(others)} are of another round than {round:,}."
    shared = [
        name for name in metric_columns(runs[0].clients) if all(name in metric_columns(run.clients) for run in runs)
    ]
    if not shared:
        return "No results by client: no metric is in every run's by_client.csv."
    if metric not in shared:
        metric = main_metric([{name: row.get(name) for name in shared} for row in runs[0].clients])
    # Params that are no model have no results at held-out clients, which need not be in a comparison of owners.
    runs = [run._replace(clients=[row for row in run.clients if _is_compared(row, metric)]) for run in runs]
    keys = _keys(runs, options)
    if isinstance(keys, str):
        return f"No results by client: {keys}"
    values: dict[tuple, dict[int, dict[Any, float | None]]] = {}  # by combination, seed and client
    for run, keys_of_run in zip(runs, keys, strict=True):
        metric_of_client = {key: row[metric] for key, row in zip(keys_of_run, run.clients, strict=True)}
        combination = tuple(run.options.get(name, NO_PART) for name in options)
        values.setdefault(combination, {})[run.seed] = metric_of_client
    labels = names_of_rows(runs, options)
    first = next(iter(values.values()))
    rows = []
    for key, row in zip(keys[0], runs[0].clients, strict=True):
        for label, (combination, by_seed) in zip(labels, values.items(), strict=True):
            numbers = [number for of_client in by_seed.values() if (number := of_client[key]) is not None]
            pairs = [(of_client[key], first[seed][key]) for seed, of_client in by_seed.items() if seed in first]
            gaps = [a - b for a, b in pairs if a is not None and b is not None]
            rows.append(
                {
                    "client": key if isinstance(key, str) else _numbered(row),
                    "run": label,
                    **dict(zip(options, combination, strict=True)),
                }
                | {"metric": metric, "seeds": len(numbers), "mean": _mean(numbers)}
                | {"difference": None if by_seed is first else _mean(gaps)}
            )
    return ClientTable(("client",), metric, rows)


def _is_compared(row: Row, metric: str) -> bool:
    """Returns whether a row is a training client's, or has a result of a held-out client."""
    return row["client"] is not None or row[metric] is not None


def _numbered(row: Row) -> str:
    """Returns the number of a client, behind its name if it has one, which then is not its own."""
    number = shown_client({**row, "name": None})
    return f"{row['name']} ({number})" if row["name"] else number


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _keys(runs: Sequence[LoggedRun], options: Sequence[str]) -> list[list[Any]] | str:
    """Returns, for each run, what identifies the client of each row; or a sentence why nothing does.

    Args:
      runs: at least two, with rows by client.
      options: paths of the options in which the runs differ.

    Returns: for each run a key for each of its rows, in their order. A key is the client's name, if names are unique in
      every run. Otherwise it is (number of the training client, number of the held-out client, name), where the number
      that a row does not have is None. All runs have the same set of keys.
    """

    def numbers(row: Row) -> tuple:
        return row["client"], row["held_out_client"], row["name"]

    keys: list[list[Any]] = [[row["name"] for row in run.clients] for run in runs]
    if not all(None not in of_run and len(set(of_run)) == len(of_run) for of_run in keys):
        keys = [[numbers(row) for row in run.clients] for run in runs]
        # Numbers of other data, or of a partition drawn from another seed, are of other clients.
        if len({run.seed for run in runs}) > 1 or any(name.startswith("data.") for name in options):
            return "clients have no names by which to find them in runs of other data or another seed."
    if any(set(of_run) != set(keys[0]) for of_run in keys):
        return "the runs have different clients."
    return keys
