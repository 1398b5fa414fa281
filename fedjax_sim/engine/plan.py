"""Plans how many clients are simulated at once, and reads how much memory a compiled program needs.

A plan is part of a result's identity: batched matrix products round by their batch, and XLA fuses a different program
around a different chunk. So a plan follows from fixed numbers, and neither from the machine's own memory or core count
nor from the number of devices.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
from jax.extend import core

from fedjax_sim import tree, validate
from fedjax_sim.engine.jaxpr import Program, inner_programs, jaxpr_and_constants
from fedjax_sim.engine.platform import device_memory, target
from fedjax_sim.types import PyTree

CPU_CACHE_BYTES = 2 << 20  # the second-level cache of a core
ACCELERATOR_BYTES = 4 << 30  # a quarter of the memory of a small accelerator, 16 GiB
MAX_CPU_LANES = 64
# The fewest groups of lanes in a cohort: one for each device of most CPUs. With one group all devices but one would be
# idle. On a single core four groups run a softmax model at 0.97 of the speed of two groups.
CPU_GROUPS = 4
# On an H100 one group of 10,000 clients of an MLP takes 1.92 ms, and three groups of 3,334 take 2.42.
MAX_LANES = 16_384
# The fewest groups for each of several accelerators. With one group each, nothing could be moved from a device whose
# clients are large, and a run that is resumed on twice as many devices would leave half of them idle.
DEVICE_GROUPS = 2


class Plan(NamedTuple):
    """How many clients are vmapped at once, and how many messages are summed at once.

    Rounding may depend on both numbers, so they belong to a result.
    """

    lanes: int  # clients under one vmap
    chunk: int  # messages that are summed at once; a multiple of `lanes`

    @classmethod
    def checked(cls, lanes: int, chunk: int | None = None) -> Plan:
        """Returns a plan from a user's numbers.

        Args:
          lanes: clients vmapped at once, 1 to 65,536.
          chunk: messages summed at once, rounded up to a multiple of `lanes`; None takes `lanes`. At most 65,536 after
            rounding.

        Raises:
          ValueError: for numbers out of range.

        >>> Plan.checked(8, 20)
        Plan(lanes=8, chunk=24)
        """
        validate.integer("lanes", lanes, 1, 1 << 16)
        chunk = lanes if chunk is None else chunk
        validate.integer("chunk", chunk, 1, 1 << 16)
        chunk = -(-chunk // lanes) * lanes
        validate.integer("chunk in whole lanes", chunk, 1, 1 << 16)
        return cls(lanes, chunk)


def check_plan(name: str, value: Any) -> None:
    """Raises InvalidType for a value that is no `Plan`, such as a number of lanes."""
    if not isinstance(value, Plan):
        validate.fail(name, "a Plan or None", value, "engine.Plan.checked(lanes=8) is one.", TypeError)


def plan_for(message: PyTree, *, working_bytes: int | None = None, num_slots: int | None = None) -> Plan:
    """Returns a plan for clients, from the size of a client's message and work.

    Dense layers whose weights differ by client are bound by memory bandwidth, and so are activations. On a CPU as many
    clients are therefore vmapped as fit the cache (2 MiB), and at most 64. Accelerators need thousands of clients at
    once, so there as many are vmapped as fit a share of the memory (4 GiB). Both are fixed numbers, so that another
    machine of the same kind repeats the bits.

    Args:
      message: the arrays or specs of one client's message.
      working_bytes: the bytes that one client has in memory at once while it trains (see the function
        `working_bytes`); None: twice the bytes of its message.
      num_slots: number of slots m of the cohort, to which lanes are fitted; None: any cohort. Lanes are then evened
        out, because 100 slots in groups of 64 would be 128. On a CPU they leave at least four groups, because one
        device works on a group, and lanes may not depend on the number of devices. On accelerators a cohort that fits
        one group keeps one device busy, because each further group costs a launch of all kernels. `shared_out` makes
        the lanes with which several accelerators share such a cohort; without it, `fold` warns with the number.

    Returns: a plan whose chunk is one group of lanes.

    Guarantees:
      A cohort has the fewest slots for the same number of groups
      (tests/engine/test_plan.py::test_lanes_fit_the_cohort).
      No device of four is idle (::test_small_cohorts_are_shared_out).

    >>> import jax.numpy as jnp
    >>> plan_for(jnp.zeros(610), working_bytes=18_000, num_slots=100).lanes
    25
    """
    message_bytes = max(tree.num_bytes(tree.spec(message)), 1)
    client_bytes = 2 * message_bytes + (2 * message_bytes if working_bytes is None else working_bytes)
    room, max_lanes = (CPU_CACHE_BYTES, MAX_CPU_LANES) if target() == "cpu" else (ACCELERATOR_BYTES, MAX_LANES)
    lanes = max(1, min(room // client_bytes, max_lanes))
    if num_slots is not None:
        lanes = min(lanes, -(-num_slots // CPU_GROUPS)) if target() == "cpu" else lanes
        # The number of groups stays the same, and their lanes become as few as hold the cohort.
        lanes = -(-num_slots // -(-num_slots // lanes))
    return Plan(lanes, lanes)


def shared_out(plan: Plan, num_slots: int, num_devices: int) -> Plan:
    """Returns the plan with lanes that keep all of several accelerators busy.

    Each device then has at least two groups where the cohort allows it, and its share of the clients but for less than
    one client a group. On a CPU, and on a single accelerator, the plan stays as it is.

    The lanes, and with them the last bits of a result, then depend on the number of devices. So only what keeps the
    plan for later sessions may ask for this: a run writes it into its config.

    Args:
      plan: of `plan_for`.
      num_slots: number of slots m of the cohort.
      num_devices: number of devices that share the cohort.

    Guarantees: the clients are shared out evenly (tests/engine/test_plan.py::test_accelerators_are_all_busy).

    >>> from fedjax_sim.engine import compiling_for
    >>> with compiling_for("cuda"):
    ...     shared_out(Plan(4096, 4096), num_slots=4096, num_devices=4)
    Plan(lanes=512, chunk=512)
    """
    if target() == "cpu" or num_devices == 1:
        return plan
    groups_of_a_device = max(DEVICE_GROUPS, -(-num_slots // (plan.lanes * num_devices)))
    lanes = -(-num_slots // (groups_of_a_device * num_devices))
    return Plan(lanes, lanes)


def working_bytes(program: Program) -> int:
    """Returns the most bytes that the values of a traced program take at once.

    A value counts from the equation that computes it until its last use. The program's arguments and constants are not
    counted, and an equation's inner programs are counted while it runs.

    Args:
      program: traced, perhaps for shapes alone.

    >>> import jax.numpy as jnp
    >>> working_bytes(jax.make_jaxpr(lambda x: (x * 2 + 1).sum())(jnp.ones(1000)))  # x * 2, and the sum beside it
    8000
    """
    jaxpr, _ = jaxpr_and_constants(program)
    last_use = {x: i for i, eqn in enumerate(jaxpr.eqns) for x in _variables(eqn.invars)}
    # Results of the program live to its end.
    last_use |= dict.fromkeys(_variables(jaxpr.outvars), len(jaxpr.eqns))
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    live_bytes = peak_bytes = 0
    for i, eqn in enumerate(jaxpr.eqns):
        output_bytes = sum(map(_bytes, eqn.outvars))
        inner_bytes = max((working_bytes(inner) for _, inner in inner_programs(eqn)), default=0)
        # While an equation runs, its operands and its results are both in memory.
        peak_bytes = max(peak_bytes, live_bytes + output_bytes + inner_bytes)
        live_bytes += sum(_bytes(x) for x in eqn.outvars if x in last_use)
        live_bytes -= sum(_bytes(x) for x in {*_variables(eqn.invars)} - inputs if last_use[x] == i)
    return peak_bytes


def _variables(atoms: Iterable[core.Var | core.Literal]) -> list[core.Var]:
    """Returns the operands or results of an equation that are no literal numbers."""
    return [x for x in atoms if not isinstance(x, core.Literal)]


def _bytes(value: core.Var) -> int:
    """Returns the bytes of a value; 0 for a value that is no array."""
    return math.prod(getattr(value.aval, "shape", ())) * getattr(getattr(value.aval, "dtype", None), "itemsize", 0)


class Needs(NamedTuple):
    """The bytes that a compiled program takes on all devices of this process."""

    arguments: int  # of the program: the population, the state
    temporary: int  # of values inside of the program
    results: int  # without results that take the memory of donated arguments

    @property
    def total(self) -> int:
        return self.arguments + self.temporary + self.results


class Executable(Protocol):
    """A program that needs memory: a `jax.stages.Compiled`, or one that was read from disk."""

    @property
    def input_shardings(self) -> PyTree:
        """The shardings of its arguments."""
        ...

    def memory_analysis(self) -> Any:
        """Returns the bytes that the compiler allots to it on each device."""
        ...


def needs(compiled: Executable) -> Needs:
    """Returns the memory that the compiler allots to a program on all devices of this process.

    The devices of a CPU are counted one by one too, because each holds a copy of the arrays that are not split.
    """
    num_devices = max(1, sum(device.process_index == jax.process_index() for device in _devices(compiled)))
    return Needs(*(num_devices * x for x in needs_of_a_device(compiled)))


def needs_of_a_device(compiled: Executable) -> Needs:
    """Returns the memory that the compiler allots to a program on each device."""
    analysis = compiled.memory_analysis()
    assert analysis is not None, "all of XLA's backends state it"
    results = max(analysis.output_size_in_bytes - analysis.alias_size_in_bytes, 0)
    return Needs(analysis.argument_size_in_bytes, analysis.temp_size_in_bytes, results)


def _devices(compiled: Executable) -> list:
    """Returns the devices that a program runs on, of all processes."""
    shardings = jax.tree.leaves(compiled.input_shardings)
    return list(shardings[0].device_set) if shardings else jax.local_devices()[:1]


def total_memory() -> int:
    """Returns the bytes of memory of this process's devices.

    On a CPU that is the memory of the machine, or the limit of the control group (as containers set it) if smaller.
    """
    if (known := device_memory()) is not None:
        return known * jax.local_device_count()
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit_file = Path("/sys/fs/cgroup/memory.max")
    limit = limit_file.read_text().strip() if limit_file.is_file() else ""
    return min(machine_bytes, int(limit)) if limit.isdigit() else machine_bytes  # the file says "max" for no limit
