"""How many clients are simulated at once: a model of the cache, not a measurement, so that a run repeats its bits."""

from __future__ import annotations

from typing import NamedTuple

import jax

from fedjax_sim import tree, validate
from fedjax_sim.types import PyTree

__all__ = ["Plan", "plan_for"]

CPU_CACHE_BYTES = 2 << 20  # the second-level cache of a core
ACCELERATOR_CACHE_BYTES = 48 << 20
MAX_CPU_LANES = 8
MAX_LANES = 4096


class Plan(NamedTuple):
    """Clients vmapped at once, and letters summed at once. Part of a result's identity: rounding may depend on both."""

    lanes: int
    chunk: int

    @classmethod
    def checked(cls, lanes: int, chunk: int | None = None) -> Plan:
        """A plan from a user's numbers; the chunk is rounded up to whole lanes."""
        validate.integer("lanes", lanes, 1, 1 << 16)
        chunk = lanes if chunk is None else chunk
        validate.integer("chunk", chunk, 1, 1 << 16)
        chunk = -(-chunk // lanes) * lanes
        validate.integer("chunk in whole lanes", chunk, 1, 1 << 16)
        return cls(lanes, chunk)


def plan_for(letter: PyTree) -> Plan:
    """The plan for clients whose letters have these leaves (arrays or specs).

    A client keeps about four copies of its letter alive (weights, gradient, optimiser, letter). Dense layers whose
    weights differ by client are bandwidth-bound, so as many clients go together as fit the cache, and no more.
    """
    letter_bytes = max(tree.num_bytes(tree.spec(letter)), 1)
    cpu = jax.default_backend() == "cpu"
    cache = CPU_CACHE_BYTES if cpu else ACCELERATOR_CACHE_BYTES
    lanes = max(1, min(cache // (4 * letter_bytes), MAX_CPU_LANES if cpu else MAX_LANES))
    lanes = 1 << (lanes.bit_length() - 1)
    return Plan(lanes, lanes)
