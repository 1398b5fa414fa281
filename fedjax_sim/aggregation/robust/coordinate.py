"""Robust rules that look at each coordinate by itself: order statistics over clients, exact_sums, without a sort."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree, validate
from fedjax_sim.engine.all_messages.all_messages import SideBySide, by_rule
from fedjax_sim.engine.all_messages.messages import columnwise
from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.engine.arithmetic.exact_sum import power_of_two
from fedjax_sim.types import Aggregator, AggregatorFacts, Array, PyTree
from fedjax_sim.validate import NonNegativeInt

__all__ = [
    "around_median",
    "coordinate_median",
    "enough",
    "mean_around_median",
    "median",
    "minority",
    "more_than",
    "sign_majority",
    "trimmed_mean",
]


def _units(weights: Array) -> Array:
    """[m] int32: weights in units of 2^-30 of the least power of two above their sum, at least one where positive."""
    total = jnp.maximum(engine.pairwise_sum(weights, (0,)), 2.0**-126)
    exponent = (jax.lax.bitcast_convert_type(total, jnp.int32) >> 23) - 127
    half = (29 - exponent) // 2  # two factors: one could be past float32's range
    scale = [power_of_two(part, jnp.float32) for part in (half, 29 - exponent - half)]
    units = jnp.round(weights * scale[0] * scale[1]).astype(jnp.int32)
    return jnp.where(weights > 0, jnp.maximum(units, 1), 0)


def enough(cohort: SideBySide, least: Array | int, update):
    """The update, or NaN (a skipped round) where fewer messages arrived than the rule is defined for."""
    return jax.tree.map(lambda x: jnp.where(cohort.number >= least, x, jnp.nan), update)


def median(*, trust_weights: bool = False) -> Aggregator:
    """The median over clients at each coordinate; the mean of the two middle values of an even number.

    Each coordinate lies within the honest clients' range as long as fewer than half of the messages are an attacker's.

    Args:
      trust_weights: clients count by the weights that they report (their examples); attackers may forge those, and then
        hold the result with any number of messages. False: each counts once.

    Returns: an Aggregator that holds all m messages.

    Guarantees: `numpy.median` (tests/aggregation/robust/test_coordinate.py::test_rules_are_numpys); within the honest
    range under any finite messages of fewer than half, and not of more (::test_breakdown_points).

    References: Yin, Chen, Ramchandran and Bartlett 2018, definition 1.

    >>> median().facts.weighted, median(trust_weights=True).facts.weighted
    (False, True)
    """

    def rule(key, round, cohort):
        return coordinate_median(cohort, trust_weights), {}

    return by_rule(rule, weighted=trust_weights, homogeneous=True, withstands=None if trust_weights else minority)


def coordinate_median(cohort: SideBySide, trust_weights: bool) -> PyTree:
    """The update of `median`, for rules that begin at it."""
    units = _units(cohort.weights) if trust_weights else cohort.arrived.astype(jnp.int32)

    def middle(values, units):
        return engine.median(values, units > 0, units if trust_weights else None)

    return columnwise(cohort.messages, middle, units)


@validate.named_arguments
def trimmed_mean(num_byzantine: NonNegativeInt, *, trust_weights: bool = False) -> Aggregator:
    """The mean at each coordinate without the f smallest and the f largest values.

    Args:
      num_byzantine: f, the attackers in a cohort that it withstands; 2 f < m. "beta" of the literature is f / m, per
        side.
      trust_weights: means are weighted, and at each side the share f / n of the weight of n messages is taken off; an
        attacker who forges weights holds the result. False: each message counts once.

    Returns: an Aggregator that holds all m messages. Rounds with at most 2 f messages are skipped.

    Raises: ValueError for 2 f >= m and for m above 131,071, when the round is built.

    Guarantees: the mean of the sorted rest (tests/aggregation/robust/test_coordinate.py::test_rules_are_numpys); within
    the honest range up to f attackers, and not with f + 1 (::test_breakdown_points).

    References: Yin, Chen, Ramchandran and Bartlett 2018, definition 2.

    >>> trimmed_mean(2).facts.homogeneous
    True
    """

    def rule(key, round, cohort):
        units = _units(cohort.weights) if trust_weights else cohort.arrived.astype(jnp.int32)
        share = engine.divide(jnp.float32(num_byzantine), jnp.maximum(cohort.number, 1).astype(jnp.float32))
        mass = jnp.floor(units.sum().astype(jnp.float32) * share).astype(jnp.int32)
        cut = mass if trust_weights else jnp.int32(num_byzantine)

        def trimmed(values, units):
            return engine.trimmed_mean(values, cut, units > 0, units if trust_weights else None)

        update = columnwise(cohort.messages, trimmed, units)
        return enough(cohort, 2 * num_byzantine + 1, update), {}

    withstands = None if trust_weights else lambda number: num_byzantine
    check = more_than(num_byzantine, 2)
    return by_rule(rule, check, weighted=trust_weights, homogeneous=True, withstands=withstands)


@validate.named_arguments
def mean_around_median(num_byzantine: NonNegativeInt) -> Aggregator:
    """The mean at each coordinate of the m - f values nearest to the median (Meamed).

    Values at equal distances, of which not all fit, count in equal parts.

    Args:
      num_byzantine: f, the attackers in a cohort that it withstands; 2 f < m.

    Returns: an Aggregator that holds all m messages. Rounds with at most 2 f messages are skipped.

    Raises: ValueError for 2 f >= m, when the round is built.

    Guarantees: NumPy's (tests/aggregation/robust/test_coordinate.py::test_rules_are_numpys); near the honest range up
    to f attackers (::test_breakdown_points).

    References: Xie, Koyejo and Gupta 2018, definition 7 (mean around median).
    """

    def rule(key, round, cohort):
        kept = cohort.number - num_byzantine

        update = columnwise(cohort.messages, partial(around_median, kept), cohort.arrived)
        return enough(cohort, 2 * num_byzantine + 1, update), {}

    facts = {"weighted": False, "homogeneous": True, "withstands": lambda number: num_byzantine}
    return by_rule(rule, more_than(num_byzantine, 2), **facts)


def around_median(kept: Array, values: Array, there: Array) -> Array:
    """[d] the mean of the `kept` values nearest to the median of values [places, d], where `there` [places] bool."""
    centre, wide = engine.median(values, there), tree.at_least_float32(values.dtype)
    away = values.astype(wide) - centre.astype(wide)[None]
    apart = jnp.where(there[:, None], jnp.abs(away), jnp.inf)
    cut = engine.order_statistic(apart, kept - 1, there)
    inside, at_cut = apart < cut[None], apart == cut[None]
    count, ties = (x.sum(0, dtype=jnp.int32) for x in (inside, at_cut & there[:, None]))
    inner, outer = exact_sums.summed(tuple(jnp.where(mask, away, 0) for mask in (inside, at_cut)))
    share = engine.divide((kept - count).astype(wide), jnp.maximum(ties, 1).astype(wide))
    mean = engine.divide(inner + outer * share, jnp.maximum(kept, 1).astype(wide))
    return (centre.astype(wide) + mean).astype(values.dtype)


def sign_majority(*, trust_weights: bool = False) -> Aggregator:
    """The sign that most clients have at each coordinate, 0 where they are even: majority vote.

    Args:
      trust_weights: votes count by the weights that clients report; False: one vote each.

    Returns: an Aggregator of updates of -1, 0 and 1: the server's learning rate is the length of a step. It holds
    nothing but sums, so its memory does not grow with m.

    Guarantees: NumPy's votes (tests/aggregation/robust/test_coordinate.py::test_rules_are_numpys); the honest
    majority's sign, as long as its lead exceeds the number of attackers (::test_breakdown_points).

    References: Bernstein, Zhao, Azizzadenesheli and Anandkumar 2019 (signSGD with majority vote is fault tolerant).
    """

    def init(update_spec, num_slots):
        wide = lambda x: jax.ShapeDtypeStruct(x.shape, tree.at_least_float32(x.dtype))  # noqa: E731
        return exact_sums.zeros((jax.tree.map(wide, update_spec), jax.ShapeDtypeStruct((), jnp.float32)))

    def accumulate(key, round, carry, received):
        share = received.weights if trust_weights else (received.weights > 0).astype(jnp.float32)
        # Whole votes: a weight in a 16-bit message's dtype would be rounded.
        votes = jax.tree.map(lambda x: jnp.sign(x).astype(tree.at_least_float32(x.dtype)), received.updates)
        return exact_sums.add(carry, (tree.scaled(votes, share), share))

    def finalize(key, round, carry):
        votes, total = exact_sums.total(carry)
        return jax.tree.map(jnp.sign, votes), {"total_weight": total}

    withstands = None if trust_weights else minority
    return Aggregator(init, accumulate, finalize, AggregatorFacts(weighted=trust_weights, withstands=withstands))


def minority(number):
    """The most of `number` messages that are fewer than half of them; an int, or integers of an array."""
    return abs(number - 1) // 2  # 0 of none


def more_than(num_byzantine: int, times: int, more: int = 1) -> Callable:
    """A check that a cohort has at least `times` f + `more` slots."""

    def check(num_slots):
        hint = f"It is defined for cohorts of at least {times} f + {more} messages."
        validate.integer("num_byzantine", num_byzantine, 0, (num_slots - more) // times, hint=hint)

    return check
