"""Robust rules that treat each coordinate by itself: medians, trimmed means and votes over clients.

Order statistics are selected, not sorted (`engine.order_statistic`), and sums over clients are exact."""

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


def _units(weights: Array) -> Array:
    """Rounds weights to integers, so that cumulative sums of weights are exact.

    Returns: [m] int32. The unit is 2^-30 of the least power of two above the sum of the weights; a positive weight is
    at least one unit.
    """
    total = jnp.maximum(weights.sum(0), 2.0**-126)  # a normal number also without messages
    exponent = (jax.lax.bitcast_convert_type(total, jnp.int32) >> 23) - 127  # floor(log2(total)), from the float's bits
    # 2^(29 - exponent) may exceed float32's range for tiny totals; each half of it does not.
    half = (29 - exponent) // 2
    scale = [power_of_two(part, jnp.float32) for part in (half, 29 - exponent - half)]
    units = jnp.round(weights * scale[0] * scale[1]).astype(jnp.int32)
    return jnp.where(weights > 0, jnp.maximum(units, 1), 0)


def enough(cohort: SideBySide, least: Array | int, update):
    """Returns the update, or NaN if fewer than `least` messages arrived; an aggregate of NaN skips the round."""
    return jax.tree.map(lambda x: jnp.where(cohort.number >= least, x, jnp.nan), update)


def median(*, trust_weights: bool = False) -> Aggregator:
    """The aggregate is the median of the messages at each coordinate.

    Of an even number of values it is the mean of the two middle values. If fewer than half of the messages are from
    attackers, each coordinate of the aggregate lies within the range of the honest clients' values.

    Args:
      trust_weights: True: clients count by the weights that they report (their examples). Attackers may forge weights,
        and then control the result with any number of messages. False: each client counts once.

    Returns: an Aggregator that holds all m messages.

    Guarantees:
      - equals `numpy.median` (tests/aggregation/robust/test_coordinate.py::test_rules_are_numpys)
      - within the honest range whatever finite messages fewer than half of the clients send, and not if more than half
        attack (::test_breakdown_points)

    References: Yin, Chen, Ramchandran and Bartlett 2018, definition 1.

    >>> median().facts.weighted, median(trust_weights=True).facts.weighted
    (False, True)
    """

    def rule(key, round, cohort):
        return coordinate_median(cohort, trust_weights), {}

    return by_rule(rule, weighted=trust_weights, homogeneous=True, withstands=None if trust_weights else minority)


def coordinate_median(cohort: SideBySide, trust_weights: bool) -> PyTree:
    """Computes the aggregate of `median`, for rules whose iteration starts at the median.

    Args:
      cohort: the messages.
      trust_weights: as in `median`.

    Returns: an update; its leaves have the dtypes of the messages.
    """
    units = _units(cohort.weights) if trust_weights else cohort.arrived.astype(jnp.int32)

    def median_of_columns(values, units):
        return engine.median(values, units > 0, units if trust_weights else None)

    return columnwise(cohort.messages, median_of_columns, units)


@validate.named_arguments
def trimmed_mean(num_byzantine: NonNegativeInt, *, trust_weights: bool = False) -> Aggregator:
    """The aggregate is the mean at each coordinate without the f smallest and the f largest values.

    Args:
      num_byzantine: f >= 0, the attackers in a cohort that the rule withstands; 2 f < m. "beta" of the literature is
        f / m, per side.
      trust_weights: True: means are weighted, and at each side the share f / n of the total weight is removed, where n
        messages arrived. An attacker who forges weights then controls the result. False: each message counts once.

    Returns: an Aggregator that holds all m messages. Rounds with at most 2 f messages are skipped.

    Raises: ValueError for 2 f >= m and for m above 131,071, when the round is built.

    Guarantees:
      - equals NumPy's mean of the sorted values that remain
        (tests/aggregation/robust/test_coordinate.py::test_rules_are_numpys)
      - the result is within the honest range with up to f attackers, and not with f + 1 (::test_breakdown_points); with
        trusted weights, with attackers of up to f / n of the total weight (::test_attackers_at_the_trimmed_share)

    References: Yin, Chen, Ramchandran and Bartlett 2018, definition 2.

    >>> trimmed_mean(2).facts.homogeneous
    True
    """

    def rule(key, round, cohort):
        # A message counts like so many messages of one unit each.
        units = _units(cohort.weights) if trust_weights else cohort.arrived.astype(jnp.int32)
        # The share of what n messages do not divide is rounded up, by at most one unit. Rounded down, a unit of an
        # attacker with exactly this share of the weight would stay, and move the mean anywhere.
        number = jnp.maximum(cohort.number, 1)
        whole, rest = jnp.divmod(units.sum(), number)
        share = jnp.float32(num_byzantine) / number.astype(jnp.float32)
        trimmed_units = whole * num_byzantine + jnp.ceil(rest.astype(jnp.float32) * share).astype(jnp.int32)
        removed_units = trimmed_units if trust_weights else jnp.int32(num_byzantine)  # at each side

        def mean_of_columns(values, units):
            return engine.trimmed_mean(values, removed_units, units > 0, units if trust_weights else None)

        update = columnwise(cohort.messages, mean_of_columns, units)
        return enough(cohort, 2 * num_byzantine + 1, update), {}

    withstands = None if trust_weights else lambda number: num_byzantine
    check = more_than(num_byzantine, 2)
    return by_rule(rule, check, weighted=trust_weights, homogeneous=True, withstands=withstands)


