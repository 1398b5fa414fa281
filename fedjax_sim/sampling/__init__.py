"""Samplers draw the cohort of a round from the population. Every public name makes a `Sampler`."""

from fedjax_sim.sampling.importance import (
    weighted as weighted,
    weighted_without_replacement as weighted_without_replacement,
)
from fedjax_sim.sampling.membership import with_membership as with_membership
from fedjax_sim.sampling.participation import (
    with_dropout as with_dropout,
    with_over_invitation as with_over_invitation,
    with_response_rates as with_response_rates,
)
from fedjax_sim.sampling.poisson import poisson as poisson
from fedjax_sim.sampling.time.battery import with_battery as with_battery
from fedjax_sim.sampling.time.clock import with_clock as with_clock
from fedjax_sim.sampling.time.deadlines import (
    with_deadline as with_deadline,
    with_over_selection as with_over_selection,
    with_radio_budget as with_radio_budget,
)
from fedjax_sim.sampling.time.hazard import with_hazard as with_hazard
from fedjax_sim.sampling.uniform import (
    cyclic as cyclic,
    full as full,
    uniform as uniform,
    with_replacement as with_replacement,
)
from fedjax_sim.sampling.utility import oort as oort, power_of_choice as power_of_choice
from fedjax_sim.sampling.visits import with_distinct_clients as with_distinct_clients
from fedjax_sim.sampling.work import with_local_steps as with_local_steps, with_stragglers as with_stragglers
