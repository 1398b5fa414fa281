"""This package accounts for the privacy of federated runs, calibrates noise, and audits mechanisms. Host code."""

from fedjax_sim.privacy.accountant import PrivacySpent, account, compose
from fedjax_sim.privacy.audit import Audit, audit_release, judge
from fedjax_sim.privacy.calibration import Calibrated, calibrate, compare, comparison_table, written_down
from fedjax_sim.privacy.claim import Claim, accounted_claim, gaussian_claim
from fedjax_sim.privacy.embeddings import embedding_claim
from fedjax_sim.privacy.labels import label_claim
from fedjax_sim.privacy.ledger import Ledger
from fedjax_sim.privacy.mechanism import Mechanism
from fedjax_sim.privacy.one_run import audit_one_run, one_run_epsilon
from fedjax_sim.privacy.reading import mechanism_from, mechanism_of
from fedjax_sim.privacy.scores import Estimate
from fedjax_sim.privacy.words import explain

__all__ = [
    "Audit",
    "Calibrated",
    "Claim",
    "Estimate",
    "Ledger",
    "Mechanism",
    "PrivacySpent",
    "account",
    "accounted_claim",
    "audit_one_run",
    "audit_release",
    "calibrate",
    "compare",
    "comparison_table",
    "compose",
    "embedding_claim",
    "explain",
    "gaussian_claim",
    "judge",
    "label_claim",
    "mechanism_from",
    "mechanism_of",
    "one_run_epsilon",
    "written_down",
]
