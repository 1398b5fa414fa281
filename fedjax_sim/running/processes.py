"""Tells which process of a job this is. Nothing here imports or starts JAX."""

from __future__ import annotations

import sys


def several() -> bool:
    """Returns whether other processes work on this job."""
    # JAX can be asked only if somebody else has imported it: a process without JAX is on its own.
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized() and jax.process_count() > 1


def index() -> int:
    """Returns the number of this process in its job, from 0."""
    return sys.modules["jax"].process_index() if several() else 0


def is_first() -> bool:
    """Returns whether this process reads, writes and prints for the job."""
    return index() == 0
