"""Which process of a job this is. Nothing here imports or starts JAX."""

from __future__ import annotations

import sys

__all__ = ["index", "is_first", "several"]


def several() -> bool:
    """Whether other processes work on this job. Imports and starts nothing."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized() and jax.process_count() > 1


def index() -> int:
    """Which process this is."""
    return sys.modules["jax"].process_index() if several() else 0


def is_first() -> bool:
    """Whether this process reads, writes and prints for the job."""
    return index() == 0
