"""How many clients are simulated at once, from a fixed model of the cache; how much memory a compiled program needs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import jax
from jax.extend import core

from fedjax_sim import tree, validate
from fedjax_sim.engine.jaxpr import Program, inner_programs, opened
from fedjax_sim.engine.platform import target
from fedjax_sim.types import PyTree

__all__ = ["Needs", "Plan", "needs", "plan_for", "total_memory", "working_bytes"]

CPU_CACHE_BYTES = 2 << 20  # the second-level cache of a core
ACCELERATOR_BYTES = 2 << 30  # an eighth of the memory of a small accelerator, 16 GiB
MAX_CPU_LANES = 64
CPU_GROUPS = 4  # of lanes in a cohort, at least: one for each device of most CPUs
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


def plan_for(message: PyTree, *, working_bytes: int | None = None, num_slots: int | None = None) -> Plan:
    """The plan for clients whose messages have these leaves (arrays or specs).

    Dense layers whose weights differ by client are bound by memory bandwidth, and so are activations: on a CPU as many
    clients are vmapped as fit the cache, and no more; on accelerators, which need thousands of them, as many as fit a
    share of the memory. Both are fixed numbers, so that another machine of the same kind repeats the bits.

    Args:
      working_bytes: what one client has in memory at once while it trains (`working_bytes`); None: twice its message.
      num_slots: m of the cohort; lanes are then evened out, for 100 slots in groups of 64 would be 128. On a CPU they
        leave at least four groups: a group is worked on by one device, and lanes may not depend on how many there are.
        On accelerators a cohort that fits one group keeps one device busy; set lanes by hand to share it out.

    Guarantees: the fewest slots for the same number of groups (tests/engine/test_plan.py::test_lanes_fit_the_cohort);
    no device of four is idle (::test_small_cohorts_are_shared_out).

    >>> import jax.numpy as jnp
    >>> plan_for(jnp.zeros(610), working_bytes=18_000, num_slots=100).lanes
    25
    """
    message_bytes = max(tree.num_bytes(tree.spec(message)), 1)
    each = 2 * message_bytes + (2 * message_bytes if working_bytes is None else working_bytes)
    room, most = (CPU_CACHE_BYTES, MAX_CPU_LANES) if target() == "cpu" else (ACCELERATOR_BYTES, MAX_LANES)
    lanes = max(1, min(room // each, most))
    if num_slots is not None:
        lanes = min(lanes, -(-num_slots // CPU_GROUPS)) if target() == "cpu" else lanes
        lanes = -(-num_slots // -(-num_slots // lanes))
    return Plan(lanes, lanes)


def working_bytes(program: Program) -> int:
    """The most bytes that a traced program's own values take at once, were each dropped after its last use.

    >>> import jax.numpy as jnp
    >>> working_bytes(jax.make_jaxpr(lambda x: (x * 2 + 1).sum())(jnp.ones(1000)))  # x * 2, and the sum beside it
    8000
    """
    jaxpr, _ = opened(program)
    last = {x: i for i, eqn in enumerate(jaxpr.eqns) for x in _variables(eqn.invars)}
    last |= dict.fromkeys(_variables(jaxpr.outvars), len(jaxpr.eqns))
    given = {*jaxpr.invars, *jaxpr.constvars}
    now = most = 0
    for i, eqn in enumerate(jaxpr.eqns):
        made = sum(map(_bytes, eqn.outvars))
        inside = max((working_bytes(inner) for _, inner in inner_programs(eqn)), default=0)
        most = max(most, now + made + inside)
        now += sum(_bytes(x) for x in eqn.outvars if x in last)
        now -= sum(_bytes(x) for x in {*_variables(eqn.invars)} - given if last[x] == i)
    return most


def _variables(atoms: Iterable[core.Var | core.Literal]) -> list[core.Var]:
    return [x for x in atoms if not isinstance(x, core.Literal)]


def _bytes(value: core.Var) -> int:
    return math.prod(getattr(value.aval, "shape", ())) * getattr(getattr(value.aval, "dtype", None), "itemsize", 0)


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
