"""Does two things at once, where one of them lets other threads of Python run, as XLA's compiler does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def beside(work: Callable[[], Result], meanwhile: Callable[[], None]) -> Result:
    """Does `work` in a thread of its own while the caller's thread does `meanwhile`, and returns the result of `work`.

    JAX's settings are those of a thread, such as the precision of products or 64 bits. Tracing and lowering read them,
    so they stay in the caller's thread; compiling what is lowered reads none.

    Args:
      work: needs none of the caller's settings.
      meanwhile: returns nothing, and raises nothing but what should end both, such as KeyboardInterrupt.

    Raises: what `meanwhile` raises, once `work` has ended; else what `work` raises.

    Guarantees: no thread is left (tests/running/test_beside.py::test_no_thread_is_left).
    """
    with ThreadPoolExecutor(1, "compiler") as other:
        result = other.submit(work)
        meanwhile()
        return result.result()
