"""Samplers: population -> cohort. Every public name is a factory of a `Sampler`."""

from fedjax_sim.sampling.importance import weighted
from fedjax_sim.sampling.participation import with_dropout, with_over_invitation
from fedjax_sim.sampling.poisson import poisson
from fedjax_sim.sampling.uniform import cyclic, full, uniform, with_replacement
from fedjax_sim.sampling.visits import with_distinct_clients
from fedjax_sim.sampling.work import with_local_steps, with_stragglers

__all__ = [
    "cyclic",
    "full",
    "poisson",
    "uniform",
    "weighted",
    "with_distinct_clients",
    "with_dropout",
    "with_local_steps",
    "with_over_invitation",
    "with_replacement",
    "with_stragglers",
]
