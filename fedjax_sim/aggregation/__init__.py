"""Aggregators turn the many messages of a round into one aggregate. Every public name makes an `Aggregator`."""

from fedjax_sim.aggregation.extrapolated import extrapolated as extrapolated
from fedjax_sim.aggregation.gather import gather as gather
from fedjax_sim.aggregation.linear import (
    fixed_mean as fixed_mean,
    horvitz_thompson as horvitz_thompson,
    keep_old as keep_old,
    li_scheme_one as li_scheme_one,
    li_scheme_two as li_scheme_two,
    mean as mean,
    total as total,
)
from fedjax_sim.aggregation.per_part import by_part as by_part
from fedjax_sim.aggregation.robust.coordinate import (
    mean_around_median as mean_around_median,
    median as median,
    sign_majority as sign_majority,
    trimmed_mean as trimmed_mean,
)
from fedjax_sim.aggregation.robust.distance import bulyan as bulyan, krum as krum, minimum_diameter as minimum_diameter
from fedjax_sim.aggregation.robust.geometric import (
    centered_clipping as centered_clipping,
    geometric_median as geometric_median,
)
from fedjax_sim.aggregation.robust.norm_bounding import norm_bounding as norm_bounding
from fedjax_sim.aggregation.robust.pre_aggregation import (
    adaptive_clipping as adaptive_clipping,
    bucketing as bucketing,
    nearest_neighbour_mixing as nearest_neighbour_mixing,
)
from fedjax_sim.aggregation.robust.reference_data import fltrust as fltrust, foolsgold as foolsgold
from fedjax_sim.aggregation.secure.additive_shares import additive_shares as additive_shares
from fedjax_sim.aggregation.secure.by_examples import by_examples as by_examples
from fedjax_sim.aggregation.secure.homomorphic import homomorphic_mean as homomorphic_mean
from fedjax_sim.aggregation.secure.modular import modular_sum as modular_sum
from fedjax_sim.aggregation.secure.protocol.aggregator import real_secure_sum as real_secure_sum
from fedjax_sim.aggregation.secure.secagg import secure_sum as secure_sum
