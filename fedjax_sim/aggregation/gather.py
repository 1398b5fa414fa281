"""Rules that must see every letter of the cohort at once."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from fedjax_sim import engine
from fedjax_sim.types import Aggregator

__all__ = ["gather"]


def gather(rule: Callable, *, sensitivity: float | None = None) -> Aggregator:
    """An aggregator from `rule(key, updates, weights) -> update`.

    Args:
      rule: pure; updates have leaves [m, ...], weights are [m], 0 where nothing arrived (those rows are zero).
      sensitivity: L2 motion of the result per unit motion of one update, if bounded.

    Guarantees: rows stand by cohort slot, whatever the chunk and devices
    (tests/laws/test_aggregators.py::test_carries_of_disjoint_slots_combine).

    >>> import jax, jax.numpy as jnp
    >>> largest = gather(lambda key, updates, weights: jax.tree.map(lambda x: x.max(0), updates))
    >>> largest.init(jax.ShapeDtypeStruct((2,), jnp.float32), 3)["updates"].shape
    (3, 2)
    """

    def init(update_spec, num_slots):
        return {
            "updates": engine.buffer(update_spec, num_slots),
            "weights": jnp.zeros(num_slots, jnp.float32),
        }

    def accumulate(key, cohort, carry, received):
        rows = {"updates": received.updates, "weights": received.weights}
        return engine.fill(carry, received.slots, rows)

    def finalize(key, cohort, carry):
        update = rule(key, carry["updates"], carry["weights"])
        return update, {"total_weight": carry["weights"].sum()}

    return Aggregator(init, accumulate, finalize, sensitivity)