@validate.named_arguments
def mean_around_median(num_byzantine: NonNegativeInt) -> Aggregator:
    """The aggregate is the mean at each coordinate of the m - f values nearest to the median (Meamed).

    If several values are at the largest distance that counts, and not all of them fit, each of them counts in part,
    with equal parts.

    Args:
      num_byzantine: f >= 0, the attackers in a cohort that the rule withstands; 2 f < m.

    Returns: an Aggregator that holds all m messages. Rounds with at most 2 f messages are skipped.

    Raises: ValueError for 2 f >= m, when the round is built.

    Guarantees:
      - equals NumPy's (tests/aggregation/robust/test_coordinate.py::test_rules_are_numpys)
      - the result is near the honest range with up to f attackers (::test_breakdown_points)

    References: Xie, Koyejo and Gupta 2018, definition 7 (mean around median).
    """

    def rule(key, round, cohort):
        num_averaged = cohort.number - num_byzantine
        update = columnwise(cohort.messages, partial(around_median, num_averaged), cohort.arrived)
        return enough(cohort, 2 * num_byzantine + 1, update), {}

    facts = {"weighted": False, "homogeneous": True, "withstands": lambda number: num_byzantine}
    return by_rule(rule, more_than(num_byzantine, 2), **facts)


def around_median(kept: Array, values: Array, there: Array) -> Array:
    """Computes, at each coordinate, the mean of the values nearest to the median.

    Args:
      kept: [] int32, how many values are averaged.
      values: [places, d], a row for each message.
      there: [places] bool, the rows that hold a message.

    Returns: [d] in the dtype of the values.
    """
    centre = engine.median(values, there)
    wide = tree.at_least_float32(values.dtype)
    differences = values.astype(wide) - centre.astype(wide)[None]
    distances = jnp.where(there[:, None], jnp.abs(differences), jnp.inf)
    # Values nearer than the `kept`-th distance count in full, values at that distance in equal parts of what remains.
    cut = engine.order_statistic(distances, kept - 1, there)
    is_inside = distances < cut[None]
    is_at_cut = distances == cut[None]
    num_inside, num_ties = (x.sum(0, dtype=jnp.int32) for x in (is_inside, is_at_cut & there[:, None]))
    inner_sum, tie_sum = exact_sums.summed(tuple(jnp.where(mask, differences, 0) for mask in (is_inside, is_at_cut)))
    tie_share = (kept - num_inside).astype(wide) / jnp.maximum(num_ties, 1).astype(wide)
    mean_difference = (inner_sum + tie_sum * tie_share) / jnp.maximum(kept, 1).astype(wide)
    return (centre.astype(wide) + mean_difference).astype(values.dtype)


def sign_majority(*, trust_weights: bool = False) -> Aggregator:
    """The aggregate is the majority vote on the sign of each coordinate, 0 if the vote is even.

    Args:
      trust_weights: True: votes count by the weights that clients report. False: each client has one vote.

    Returns: an Aggregator whose aggregates hold -1, 0 and 1: the server's learning rate is the length of a step at each
    coordinate. It holds only sums, so its memory does not grow with m.

    Guarantees:
      - equals NumPy's votes (tests/aggregation/robust/test_coordinate.py::test_rules_are_numpys)
      - the honest majority's sign, as long as its lead exceeds the number of attackers (::test_breakdown_points)

    References: Bernstein, Zhao, Azizzadenesheli and Anandkumar 2019 (signSGD with majority vote is fault tolerant).
    """

    def init(update_spec, num_slots):
        wide_spec = lambda x: jax.ShapeDtypeStruct(x.shape, tree.at_least_float32(x.dtype))  # noqa: E731
        return exact_sums.zeros((jax.tree.map(wide_spec, update_spec), jax.ShapeDtypeStruct((), jnp.float32)))

    def accumulate(key, round, carry, received):
        weights = received.weights if trust_weights else (received.weights > 0).astype(jnp.float32)
        # Votes are float32 at least: in the dtype of a 16-bit message, a weight would be rounded.
        votes = jax.tree.map(lambda x: jnp.sign(x).astype(tree.at_least_float32(x.dtype)), received.updates)
        return exact_sums.add(carry, (tree.scaled(votes, weights), weights))

    def finalize(key, round, carry):
        votes, total_weight = exact_sums.total(carry)
        return jax.tree.map(jnp.sign, votes), {"total_weight": total_weight}

    withstands = None if trust_weights else minority
    return Aggregator(init, accumulate, finalize, AggregatorFacts(weighted=trust_weights, withstands=withstands))


def minority(number):
    """Returns the largest count that is less than half of `number` messages; 0 of no messages.

    Args:
      number: an int, or an array of integers, at least 0.

    >>> [minority(number) for number in (0, 1, 2, 3, 4, 5)]
    [0, 0, 0, 1, 1, 2]
    """
    return abs(number - 1) // 2  # `abs` gives 0 for no messages, where number - 1 would round to -1


def more_than(num_byzantine: int, times: int, more: int = 1) -> Callable:
    """Makes a check that a cohort has at least `times` f + `more` slots.

    Args:
      num_byzantine: f, the attackers that a rule withstands.
      times: how many slots each attacker requires.
      more: the slots required beside these.

    Returns: (num_slots) -> None; it raises ValueError for a smaller cohort. `by_rule` takes it as `check`.
    """

    def check(num_slots):
        hint = f"It is defined for cohorts of at least {times} f + {more} messages."
        validate.integer("num_byzantine", num_byzantine, 0, (num_slots - more) // times, hint=hint)

    return check
