"""This package accounts for the privacy of federated runs, calibrates noise, and audits mechanisms. Host code."""

from fedjax_sim.privacy.accountant import PrivacySpent as PrivacySpent, account as account, compose as compose
from fedjax_sim.privacy.audit import Audit as Audit, audit_release as audit_release, judge as judge
from fedjax_sim.privacy.calibration import (
    Calibrated as Calibrated,
    calibrate as calibrate,
    compare as compare,
    comparison_table as comparison_table,
    written_down as written_down,
)
from fedjax_sim.privacy.claim import (
    Claim as Claim,
    accounted_claim as accounted_claim,
    gaussian_claim as gaussian_claim,
)
from fedjax_sim.privacy.embeddings import embedding_claim as embedding_claim
from fedjax_sim.privacy.labels import label_claim as label_claim
from fedjax_sim.privacy.ledger import Ledger as Ledger
from fedjax_sim.privacy.mechanism import Mechanism as Mechanism
from fedjax_sim.privacy.one_run import audit_one_run as audit_one_run, one_run_epsilon as one_run_epsilon
from fedjax_sim.privacy.reading import mechanism_from as mechanism_from, mechanism_of as mechanism_of
from fedjax_sim.privacy.scores import Estimate as Estimate
from fedjax_sim.privacy.words import explain as explain
