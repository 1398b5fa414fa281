"""Robust rules that give messages far from a centre less weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree, validate
from fedjax_sim.aggregation.robust.coordinate import coordinate_median, minority
from fedjax_sim.engine.all_messages.all_messages import by_rule
from fedjax_sim.engine.all_messages.messages import mean_and_distances, one_row, squared_distances, weighted_sum
from fedjax_sim.types import Aggregator, Array
from fedjax_sim.validate import Positive, PositiveInt, Share


def _message_weights(cohort, trust_weights: bool) -> Array:
    """Returns the reported weights, or 1 for each message that arrived, [m] float32."""
    return cohort.weights if trust_weights else cohort.arrived.astype(jnp.float32)


@validate.named_arguments
def geometric_median(
    num_steps: PositiveInt = 100, *, tolerance: Share = 1e-3, smoothing: Positive = 1e-6, trust_weights: bool = False
) -> Aggregator:
    """The aggregate is the geometric median z: the point with the least weighted sum of distances from the messages.

    It is computed by smoothed Weiszfeld iteration (RFA): each step moves z to the mean of the messages with weights
    w_i / max(nu, |u_i - z|). The rule withstands attackers with less than half of the weight.

    The steps begin at the coordinate median. From the mean, as in the paper, a single message of 2^90 would cost a step
    for each few powers of two; from a fixed point, honest messages far from it would cost as many.

    In the first step, messages nearer than the median distance count as if they were at the median distance. Otherwise
    messages that lie at the coordinate median, such as zeros among sparse messages, would hold z there.

    Args:
      num_steps: T, the largest number of steps. The messages are read once more than that, beside their median.
      tolerance: in [0, 1]; the iteration ends at a step that moves z by at most this share of the median distance of
        the messages from z. With 0 all T steps are made.
      smoothing: nu, positive, in the unit of updates: distances below nu count as nu.
      trust_weights: True: w_i is the weight that a client reports (its examples), which an attacker may forge. False:
        w_i = 1.

    Returns: an Aggregator that holds all m messages. Messages further than 1.8e19 away count for nothing.

    Raises: ValueError for options out of their ranges.

    Guarantees:
      - equals NumPy's steps, and the minimum as the number of steps grows
        (tests/aggregation/robust/test_geometric.py::test_geometric_median)
      - by default within 5 % of the minimum's distance from the honest mean, however far that is from zero
        (::test_it_does_not_matter_where_messages_are), also where some clients send zeros
        (::test_free_riders_do_not_hold_it)
      - the result is near the honest messages under any f < m / 2 attackers (::test_attackers_move_it_little)

    References: Pillutla, Kakade and Harchaoui 2022 (RFA), algorithm 2; Weiszfeld 1937.

    >>> geometric_median().facts.weighted
    False
    """

    def rule(key, round, cohort):
        messages = cohort.messages
        weights = _message_weights(cohort, trust_weights)

        def mean_weights(distances: Array, least: Array | float = smoothing) -> Array:
            return weights / jnp.maximum(distances, least)

        def median_distance(distances):
            return engine.median(distances, cohort.arrived)

        def weiszfeld_step(state):
            step, scales, point, _ = state
            # One pass over the messages gives both the new point and the distances from it.
            new_point, squares = mean_and_distances(messages, scales)
            distances = jnp.sqrt(squares)
            step_length = jnp.sqrt(squared_distances(one_row(messages, new_point), point)[0])
            is_moving = step_length > tolerance * median_distance(distances)
            return step + 1, mean_weights(distances), new_point, is_moving

        def goes_on(state):
            step, _, _, is_moving = state
            return (step < num_steps) & is_moving

        start = coordinate_median(cohort, trust_weights)
        start = jax.tree.map(lambda x: x.astype(tree.at_least_float32(x.dtype)), start)
        distances = jnp.sqrt(squared_distances(messages, start))
        # The median distance is the floor of the first step, so that messages at the start do not hold it there.
        first_weights = mean_weights(distances, jnp.maximum(median_distance(distances), smoothing))
        first_state = (jnp.int32(0), first_weights, start, jnp.array(True))
        _, _, point, _ = jax.lax.while_loop(goes_on, weiszfeld_step, first_state)
        return point, {}

    return by_rule(rule, weighted=trust_weights, withstands=None if trust_weights else minority)


@validate.named_arguments
def centered_clipping(radius: Positive, num_steps: PositiveInt = 1, *, trust_weights: bool = False) -> Aggregator:
    """The aggregate is the last aggregate v plus the mean of the messages' differences from v, each clipped to a
    radius.

    Each step is v <- v + sum_i w_i min(1, radius / |u_i - v|) (u_i - v) / sum_i w_i. A round makes `num_steps` steps. v
    starts at zero and is kept from round to round; a round that is skipped keeps the old v.

    Args:
      radius: positive, in the unit of updates.
      num_steps: the steps of v in a round, at least 1; each reads the messages twice.
      trust_weights: True: w_i is the weight that a client reports, which an attacker may forge. False: w_i = 1.

    Returns: an Aggregator with state (v) that holds all m messages. A message further than 1.8e19 away counts as v.

    Raises: ValueError for options out of their ranges.

    Guarantees:
      - equals NumPy's over rounds (tests/aggregation/robust/test_geometric.py::test_centered_clipping)
      - f of m attackers move a step by at most f / m of the radius (::test_attackers_move_it_little)

    References: Karimireddy, He and Jaggi 2021, algorithm 2 and section 4.1.
    """

    def rule(key, round, cohort):
        weights = _message_weights(cohort, trust_weights)
        total = weights.sum(0)
        total = jnp.where(total > 0, total, 1)  # a round without messages leaves v as it is

        def clipped_step(_, point):
            distances = jnp.maximum(jnp.sqrt(squared_distances(cohort.messages, point)), 2.0**-100)  # not divided by 0
            clip_factors = jnp.minimum(1, jnp.float32(radius) / distances)
            shares = (weights * clip_factors) / total
            # v + sum_i s_i (u_i - v) = (1 - sum_i s_i) v + sum_i s_i u_i, which needs no array of differences.
            share_of_point = 1 - shares.sum(0)
            sums = weighted_sum(cohort.messages, shares)
            return jax.tree.map(lambda v, x: v * share_of_point.astype(v.dtype) + x.astype(v.dtype), point, sums)

        point = jax.lax.fori_loop(0, num_steps, clipped_step, round.state)
        return point, {}, point

    def start(update_spec):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, tree.at_least_float32(x.dtype)), update_spec)

    withstands = None if trust_weights else minority
    return by_rule(rule, weighted=trust_weights, start=start, withstands=withstands)
