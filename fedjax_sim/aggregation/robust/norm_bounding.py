"""`norm_bounding` shortens messages at the server, so that the bound on their norm holds for attackers too."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.aggregation.rows import squared_norms
from fedjax_sim.types import Aggregator, Array, PyTree
from fedjax_sim.validate import Positive


@validate.named_arguments
def norm_bounding(aggregator: Aggregator, max_norm: Positive) -> Aggregator:
    """The server shortens each message to norm C before it is aggregated: u_i min(1, C / |u_i|).

    A clip in the transform is done by clients, and binds only honest clients; this bound binds everybody. So under a
    mean of m equal weights an attacker's message adds a vector of norm C / m at most.

    Args:
      aggregator: an aggregator of the shortened messages. An aggregator that sums integers is refused. An aggregator
        with attackers inside is refused too, since the bound would not meet their messages: write
        `corrupted(norm_bounding(...), ...)`, and in a config `[aggregator.norm_bounding]` first.
      max_norm: C, positive, in the unit of updates.

    Returns: an Aggregator with the memory of the given aggregator, and two counts more. The metric `shortened_share` is
    the share of messages that were longer than C. Norms past 1.8e19 count as infinite: such a message becomes zero.

    Raises: TypeError for an argument that is no aggregator; ValueError for a refused one, and for a norm that is not
      positive.

    Guarantees:
      - equals NumPy's shortened messages, none of which is longer than C but for the rounding of its numbers
        (tests/aggregation/robust/test_norm_bounding.py)
      - no sensitivity is stated, so the accountant does not take this bound for a clip

    References: Sun, Kairouz, Suresh and McMahan 2019 (norm thresholding of updates), section 4.2.
    """
    validate.part("aggregator", aggregator, Aggregator)
    if aggregator.facts.modulus is not None:
        validate.fail("aggregator", "a sum of numbers", "a modular sum", "Nobody sees single messages of that one.")
    check_honest(aggregator)
    limit = jnp.float32(max_norm)

    def init(update_spec, num_slots):
        zero = jnp.zeros((), jnp.int32)
        return aggregator.init(update_spec, num_slots), {"longer": zero, "all": zero}

    def accumulate(key, round, carry, received):
        inner_carry, counts = carry
        updates, is_longer = _shortened(received.updates, limit)
        has_arrived = received.weights > 0
        inner_carry = aggregator.accumulate(key, round, inner_carry, received._replace(updates=updates))
        masks = {"longer": has_arrived & is_longer, "all": has_arrived}
        return inner_carry, {name: counts[name] + mask.sum(dtype=jnp.int32) for name, mask in masks.items()}

    def finalize(key, round, carry):
        inner_carry, counts = carry
        update, metrics, *state = aggregator.finalize(key, round, inner_carry)
        share = counts["longer"].astype(jnp.float32) / jnp.maximum(counts["all"], 1).astype(jnp.float32)
        return update, metrics | {"shortened_share": share}, *state

    # `rule` would show the messages before they are shortened, so no wrapper may use it.
    bounded = aggregator._replace(init=init, accumulate=accumulate, finalize=finalize, rule=None)
    return bounded.stating(sensitivity=None, homogeneous=False, chooses=False)


def check_honest(aggregator: Aggregator) -> None:
    """Refuses an aggregator with attackers inside, for a wrapper that would only meet the honest messages.

    Raises: ValueError if the aggregator's facts name attackers.
    """
    if aggregator.facts.attackers is not None:
        hint = "This wrapper would meet honest messages alone: put `corrupted` around it, in a config behind it."
        validate.fail("aggregator", "one without attackers inside", "a corrupted one", hint)


def _shortened(updates: PyTree, limit: Array) -> tuple[PyTree, Array]:
    """Returns (updates [m, ...] of at most this norm, [m] whether each was longer)."""
    norms = jnp.sqrt(squared_norms(updates))
    # Scaled in float32: a factor of 16 bits could be rounded up, and the message would be longer than the limit.
    scaled = tree.scaled(tree.widened(updates), shortening(norms, limit))
    return tree.cast_like(scaled, updates), norms > limit


def shortening(norms: Array, limit: Array) -> Array:
    """Computes the factors that bring norms down to a limit.

    Args:
      norms: [m] float32, at least 0; infinity where a norm exceeds float32.
      limit: [] float32, positive.

    Returns: [m] factors in [0, 1]: 1 where the norm is within the limit, 0 for an infinite norm.
    """
    return jnp.where(norms > limit, jnp.broadcast_to(limit, norms.shape) / norms, 1)
