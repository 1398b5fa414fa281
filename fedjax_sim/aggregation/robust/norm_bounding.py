"""A bound on the norm of what is aggregated, which holds for attackers too."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim import engine, tree, validate
from fedjax_sim.aggregation.rows import squared_norms
from fedjax_sim.types import Aggregator, Array, PyTree
from fedjax_sim.validate import Positive

__all__ = ["check_honest", "norm_bounding", "shortening"]


@validate.named_arguments
def norm_bounding(aggregator: Aggregator, max_norm: Positive) -> Aggregator:
    """An aggregator of messages that are shortened to a norm at the server: u_i min(1, C / |u_i|).

    A clip in the transform is done by clients, and binds only those who are honest; this one binds everybody. So under
    a mean of m equal weights an attacker moves the aggregate by at most C / m.

    Args:
      aggregator: of the shortened messages; one that sums integers is refused, and one with attackers inside, whom no
        bound would meet: write `corrupted(norm_bounding(...), ...)`, in a config `[aggregator.norm_bounding]` first.
      max_norm: C, positive, in the unit of updates.

    Returns: an Aggregator that holds what the given one holds; the metric `shortened_share` is the share of messages
    that were longer than C. Norms past 1.8e19 count as infinite: such a message becomes zero.

    Guarantees: NumPy's shortened messages, and none longer but for the rounding of its numbers
    (tests/aggregation/robust/test_norm_bounding.py); the accountant does not take it for a clip: it states no
    sensitivity.

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
        inner, counts = carry
        updates, longer = _shortened(received.updates, limit)
        there = received.weights > 0
        inner = aggregator.accumulate(key, round, inner, received._replace(updates=updates))
        found = {"longer": there & longer, "all": there}
        return inner, {name: counts[name] + mask.sum(dtype=jnp.int32) for name, mask in found.items()}

    def finalize(key, round, carry):
        inner, counts = carry
        update, metrics, *state = aggregator.finalize(key, round, inner)
        share = engine.divide(counts["longer"].astype(jnp.float32), jnp.maximum(counts["all"], 1).astype(jnp.float32))
        return update, metrics | {"shortened_share": share}, *state

    made = aggregator._replace(init=init, accumulate=accumulate, finalize=finalize, rule=None)
    return made.stating(sensitivity=None, homogeneous=False, chooses=False)


def check_honest(aggregator: Aggregator) -> None:
    """Refuses an aggregator with attackers inside, for a wrapper that would meet honest messages alone."""
    if aggregator.facts.attackers is not None:
        hint = "This wrapper would meet honest messages alone: put `corrupted` around it, in a config behind it."
        validate.fail("aggregator", "one without attackers inside", "a corrupted one", hint)


def _shortened(updates: PyTree, limit: Array) -> tuple[PyTree, Array]:
    """(updates [m, ...] of at most this norm, [m] whether they were longer)."""
    norms = jnp.sqrt(squared_norms(updates))
    shorter = tree.scaled(tree.widened(updates), shortening(norms, limit))  # no factor of 16 bits
    return tree.cast(shorter, updates), norms > limit


def shortening(norms: Array, limit: Array) -> Array:
    """[m] the factors in (0, 1] that bring norms [m] down to a limit []; 0 for an infinite norm."""
    return jnp.where(norms > limit, engine.divide(jnp.broadcast_to(limit, norms.shape), norms), 1)
