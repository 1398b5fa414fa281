"""What a run returns beside its state: its records and its summary."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedjax_sim import validate

__all__ = ["History"]


class History(NamedTuple):
    """The log of a run and its summary.

    With an evaluation the first record is that of round 0: the evaluation of the model before training, nothing else.
    """

    records: list[dict[str, Any]]  # one a round, as in metrics.jsonl
    summary: dict[str, Any]  # as in summary.json

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(rounds, values) of a metric, over the rounds that have it; those of an evaluation start at round 0.

        Raises: KeyError for a name that no record has, with the nearest one.
        """
        having = [record for record in self.records if name in record]
        if self.records and not having:
            known = sorted({key for record in self.records for key in record})
            raise KeyError(f"name: expected one of {', '.join(known)}, got {name!r}. {validate.nearest(name, known)}")
        return np.array([r["round"] for r in having]), np.array([r[name] for r in having], float)
