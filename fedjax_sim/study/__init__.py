"""The laboratory: a question, its grid, its theory, its figure."""

from fedjax_sim.study.audit import (
    audit_algorithm,
    audit_command,
    canary_release,
    claim_of,
    one_run_release,
)
from fedjax_sim.study.audit_figure import audit_figure

__all__ = ["audit_algorithm", "audit_command", "audit_figure", "canary_release", "claim_of", "one_run_release"]
