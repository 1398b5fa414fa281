"""Stops a run by Ctrl-C between two blocks of rounds."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts() -> Iterator[list]:
    """Yields a list that the first Ctrl-C fills, so that a run can stop between two blocks.

    The second Ctrl-C stops the run at once. An exception raised at once could hit Python code that is called from
    compiled code, and would be lost there.
    """
    received_signals: list = []
    # Python lets only the main thread handle signals.
    if threading.current_thread() is not threading.main_thread():
        yield received_signals
        return

    def note_signal(number, frame):
        received_signals.append(number)
        if len(received_signals) > 1 and callable(previous_handler):
            previous_handler(number, frame)

    previous_handler = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, note_signal)
    try:
        yield received_signals
    finally:
        signal.signal(signal.SIGINT, previous_handler)
