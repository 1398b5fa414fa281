"""Keeps account of a run's wall time: at any moment exactly one named part of it passes, so the parts add up to it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

# Name of a part in a summary -> words for it. A part does not hold the seconds of parts inside of it.
PARTS = {
    "start": "start: imports, config, model, initial state",
    "data": "reading data",
    "compilation": "tracing and compiling rounds",
    "rounds": "rounds",
    "evaluation": "evaluations, with their compilation",
    "checkpoints": "checkpoints",
    "logs": "logs and loggers",
    "callbacks": "callbacks",
    "waiting": "waiting for other processes",
    "page": "summary and page",
    "other": "other",
}
NANO = 10**9


class Account:
    """Wall time divided among parts: since it began, each nanosecond belongs to the part that was on then.

    Args:
      began: when it began, in nanoseconds of `time.perf_counter_ns`; None for now.
      part: the part that is on.

    Guarantees: the parts add up to the time since it began, exactly, and to that of earlier sessions
    (tests/running/test_seconds.py::test_parts_add_up).
    """

    def __init__(self, began: int | None = None, part: str = "other"):
        self.nanoseconds = dict.fromkeys(PARTS, 0)
        self._part = part
        self._since = time.perf_counter_ns() if began is None else began

    def switch(self, part: str) -> str:
        """Turns a part on, and returns the one that was on before."""
        now = time.perf_counter_ns()
        self.nanoseconds[self._part] += now - self._since
        self._since = now
        before, self._part = self._part, part
        return before

    def add(self, earlier: Mapping[str, float]) -> None:
        """Adds the seconds of earlier sessions of a run, by part."""
        for name, seconds in earlier.items():
            self.nanoseconds[name] += round(seconds * NANO)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each part until now."""
        self.switch(self._part)
        return {name: count / NANO for name, count in self.nanoseconds.items()}


_running: ContextVar[Account | None] = ContextVar("running", default=None)


@contextmanager
def time_account(began: int | None = None, part: str = "other") -> Iterator[Account]:
    """Yields the account of the time of this block: the one that is kept already, or a new one.

    The arguments are those of `Account`.
    """
    if (kept := _running.get()) is not None:
        yield kept
        return
    token = _running.set(new := Account(began, part))
    try:
        yield new
    finally:
        _running.reset(token)


@contextmanager
def timed_part(name: str) -> Iterator[None]:
    """Books the time of the block on a part; outside of a `time_account` it does nothing.

    Args:
      name: of `PARTS`.
    """
    kept = _running.get()
    if kept is None:
        yield
        return
    before = kept.switch(name)
    try:
        yield
    finally:
        kept.switch(before)


def so_far() -> dict[str, float]:
    """Returns the seconds of each part of the account that is kept; {} outside of one."""
    kept = _running.get()
    return {} if kept is None else kept.seconds()


def shown_parts(seconds: Mapping[str, float]) -> str:
    """Returns a sum of seconds and its parts as text, the largest first, without those below 0.05 s.

    >>> shown_parts({"rounds": 2.0, "evaluation": 20.0, "other": 0.01})
    '22.0 s: evaluations, with their compilation 20.0, rounds 2.0'
    """
    parts = sorted(seconds.items(), key=lambda item: -item[1])
    texts = [f"{PARTS.get(name, name)} {value:.1f}" for name, value in parts if value >= 0.05]
    return f"{sum(seconds.values()):.1f} s" + (": " if texts else "") + ", ".join(texts)


def process_began() -> int:
    """Returns when this process began, in nanoseconds of `time.perf_counter_ns`; now, where the system does not say."""
    now = time.perf_counter_ns()
    try:
        # The name of the program, in brackets, may hold spaces.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) * NANO // os.sysconf("SC_CLK_TCK")
        return min(now, now - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - began))
    except (AttributeError, IndexError, OSError, ValueError):
        return now
