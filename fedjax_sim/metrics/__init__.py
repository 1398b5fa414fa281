"""This package measures models and populations: evaluation, heterogeneity, client drift and communication."""

from fedjax_sim.metrics.communication import rounds_to_target as rounds_to_target
from fedjax_sim.metrics.distributions import (
    earth_mover_distance as earth_mover_distance,
    jensen_shannon_divergence as jensen_shannon_divergence,
    kullback_leibler_divergence as kullback_leibler_divergence,
    l1_distance as l1_distance,
    label_counts as label_counts,
    label_heterogeneity as label_heterogeneity,
    optimum_gap as optimum_gap,
    total_variation as total_variation,
)
from fedjax_sim.metrics.drift import (
    Drift as Drift,
    drift as drift,
    drift_bias as drift_bias,
    drift_leading_term as drift_leading_term,
)
from fedjax_sim.metrics.evaluation import (
    Evaluation as Evaluation,
    evaluation as evaluation,
    objective as objective,
    owner_models as owner_models,
    per_client as per_client,
    pooled as pooled,
)
from fedjax_sim.metrics.fairness import (
    fairness as fairness,
    highest_decile as highest_decile,
    lowest_decile as lowest_decile,
)
from fedjax_sim.metrics.heterogeneity import (
    GradientHeterogeneity as GradientHeterogeneity,
    GradientMoments as GradientMoments,
    gradient_heterogeneity as gradient_heterogeneity,
    gradient_moments as gradient_moments,
)
