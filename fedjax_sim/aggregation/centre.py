"""Robust rules that give messages far from a centre less weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree, validate
from fedjax_sim.aggregation.coordinate import minority
from fedjax_sim.engine.messages import mean_and_distances, squared_distances, weighted_mean, weighted_sum
from fedjax_sim.engine.side_by_side import by_rule
from fedjax_sim.types import Aggregator, Array

__all__ = ["centered_clipping", "geometric_median"]


def _weights(cohort, trust_weights: bool) -> Array:
    return cohort.weights if trust_weights else cohort.arrived.astype(jnp.float32)


def geometric_median(num_steps: int = 8, *, smoothing: float = 1e-6, trust_weights: bool = False) -> Aggregator:
    """The point with the least (weighted) sum of distances from the messages: smoothed Weiszfeld, RFA.

    Each step is the mean of the messages with weights w_i / max(nu, |u_i - z|), from z = 0 (the model that was
    broadcast): from the mean, as in the paper, a single message of 2^90 would take a step for each few powers of two.
    In the first step messages shorter than the median length count as long as that: else those of free riders, who
    send zeros, would hold z where it begins. Half of the weight breaks it down.

    Args:
      num_steps: T; the messages are read once more than that.
      smoothing: nu, positive, in the unit of updates: distances below it count as nu.
      trust_weights: w_i is the weight that a client reports (its examples), which an attacker may forge. False: 1.

    Returns: an Aggregator that holds all m messages. Those further than 1.8e19 away count for nothing.

    Guarantees: NumPy's steps, and the minimum as steps grow (tests/aggregation/test_centre.py::test_geometric_median);
    near the honest messages under any f < m / 2 attackers (::test_attackers_move_it_little), and after 8 steps where
    these send zeros (::test_free_riders_do_not_hold_it).

    References: Pillutla, Kakade and Harchaoui 2022 (RFA), algorithm 2; Weiszfeld 1937.

    >>> geometric_median().weighted
    False
    """
    validate.integer("num_steps", num_steps)
    validate.positive("smoothing", smoothing)

    def rule(key, round, cohort):
        weights = _weights(cohort, trust_weights)

        def shares(apart, least=smoothing):
            return engine.divide(weights, jnp.maximum(apart, least))

        def closer(_, scales):
            return shares(jnp.sqrt(mean_and_distances(cohort.messages, scales)[1]))

        lengths = jnp.sqrt(squared_distances(cohort.messages))
        first = shares(lengths, jnp.maximum(engine.median(lengths, cohort.arrived), smoothing))
        return weighted_mean(cohort.messages, jax.lax.fori_loop(0, num_steps - 1, closer, first)), {}

    return by_rule(rule, weighted=trust_weights, withstands=None if trust_weights else minority)


def centered_clipping(radius: float, num_steps: int = 1, *, trust_weights: bool = False) -> Aggregator:
    """The last result v plus the mean of the messages' differences from it, each clipped to a radius.

    v <- v + sum_i w_i min(1, radius / |u_i - v|) (u_i - v) / sum_i w_i, `num_steps` times a round; v is kept from round
    to round, and starts at zero. A round that is skipped keeps the old one.

    Args:
      radius: positive, in the unit of updates.
      num_steps: of v in a round; each reads the messages twice.
      trust_weights: w_i is the weight that a client reports, which an attacker may forge. False: 1.

    Returns: an Aggregator with state (v), that holds all m messages. One that is further than 1.8e19 away counts as v.

    Guarantees: NumPy's over rounds (tests/aggregation/test_centre.py::test_centered_clipping); f of m attackers move a
    step by at most f / m of the radius (::test_attackers_move_it_little).

    References: Karimireddy, He and Jaggi 2021, algorithm 2 and section 4.1.
    """
    validate.positive("radius", radius)
    validate.integer("num_steps", num_steps)

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
