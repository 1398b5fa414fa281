"""Aggregators whose rule sees all messages of a cohort at once, split by coordinate over devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.engine.all_messages.messages import Messages, messages_of
from fedjax_sim.engine.all_messages.rows import all_rows, buffer, fill
from fedjax_sim.types import Aggregator, AggregatorFacts, Array

__all__ = ["SideBySide", "by_rule", "with_cohort_check"]


class SideBySide(NamedTuple):
    """The messages of a cohort in the order of their clients' ids; those that did not arrive stand last."""

    messages: Messages  # m messages; zeros for those that did not arrive
    weights: Array  # [m] float32; 0 where nothing arrived
    ids: Array  # [m] int32; -1 where nothing arrived
    number: Array  # [] int32 messages that arrived: the first ones

    @property
    def arrived(self) -> Array:
        """[m] bool."""
        return self.weights > 0


def by_rule(rule: Callable, check: Callable | None = None, *, start: Callable | None = None, **facts) -> Aggregator:
    """An aggregator from `rule(key, Round, SideBySide) -> (update, metrics)`, followed by its next state with `start`.

    Unlike in `aggregation.gather`, a rule gets no arrays of messages but `engine.all_messages.messages.Messages`, and
    the functions of that file for what it needs of them: distances, sums, products, a coordinate at a time. On several
    devices each holds a part of the coordinates, and nothing is worked out twice.

    Args:
      check: (num_slots m) -> None; raises for a cohort that the rule is not defined for.
      start: as `Aggregator` has it.
      facts: as `AggregatorFacts` has them.
    """

    def init(update_spec, num_slots):
        if check is not None:
            check(num_slots)
        number, id = (jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.float32, jnp.int32))
        return buffer((update_spec, number, id), num_slots)

    def accumulate(key, round, carry, received):
        return fill(carry, received.slots, (received.updates, received.weights, received.ids))

    def finalize(key, round, carry):
        updates, *rest = carry.values
        slots = jnp.arange(carry.place.shape[0], dtype=jnp.int32)
        weights, ids = all_rows(dataclasses.replace(carry, values=rest), slots)
        absent = weights == 0
        order = jax.lax.sort((absent, jnp.where(absent, 0, ids), slots), num_keys=2)[2]
        messages = messages_of(dataclasses.replace(carry, values=updates), order)
        weights = weights[order]
        ids = jnp.where(absent, -1, ids)[order]
        cohort = SideBySide(messages, weights, ids, (~absent).sum(dtype=jnp.int32))
        update, metrics, *state = rule(key, round, cohort)
        return update, {name: x for name, x in metrics.items() if name != "chosen"}, *state

    return Aggregator(init, accumulate, finalize, AggregatorFacts(**facts), start=start, rule=rule)


def with_cohort_check(
    wrapper: Aggregator, inner: Aggregator, number: Callable = lambda num_slots: num_slots
) -> Aggregator:
    """A wrapper that refuses the cohorts that `inner` refuses, which meets `number(num_slots)` messages of them.

    Guarantees: tests/aggregation/robust/test_pre_aggregation.py::test_wrappers_refuse_what_their_rule_refuses.
    """

    def init(update_spec, num_slots):
        jax.eval_shape(partial(inner.init, update_spec, number(num_slots)))
        return wrapper.init(update_spec, num_slots)

    return wrapper._replace(init=init)
