"""What a round asks of each client, as arrays in a sampler's state: flops by its local steps, and bytes."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.network import load_of
from fedjax_sim.types import Array, Cohort, Load, PyTree, Work

__all__ = ["NOTHING_MORE", "More", "Price", "price_of"]


class More(NamedTuple):
    """What the slots of one cohort spend beside their loads, [m] each: what follows from who takes part together."""

    ticks: tuple[Array | int, ...]  # int32, of download, local work and message
    joules: tuple[Array | float, ...]  # float32, of the same
    least: Array | int = 0  # int32 ticks until the slot is done, at least: it waits for others that long
    bytes_up: Array | int = 0  # [] float32, on a radio channel of the cohort
    airtime: Array | None = None  # int32 ticks on such a channel; None = those of the slot's own message
    sends: Array | None = None  # bool, whether the slot sends at all; None = all do


NOTHING_MORE = More((0, 0, 0), (0.0, 0.0, 0.0))


class Price(NamedTuple):
    """The cost of a client's round; [N] where clients differ by their numbers of examples, else []."""

    first: Array  # [] or [N] float32 flops of the local work if it is one step
    step: Array  # [] or [N] float32 flops of each further step
    steps: Array  # [] or [N] int32 steps of the whole local work
    bytes_down: Array  # [] float32
    bytes_up: Array  # [] float32
    before: Load | None = None  # [] or [N] each: of a pass before the local work, which is not in the numbers above
    inside: PyTree = None  # leaves [N, ...] of clients that are federations: what their rounds inside ask
    more: More | None = None  # of one cohort alone, so no state between rounds has it
    by_invited: Array | None = (
        None  # [m + 1, 2] float32 bytes up and down, in place of those above, if so many are invited
    )

    def num_steps(self, cohort: Cohort) -> Array:
        """[m] int32 local steps that each slot takes, by its `Cohort.work`.

        Guarantees: as clients count them (tests/sampling/time/test_clock.py::test_steps_are_those_that_clients_take).
        """
        steps = _of(self.steps, cohort.ids)
        if cohort.work is None:
            return steps
        if not jnp.issubdtype(cohort.work.dtype, jnp.integer):
            return jnp.clip(jnp.ceil(cohort.work * steps.astype(jnp.float32)).astype(jnp.int32), 1, steps)
        return jnp.clip(cohort.work, 1, steps)

    def loads(self, cohort: Cohort) -> tuple[Load, ...]:
        """What each pass of the round asks of each slot, [m] each: one, or two in their order."""
        first, step = (_of(x, cohort.ids) for x in (self.first, self.step))
        flops = first + step * (self.num_steps(cohort) - 1).astype(jnp.float32)
        bytes_up, bytes_down = self._bytes(cohort)
        last = Load(flops, *(_of(x, cohort.ids) for x in (bytes_down, bytes_up)))
        return (last,) if self.before is None else (Load(*(_of(x, cohort.ids) for x in self.before)), last)

    def all_bytes_up(self, cohort: Cohort) -> Array:
        """[] float32 bytes of all that a client of this cohort sends in the round."""
        sent, _ = self._bytes(cohort)
        sent = sent if self.before is None else sent + self.before.bytes_up
        return sent if self.more is None else sent + self.more.bytes_up

    def _bytes(self, cohort: Cohort) -> tuple[Array, Array]:
        """[] float32 bytes up and down of the last pass."""
        if self.by_invited is None:
            return self.bytes_up, self.bytes_down
        return tuple(self.by_invited[cohort.invited.sum()])


def price_of(work: Work | None, flops_scale: float = 1.0, bytes_scale: float = 1.0) -> Price:
    """The costs of a round, from what a sampler is told of them; None = nothing was told: nothing costs anything.

    Clients are looked up by their numbers of examples where their work depends on these; else all are alike, and count
    as having some. Operations and bytes are multiplied by the two scales.

    Raises: ValueError where those numbers are needed and not known.
    """
    if work is None:
        work = Work(0, 0, None, 0.0)
    passes = [one for one in (work, work.before) if one is not None]
    if any(callable(one.steps) or one.rows is not None for one in passes):
        if work.examples is None:
            validate.fail("work.examples", "the clients' numbers of examples", None, "Their work depends on these.")
        examples = jnp.asarray(work.examples(), jnp.int32)
    else:
        examples = jnp.int32(1)
    steps = 1 if work.steps is None else work.steps(examples) if callable(work.steps) else work.steps

    def scaled(sizes):
        return [jnp.float32(x) * jnp.float32(bytes_scale) for x in sizes]

    def flops(number):
        share = None if work.steps is None else jnp.full(examples.shape, number, jnp.int32)
        return load_of(own, examples, share).flops * jnp.float32(flops_scale)

    own, sizes, before = work._replace(before=None), (work.bytes_down, work.bytes_up), None
    if work.before is not None:
        asked = work.before.bytes_down, work.before.bytes_up
        operations = load_of(work.before, examples).flops * jnp.float32(flops_scale)
        before = Load(operations, *scaled(asked))
        sizes = [x - y for x, y in zip(sizes, asked, strict=True)]
    first, step = flops(1), flops(2) - flops(1)
    inside = None if work.inside is None else work.inside(flops_scale, bytes_scale)
    steps, by_invited = jnp.broadcast_to(jnp.int32(steps), examples.shape), None
    if work.by_invited is not None:
        asked = (0, 0) if work.before is None else (work.before.bytes_up, work.before.bytes_down)
        by_invited = jnp.asarray(work.by_invited - np.array(asked), jnp.float32) * jnp.float32(bytes_scale)
    return Price(first, step, steps, *scaled(sizes), before, inside, by_invited=by_invited)


def _of(values: Array, ids: Array) -> Array:
    return values[ids] if values.ndim else jnp.broadcast_to(values, ids.shape)
