"""Samplers that draw clients with unequal probabilities."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fedjax_sim import validate
from fedjax_sim.prng import below, stream
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.types import Array, Cohort, Sampler
from fedjax_sim.validate import FromData, PositiveInt

_ONE = 2**32  # the units of probability in a column of the table
_RACED = 1 << 14  # for at most this many clients, every client draws a waiting time in every round


class AliasTable(NamedTuple):
    """Walker's alias table: column i gives client i with probability threshold / 2^32, and otherwise its alias."""

    threshold: Array  # [N] uint32
    alias: Array  # [N] int32; the client itself where the column is full


@validate.named_arguments
def weighted(weights: Annotated[Any, FromData("weights")], cohort_size: PositiveInt) -> Sampler:
    """Draws m clients independently, client i with probability p_i = weights[i] / sum(weights).

    An unweighted mean over the slots is then an unbiased estimate of the p-weighted mean over the population.

    Args:
      weights: [N] finite numbers >= 0, not all 0; usually the numbers of examples.
      cohort_size: m, any positive integer.

    Returns: a sampler with m slots, all of them invited; a draw costs O(1). The state is an alias table, 8 bytes for
    each client, which a round takes as an argument and not as a constant.

    Raises: ValueError or TypeError for values out of range.

    Guarantees:
      - p_i is exact to 2^-32 / N + 2^-52 (tests/sampling/test_importance.py::test_table_holds_the_weights)
      - draws follow p (test_draws_follow_the_weights)
      - a client of weight 0 is never drawn (test_zero_weights_are_never_drawn)
      - the unweighted mean is unbiased (test_plain_mean_is_unbiased)

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
    """Draws m different clients one by one, in proportion to the weights of the remaining clients.

    This is successive sampling. Two algorithms give the same distribution. For up to 16,384 clients, every client draws
    an exponential waiting time with its weight as the rate, and the first m clients are chosen (O(N)). For more
    clients, draws with replacement from an alias table are made until m different clients were drawn (O(m)).

    Args:
      weights: [N] finite numbers >= 0, not all 0; usually the numbers of examples.
      cohort_size: m, at most the number of positive weights.

    Returns: a sampler with m slots, in the order of the draws. Inclusion probabilities have no closed form: formulas,
    weights by examples, and accountants refuse its design.

    Raises: ValueError or TypeError for values out of range, and for weights so unequal that m different clients may
      need more than 64 m + 4,096 draws.

    Guarantees: the distribution of successive draws, by both algorithms
    (tests/sampling/test_importance.py::test_successive_draws).

    References: Hajek 1981, chapter 9 (successive sampling); Cho, Wang and Joshi 2022, section 3, candidates.

    >>> weighted_without_replacement([5, 5, 0], 2).design.scheme
    'unknown_without_replacement'
    """
    weights = checked_weights(weights)
    num_positive = int(np.count_nonzero(weights))
    validate.integer("cohort_size", cohort_size, 1, num_positive, hint="So many clients have a positive weight.")
    design = SamplingDesign(
        scheme="unknown_without_replacement",
        population_size=len(weights),
        cohort_size=cohort_size,
        num_slots=cohort_size,
    )
    if len(weights) <= _RACED:
        return _by_waiting_times(weights, cohort_size, design)
    num_draws = _draws_needed(weights / weights.sum(), cohort_size)
    inner = weighted(weights, num_draws)

    def sample(key, state):
        ids = inner.sample(key, state)[0].ids
        # A draw is new if it is the first of its id: the first of a run of equal ids, in a stable sort.
        order = jnp.argsort(ids, stable=True)
        is_first = jnp.concatenate([jnp.ones(1, bool), ids[order][1:] != ids[order][:-1]])
        is_new = jnp.zeros_like(is_first).at[order].set(is_first)
        chosen = jnp.argsort(~is_new, stable=True)[:cohort_size]
        # With a probability below 1e-9 the draws hold fewer than m different clients; the other slots are padding.
        return Cohort(ids[chosen], is_new[chosen], is_new[chosen]), state

    return Sampler(inner.init, sample, cohort_size, design)


def _by_waiting_times(weights: np.ndarray, cohort_size: int, design: SamplingDesign) -> Sampler:
    """Successive sampling in which every client draws a waiting time."""

    def sample(key, state):
        ids = jax.lax.top_k(-race(stream(key, "cohort"), state), cohort_size)[1].astype(jnp.int32)
        invited = jnp.ones((cohort_size,), bool)
        return Cohort(ids, invited, invited), state

    return Sampler(lambda: jnp.asarray(weights / weights.max(), jnp.float32), sample, cohort_size, design)


def race(key: Array, weights: Array) -> Array:
    """Draws exponential waiting times whose rates are the weights; the order of the times is successive sampling.

    Args:
      key: random key.
      weights: [N] float32 >= 0. A weight of 0 waits longer than any weight above 1e-30 of the largest.

    Returns: [N] float32.

    Guarantees: 40,000 ordered draws of 2 of 5 clients pass a chi-square test of successive sampling, p > 1e-6, and
    weights of 0 are not drawn (tests/sampling/test_importance.py::test_successive_draws).
    """
    uniform = (jax.random.bits(key, weights.shape, jnp.uint32).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    return -jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24)) / jnp.maximum(weights, 1e-35)


def _draws_needed(chances: np.ndarray, cohort_size: int) -> int:
    """Finds a number of draws with replacement that hold fewer than m different clients with probability below 1e-9.

    The number D of different clients is a sum of negatively associated indicators, for which Chernoff's bound holds:
    P(D <= (1 - t) E D) <= exp(-t^2 E D / 2). For n draws E D = sum_i (1 - (1 - p_i)^n), and t is such that
    (1 - t) E D = m - 1.

    Args:
      chances: [N] float64, p_i >= 0, which add up to 1.
      cohort_size: m, at most the number of positive chances.

    Returns: n, in [m, 64 m + 4,096].

    Raises: ValueError if so many draws are too few.
    """
    max_draws = 64 * cohort_size + 4096
    for draws in np.unique(np.geomspace(cohort_size, max_draws, 200).astype(int)):
        mean = -np.expm1(draws * np.log1p(-chances)).sum()  # E D
        t = 1 - (cohort_size - 1) / mean
        if t > 0 and t**2 * mean / 2 > 9 * np.log(10):
            return int(draws)
    hint = "Draw fewer clients, or with replacement (`weighted`)."
    rule = f"weights of which {max_draws} draws hold {cohort_size} different clients"
    validate.fail("weights", rule, chances.max(), hint)


def checked_weights(weights: Any) -> np.ndarray:
    """Checks weights and converts them to [N] float64.

    Args:
      weights: [N] numbers, on the host.

    Raises: ValueError or TypeError for other than finite numbers >= 0 that are not all 0.
    """
    rule = "a 1-dimensional array of finite numbers >= 0, not all 0"
    if isinstance(weights, Tracer):
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
    # Rounding the cumulative sums, and not the weights, makes the units add up to exactly 1.
    cumulative = np.cumsum(weights / weights.max())
    cumulative = np.rint(cumulative / cumulative[-1] * (float(_ONE) * len(weights))).astype(np.int64)
    return np.diff(cumulative, prepend=0)


def _alias_table(units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes (threshold, alias) of Vose's alias table in integer units, vectorised.

    Heavy clients (more than the mean weight) fill the columns of light clients, both in order. Let D be the cumulative
    deficits of the light columns, and E the cumulative surpluses of the heavy clients. Light column i is filled by the
    first heavy client with E > D[i-1]. A heavy client is used up at the first i with D[i] >= E; the next heavy client
    fills the deficit that it then has itself.

    Args:
      units: [N] int64 >= 0, the weights in units that add up to N 2^32, so that the mean weight is 2^32.

    Returns: (threshold [N] uint32, alias [N] int32). A draw in column c is client c with probability
    threshold[c] / 2^32, else client alias[c]. A column of the mean weight has threshold 0, and is its own alias.
    """
    size = len(units)
    threshold = np.zeros(size, np.uint32)
    alias = np.arange(size, dtype=np.int32)
    light = np.flatnonzero(units < _ONE)
    heavy = np.flatnonzero(units > _ONE)
    if not light.size:
        return threshold, alias
    deficits = np.cumsum(_ONE - units[light])  # D
    surpluses = np.cumsum(units[heavy] - _ONE)  # E
    threshold[light] = units[light]
    alias[light] = heavy[np.searchsorted(surpluses, np.concatenate([[0], deficits[:-1]]), side="right")]
    overdrawn = deficits[np.searchsorted(deficits, surpluses, side="left")] - surpluses
    used_up = np.flatnonzero(overdrawn > 0)
    threshold[heavy[used_up]] = _ONE - overdrawn[used_up]
    alias[heavy[used_up]] = heavy[used_up + 1]
    return threshold, alias
