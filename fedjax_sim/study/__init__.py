"""Studies: each function answers one question about federated learning by simulation and compares it with theory.

A study runs a grid of settings, puts the closed form beside each measured number where there is one, and returns
`Findings`: the numbers with joint confidence intervals, a reading in plain words, and a figure.
"""

from fedjax_sim.study.availability.question import availability
from fedjax_sim.study.bits.question import bits
from fedjax_sim.study.breakdown.question import breakdown
from fedjax_sim.study.budget.question import budget
from fedjax_sim.study.central_local.question import central_local
from fedjax_sim.study.clip.question import clip
from fedjax_sim.study.connectivity.question import connectivity
from fedjax_sim.study.drift.question import drift
from fedjax_sim.study.dropout.question import dropout
from fedjax_sim.study.error_floor.question import error_floor
from fedjax_sim.study.findings import Comparison, Findings, measured
from fedjax_sim.study.heterogeneity.question import heterogeneity
from fedjax_sim.study.hierarchy.question import hierarchy
from fedjax_sim.study.leakage.question import leakage
from fedjax_sim.study.page import write_findings
from fedjax_sim.study.participation.question import participation
from fedjax_sim.study.personal_models.question import personal_models
from fedjax_sim.study.price_of_robustness.question import price_of_robustness
from fedjax_sim.study.privacy_utility.question import privacy_utility
from fedjax_sim.study.robustness.question import robustness
from fedjax_sim.study.rounds_to_target.question import rounds_to_target
from fedjax_sim.study.staleness.question import staleness
from fedjax_sim.study.stragglers.question import stragglers
from fedjax_sim.study.time_to_target.question import time_to_target

__all__ = [
    "Comparison",
    "Findings",
    "availability",
    "bits",
    "breakdown",
    "budget",
    "central_local",
    "clip",
    "connectivity",
    "drift",
    "dropout",
    "error_floor",
    "heterogeneity",
    "hierarchy",
    "leakage",
    "measured",
    "participation",
    "personal_models",
    "price_of_robustness",
    "privacy_utility",
    "robustness",
    "rounds_to_target",
    "staleness",
    "stragglers",
    "time_to_target",
    "write_findings",
]
