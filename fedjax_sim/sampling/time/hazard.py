"""Clients that leave while they train."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.network import Hazard
from fedjax_sim.prng import stream
from fedjax_sim.sampling.design import responding
from fedjax_sim.sampling.time.clock import INTERRUPTED
from fedjax_sim.sampling.time.cut import changed, cut_cohort, timed, unlimited
from fedjax_sim.types import Array, Devices, Sampler, Spent

__all__ = ["leaves_at", "with_hazard"]

NEVER = 2**31 - 1


def with_hazard(sampler: Sampler, hazard: Hazard) -> Sampler:
    """Clients may leave while they train: the longer it takes, the likelier.

    Who leaves stops there and does not report; `metrics["interrupted"]` counts them. Around a deadline with partial
    work a client must stay until that work is done; inside of one, until the message of that work has arrived.

    Args:
      sampler: one with a clock, `with_clock(...)`, and without a limit of reports: this goes inside of that.
      hazard: seconds of computing until a client leaves, such as `network.memoryless(3600.0)`; in a config
        `hazard = {name = "memoryless", mean_seconds = 3600.0}`.

    Returns: a sampler of the same cohorts. Slow clients report less often: formulas and Horvitz-Thompson refuse the
    design. Accountants of client-level privacy take it, for no client decides about another.

    Raises: ValueError, TypeError for a sampler without a clock, or what is no hazard.

    Guarantees: clients stay with the hazard's chance for their time of computing
    (tests/sampling/time/test_clock.py::test_hazard_is_that_of_the_time).

    References: Bonawitz et al. 2019, section 4 (6 to 10 % of the clients of a round leave).
    """
    devices = timed(sampler, "with_hazard")
    unlimited(sampler, "with_hazard", "Who leaves is not among the first: put it inside of what limits the reports.")
    validate.part("hazard", hazard, Hazard)

    def thinned(key, cohort, price):
        leaves = leaves_at(hazard, devices, key, cohort.ids, cohort.timing.spent)
        return cut_cohort(devices, key, cohort, price, leaves, INTERRUPTED.name)

    known = any(metric.name == INTERRUPTED.name for metric in sampler.metrics)
    return changed(sampler, thinned, responding(sampler.design, "client"), () if known else (INTERRUPTED,))


def leaves_at(hazard: Hazard, devices: Devices, key: Array, ids: Array, spent: Spent) -> Array:
    """When clients leave, [c] int32 ticks after they began; `NEVER` for who stays until its work is done.

    Args:
      key: that the cohort was drawn with, or that its clients were sent work with.
    """
    compute = spent.compute.astype(jnp.float32)
    after = hazard.leaves_after(stream(key, "hazard"), ids) * devices.ticks_per_second
    leaves = spent.down + jnp.minimum(after, compute).astype(jnp.int32)
    return jnp.where(after >= compute, NEVER, leaves)
