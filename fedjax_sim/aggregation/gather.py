"""`gather` makes an aggregator from a function of all the messages of a cohort at once, such as a median."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim import engine, validate
from fedjax_sim.types import Aggregator, AggregatorFacts
from fedjax_sim.validate import NonNegative


@validate.named_arguments
def gather(
    rule: Callable,
    *,
    start: Callable | None = None,
    sensitivity: NonNegative | None = None,
    weighted: bool = True,
    homogeneous: bool = False,
) -> Aggregator:
    """Makes an aggregator from a rule that sees all messages: `rule(key, updates, weights, ids) -> update`.

    Rows are sorted by client id, and rows without a message come last. So a float sum over rows does not depend on the
    order of the cohort. `aggregation.rows` has norms and weighted means of rows.

    Args:
      rule: a pure function of m rows. `updates` has leaves [m, ...], `weights` is [m], `ids` is [m] int32. Where no
        message arrived, the update is zero, the weight is 0 and the id is -1. With `start` the rule is
        `rule(key, updates, weights, ids, round) -> (update, state)`, where `round` is a `types.Round`: it holds the
        broadcast model and the rule's state before this round.
      start: (update_spec) -> the rule's state before the first round; () for a rule that reads the model and keeps no
        state. None: the rule takes and returns no state.
      sensitivity: L2 motion of the result per unit motion of one update, at least 0; None = unbounded.
      weighted: False states that the result depends only on which weights are positive, not on their values.
      homogeneous: True states that messages in another unit give the result in that unit, as for a median.

    Returns: an Aggregator that holds all m messages.

    Raises: TypeError for a rule that does not take these arguments; ValueError for a sensitivity below 0.

    Guarantees:
      - the bits are the same for every order of the cohort, also if a client is drawn twice
        (tests/laws/test_aggregators.py::test_order_of_the_cohort_is_irrelevant), and for every chunk size and number of
        devices (::test_carries_of_disjoint_slots_combine)
      - rows and weights belong together, and absent rows are zero
        (tests/aggregation/test_gather.py::test_rule_sees_rows_by_id_and_zeros_for_the_absent); ids are those of the
        rows (::test_ids_stand_beside_their_rows)
      - a rule with `start` sees its own state and the model (::test_a_rule_with_memory)

    >>> import jax, jax.numpy as jnp
    >>> largest = gather(lambda key, updates, weights, ids: jax.tree.map(lambda x: x.max(0), updates))
    >>> largest.init(jax.ShapeDtypeStruct((2,), jnp.float32), 3).values["updates"].shape
    (3, 2)
    """

    argument_names = "key, updates, weights, ids" + (", round" if start else "")
    validate.function("rule", rule, argument_names, hint="Rules that need no ids take them all the same.")

    def init(update_spec, num_slots):
        weight_spec = jax.ShapeDtypeStruct((), jnp.float32)
        id_spec = jax.ShapeDtypeStruct((), jnp.int32)
        return engine.buffer({"updates": update_spec, "weights": weight_spec, "ids": id_spec}, num_slots)

    def accumulate(key, cohort, carry, received):
        rows = {"updates": received.updates, "weights": received.weights, "ids": received.ids}
        return engine.fill(carry, received.slots, rows)

    def finalize(key, round, carry):
        slots = jnp.arange(carry.place.shape[0], dtype=jnp.int32)
        weights, ids = engine.all_rows(carry.only("weights", "ids"), slots)
        # Sorted by (absent, id): messages in the order of their ids, then the rows without a message. The sort is
        # stable, so two messages of the same client keep the order of their slots.
        absent = weights == 0
        order = jax.lax.sort((absent, jnp.where(absent, 0, ids), slots), num_keys=2)[2]
        weights = weights[order]
        ids = jnp.where(absent, -1, ids)[order]
        (updates,) = engine.all_rows(carry.only("updates"), order)
        metrics = {"total_weight": weights.sum()}
        if start is None:
            return rule(key, updates, weights, ids), metrics
        update, state = rule(key, updates, weights, ids, round)
        return update, metrics, state

    facts = AggregatorFacts(sensitivity=sensitivity, weighted=weighted, homogeneous=homogeneous)
    return Aggregator(init, accumulate, finalize, facts, start=start)
