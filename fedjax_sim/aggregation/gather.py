"""Rules that must see every letter of the cohort at once."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree
from fedjax_sim.types import Aggregator

__all__ = ["gather"]


def gather(
    rule: Callable, *, sensitivity: float | None = None, weighted: bool = True, homogeneous: bool = False
) -> Aggregator:
    """An aggregator from `rule(key, updates, weights) -> update`.

    Args:
      rule: pure; updates have leaves [m, ...], weights are [m], 0 where nothing arrived (those rows are zero). Rows
        stand by client id, those without a message last, so float sums over them do not depend on the cohort's order.
      sensitivity: L2 motion of the result per unit motion of one update, if bounded.
      weighted: False states that the result depends on who has a weight above 0 and on nothing else of the weights.
      homogeneous: True states that messages in another unit give the result in that unit, as for a median.

    Guarantees: the same bits whatever the order of the cohort, a client drawn twice included
    (tests/laws/test_aggregators.py::test_order_of_the_cohort_is_irrelevant), and whatever the chunk and devices
    (::test_carries_of_disjoint_slots_combine).

    >>> import jax, jax.numpy as jnp
    >>> largest = gather(lambda key, updates, weights: jax.tree.map(lambda x: x.max(0), updates))
    >>> largest.init(jax.ShapeDtypeStruct((2,), jnp.float32), 3)["updates"].shape
    (3, 2)
    """

    def init(update_spec, num_slots):
        return {
            "updates": engine.buffer(update_spec, num_slots),
            "weights": jnp.zeros(num_slots, jnp.float32),
            "ids": jnp.zeros(num_slots, jnp.int32),
        }

    def accumulate(key, cohort, carry, received):
        rows = {"updates": received.updates, "weights": received.weights, "ids": received.ids}
        return engine.fill(carry, received.slots, rows)

    def finalize(key, cohort, carry):
        absent, ids = carry["weights"] == 0, carry["ids"]
        slots = jnp.arange(ids.shape[0], dtype=jnp.int32)
        order = jax.lax.sort((absent, jnp.where(absent, 0, ids), slots), num_keys=2)[2]
        updates, weights = tree.take((carry["updates"], carry["weights"]), order)
        return rule(key, updates, weights), {"total_weight": weights.sum()}

    return Aggregator(init, accumulate, finalize, sensitivity, weighted=weighted, homogeneous=homogeneous)
