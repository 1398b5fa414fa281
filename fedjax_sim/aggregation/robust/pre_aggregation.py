"""Pre-aggregation: messages are averaged, mixed or shortened before a robust rule sees them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, validate
from fedjax_sim.aggregation.robust.coordinate import enough, more_than
from fedjax_sim.aggregation.robust.norm_bounding import check_honest, shortening
from fedjax_sim.engine.all_messages.all_messages import SideBySide, by_rule, with_cohort_check
from fedjax_sim.engine.all_messages.messages import (
    gaps,
    linear_combinations,
    pooled_messages,
    squared_distances,
    weighted_rows,
)
from fedjax_sim.prng import stream
from fedjax_sim.types import Aggregator
from fedjax_sim.validate import NonNegativeInt, PositiveInt


def _pre_aggregated(
    aggregator: Aggregator,
    change: Callable,
    check: Callable | None = None,
    *,
    number: Callable = lambda num_slots: num_slots,
    least: int = 0,
    most: int | None = None,
) -> Aggregator:
    """Makes an aggregator that changes the messages of a cohort before a robust rule sees them.

    Args:
      aggregator: the robust rule.
      change: (key, SideBySide) -> SideBySide.
      check: (num_slots) -> None; raises for a cohort that `change` is not defined for.
      number: (messages before the change) -> messages after the change.
      least: a round with fewer messages is skipped.
      most: the attackers withstood, at most, even if the rule withstands more; None = no limit beside the rule's.
    """
    validate.part("aggregator", aggregator, Aggregator)
    check_honest(aggregator)
    inner_rule, inner_limit = aggregator.rule, aggregator.facts.withstands
    if inner_rule is None:
        hint = "Rules such as median, trimmed_mean, krum and geometric_median do; sums gain nothing from it."
        validate.fail("aggregator", "one that sees all messages at once", "another", hint)

    def rule(key, round, cohort):
        changed = change(stream(key, "pre_aggregation"), cohort)
        update, metrics, *state = inner_rule(stream(key, "rule"), round, changed)
        # The rule chose among changed messages, which belong to no single client.
        metrics = {name: x for name, x in metrics.items() if name != "chosen"}
        return enough(cohort, least, update), metrics, *state

    def withstands(num_messages):
        assert inner_limit is not None, "only then it is stated"
        limit_of_rule = inner_limit(number(num_messages))
        return limit_of_rule if most is None else jnp.minimum(most, limit_of_rule)

    facts = {name: getattr(aggregator.facts, name) for name in ("weighted", "homogeneous", "metrics")}
    facts["withstands"] = None if inner_limit is None else withstands
    return with_cohort_check(by_rule(rule, check, start=aggregator.start, **facts), aggregator, number)


@validate.named_arguments
def bucketing(aggregator: Aggregator, bucket_size: PositiveInt) -> Aggregator:
    """The robust rule sees the means of random buckets of messages instead of single messages.

    The n messages that arrived are assigned to ceil(n / s) buckets at random; the sizes of buckets differ by at most
    one message. Means of buckets differ less than the messages of heterogeneous clients do, but a single attacker
    corrupts a whole bucket.

    Args:
      aggregator: a robust rule; it must withstand f attackers among m / s messages.
      bucket_size: s, at least 1; usually 2.

    Returns: an Aggregator that holds all m messages, and the buckets. The weight of a bucket is the sum of its
    messages' weights. Its mean is weighted if the rule trusts weights, else plain. These buckets are also the random
    groups that secure aggregation needs beside a robust rule: the server sees a group's sum and size, and no single
    message.

    Raises: ValueError for an aggregator that does not see all messages at once; when the round is built, for one that
      is not defined for ceil(m / s) messages.

    Guarantees: equals NumPy's means of the buckets, with each message in exactly one bucket
    (tests/aggregation/robust/test_pre_aggregation.py::test_bucketing).

    References: Karimireddy, He and Jaggi 2022, algorithm 1.
    """

    def change(key, cohort):
        m = cohort.messages.number
        number = cohort.number
        max_buckets = -(-m // bucket_size)  # if all m messages arrive
        num_buckets = -(-number // bucket_size)
        # Messages are sorted by a random number that depends on the client's id alone, so the order does not depend on
        # m. Bucket b takes the messages at b, b + num_buckets, b + 2 num_buckets, ... of that order.
        sort_keys = engine.client_keys(key, cohort.ids)[:, 0]
        shuffled = jax.lax.sort((~cohort.arrived, sort_keys, jnp.arange(m, dtype=jnp.int32)), num_keys=3)[2]
        places = jnp.arange(bucket_size)[None] * num_buckets + jnp.arange(max_buckets)[:, None]
        is_member = (jnp.arange(max_buckets)[:, None] < num_buckets) & (places < number)
        members = shuffled[jnp.clip(places, 0, m - 1)]  # [max_buckets, bucket_size]; places past the end are clipped
        weights = cohort.weights if aggregator.facts.weighted else cohort.arrived.astype(jnp.float32)
        weights = jnp.where(is_member, weights[members], 0)
        totals = weights.sum(1)
        shares = weights / jnp.where(totals > 0, totals, 1)[:, None]
        means = pooled_messages(cohort.messages, members, shares)
        is_bucket = jnp.arange(max_buckets) < num_buckets
        bucket_ids = jnp.where(is_bucket, jnp.arange(max_buckets, dtype=jnp.int32), -1)
        return SideBySide(means, jnp.where(is_bucket, totals, 0), bucket_ids, num_buckets)

    return _pre_aggregated(aggregator, change, number=lambda num_slots: -(-num_slots // bucket_size))


@validate.named_arguments
def nearest_neighbour_mixing(aggregator: Aggregator, num_byzantine: NonNegativeInt) -> Aggregator:
    """The robust rule sees each message replaced by the mean of the m - f messages nearest to it (NNM).

    A message is among its own nearest messages.

    Args:
      aggregator: a robust rule.
      num_byzantine: f >= 0, the attackers in a cohort; 2 f < m.

    Returns: an Aggregator that holds all m messages, their mixtures, and m x m distances. Neighbours at equal distances
    are taken by client id. Rounds with at most 2 f messages are skipped.

    Raises: ValueError for 2 f >= m, when the round is built; and for an aggregator that does not see all messages.

    Guarantees: the median of the mixtures equals NumPy's up to rounding, also if some messages do not arrive
    (tests/aggregation/robust/test_pre_aggregation.py::test_nearest_neighbour_mixing).

    References: Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan 2023, algorithm 2.
    """

    def change(key, cohort):
        m = cohort.messages.number
        num_mixed = cohort.number - num_byzantine
        distances = jnp.where(cohort.arrived[None], gaps(cohort.messages), jnp.inf)
        ids = jnp.broadcast_to(jnp.arange(m, dtype=jnp.int32)[None], (m, m))
        nearest = jax.lax.sort((distances, ids), num_keys=2)[1]  # each row's messages, from the nearest on
        # [m, m] whether message j is in the mixture of message i.
        is_mixed = jnp.zeros((m, m), bool).at[jnp.arange(m)[:, None], nearest].set(jnp.arange(m)[None] < num_mixed)
        is_mixed &= cohort.arrived[:, None]
        shares = is_mixed.astype(jnp.float32) / jnp.maximum(num_mixed, 1).astype(jnp.float32)
        return cohort._replace(messages=linear_combinations(cohort.messages, shares))

    least = 2 * num_byzantine + 1
    return _pre_aggregated(aggregator, change, more_than(num_byzantine, 2), least=least, most=num_byzantine)


@validate.named_arguments
def adaptive_clipping(aggregator: Aggregator, num_byzantine: NonNegativeInt) -> Aggregator:
    """The robust rule sees messages of which the longest are shortened (adaptive robust clipping, ARC).

    The k = floor(2 (f / m) (m - f)) longest messages are shortened to the norm of the longest of the others.

    Args:
      aggregator: a robust rule.
      num_byzantine: f >= 0, the attackers in a cohort; 2 f < m.

    Returns: an Aggregator that holds all m messages twice.

    Raises: ValueError for 2 f >= m, when the round is built; and for an aggregator that does not see all messages.

    Guarantees: the median of the shortened messages equals NumPy's up to rounding, with k from the messages that
    arrived (tests/aggregation/robust/test_pre_aggregation.py::test_adaptive_clipping).

    References: Allouah, Guerraoui, Gupta, Jellouli, Rizk and Stephan 2025 (adaptive gradient clipping for robust
    federated learning), algorithm 2.
    """

    def change(key, cohort):
        norms = jnp.where(cohort.arrived, jnp.sqrt(squared_distances(cohort.messages)), -1)  # -1 sorts absent rows last
        # k for every number of messages, computed on the host: 2 f (m - f) of large cohorts exceeds 32 bits.
        num_messages = np.arange(1, norms.size + 1)
        num_shortened = jnp.asarray(2 * num_byzantine * (num_messages - num_byzantine) // num_messages, jnp.int32)
        k = jnp.maximum(num_shortened[cohort.number - 1], 0)
        limit = jnp.sort(norms)[::-1][k]
        return cohort._replace(messages=weighted_rows(cohort.messages, shortening(norms, limit)))

    return _pre_aggregated(aggregator, change, more_than(num_byzantine, 2), most=num_byzantine)
