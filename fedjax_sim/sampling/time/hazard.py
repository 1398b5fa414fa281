"""`with_hazard` lets clients leave while they train."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.network import Hazard
from fedjax_sim.prng import stream
from fedjax_sim.sampling.design import responding
from fedjax_sim.sampling.time.clock import INTERRUPTED
from fedjax_sim.sampling.time.cut import changed, cut_cohort, devices_with_clock, spent_by_slots, unlimited
from fedjax_sim.types import Array, Devices, Sampler, Spent

NEVER = 2**31 - 1  # ticks


def with_hazard(sampler: Sampler, hazard: Hazard) -> Sampler:
    """Clients may leave while they train; a longer local work makes this more likely.

    A client that leaves stops at that moment and does not report. Around a deadline with partial work, a client must
    stay until the partial work is done. Inside of such a deadline, it must stay until the message of this work has
    arrived.

    Args:
      sampler: a sampler with a clock, `with_clock(...)`, and without a limit of reports; this wrapper goes inside of a
        limit of reports.
      hazard: the distribution of the seconds of computing until a client leaves, such as `network.memoryless(3600.0)`;
        in a config `hazard = {name = "memoryless", mean_seconds = 3600.0}`.

    Returns: a sampler of the same cohorts; `metrics["interrupted"]` counts clients that leave. Slow clients report less
    often, so formulas and Horvitz-Thompson refuse the design. Accountants of client-level privacy accept it, since no
    client affects another.

    Raises: ValueError or TypeError for a sampler without a clock, and for an argument that is no hazard.

    Guarantees: clients stay with the hazard's probability for their time of computing
    (tests/sampling/time/test_clock.py::test_hazard_is_that_of_the_time).

    References: Bonawitz et al. 2019, section 4 (6 to 10 % of the clients of a round leave).
    """
    devices = devices_with_clock(sampler, "with_hazard")
    unlimited(sampler, "with_hazard", "Who leaves is not among the first: put it inside of what limits the reports.")
    validate.part("hazard", hazard, Hazard)

    def interrupt(key, cohort, price):
        leave_ticks = leaves_at(hazard, devices, key, cohort.ids, spent_by_slots(cohort))
        return cut_cohort(devices, key, cohort, price, leave_ticks, name=INTERRUPTED.name)

    # A clock with availability states this metric already.
    is_stated = any(metric.name == INTERRUPTED.name for metric in sampler.metrics)
    return changed(sampler, interrupt, responding(sampler.design, "client"), () if is_stated else (INTERRUPTED,))


def leaves_at(hazard: Hazard, devices: Devices, key: Array, ids: Array, spent: Spent) -> Array:
    """Draws when clients leave, in ticks after their invitation.

    Args:
      hazard: the distribution of the seconds of computing until a client leaves.
      devices: what the clients run on.
      key: the key that the cohort was drawn with, or with which its clients were sent work.
      ids: [c] int32.
      spent: the ticks of the clients' round, [c] each.

    Returns: [c] int32; `NEVER` for clients that stay until their local work is done.
    """
    compute_ticks = spent.compute.astype(jnp.float32)
    leaves_after = hazard.leaves_after(stream(key, "hazard"), ids) * devices.ticks_per_second
    leave_ticks = spent.down + jnp.minimum(leaves_after, compute_ticks).astype(jnp.int32)
    return jnp.where(leaves_after >= compute_ticks, NEVER, leave_ticks)
