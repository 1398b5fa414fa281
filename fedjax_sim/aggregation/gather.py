"""An aggregator from a function of all the cohort's messages at once, such as a median."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim import engine, validate
from fedjax_sim.types import Aggregator, AggregatorFacts
from fedjax_sim.validate import NonNegative

__all__ = ["gather"]


@validate.named_arguments
def gather(
    rule: Callable,
    *,
    start: Callable | None = None,
    sensitivity: NonNegative | None = None,
    weighted: bool = True,
    homogeneous: bool = False,
) -> Aggregator:
    """An aggregator from `rule(key, updates, weights, ids) -> update`.

    Args:
      rule: pure; updates have leaves [m, ...], weights are [m], 0 where nothing arrived (those rows are zero), ids are
        [m] int32, -1 where nothing arrived. Rows are sorted by client id, those without a message last, so float sums
        over them do not depend on the cohort's order; `aggregation.rows` has norms and weighted means of them. With
        `start` the rule is `rule(key, updates, weights, ids, round) -> (update, state)`, where `round` is a
        `types.Round`: the broadcast model, and the state before.
      start: (update_spec) -> the rule's state before the first round; () for a rule that only looks at the model.
      sensitivity: L2 motion of the result per unit motion of one update, if bounded.
      weighted: False states that the result depends on who has a weight above 0 and on nothing else of the weights.
      homogeneous: True states that messages in another unit give the result in that unit, as for a median.

    Raises: TypeError for a rule that does not take these arguments; ValueError for a sensitivity below 0.

    Guarantees: the same bits whatever the order of the cohort, a client drawn twice included
    (tests/laws/test_aggregators.py::test_order_of_the_cohort_is_irrelevant), and whatever the chunk and devices
    (::test_carries_of_disjoint_slots_combine); rows and weights belong together, and absent ones are zero
    (tests/aggregation/test_gather.py::test_rule_sees_rows_by_id_and_zeros_for_the_absent); ids are those of the rows
    (::test_ids_stand_beside_their_rows); a rule sees its own state and the model (::test_a_rule_with_memory).

    >>> import jax, jax.numpy as jnp
    >>> largest = gather(lambda key, updates, weights, ids: jax.tree.map(lambda x: x.max(0), updates))
    >>> largest.init(jax.ShapeDtypeStruct((2,), jnp.float32), 3).values["updates"].shape
    (3, 2)
    """

    names = "key, updates, weights, ids" + (", round" if start else "")
    validate.function("rule", rule, names, hint="Rules that need no ids take them all the same.")

    def init(update_spec, num_slots):
        number, id = (jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.float32, jnp.int32))
        return engine.buffer({"updates": update_spec, "weights": number, "ids": id}, num_slots)

    def accumulate(key, cohort, carry, received):
        rows = {"updates": received.updates, "weights": received.weights, "ids": received.ids}
        return engine.fill(carry, received.slots, rows)

    def finalize(key, round, carry):
        slots = jnp.arange(carry.place.shape[0], dtype=jnp.int32)
        weights, ids = engine.all_rows(carry.only("weights", "ids"), slots)
        absent = weights == 0
        order = jax.lax.sort((absent, jnp.where(absent, 0, ids), slots), num_keys=2)[2]
        weights, ids = weights[order], jnp.where(absent, -1, ids)[order]
        (updates,) = engine.all_rows(carry.only("updates"), order)
        metrics = {"total_weight": weights.sum()}
        if start is None:
            return rule(key, updates, weights, ids), metrics
        update, state = rule(key, updates, weights, ids, round)
        return update, metrics, state

    facts = AggregatorFacts(sensitivity=sensitivity, weighted=weighted, homogeneous=homogeneous)
    return Aggregator(init, accumulate, finalize, facts, start=start)
