"""The desk: numbers about models and populations."""

from fedjax_sim.metrics.evaluation import evaluation, per_client, pooled

__all__ = ["evaluation", "per_client", "pooled"]
