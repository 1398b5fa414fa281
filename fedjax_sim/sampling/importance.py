"""Cohorts drawn with unequal probabilities."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.prng import below, stream
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.types import Array, Cohort, Sampler
from fedjax_sim.validate import FromData, PositiveInt

__all__ = ["checked_weights", "race", "weighted", "weighted_without_replacement"]

_ONE = 2**32  # units of probability in a column of the table
_RACED = 1 << 14  # clients that all draw in every round


class AliasTable(NamedTuple):
    """Walker's alias table: column i stands for client i with probability threshold / 2^32, else for its alias."""

    threshold: Array  # [N] uint32
    alias: Array  # [N] int32; the client itself where the column is full


@validate.named_arguments
def weighted(weights: Annotated[Any, FromData("weights")], cohort_size: PositiveInt) -> Sampler:
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
    weights = checked_weights(weights)
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


def weighted_without_replacement(weights: Annotated[Any, FromData("weights")], cohort_size: int) -> Sampler:
    """m different clients, drawn one by one in proportion to their weights: successive sampling.

    Each draw is in proportion to the weights of those who are left. Up to 16,384 clients all wait for exponential
    times of their rates, and the first m come (O(N)); beyond, draws with replacement from an alias table go on until m
    different clients were drawn (O(m)).

    Args:
      weights: [N] finite numbers >= 0, not all 0; usually the numbers of examples.
      cohort_size: m, at most the number of positive weights.

    Returns: a sampler with m slots, in the order of the draws. Inclusion probabilities have no closed form: formulas,
    weights by examples, and accountants refuse its design.

    Raises: ValueError, TypeError for values out of range, and for so unequal weights that m different clients may need
    more than 64 m + 4,096 draws.

    Guarantees: the law of successive draws, by either way (tests/sampling/test_importance.py::test_successive_draws).

    References: Hajek 1981, chapter 9 (successive sampling); Cho, Wang and Joshi 2022, section 3, candidates.

    >>> weighted_without_replacement([5, 5, 0], 2).design.scheme
    'unknown_without_replacement'
    """
    weights = checked_weights(weights)
    positive = int(np.count_nonzero(weights))
    validate.integer("cohort_size", cohort_size, 1, positive, hint="So many clients have a positive weight.")
    design = SamplingDesign(
        scheme="unknown_without_replacement",
        population_size=len(weights),
        cohort_size=cohort_size,
        num_slots=cohort_size,
    )
    if len(weights) <= _RACED:
        return _raced(weights, cohort_size, design)
    draws = _draws_needed(weights / weights.sum(), cohort_size)
    inner = weighted(weights, draws)

    def sample(key, state):
        ids = inner.sample(key, state)[0].ids
        order = jnp.argsort(ids, stable=True)
        first = jnp.concatenate([jnp.ones(1, bool), ids[order][1:] != ids[order][:-1]])
        new = jnp.zeros_like(first).at[order].set(first)
        chosen = jnp.argsort(~new, stable=True)[:cohort_size]
        return Cohort(ids[chosen], new[chosen], new[chosen]), state

    return Sampler(inner.init, sample, cohort_size, design)


def _raced(weights: np.ndarray, cohort_size: int, design: SamplingDesign) -> Sampler:
    def sample(key, state):
        ids = jax.lax.top_k(-race(stream(key, "cohort"), state), cohort_size)[1].astype(jnp.int32)
        invited = jnp.ones((cohort_size,), bool)
        return Cohort(ids, invited, invited), state

    return Sampler(lambda: jnp.asarray(weights / weights.max(), jnp.float32), sample, cohort_size, design)


def race(key: Array, weights: Array) -> Array:
    """[N] exponential waiting times whose rates are the weights >= 0; who comes first is drawn in proportion to them.

    A weight of 0 waits longer than any positive one above 1e-30 of the largest.

    Guarantees: tests/sampling/test_importance.py::test_successive_draws.
    """
    uniform = (jax.random.bits(key, weights.shape, jnp.uint32).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    return -jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24)) / jnp.maximum(weights, 1e-35)


def _draws_needed(chances: np.ndarray, cohort_size: int) -> int:
    """So many draws with replacement that fewer than m different clients come with probability below 1e-9.

    The number of different clients is a sum of negatively associated indicators, for which Chernoff's bound holds:
    P(D <= (1 - t) E D) <= exp(-t^2 E D / 2).
    """
    most = 64 * cohort_size + 4096
    for draws in np.unique(np.geomspace(cohort_size, most, 200).astype(int)):
        mean = -np.expm1(draws * np.log1p(-chances)).sum()
        lacks = 1 - (cohort_size - 1) / mean
        if lacks > 0 and lacks**2 * mean / 2 > 9 * np.log(10):
            return int(draws)
    hint = "Draw fewer clients, or with replacement (`weighted`)."
    validate.fail("weights", f"weights of which {most} draws hold {cohort_size} different clients", chances.max(), hint)


def checked_weights(weights: Any) -> np.ndarray:
    """[N] float64 weights.

    Raises: ValueError, TypeError for other than finite numbers >= 0 that are not all 0.
    """
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
