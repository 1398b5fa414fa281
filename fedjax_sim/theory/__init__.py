"""This package predicts what the simulator measures, in closed form, on the host in float64. No model is trained."""

from __future__ import annotations

from fedjax_sim.theory.allocation import Allocation, Choice, ClientCosts, SharedQuadratics, allocate
from fedjax_sim.theory.asynchrony import arrival_weights, fedasync_contraction, fedasync_floor
from fedjax_sim.theory.bounds import FedAvgBound, ProximalDrift, fedavg_bound, fedprox_descent, proximal_drift
from fedjax_sim.theory.clipping import ClippedMean, best_clip_norm, clipped_mean_error, largest_personal_factor
from fedjax_sim.theory.coefficients import cohort_coefficients
from fedjax_sim.theory.cohorts import enumerate_cohorts, joint_inclusion_probability, report_counts
from fedjax_sim.theory.consensus import (
    GossipFloor,
    agreed_weights,
    best_constant,
    best_contraction,
    consensus_error,
    dgd_fixed_point,
    dpsgd_floor,
    mixing_rounds,
)
from fedjax_sim.theory.convergence import (
    fedavg_contraction,
    fedavg_fixed_point,
    fednova_fixed_point,
    fedprox_contraction,
    fedprox_fixed_point,
    proximal_curvature,
    proximal_solution,
)
from fedjax_sim.theory.drift import QuadraticDrift, quadratic_drift
from fedjax_sim.theory.estimators import DesignVariance, design_variance
from fedjax_sim.theory.floor import Budget, budget
from fedjax_sim.theory.heavy_hitters import heavy_hitter_miss_rate
from fedjax_sim.theory.hierarchy import hierarchy_contraction, hierarchy_fixed_point
from fedjax_sim.theory.leakage import alignment_auc, overfitting_advantage
from fedjax_sim.theory.moment_budget import MomentBudget, budget_from_moments
from fedjax_sim.theory.moments import Moments
from fedjax_sim.theory.noise import local_to_central_ratio, noise_floor, noise_variance
from fedjax_sim.theory.quadratic import effective_shares, quadratic_optimum
from fedjax_sim.theory.quantization import (
    QuantizationError,
    crossover_cohort_size,
    expected_squared_error,
    level_distance,
    quantization_error,
    quantization_floor,
)
from fedjax_sim.theory.relative_error import (
    largest_stable_step,
    qsgd_relative_variance,
    random_k_relative_variance,
    stochastic_relative_variance,
    top_k_contraction,
)
from fedjax_sim.theory.robustness import (
    Breakdown,
    Robustness,
    attackers_met,
    breakdown_points,
    chance_beyond,
    chance_of_more_attackers,
    median_efficiency,
    most_attackers,
    robustness_coefficients,
    trimmed_mean_efficiency,
)
from fedjax_sim.theory.rounding import rounding_variance
from fedjax_sim.theory.sampling_variance import (
    cohort_mean_variance,
    finite_population_correction,
    horvitz_thompson_variance,
    noise_to_signal_ratio,
    population_variance,
    required_cohort_size,
)
from fedjax_sim.theory.secure_aggregation import abort_probability, expected_messages
from fedjax_sim.theory.sgd import (
    decaying_step_limit,
    excess_loss,
    expected_squared_distance,
    rounds_until,
    sgd_contraction,
    sgd_floor,
    stationary_covariance,
)
from fedjax_sim.theory.spectra import exponential_spectrum, laplacian_spectrum, regular_spectrum
from fedjax_sim.theory.staleness import (
    StaleError,
    delayed_contraction,
    delayed_floor,
    delayed_step_limit,
    expected_staleness,
    stale_gradient_error,
)
from fedjax_sim.theory.timing import (
    expected_order_statistic,
    expected_round_time,
    exponential_quantile,
    harmonic,
    sampled_order_statistic,
    shortfall_probability,
    throughput_ratio,
)

__all__ = [
    "Allocation",
    "Breakdown",
    "Budget",
    "Choice",
    "ClientCosts",
    "ClippedMean",
    "DesignVariance",
    "FedAvgBound",
    "GossipFloor",
    "MomentBudget",
    "Moments",
    "ProximalDrift",
    "QuadraticDrift",
    "QuantizationError",
    "Robustness",
    "SharedQuadratics",
    "StaleError",
    "abort_probability",
    "agreed_weights",
    "alignment_auc",
    "allocate",
    "arrival_weights",
    "attackers_met",
    "best_clip_norm",
    "best_constant",
    "best_contraction",
    "breakdown_points",
    "budget",
    "budget_from_moments",
    "chance_beyond",
    "chance_of_more_attackers",
    "clipped_mean_error",
    "cohort_coefficients",
    "cohort_mean_variance",
    "consensus_error",
    "crossover_cohort_size",
    "decaying_step_limit",
    "delayed_contraction",
    "delayed_floor",
    "delayed_step_limit",
    "design_variance",
    "dgd_fixed_point",
    "dpsgd_floor",
    "effective_shares",
    "enumerate_cohorts",
    "excess_loss",
    "expected_messages",
    "expected_order_statistic",
    "expected_round_time",
    "expected_squared_distance",
    "expected_squared_error",
    "expected_staleness",
    "exponential_quantile",
    "exponential_spectrum",
    "fedasync_contraction",
    "fedasync_floor",
    "fedavg_bound",
    "fedavg_contraction",
    "fedavg_fixed_point",
    "fednova_fixed_point",
    "fedprox_contraction",
    "fedprox_descent",
    "fedprox_fixed_point",
    "finite_population_correction",
    "harmonic",
    "heavy_hitter_miss_rate",
    "hierarchy_contraction",
    "hierarchy_fixed_point",
    "horvitz_thompson_variance",
    "joint_inclusion_probability",
    "laplacian_spectrum",
    "largest_personal_factor",
    "largest_stable_step",
    "level_distance",
    "local_to_central_ratio",
    "median_efficiency",
    "mixing_rounds",
    "most_attackers",
    "noise_floor",
    "noise_to_signal_ratio",
    "noise_variance",
    "overfitting_advantage",
    "population_variance",
    "proximal_curvature",
    "proximal_drift",
    "proximal_solution",
    "qsgd_relative_variance",
    "quadratic_drift",
    "quadratic_optimum",
    "quantization_error",
    "quantization_floor",
    "random_k_relative_variance",
    "regular_spectrum",
    "report_counts",
    "required_cohort_size",
    "robustness_coefficients",
    "rounding_variance",
    "rounds_until",
    "sampled_order_statistic",
    "sgd_contraction",
    "sgd_floor",
    "shortfall_probability",
    "stale_gradient_error",
    "stationary_covariance",
    "stochastic_relative_variance",
    "throughput_ratio",
    "top_k_contraction",
    "trimmed_mean_efficiency",
]
