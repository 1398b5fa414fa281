"""How many clients are simulated at once, from a fixed model of the cache; how much memory a compiled program needs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import jax

from fedjax_sim import tree, validate
from fedjax_sim.types import PyTree

__all__ = ["Needs", "Plan", "needs", "plan_for", "total_memory"]

CPU_CACHE_BYTES = 2 << 20  # the second-level cache of a core
ACCELERATOR_CACHE_BYTES = 48 << 20
MAX_CPU_LANES = 32
MAX_LANES = 4096


class Plan(NamedTuple):
    """Clients vmapped at once, and messages summed at once. Rounding may depend on both: they belong to a result."""

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


def plan_for(message: PyTree) -> Plan:
    """The plan for clients whose messages have these leaves (arrays or specs).

    A client keeps about four copies of its message alive (weights, gradient, optimiser, message). Dense layers whose
    weights differ by client are bound by memory bandwidth, so as many clients are vmapped as fit the cache, and no
    more. The model of the cache is fixed, so that another machine of the same kind repeats the bits.
    """
    message_bytes = max(tree.num_bytes(tree.spec(message)), 1)
    cpu = jax.default_backend() == "cpu"
    cache = CPU_CACHE_BYTES if cpu else ACCELERATOR_CACHE_BYTES
    lanes = max(1, min(cache // (4 * message_bytes), MAX_CPU_LANES if cpu else MAX_LANES))
    lanes = 1 << (lanes.bit_length() - 1)
    return Plan(lanes, lanes)


class Needs(NamedTuple):
    """Bytes of a compiled program on all devices of this process."""

    arguments: int  # what it is given: the population, the state
    temporary: int
    results: int  # without those that take the place of arguments

    @property
    def total(self) -> int:
        return self.arguments + self.temporary + self.results


def needs(compiled: jax.stages.Compiled) -> Needs:
    """The memory that the compiler allots to a program on all devices of this process. Devices of a CPU are counted one
    by one too: each holds a copy of what is not split."""
    found = compiled.memory_analysis()
    devices = max(1, sum(device.process_index == jax.process_index() for device in _devices(compiled)))
    results = max(found.output_size_in_bytes - found.alias_size_in_bytes, 0)
    return Needs(*(devices * x for x in (found.argument_size_in_bytes, found.temp_size_in_bytes, results)))


def _devices(compiled: jax.stages.Compiled) -> list:
    shardings = jax.tree.leaves(compiled.input_shardings)
    return list(shardings[0].device_set) if shardings else jax.local_devices()[:1]


def total_memory() -> int:
    """Bytes of memory of this process's devices; on a CPU the machine's, or the control group's limit if smaller."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] * jax.local_device_count()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup/memory.max")
    limit = group.read_text().strip() if group.is_file() else ""
    return min(total, int(limit)) if limit.isdigit() else total
