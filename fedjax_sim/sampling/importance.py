"""Cohorts drawn with unequal probabilities."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.prng import below, stream
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.types import Array, Cohort, Sampler

__all__ = ["weighted"]

_ONE = 2**32  # units of probability in a column of the table


class AliasTable(NamedTuple):
    """Walker's alias table: column i stands for client i with probability threshold / 2^32, else for its alias."""

    threshold: Array  # [N] uint32
    alias: Array  # [N] int32; the client itself where the column is full


def weighted(weights: Any, cohort_size: int) -> Sampler:
    """m independent draws of client i with probability p_i = weights[i] / sum(weights).

    An unweighted mean over the slots is then an unbiased estimate of the p-weighted mean over the population. The state
    is the alias table, 8 bytes a client, which a round takes as an argument and not as a constant.

    Args:
      weights: [N] finite numbers >= 0, not all 0; usually the numbers of examples.
      cohort_size: m, any positive integer.

    Returns: a sampler with m slots, all of them invited; a draw costs O(1).

    Raises: ValueError, TypeError for values out of range.

    Guarantees: p_i is exact to 2^-32 / N + 2^-52 (tests/sampling/test_importance.py::test_table_holds_the_weights);
    draws follow it (test_draws_follow_the_weights); a client of weight 0 is never drawn
    (test_zero_weights_are_never_drawn); the unweighted mean is unbiased (test_plain_mean_is_unbiased).

    References: Li et al. 2020 (FedAvg on non-IID data, scheme I); Walker 1977; Vose 1991.

    >>> weighted([1, 0, 3], 2).design.draw_probabilities.round(6).tolist()
    [0.25, 0.0, 0.75]
    """
    weights = _check_weights(weights)
    validate.integer("cohort_size", cohort_size)
    size = len(weights)
    units = _units(weights)
    threshold, alias = _alias_table(units)
    probabilities = units / (size * float(_ONE))
    probabilities.flags.writeable = False

    def init():
        return AliasTable(jnp.array(threshold), jnp.array(alias))

    def sample(key, state):
        columns = below(stream(key, "cohort"), size, (cohort_size,))
        bits = jax.random.bits(stream(key, "alias"), (cohort_size,), jnp.uint32)
        ids = jnp.where(bits < state.threshold[columns], columns, state.alias[columns])
        invited = jnp.ones((cohort_size,), bool)
        return Cohort(ids=ids, invited=invited, reported=invited), state

    design = SamplingDesign(
        scheme="weighted_with_replacement",
        population_size=size,
        cohort_size=cohort_size,
        num_slots=cohort_size,
        draw_probabilities=probabilities,
    )
    return Sampler(init, sample, cohort_size, design)


def _check_weights(weights: Any) -> np.ndarray:
    rule = "a 1-dimensional array of finite numbers >= 0, not all 0"
    if isinstance(weights, jax.core.Tracer):
        validate.fail("weights", rule, weights, "The alias table is made on the host: pass a NumPy array.", TypeError)
    array = np.asarray(weights)
    if array.dtype.kind not in "iuf":
        validate.fail("weights", rule, array, f"The dtype is {array.dtype}.", TypeError)
    if array.ndim != 1 or not (1 <= array.size <= validate.INT32_MAX):
        validate.fail("weights", rule, weights, f"The shape is {array.shape}.")
    array = array.astype(np.float64)
    wrong = np.flatnonzero(~((array >= 0) & np.isfinite(array)))
    if wrong.size:
        validate.fail(f"weights[{wrong[0]}]", "a finite number >= 0", float(array[wrong[0]]))
    if not array.max() > 0:
        validate.fail("weights", rule, weights, "At least one client must have a positive weight.")
    return array


def _units(weights: np.ndarray) -> np.ndarray:
    """[N] int64 multiples of 2^-32 / N that sum to exactly 1, each within one unit of its weight; 0 stays 0."""
    cumulative = np.cumsum(weights / weights.max())
    cumulative = np.rint(cumulative / cumulative[-1] * (float(_ONE) * len(weights))).astype(np.int64)
    return np.diff(cumulative, prepend=0)


def _alias_table(units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vose's alias table in integer units, vectorised: heavy clients fill the columns of light ones, both in order.

    With D the running sum of the light columns' deficits and E that of the heavy clients' surpluses, light column i is
    filled by the first heavy client with E > D[i-1]; a heavy client is used up at the first i with D[i] >= E, and the
    next heavy one fills the deficit that it then has itself.
    """
    size = len(units)
    threshold, alias = np.zeros(size, np.uint32), np.arange(size, dtype=np.int32)
    light, heavy = np.flatnonzero(units < _ONE), np.flatnonzero(units > _ONE)
    if not light.size:
        return threshold, alias
    lacks, gives = np.cumsum(_ONE - units[light]), np.cumsum(units[heavy] - _ONE)
    threshold[light] = units[light]
    alias[light] = heavy[np.searchsorted(gives, np.concatenate([[0], lacks[:-1]]), side="right")]
    overdrawn = lacks[np.searchsorted(lacks, gives, side="left")] - gives
    spent = np.flatnonzero(overdrawn > 0)
    threshold[heavy[spent]] = _ONE - overdrawn[spent]
    alias[heavy[spent]] = heavy[spent + 1]
    return threshold, alias
