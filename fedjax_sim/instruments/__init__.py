"""Measures an algorithm: variance budget, hyper-gradients, privacy audit, clients' values, costs, runs, timelines."""

from fedjax_sim.instruments.audit import (
    audit_algorithm as audit_algorithm,
    canary_release as canary_release,
    claim_of as claim_of,
    one_run_release as one_run_release,
)
from fedjax_sim.instruments.audit_command import audit_command as audit_command
from fedjax_sim.instruments.audit_figure import audit_figure as audit_figure
from fedjax_sim.instruments.client_costs import client_costs as client_costs
from fedjax_sim.instruments.client_value import ClientValues as ClientValues, client_values as client_values
from fedjax_sim.instruments.hypergradient import hypergradient as hypergradient
from fedjax_sim.instruments.moments import Moments as Moments, population_moments as population_moments
from fedjax_sim.instruments.runs import independent_runs as independent_runs, squared_distance as squared_distance
from fedjax_sim.instruments.timeline import timeline as timeline, timeline_of_round as timeline_of_round
from fedjax_sim.instruments.variance_budget import variance_budget as variance_budget
