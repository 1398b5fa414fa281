"""`with_battery` stops clients whose battery does not last for a round."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.core import Tracer

from fedjax_sim import validate
from fedjax_sim.network.distributions import Distribution, as_distribution
from fedjax_sim.prng import stream
from fedjax_sim.sampling.design import responding
from fedjax_sim.sampling.time.cut import changed, cut_cohort, devices_with_clock, lasting, unlimited
from fedjax_sim.types import Devices, Load, Metric, Sampler
from fedjax_sim.validate import NonNegativeInt

EXHAUSTED = Metric("exhausted", "clients whose battery ran out", "count")
SOME = 64  # the clients for which it is checked that they spend energy


@validate.named_arguments
def with_battery(sampler: Sampler, joules: Distribution | float, *, seed: NonNegativeInt = 0) -> Sampler:
    """A client spends at most the energy that its battery holds for a round; batteries are charged between rounds.

    A client whose battery is empty stops at that moment and does not report. In each part of a round (download, local
    work, message), energy is spent evenly over time.

    Args:
      sampler: a sampler with a clock, `with_clock(...)`, whose devices state their energy, and without a limit of
        reports. This wrapper goes inside of a limit of reports, and around a deadline with partial work.
      joules: the energy that a client's battery holds for a round, positive: a number, or a distribution over clients.
      seed: of the draws from the distribution.

    Returns: a sampler of the same cohorts; `metrics["exhausted"]` counts clients whose battery is empty. Whether a
    client reports depends on the client, so formulas and Horvitz-Thompson refuse the design. Accountants of
    client-level privacy accept it, since no client affects another.

    Raises: ValueError or TypeError for a sampler without a clock, with a limit of reports or with batteries already,
      for devices that spend no energy, and for values out of range.

    Guarantees:
      - clients with enough energy report, no client spends more than it has, and clients stop at the moment at which
        their battery is empty (tests/sampling/time/test_battery.py::test_who_runs_out)
      - a client has the same battery in all rounds (::test_batteries_belong_to_clients)

    References: Kairouz et al. 2021, table 1 (limited battery of cross-device clients).
    """
    devices = devices_with_clock(sampler, "with_battery")
    unlimited(sampler, "with_battery", "Who runs out is not among the first: put it inside of what limits the reports.")
    if EXHAUSTED in sampler.metrics:
        validate.fail("sampler", "one without batteries", "one with batteries", "Keep the smaller of the two.")
    capacity = as_distribution("joules", joules)
    if not capacity.least > 0:
        validate.fail("joules", "a distribution above 0", capacity.least, "Nobody would ever receive the model.")
    _check_energy(devices)
    # A key of its own, and not the round's: a client has the same battery in every round.
    battery_key = stream(jax.random.key(seed), "batteries")

    def stop_exhausted(key, cohort, price):
        end_ticks = lasting(devices, key, cohort, price, capacity.draw(battery_key, cohort.ids))
        return cut_cohort(devices, key, cohort, price, end_ticks, name=EXHAUSTED.name)

    return changed(sampler, stop_exhausted, responding(sampler.design, "client"), (EXHAUSTED,))


def _check_energy(devices: Devices) -> None:
    """Refuses devices that spend no energy on a large load, since no battery would ever be empty.

    The devices of a sweep, which are traced, are not checked.
    """
    ids = jnp.arange(min(devices.population_size, SOME), dtype=jnp.int32)
    large_load = Load(*(jnp.full(ids.shape, x, jnp.float32) for x in (1e12, 1e9, 1e9)))
    joules = jax.jit(devices.spend)(jax.random.key(0), ids, large_load).joules
    if not isinstance(joules, Tracer) and not (joules > 0).any():
        hint = "Give them joules_per_flop, joules_per_byte, compute_watts or radio_watts."
        validate.fail("sampler", "a clock of devices that state their energy", "devices that spend none", hint)
