"""Pre-aggregation: messages are averaged, mixed or shortened by each other before a robust rule sees them."""

from __future__ import annotations

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

__all__ = ["adaptive_clipping", "bucketing", "nearest_neighbour_mixing"]


def _around(
    aggregator: Aggregator, change, check=None, number=lambda num_slots: num_slots, least: int = 0, most=None
) -> Aggregator:
    """`aggregator` of what `change(key, SideBySide) -> SideBySide` makes of a cohort of at least `least`: `number(m)`
    messages. It withstands at most `most` attackers, however many the aggregator does; None = no limit of its own."""
    validate.part("aggregator", aggregator, Aggregator)
    check_honest(aggregator)
    if aggregator.rule is None:
        hint = "Rules such as median, trimmed_mean, krum and geometric_median do; sums gain nothing from it."
        validate.fail("aggregator", "one that sees all messages at once", "another", hint)

    def rule(key, round, cohort):
        changed = change(stream(key, "pre_aggregation"), cohort)
        update, metrics, *state = aggregator.rule(stream(key, "rule"), round, changed)
        metrics = {name: x for name, x in metrics.items() if name != "chosen"}  # what it chose is no client's message
        return enough(cohort, least, update), metrics, *state

    def withstands(num_messages):
        inner = aggregator.facts.withstands(number(num_messages))
        return inner if most is None else jnp.minimum(most, inner)

    facts = {name: getattr(aggregator.facts, name) for name in ("weighted", "homogeneous", "metrics")}
    facts["withstands"] = aggregator.facts.withstands and withstands
    return with_cohort_check(by_rule(rule, check, start=aggregator.start, **facts), aggregator, number)


@validate.named_arguments
def bucketing(aggregator: Aggregator, bucket_size: PositiveInt) -> Aggregator:
    """A rule over the means of random buckets of messages: heterogeneous clients look more alike, but an attacker
    spoils a bucket.

    The messages that arrived are dealt to ceil(n / s) buckets at random, which differ by one message at most.

    Args:
      aggregator: a robust rule; it must withstand f attackers among m / s messages.
      bucket_size: s, 2 as a rule.

    Returns: an Aggregator that holds all m messages, and the buckets. A bucket weighs as much as its messages together;
    its mean is by their weights if the rule trusts them, else plain. These are also the random groups that secure
    aggregation needs beside a robust rule: the server sees a group's sum and its size, and nothing of a single message.

    Raises: ValueError for an aggregator that does not see all messages at once; when the round is built, for one that
      is not defined for ceil(m / s) messages.

    Guarantees: NumPy's means of the buckets, each message in one
    (tests/aggregation/robust/test_pre_aggregation.py::test_bucketing).

    References: Karimireddy, He and Jaggi 2022, algorithm 1.
    """

    def change(key, cohort):
        m, number = cohort.messages.number, cohort.number
        most = -(-m // bucket_size)
        buckets = -(-number // bucket_size)
        # Messages in a random order, which does not depend on m, are dealt to the buckets in turn.
        luck = engine.client_keys(key, cohort.ids)[:, 0]
        drawn = jax.lax.sort((~cohort.arrived, luck, jnp.arange(m, dtype=jnp.int32)), num_keys=3)[2]
        places = jnp.arange(bucket_size)[None] * buckets + jnp.arange(most)[:, None]
        inside = (jnp.arange(most)[:, None] < buckets) & (places < number)
        members = drawn[jnp.clip(places, 0, m - 1)]
        share = cohort.weights if aggregator.facts.weighted else cohort.arrived.astype(jnp.float32)
        share = jnp.where(inside, share[members], 0)
        total = engine.pairwise_sum(share, (1,))
        means = pooled_messages(cohort.messages, members, engine.divide(share, jnp.where(total > 0, total, 1)[:, None]))
        there = jnp.arange(most) < buckets
        ids = jnp.where(there, jnp.arange(most, dtype=jnp.int32), -1)
        return SideBySide(means, jnp.where(there, total, 0), ids, buckets)

    return _around(aggregator, change, number=lambda num_slots: -(-num_slots // bucket_size))


@validate.named_arguments
def nearest_neighbour_mixing(aggregator: Aggregator, num_byzantine: NonNegativeInt) -> Aggregator:
    """A rule over messages that are each replaced by the mean of the m - f nearest to it, itself included (NNM).

    Args:
      aggregator: a robust rule.
      num_byzantine: f, the attackers in a cohort; 2 f < m.

    Returns: an Aggregator that holds all m messages, their mixtures, and m x m distances. Neighbours at equal distances
    are taken by client id. Rounds with at most 2 f messages are skipped.

    Raises: ValueError for 2 f >= m, when the round is built; and for an aggregator that does not see all messages.

    Guarantees: NumPy's mixtures (tests/aggregation/robust/test_pre_aggregation.py::test_nearest_neighbour_mixing).

    References: Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan 2023, algorithm 2.
    """

    def change(key, cohort):
        m, kept = cohort.messages.number, cohort.number - num_byzantine
        apart = jnp.where(cohort.arrived[None], gaps(cohort.messages), jnp.inf)
        ids = jnp.broadcast_to(jnp.arange(m, dtype=jnp.int32)[None], (m, m))
        nearest = jax.lax.sort((apart, ids), num_keys=2)[1]
        chosen = jnp.zeros((m, m), bool).at[jnp.arange(m)[:, None], nearest].set(jnp.arange(m)[None] < kept)
        chosen &= cohort.arrived[:, None]
        share = engine.divide(chosen.astype(jnp.float32), jnp.maximum(kept, 1).astype(jnp.float32))
        return cohort._replace(messages=linear_combinations(cohort.messages, share))

    least = 2 * num_byzantine + 1
    return _around(aggregator, change, more_than(num_byzantine, 2), least=least, most=num_byzantine)


@validate.named_arguments
def adaptive_clipping(aggregator: Aggregator, num_byzantine: NonNegativeInt) -> Aggregator:
    """A rule over messages of which the longest are shortened to the norm of the next (adaptive robust clipping, ARC).

    The k = floor(2 (f / m) (m - f)) longest messages are shortened to the norm of the one after them.

    Args:
      aggregator: a robust rule.
      num_byzantine: f, the attackers in a cohort; 2 f < m.

    Returns: an Aggregator that holds all m messages twice.

    Raises: ValueError for 2 f >= m, when the round is built; and for an aggregator that does not see all messages.

    Guarantees: NumPy's (tests/aggregation/robust/test_pre_aggregation.py::test_adaptive_clipping).

    References: Allouah, Guerraoui, Gupta, Jellouli, Rizk and Stephan 2025 (adaptive gradient clipping for robust
    federated learning), algorithm 2.
    """

    def change(key, cohort):
        norms = jnp.where(cohort.arrived, jnp.sqrt(squared_distances(cohort.messages)), -1)
        number = np.arange(1, norms.size + 1)  # 64 bits: 2 f (m - f) of large cohorts is past 32
        counts = jnp.asarray(2 * num_byzantine * (number - num_byzantine) // number, jnp.int32)
        limit = jnp.sort(norms)[::-1][jnp.maximum(counts[cohort.number - 1], 0)]
        return cohort._replace(messages=weighted_rows(cohort.messages, shortening(norms, limit)))

    return _around(aggregator, change, more_than(num_byzantine, 2), most=num_byzantine)
