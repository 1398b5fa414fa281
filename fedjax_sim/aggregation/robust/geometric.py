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

__all__ = ["centered_clipping", "geometric_median"]


def _weights(cohort, trust_weights: bool) -> Array:
    return cohort.weights if trust_weights else cohort.arrived.astype(jnp.float32)


@validate.named_arguments
def geometric_median(
    num_steps: PositiveInt = 100, *, tolerance: Share = 1e-3, smoothing: Positive = 1e-6, trust_weights: bool = False
) -> Aggregator:
    """The point with the least (weighted) sum of distances from the messages: smoothed Weiszfeld, RFA.

    Each step is the mean of the messages with weights w_i / max(nu, |u_i - z|). The steps begin at the coordinate
    median: from the mean, as in the paper, a single message of 2^90 would take a step for each few powers of two, and
    from a fixed point honest messages far from it would take as many. In the first step messages nearer than the median
    distance count as that far: else those that lie at the coordinate median, such as zeros among sparse messages, would
    hold z there. Half of the weight breaks it down.

    Args:
      num_steps: T, at most; the messages are read once more than that, beside their median.
      tolerance: a step that moves z by at most this share of the median distance of the messages from z is the last; at
        least 0, which makes all T steps.
      smoothing: nu, positive, in the unit of updates: distances below it count as nu.
      trust_weights: w_i is the weight that a client reports (its examples), which an attacker may forge. False: 1.

    Returns: an Aggregator that holds all m messages. Those further than 1.8e19 away count for nothing.

    Guarantees: NumPy's steps, and the minimum as steps grow
    (tests/aggregation/robust/test_geometric.py::test_geometric_median); by default within 5 % of the minimum's distance
    from the honest mean, however far that is from zero (::test_it_does_not_matter_where_messages_are), and where some
    send zeros (::test_free_riders_do_not_hold_it); near the honest messages under any f < m / 2 attackers
    (::test_attackers_move_it_little).

    References: Pillutla, Kakade and Harchaoui 2022 (RFA), algorithm 2; Weiszfeld 1937.

    >>> geometric_median().facts.weighted
    False
    """

    def rule(key, round, cohort):
        messages, weights = cohort.messages, _weights(cohort, trust_weights)

        def shares(distances, least=smoothing):
            return engine.divide(weights, jnp.maximum(distances, least))

        def middle(distances):
            return engine.median(distances, cohort.arrived)

        def closer(state):
            step, scales, point, _ = state
            moved, squares = mean_and_distances(messages, scales)
            distances = jnp.sqrt(squares)
            length = jnp.sqrt(squared_distances(one_row(messages, moved), point)[0])
            return step + 1, shares(distances), moved, length > tolerance * middle(distances)

        def goes_on(state):
            step, _, _, is_moving = state
            return (step < num_steps) & is_moving

        start = coordinate_median(cohort, trust_weights)
        start = jax.tree.map(lambda x: x.astype(tree.at_least_float32(x.dtype)), start)
        distances = jnp.sqrt(squared_distances(messages, start))
        first = shares(distances, jnp.maximum(middle(distances), smoothing))
        _, _, point, _ = jax.lax.while_loop(goes_on, closer, (jnp.int32(0), first, start, jnp.array(True)))
        return point, {}

    return by_rule(rule, weighted=trust_weights, withstands=None if trust_weights else minority)


@validate.named_arguments
def centered_clipping(radius: Positive, num_steps: PositiveInt = 1, *, trust_weights: bool = False) -> Aggregator:
    """The last result v plus the mean of the messages' differences from it, each clipped to a radius.

    v <- v + sum_i w_i min(1, radius / |u_i - v|) (u_i - v) / sum_i w_i, `num_steps` times a round; v is kept from round
    to round, and starts at zero. A round that is skipped keeps the old one.

    Args:
      radius: positive, in the unit of updates.
      num_steps: of v in a round; each reads the messages twice.
      trust_weights: w_i is the weight that a client reports, which an attacker may forge. False: 1.

    Returns: an Aggregator with state (v), that holds all m messages. One that is further than 1.8e19 away counts as v.

    Guarantees: NumPy's over rounds (tests/aggregation/robust/test_geometric.py::test_centered_clipping); f of m
    attackers move a step by at most f / m of the radius (::test_attackers_move_it_little).

    References: Karimireddy, He and Jaggi 2021, algorithm 2 and section 4.1.
    """

    def rule(key, round, cohort):
        weights = _weights(cohort, trust_weights)
        total = engine.pairwise_sum(weights, (0,))
        total = jnp.where(total > 0, total, 1)

        def closer(_, point):
            apart = jnp.maximum(jnp.sqrt(squared_distances(cohort.messages, point)), 2.0**-100)
            shares = engine.divide(weights * jnp.minimum(1, engine.divide(jnp.float32(radius), apart)), total)
            rest = 1 - engine.pairwise_sum(shares, (0,))
            moved = weighted_sum(cohort.messages, shares)
            return jax.tree.map(lambda v, x: v * rest.astype(v.dtype) + x.astype(v.dtype), point, moved)

        point = jax.lax.fori_loop(0, num_steps, closer, round.state)
        return point, {}, point

    def start(update_spec):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, tree.at_least_float32(x.dtype)), update_spec)

    withstands = None if trust_weights else minority
    return by_rule(rule, weighted=trust_weights, start=start, withstands=withstands)
