"""Clients whose battery does not last for a round."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.network.distributions import Distribution, as_distribution
from fedjax_sim.prng import stream
from fedjax_sim.sampling.design import responding
from fedjax_sim.sampling.time.cut import changed, cut_cohort, lasting, timed, unlimited
from fedjax_sim.types import Devices, Load, Metric, Sampler
from fedjax_sim.validate import NonNegativeInt

__all__ = ["EXHAUSTED", "with_battery"]

EXHAUSTED = Metric("exhausted", "clients whose battery ran out", "count")
SOME = 64  # clients who are asked whether they spend energy


@validate.named_arguments
def with_battery(sampler: Sampler, joules: Distribution | float, *, seed: NonNegativeInt = 0) -> Sampler:
    """A client spends no more energy on a round than its battery holds for it; it is charged between rounds.

    Who runs out stops there and does not report; `metrics["exhausted"]` counts them. In each part of a round energy
    flows evenly over its time.

    Args:
      sampler: one with a clock, `with_clock(...)`, whose devices state their energy, and without a limit of reports:
        this goes inside of that, and around a deadline with partial work.
      joules: what a client's battery holds for a round, above 0: a number, or a distribution over clients.
      seed: of the draws from that distribution.

    Returns: a sampler of the same cohorts. Who responds depends on the client: formulas and Horvitz-Thompson refuse the
    design. Accountants of client-level privacy take it, for no client decides about another.

    Raises: ValueError, TypeError for a sampler without a clock, with a limit of reports or such a battery already, for
    devices that spend no energy, and values out of range.

    Guarantees: who has enough reports, nobody spends more, and who runs out does so at its moment
    (tests/sampling/time/test_battery.py::test_who_runs_out); a client's battery is its own in all rounds
    (::test_batteries_belong_to_clients).

    References: Kairouz et al. 2021, table 1 (limited battery of cross-device clients).
    """
    devices = timed(sampler, "with_battery")
    unlimited(sampler, "with_battery", "Who runs out is not among the first: put it inside of what limits the reports.")
    if EXHAUSTED in sampler.metrics:
        validate.fail("sampler", "one without batteries", "one with batteries", "Keep the smaller of the two.")
    holds = as_distribution("joules", joules)
    if not holds.least > 0:
        validate.fail("joules", "a distribution above 0", holds.least, "Nobody would ever receive the model.")
    _check_energy(devices)
    own = stream(jax.random.key(seed), "batteries")

    def ended(key, cohort, price):
        at = lasting(devices, key, cohort, price, holds.draw(own, cohort.ids))
        return cut_cohort(devices, key, cohort, price, at, EXHAUSTED.name)

    return changed(sampler, ended, responding(sampler.design, "client"), (EXHAUSTED,))


def _check_energy(devices: Devices) -> None:
    """Refuses devices that spend nothing on much work, for nobody would ever run out; a sweep's are not looked at."""
    ids = jnp.arange(min(devices.population_size, SOME), dtype=jnp.int32)
    much = Load(*(jnp.full(ids.shape, x, jnp.float32) for x in (1e12, 1e9, 1e9)))
    spent = jax.jit(devices.spend)(jax.random.key(0), ids, much).joules
    if not isinstance(spent, jax.core.Tracer) and not (spent > 0).any():
        hint = "Give them joules_per_flop, joules_per_byte, compute_watts or radio_watts."
        validate.fail("sampler", "a clock of devices that state their energy", "devices that spend none", hint)
