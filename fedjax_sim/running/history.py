"""Holds what a run returns beside its state: its records and its summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim import validate


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a record by name, without its round; entry i of an array is `name/i`.

    >>> numbers_of({"round": 3, "test_loss": "nan", "norms": [1.0, 2.0]})
    {'test_loss': nan, 'norms/0': 1.0, 'norms/1': 2.0}
    """
    numbers = {}
    for name, value in record.items():
        if name != "round":
            for place, number in np.ndenumerate(np.asarray(value, float)):
                numbers[name + "".join(f"/{i}" for i in place)] = float(number)
    return numbers


class History(NamedTuple):
    """The log of a run and its summary.

    With an evaluation the first record is of round 0. It holds the evaluation before training, and nothing else.
    `test_*` are of the algorithm's params, `personal_*` of trained clients' own models, and `owner_*` of the model that
    each client would use (`metrics.evaluation`).
    """

    records: list[dict[str, Any]]  # one record a round, as in metrics.jsonl
    summary: dict[str, Any]  # as in summary.json
    # Of the last evaluation, if `metrics.evaluation` built it: see `Evaluation.with_clients`.
    by_client: Mapping[str, Mapping[str, np.ma.MaskedArray]] = {}

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns (rounds, values) of a metric, over the rounds that have it.

        The values of an evaluation start at round 0.

        Args:
          name: the metric's name, such as "test_loss".

        Raises: KeyError for a name that no record has, with the nearest name.
        """
        records_with_it = [record for record in self.records if name in record]
        if self.records and not records_with_it:
            known_names = sorted({key for record in self.records for key in record})
            raise KeyError(
                f"name: expected one of {', '.join(known_names)}, got {name!r}. {validate.nearest(name, known_names)}"
            )
        return np.array([record["round"] for record in records_with_it]), np.array(
            [record[name] for record in records_with_it], float
        )

    def to_pandas(self) -> Any:
        """Returns the log as a pandas frame: a row a round, a column a number. Entry i of an array is column `name/i`.

        A metric that a round does not have is NaN there.

        Raises: ImportError without pandas.

        Guarantees: each number of `metrics.jsonl` is in the row of its round
        (tests/running/test_loop.py::test_history_as_a_frame).
        """
        import pandas

        rounds = pandas.Index([record["round"] for record in self.records], name="round")
        return pandas.DataFrame([numbers_of(record) for record in self.records], index=rounds)
