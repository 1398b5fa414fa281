"""This package measures models and populations: evaluation, heterogeneity, client drift and communication."""

from fedjax_sim.metrics.communication import rounds_to_target
from fedjax_sim.metrics.distributions import (
    earth_mover_distance,
    jensen_shannon_divergence,
    kullback_leibler_divergence,
    l1_distance,
    label_counts,
    label_heterogeneity,
    optimum_gap,
    total_variation,
)
from fedjax_sim.metrics.drift import Drift, drift, drift_bias, drift_leading_term
from fedjax_sim.metrics.evaluation import Evaluation, evaluation, objective, owner_models, per_client, pooled
from fedjax_sim.metrics.fairness import fairness, highest_decile, lowest_decile
from fedjax_sim.metrics.heterogeneity import (
    GradientHeterogeneity,
    GradientMoments,
    gradient_heterogeneity,
    gradient_moments,
)

__all__ = [
    "Drift",
    "Evaluation",
    "GradientHeterogeneity",
    "GradientMoments",
    "drift",
    "drift_bias",
    "drift_leading_term",
    "earth_mover_distance",
    "evaluation",
    "fairness",
    "gradient_heterogeneity",
    "gradient_moments",
    "highest_decile",
    "jensen_shannon_divergence",
    "kullback_leibler_divergence",
    "l1_distance",
    "label_counts",
    "label_heterogeneity",
    "lowest_decile",
    "objective",
    "optimum_gap",
    "owner_models",
    "per_client",
    "pooled",
    "rounds_to_target",
    "total_variation",
]
