"""Studies: each function answers one question about federated learning by simulation and compares it with theory.

A study runs a grid of settings, puts the closed form beside each measured number where there is one, and returns
`Findings`: the numbers with joint confidence intervals, claims that they bear out or refute, and a figure.
"""

from fedjax_sim.study.availability.question import availability as availability
from fedjax_sim.study.bits.question import bits as bits
from fedjax_sim.study.breakdown.question import breakdown as breakdown
from fedjax_sim.study.budget.question import budget as budget
from fedjax_sim.study.central_local.question import central_local as central_local
from fedjax_sim.study.clip.question import clip as clip
from fedjax_sim.study.connectivity.question import connectivity as connectivity
from fedjax_sim.study.drift.question import drift as drift
from fedjax_sim.study.dropout.question import dropout as dropout
from fedjax_sim.study.error_floor.question import error_floor as error_floor
from fedjax_sim.study.findings import Comparison as Comparison, Findings as Findings, measured as measured
from fedjax_sim.study.heterogeneity.question import heterogeneity as heterogeneity
from fedjax_sim.study.hierarchy.question import hierarchy as hierarchy
from fedjax_sim.study.leakage.question import leakage as leakage
from fedjax_sim.study.page import write_findings as write_findings
from fedjax_sim.study.participation.question import participation as participation
from fedjax_sim.study.personal_models.question import personal_models as personal_models
from fedjax_sim.study.price_of_robustness.question import price_of_robustness as price_of_robustness
from fedjax_sim.study.privacy_utility.question import privacy_utility as privacy_utility
from fedjax_sim.study.robustness.question import robustness as robustness
from fedjax_sim.study.rounds_to_target.question import rounds_to_target as rounds_to_target
from fedjax_sim.study.staleness.question import staleness as staleness
from fedjax_sim.study.stragglers.question import stragglers as stragglers
from fedjax_sim.study.time_to_target.question import time_to_target as time_to_target
