"""What a round asks of each client, as arrays in a sampler's state: flops by its local steps, and bytes."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.network import load_of
from fedjax_sim.types import Array, Cohort, Load, Work

__all__ = ["Price", "price_of"]


class Price(NamedTuple):
    """The cost of a client's round; [N] where clients differ by their numbers of examples, else []."""

    first: Array  # [] or [N] float32 flops of the local work if it is one step
    step: Array  # [] or [N] float32 flops of each further step
    steps: Array  # [] or [N] int32 steps of the whole local work
    bytes_down: Array  # [] float32
    bytes_up: Array  # [] float32

    def num_steps(self, cohort: Cohort) -> Array:
        """[m] int32 local steps that each slot takes, by its `Cohort.work`.

        Guarantees: as clients count them (tests/sampling/test_timed.py::test_steps_are_those_that_clients_take).
        """
        steps = _of(self.steps, cohort.ids)
        if cohort.work is None:
            return steps
        if not jnp.issubdtype(cohort.work.dtype, jnp.integer):
            return jnp.clip(jnp.ceil(cohort.work * steps).astype(jnp.int32), 1, steps)
        return jnp.clip(cohort.work, 1, steps)

    def load(self, cohort: Cohort) -> Load:
        """What the round asks of each slot, [m] each."""
        first, step = (_of(x, cohort.ids) for x in (self.first, self.step))
        flops = first + step * (self.num_steps(cohort) - 1)
        return Load(flops, *(_of(x, cohort.ids) for x in (self.bytes_down, self.bytes_up)))


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

    def flops(number):
        share = None if work.steps is None else jnp.full(examples.shape, number, jnp.int32)
        return load_of(own, examples, share).flops * jnp.float32(flops_scale)

    own = work._replace(before=None)  # a step may be small beside the pass before
    first, step = flops(1), flops(2) - flops(1)
    if work.before is not None:
        first = first + load_of(work.before, examples).flops * jnp.float32(flops_scale)
    sizes = (jnp.float32(x) * jnp.float32(bytes_scale) for x in (work.bytes_down, work.bytes_up))
    return Price(first, step, jnp.broadcast_to(jnp.int32(steps), examples.shape), *sizes)


def _of(values: Array, ids: Array) -> Array:
    return values[ids] if values.ndim else jnp.broadcast_to(values, ids.shape)
