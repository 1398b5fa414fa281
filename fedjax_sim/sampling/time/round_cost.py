"""The cost of a round for each client, as arrays in a sampler's state: operations by local steps, and bytes."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.network import load_of
from fedjax_sim.types import Array, Cohort, Load, PyTree, Work
from fedjax_sim.types.shares import steps_of_work


class More(NamedTuple):
    """A `More` holds what the slots of a cohort spend beside their loads, because of the clients they take part with.

    Each value is [m], or a scalar for all slots.
    """

    ticks: tuple[Array | int, Array | int, Array | int]  # int32, of download, local work and message
    joules: tuple[Array | float, Array | float, Array | float]  # float32, of download, local work and message
    least: Array | int = 0  # int32, the least ticks until the slot is done: it waits for others that long
    bytes_up: Array | int = 0  # [] float32, on a radio channel of the cohort
    airtime: Array | None = None  # int32 ticks on such a channel; None = the ticks of the slot's own message
    sends: Array | None = None  # bool, whether the slot sends at all; None = all slots send


NOTHING_MORE = More((0, 0, 0), (0.0, 0.0, 0.0))


class Price(NamedTuple):
    """The cost of a client's round; arrays are [N] if clients differ by their numbers of examples, else []."""

    first: Array  # [] or [N] float32, the operations of local work of a single step
    step: Array  # [] or [N] float32, the operations of each further step
    steps: Array  # [] or [N] int32, the steps of the whole local work
    bytes_down: Array  # [] float32
    bytes_up: Array  # [] float32
    # [] or [N] each, of a pass before the local work, which the numbers above do not include
    before: Load | None = None
    inside: PyTree = None  # leaves [N, ...] of clients that are federations: what their rounds inside ask
    more: More | None = None  # of a single cohort, so the state between rounds never has it
    # [m + 1, 2] float32, bytes up and down if 0, 1, ..., m clients are invited, in place of the bytes above; None = the
    # bytes do not depend on the number of invited clients.
    by_invited: Array | None = None

    def num_steps(self, cohort: Cohort) -> Array:
        """Computes the local steps that each slot takes, [m] int32, from its `Cohort.work`.

        Guarantees: as clients count them (tests/sampling/time/test_clock.py::test_steps_are_those_that_clients_take).
        """
        steps = _rows_of(self.steps, cohort.ids)
        return steps if cohort.work is None else steps_of_work(cohort.work, steps)

    def loads(self, cohort: Cohort) -> tuple[Load, ...]:
        """Returns the load of each slot, [m] each, for each pass of the round: one pass, or two in their order."""
        first, step = (_rows_of(x, cohort.ids) for x in (self.first, self.step))
        flops = first + step * (self.num_steps(cohort) - 1).astype(jnp.float32)
        bytes_up, bytes_down = self._bytes(cohort)
        last_pass = Load(flops, *(_rows_of(x, cohort.ids) for x in (bytes_down, bytes_up)))
        if self.before is None:
            return (last_pass,)
        return Load(*(_rows_of(x, cohort.ids) for x in self.before)), last_pass

    def all_bytes_up(self, cohort: Cohort) -> Array:
        """Returns the bytes of everything that a client of this cohort sends in the round, [] float32."""
        bytes_up, _ = self._bytes(cohort)
        bytes_up = bytes_up if self.before is None else bytes_up + self.before.bytes_up
        return bytes_up if self.more is None else bytes_up + self.more.bytes_up

    def _bytes(self, cohort: Cohort) -> tuple[Array, Array]:
        """Returns (bytes up, bytes down) of the last pass, [] float32 each."""
        if self.by_invited is None:
            return self.bytes_up, self.bytes_down
        bytes_up, bytes_down = self.by_invited[cohort.invited.sum()]
        return bytes_up, bytes_down


def price_of(work: Work | None, flops_scale: float = 1.0, bytes_scale: float = 1.0) -> Price:
    """Computes the costs of a round from the `Work` that a sampler is told.

    If the work depends on the number of examples, clients have costs of their own. Otherwise all clients are alike, and
    count as clients with examples.

    Args:
      work: what a round asks of a client; None = nothing was told, and nothing costs anything.
      flops_scale: multiplies operations.
      bytes_scale: multiplies bytes.

    Raises: ValueError if numbers of examples are needed and not known.
    """
    if work is None:
        work = Work(0, 0, None, 0.0)
    passes = [x for x in (work, work.before) if x is not None]
    if any(callable(x.steps) or x.rows is not None for x in passes):
        if work.examples is None:
            validate.fail("work.examples", "the clients' numbers of examples", None, "Their work depends on these.")
        examples = jnp.asarray(work.examples(), jnp.int32)
    else:
        examples = jnp.int32(1)
    steps = 1 if work.steps is None else work.steps(examples) if callable(work.steps) else work.steps

    def scaled(bytes_down: float, bytes_up: float) -> tuple[Array, Array]:
        return jnp.float32(bytes_down) * jnp.float32(bytes_scale), jnp.float32(bytes_up) * jnp.float32(bytes_scale)

    def flops(num_steps):
        steps_taken = None if work.steps is None else jnp.full(examples.shape, num_steps, jnp.int32)
        return load_of(last_pass, examples, steps_taken).flops * jnp.float32(flops_scale)

    last_pass = work._replace(before=None)
    sizes = (work.bytes_down, work.bytes_up)
    before = None
    if work.before is not None:
        # The bytes of `work` include those of the first pass, and its operations do not.
        first_sizes = work.before.bytes_down, work.before.bytes_up
        first_flops = load_of(work.before, examples).flops * jnp.float32(flops_scale)
        before = Load(first_flops, *scaled(*first_sizes))
        sizes = work.bytes_down - work.before.bytes_down, work.bytes_up - work.before.bytes_up
    first = flops(1)
    step = flops(2) - flops(1)
    inside = None if work.inside is None else work.inside(flops_scale, bytes_scale)
    steps = jnp.broadcast_to(jnp.int32(steps), examples.shape)
    by_invited = None
    if work.by_invited is not None:
        first_bytes = (0, 0) if work.before is None else (work.before.bytes_up, work.before.bytes_down)
        by_invited = jnp.asarray(work.by_invited - np.array(first_bytes), jnp.float32) * jnp.float32(bytes_scale)
    return Price(first, step, steps, *scaled(*sizes), before, inside, by_invited=by_invited)


def _rows_of(values: Array, ids: Array) -> Array:
    """Returns the values of clients, [c], from values [N] or a common value []."""
    return values[ids] if values.ndim else jnp.broadcast_to(values, ids.shape)
