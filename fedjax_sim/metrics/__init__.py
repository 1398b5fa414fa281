"""This package measures models and populations: evaluation, heterogeneity, client drift and communication."""

from fedjax_sim.metrics.classes import (
    balanced_accuracy_score as balanced_accuracy_score,
    brier_score as brier_score,
    confusion_matrix as confusion_matrix,
    expected_calibration_error as expected_calibration_error,
    f1_score as f1_score,
    precision_score as precision_score,
    recall_score as recall_score,
    top_k_accuracy_score as top_k_accuracy_score,
)
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
from fedjax_sim.metrics.group_fairness import (
    accuracy_by_group as accuracy_by_group,
    demographic_parity_difference as demographic_parity_difference,
    equal_opportunity_difference as equal_opportunity_difference,
    equalized_odds_difference as equalized_odds_difference,
)
from fedjax_sim.metrics.heterogeneity import (
    GradientHeterogeneity as GradientHeterogeneity,
    GradientMoments as GradientMoments,
    gradient_heterogeneity as gradient_heterogeneity,
    gradient_moments as gradient_moments,
)
from fedjax_sim.metrics.ranking import (
    average_precision_score as average_precision_score,
    roc_auc_score as roc_auc_score,
)
from fedjax_sim.metrics.regression import (
    mean_absolute_error as mean_absolute_error,
    r2_score as r2_score,
    root_mean_squared_error as root_mean_squared_error,
)
from fedjax_sim.metrics.score_metrics import (
    ScoreMetric as ScoreMetric,
    average_precision as average_precision,
    balanced_accuracy as balanced_accuracy,
    brier as brier,
    calibration_error as calibration_error,
    f1_binary as f1_binary,
    f1_macro as f1_macro,
    f1_weighted as f1_weighted,
    mae as mae,
    precision_binary as precision_binary,
    precision_macro as precision_macro,
    r2 as r2,
    recall_binary as recall_binary,
    recall_macro as recall_macro,
    rmse as rmse,
    roc_auc as roc_auc,
    top_k_accuracy as top_k_accuracy,
)
