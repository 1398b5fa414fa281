"""Aggregators turn the many messages of a round into one aggregate. Every public name makes an `Aggregator`."""

from fedjax_sim.aggregation.extrapolated import extrapolated
from fedjax_sim.aggregation.gather import gather
from fedjax_sim.aggregation.linear import (
    fixed_mean,
    horvitz_thompson,
    keep_old,
    li_scheme_one,
    li_scheme_two,
    mean,
    total,
)
from fedjax_sim.aggregation.per_part import by_part
from fedjax_sim.aggregation.robust.coordinate import mean_around_median, median, sign_majority, trimmed_mean
from fedjax_sim.aggregation.robust.distance import bulyan, krum, minimum_diameter
from fedjax_sim.aggregation.robust.geometric import centered_clipping, geometric_median
from fedjax_sim.aggregation.robust.norm_bounding import norm_bounding
from fedjax_sim.aggregation.robust.pre_aggregation import adaptive_clipping, bucketing, nearest_neighbour_mixing
from fedjax_sim.aggregation.robust.reference_data import fltrust, foolsgold
from fedjax_sim.aggregation.secure.additive_shares import additive_shares
from fedjax_sim.aggregation.secure.by_examples import by_examples
from fedjax_sim.aggregation.secure.homomorphic import homomorphic_mean
from fedjax_sim.aggregation.secure.modular import modular_sum
from fedjax_sim.aggregation.secure.protocol.aggregator import real_secure_sum
from fedjax_sim.aggregation.secure.secagg import secure_sum

__all__ = [
    "adaptive_clipping",
    "additive_shares",
    "bucketing",
    "bulyan",
    "by_examples",
    "by_part",
    "centered_clipping",
    "extrapolated",
    "fixed_mean",
    "fltrust",
    "foolsgold",
    "gather",
    "geometric_median",
    "homomorphic_mean",
    "horvitz_thompson",
    "keep_old",
    "krum",
    "li_scheme_one",
    "li_scheme_two",
    "mean",
    "mean_around_median",
    "median",
    "minimum_diameter",
    "modular_sum",
    "nearest_neighbour_mixing",
    "norm_bounding",
    "real_secure_sum",
    "secure_sum",
    "sign_majority",
    "total",
    "trimmed_mean",
]
