"""This package predicts what the simulator measures, in closed form, on the host in float64. No model is trained."""

from __future__ import annotations

from fedjax_sim.theory.allocation import (
    Allocation as Allocation,
    Choice as Choice,
    ClientCosts as ClientCosts,
    SharedQuadratics as SharedQuadratics,
    allocate as allocate,
)
from fedjax_sim.theory.asynchrony import (
    arrival_weights as arrival_weights,
    fedasync_contraction as fedasync_contraction,
    fedasync_floor as fedasync_floor,
)
from fedjax_sim.theory.bounds import (
    FedAvgBound as FedAvgBound,
    ProximalDrift as ProximalDrift,
    fedavg_bound as fedavg_bound,
    fedprox_descent as fedprox_descent,
    proximal_drift as proximal_drift,
)
from fedjax_sim.theory.clipping import (
    ClippedMean as ClippedMean,
    best_clip_norm as best_clip_norm,
    clipped_mean_error as clipped_mean_error,
    largest_personal_factor as largest_personal_factor,
)
from fedjax_sim.theory.coefficients import cohort_coefficients as cohort_coefficients
from fedjax_sim.theory.cohorts import (
    enumerate_cohorts as enumerate_cohorts,
    joint_inclusion_probability as joint_inclusion_probability,
    report_counts as report_counts,
)
from fedjax_sim.theory.consensus import (
    GossipFloor as GossipFloor,
    agreed_weights as agreed_weights,
    best_constant as best_constant,
    best_contraction as best_contraction,
    consensus_error as consensus_error,
    dgd_fixed_point as dgd_fixed_point,
    dpsgd_floor as dpsgd_floor,
    mixing_rounds as mixing_rounds,
)
from fedjax_sim.theory.convergence import (
    fedavg_contraction as fedavg_contraction,
    fedavg_fixed_point as fedavg_fixed_point,
    fednova_fixed_point as fednova_fixed_point,
    fedprox_contraction as fedprox_contraction,
    fedprox_fixed_point as fedprox_fixed_point,
    proximal_curvature as proximal_curvature,
    proximal_solution as proximal_solution,
)
from fedjax_sim.theory.drift import QuadraticDrift as QuadraticDrift, quadratic_drift as quadratic_drift
from fedjax_sim.theory.estimators import DesignVariance as DesignVariance, design_variance as design_variance
from fedjax_sim.theory.floor import Budget as Budget, budget as budget
from fedjax_sim.theory.heavy_hitters import heavy_hitter_miss_rate as heavy_hitter_miss_rate
from fedjax_sim.theory.hierarchy import (
    hierarchy_contraction as hierarchy_contraction,
    hierarchy_fixed_point as hierarchy_fixed_point,
)
from fedjax_sim.theory.leakage import alignment_auc as alignment_auc, overfitting_advantage as overfitting_advantage
from fedjax_sim.theory.moment_budget import MomentBudget as MomentBudget, budget_from_moments as budget_from_moments
from fedjax_sim.theory.moments import Moments as Moments
from fedjax_sim.theory.noise import (
    local_to_central_ratio as local_to_central_ratio,
    noise_floor as noise_floor,
    noise_variance as noise_variance,
)
from fedjax_sim.theory.quadratic import effective_shares as effective_shares, quadratic_optimum as quadratic_optimum
from fedjax_sim.theory.quantization import (
    QuantizationError as QuantizationError,
    crossover_cohort_size as crossover_cohort_size,
    expected_squared_error as expected_squared_error,
    level_distance as level_distance,
    quantization_error as quantization_error,
    quantization_floor as quantization_floor,
)
from fedjax_sim.theory.relative_error import (
    largest_stable_step as largest_stable_step,
    qsgd_relative_variance as qsgd_relative_variance,
    random_k_relative_variance as random_k_relative_variance,
    stochastic_relative_variance as stochastic_relative_variance,
    top_k_contraction as top_k_contraction,
)
from fedjax_sim.theory.robustness import (
    Breakdown as Breakdown,
    Robustness as Robustness,
    attackers_met as attackers_met,
    breakdown_points as breakdown_points,
    chance_beyond as chance_beyond,
    chance_of_more_attackers as chance_of_more_attackers,
    median_efficiency as median_efficiency,
    most_attackers as most_attackers,
    robustness_coefficients as robustness_coefficients,
    trimmed_mean_efficiency as trimmed_mean_efficiency,
)
from fedjax_sim.theory.rounding import rounding_variance as rounding_variance
from fedjax_sim.theory.sampling_variance import (
    cohort_mean_variance as cohort_mean_variance,
    finite_population_correction as finite_population_correction,
    horvitz_thompson_variance as horvitz_thompson_variance,
    noise_to_signal_ratio as noise_to_signal_ratio,
    population_variance as population_variance,
    required_cohort_size as required_cohort_size,
)
from fedjax_sim.theory.secure_aggregation import (
    abort_probability as abort_probability,
    expected_messages as expected_messages,
)
from fedjax_sim.theory.sgd import (
    decaying_step_limit as decaying_step_limit,
    excess_loss as excess_loss,
    expected_squared_distance as expected_squared_distance,
    rounds_until as rounds_until,
    sgd_contraction as sgd_contraction,
    sgd_floor as sgd_floor,
    stationary_covariance as stationary_covariance,
)
from fedjax_sim.theory.spectra import (
    exponential_spectrum as exponential_spectrum,
    laplacian_spectrum as laplacian_spectrum,
    regular_spectrum as regular_spectrum,
)
from fedjax_sim.theory.staleness import (
    StaleError as StaleError,
    delayed_contraction as delayed_contraction,
    delayed_floor as delayed_floor,
    delayed_step_limit as delayed_step_limit,
    expected_staleness as expected_staleness,
    stale_gradient_error as stale_gradient_error,
)
from fedjax_sim.theory.timing import (
    expected_order_statistic as expected_order_statistic,
    expected_round_time as expected_round_time,
    exponential_quantile as exponential_quantile,
    harmonic as harmonic,
    sampled_order_statistic as sampled_order_statistic,
    shortfall_probability as shortfall_probability,
    throughput_ratio as throughput_ratio,
)
