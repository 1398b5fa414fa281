"""Devices whose times are tables, for tests of simulated time."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from fedjax_sim.types import Availability, Devices, Spent, Work

N = 12
_rng = np.random.default_rng(4)
DOWN, STEP, UP = (_rng.integers(1, most, N) for most in (40, 400, 300))  # ticks; STEP of each local step
WORK = Work(8, 16, 5, flops=1.0, step_flops=1.0)  # so a load's flops are local steps
WATTS = (1.0, 10.0, 100.0)  # joules a tick of each part of a round


def tables(down=DOWN, step=STEP, up=UP, *, there=None, ticks_per_second=1000) -> Devices:
    """Devices of clients with these ticks for the download, a local step and the message.

    there: (ids, seconds) -> bool; None = always.
    """
    down, step, up = (jnp.asarray(x, jnp.int32) for x in (down, step, up))

    def spend(key, ids, load):
        ticks = [jnp.where(load.bytes_down > 0, down[ids], 0), step[ids] * load.flops.astype(jnp.int32)]
        ticks.append(jnp.where(load.bytes_up > 0, up[ids], 0))
        return Spent(*ticks, sum(rate * x for rate, x in zip(WATTS, ticks, strict=True)))

    availability = None if there is None else Availability(there)
    return Devices(len(down), spend, availability, ticks_per_second)


def told(sampler, work=WORK):
    """The sampler's first state, after it was told the costs."""
    return sampler.tell(sampler.init(), work)
