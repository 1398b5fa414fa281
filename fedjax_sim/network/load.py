"""This module computes the load of each client, from the work of one client, its examples and its share of the work."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.types import Array, Load, Work
from fedjax_sim.types.shares import steps_of_work


def load_of(work: Work, num_examples: Array, share: Array | None = None) -> Load:
    """Computes the `Load` of clients, by their numbers of examples.

    Operations grow with the local steps of a client: those of its epochs, of which partial work takes a share. If each
    step reads all examples, operations grow with the number of examples too; a minibatch counts as full. A client
    without examples computes nothing.

    Args:
      work: of one client, as a sampler is told.
      num_examples: [c] integers.
      share: [c] `Cohort.work` of these clients: a share in (0, 1] of the steps (float), or a number of steps (int32).
        None = all steps.

    Returns: `Load`, with each number [c] float32.

    Raises: ValueError for partial work of clients that do not state their steps.

    Guarantees: Steps are those that clients take (tests/network/test_load.py::test_steps_are_those_of_the_client).
    Operations are those of programs with as many steps and examples (::test_operations_are_those_of_the_program).

    >>> load_of(Work(8, 4, 10, flops=110.0, step_flops=100.0), jnp.array([7, 0]), jnp.array([0.5, 1.0])).flops.tolist()
    [510.0, 0.0]
    """
    examples = jnp.asarray(num_examples, jnp.int32)
    if share is not None and work.steps is None:
        validate.fail("share", "None for clients who do not state their steps", "partial work")
    steps = jnp.int32(1) if work.steps is None else work.steps(examples) if callable(work.steps) else work.steps
    if share is not None:
        steps = steps_of_work(share, steps)
    # `work.flops` includes one step.
    flops = work.flops + work.step_flops * (jnp.asarray(steps, jnp.float32) - 1)
    if work.rows is not None:
        flops = flops * (examples / work.rows)
    flops = jnp.where(examples > 0, flops, 0.0).astype(jnp.float32)
    # A pass before the local work, whose operations are stated apart.
    if work.before is not None:
        flops = flops + load_of(work.before, examples).flops
    return Load(flops, *(jnp.full(examples.shape, size, jnp.float32) for size in (work.bytes_down, work.bytes_up)))
