"""Samplers draw the cohort of a round from the population. Every public name makes a `Sampler`."""

from fedjax_sim.sampling.importance import weighted, weighted_without_replacement
from fedjax_sim.sampling.membership import with_membership
from fedjax_sim.sampling.participation import with_dropout, with_over_invitation, with_response_rates
from fedjax_sim.sampling.poisson import poisson
from fedjax_sim.sampling.time.battery import with_battery
from fedjax_sim.sampling.time.clock import with_clock
from fedjax_sim.sampling.time.deadlines import with_deadline, with_over_selection, with_radio_budget
from fedjax_sim.sampling.time.hazard import with_hazard
from fedjax_sim.sampling.uniform import cyclic, full, uniform, with_replacement
from fedjax_sim.sampling.utility import oort, power_of_choice
from fedjax_sim.sampling.visits import with_distinct_clients
from fedjax_sim.sampling.work import with_local_steps, with_stragglers

__all__ = [
    "cyclic",
    "full",
    "oort",
    "poisson",
    "power_of_choice",
    "uniform",
    "weighted",
    "weighted_without_replacement",
    "with_battery",
    "with_clock",
    "with_deadline",
    "with_distinct_clients",
    "with_dropout",
    "with_hazard",
    "with_local_steps",
    "with_membership",
    "with_over_invitation",
    "with_over_selection",
    "with_radio_budget",
    "with_replacement",
    "with_response_rates",
    "with_stragglers",
]
