"""The laboratory: a question, its grid, its theory, its figure."""

from fedjax_sim.study.audit import (
    audit_algorithm,
    audit_command,
    canary_release,
    claim_of,
    one_run_release,
)
from fedjax_sim.study.audit_figure import audit_figure
from fedjax_sim.study.bits import bits
from fedjax_sim.study.central_local import central_local
from fedjax_sim.study.clip import clip
from fedjax_sim.study.drift import drift
from fedjax_sim.study.error_floor import error_floor
from fedjax_sim.study.findings import Comparison, Findings, measured
from fedjax_sim.study.heterogeneity import heterogeneity
from fedjax_sim.study.hypergradient import hypergradient
from fedjax_sim.study.moments import Moments, population_moments
from fedjax_sim.study.page import write_findings
from fedjax_sim.study.participation import participation
from fedjax_sim.study.privacy_utility import privacy_utility
from fedjax_sim.study.results import Paired, Sweep
from fedjax_sim.study.rounds import independent_runs, squared_distance
from fedjax_sim.study.rounds_to_target import rounds_to_target
from fedjax_sim.study.sweep import sweep
from fedjax_sim.study.sweep_figure import sweep_figure
from fedjax_sim.study.variance_budget import variance_budget

__all__ = [
    "Comparison",
    "Findings",
    "Moments",
    "Paired",
    "Sweep",
    "audit_algorithm",
    "audit_command",
    "audit_figure",
    "bits",
    "canary_release",
    "central_local",
    "claim_of",
    "clip",
    "drift",
    "error_floor",
    "heterogeneity",
    "hypergradient",
    "independent_runs",
    "measured",
    "one_run_release",
    "participation",
    "population_moments",
    "privacy_utility",
    "rounds_to_target",
    "squared_distance",
    "sweep",
    "sweep_figure",
    "variance_budget",
    "write_findings",
]
