"""Aggregators: many messages -> one aggregate. Every public name is a factory of an `Aggregator`."""

from fedjax_sim.aggregation.by_part import by_part
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
from fedjax_sim.aggregation.modular import modular_sum

__all__ = [
    "by_part",
    "extrapolated",
    "fixed_mean",
    "gather",
    "horvitz_thompson",
    "keep_old",
    "li_scheme_one",
    "li_scheme_two",
    "mean",
    "modular_sum",
    "total",
]
