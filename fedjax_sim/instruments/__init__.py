"""Measures an algorithm: variance budget, hyper-gradients, privacy audit, clients' values, costs, runs, timelines."""

from fedjax_sim.instruments.audit import (
    audit_algorithm,
    canary_release,
    claim_of,
    one_run_release,
)
from fedjax_sim.instruments.audit_command import audit_command
from fedjax_sim.instruments.audit_figure import audit_figure
from fedjax_sim.instruments.client_costs import client_costs
from fedjax_sim.instruments.client_value import ClientValues, client_values
from fedjax_sim.instruments.hypergradient import hypergradient
from fedjax_sim.instruments.moments import Moments, population_moments
from fedjax_sim.instruments.runs import independent_runs, squared_distance
from fedjax_sim.instruments.timeline import timeline, timeline_of_round
from fedjax_sim.instruments.variance_budget import variance_budget

__all__ = [
    "ClientValues",
    "Moments",
    "audit_algorithm",
    "audit_command",
    "audit_figure",
    "canary_release",
    "claim_of",
    "client_costs",
    "client_values",
    "hypergradient",
    "independent_runs",
    "one_run_release",
    "population_moments",
    "squared_distance",
    "timeline",
    "timeline_of_round",
    "variance_budget",
]
