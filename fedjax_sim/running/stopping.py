"""Stops a run at a target, or when a metric no longer improves: `run.stop_when` of a config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.types.shares import reaches

NONE_BESIDE_NOISE = "When it stops would tell about test rows or clients whom no epsilon covers."

TARGET = re.compile(r"(\w+) *(>=|<=) *(\S+)")
PATIENCE_RULE = re.compile(r"(\w+) not (higher|lower) for ([0-9]+)")


class StopWhen:
    """A callback of `run` that stops it after the first evaluation at which a rule holds.

    Args:
      rule: one of
        - "METRIC >= NUMBER" and "METRIC <= NUMBER": the metric has reached the number,
        - "METRIC not higher for N" and "METRIC not lower for N": the last N evaluations brought no value above (below)
          the best one before them.
      records: records of rounds that were run before, of a run that is resumed. A round that comes twice counts once.

    A value that is not finite reaches no number, and is no improvement. A value that float32 cannot tell from the
    number reaches it.

    Raises: ValueError for a rule in another form; when called, for a record without the metric.

    Guarantees: a run stops after the evaluation at which its rule first holds
    (tests/running/test_stopping.py::test_runs_stop_where_their_rule_holds), and a stopped and resumed run stops in the
    same round (::test_a_resume_does_not_wait_anew). k of n rows reach the target k / n
    (tests/laws/test_shares.py::test_a_target_is_reached_at_its_share).

    >>> stop = StopWhen("test_loss not lower for 2")
    >>> [stop(round, None, {"round": round, "test_loss": x}) for round, x in enumerate([3.0, 2.0, 2.5, 2.1])]
    [False, False, False, True]
    """

    def __init__(self, rule: str, records: Iterable[Mapping[str, Any]] = ()):
        text = rule.strip() if isinstance(rule, str) else ""
        patience = PATIENCE_RULE.fullmatch(text)
        match = patience or TARGET.fullmatch(text)
        number = float("nan") if match is None else validate.decimal(match[3])
        if match is None or number != number or (patience is not None and number < 1):
            rules = "'test_accuracy >= 0.9', 'test_loss <= 0.3' or 'test_loss not lower for 5' (evaluations)"
            validate.fail("stop_when", f"a rule such as {rules}", rule)
        self.metric = match[1]
        self.number = number
        self.is_patience = patience is not None
        # Values are negated where lower is better, so that higher is better below.
        self.sign = 1.0 if match[2] in (">=", "higher") else -1.0
        self.values: dict[int, float] = {}  # by round
        for record in records:
            if self.metric in record and record["round"] > 0:
                self._add(record)

    def __call__(self, round: int, state: Any, record: Mapping[str, Any]) -> bool:
        """Returns whether the run is to stop after this evaluation."""
        if self.metric not in record:
            hint = validate.nearest(self.metric, record)
            validate.fail("stop_when", "a metric of the evaluation, one of " + ", ".join(record), self.metric, hint)
        self._add(record)
        values = [self.values[place] for place in sorted(self.values) if place <= round]
        if not self.is_patience:
            # Metrics are float32: 5 right answers of 100 may be logged as 0.049999997, and reach 0.05.
            return bool(reaches(np.asarray(values[-1]), self.sign * self.number))
        num_waits = int(self.number)
        best_before = max(values[:-num_waits], default=float("inf"))
        return not any(value > best_before for value in values[-num_waits:]) and len(values) > num_waits

    def _add(self, record: Mapping[str, Any]) -> None:
        """Keeps the metric of a record; NaN as the worst value."""
        value = self.sign * float(record[self.metric])
        self.values[record["round"]] = value if value == value else -float("inf")
