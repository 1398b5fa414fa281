"""Ctrl-C between two blocks of rounds."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["interrupts"]


@contextmanager
def interrupts() -> Iterator[list]:
    """A list that the first Ctrl-C fills, so that a run stops between two blocks; the second one stops it at once.

    An exception raised at once could hit Python code that is called from compiled code, and would be lost there.
    """
    seen: list = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def note(number, frame):
        seen.append(number)
        if len(seen) > 1 and callable(before):
            before(number, frame)

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
