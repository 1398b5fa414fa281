"""Makes aggregators whose rule sees all messages of a cohort at once, split by coordinate over devices."""

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


class SideBySide(NamedTuple):
    """The messages of a cohort in the order of their clients' ids; messages that did not arrive stand last."""

    messages: Messages  # m messages; zeros for those that did not arrive
    weights: Array  # [m] float32; 0 where nothing arrived
    ids: Array  # [m] int32; -1 where nothing arrived
    number: Array  # [] int32, how many messages arrived: they come first

    @property
    def arrived(self) -> Array:
        """[m] bool: which messages arrived."""
        return self.weights > 0


def by_rule(rule: Callable, check: Callable | None = None, *, start: Callable | None = None, **facts) -> Aggregator:
    """Makes an aggregator from `rule(key, Round, SideBySide) -> (update, metrics)`.

    With `start`, the rule returns the aggregator's next state as a third result.

    Unlike a rule of `aggregation.gather`, this rule gets no arrays of messages, but an
    `engine.all_messages.messages.Messages`. The functions of that file compute what a rule needs of the messages:
    distances, sums, products, a coordinate at a time. Over several devices each device holds a part of the coordinates,
    and nothing is computed twice.

    Args:
      rule: as above.
      check: (num_slots m) -> None; raises for a cohort that the rule is not defined for.
      start: as `Aggregator` has it; None for a rule without a state.
      facts: as `AggregatorFacts` has them.
    """

    def init(update_spec, num_slots):
        if check is not None:
            check(num_slots)
        weight, id = (jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.float32, jnp.int32))
        return buffer((update_spec, weight, id), num_slots)

    def accumulate(key, round, carry, received):
        return fill(carry, received.slots, (received.updates, received.weights, received.ids))

    def finalize(key, round, carry):
        updates, *weights_and_ids = carry.values
        slots = jnp.arange(carry.place.shape[0], dtype=jnp.int32)
        weights, ids = all_rows(dataclasses.replace(carry, values=weights_and_ids), slots)
        # A slot without a message has no weight. Arrived messages come first, in the order of ids.
        is_absent = weights == 0
        order = jax.lax.sort((is_absent, jnp.where(is_absent, 0, ids), slots), num_keys=2)[2]
        messages = messages_of(dataclasses.replace(carry, values=updates), order)
        weights = weights[order]
        ids = jnp.where(is_absent, -1, ids)[order]
        cohort = SideBySide(messages, weights, ids, (~is_absent).sum(dtype=jnp.int32))
        update, metrics, *state = rule(key, round, cohort)
        # "chosen" is for wrappers of the rule, and no metric.
        return update, {name: x for name, x in metrics.items() if name != "chosen"}, *state

    return Aggregator(init, accumulate, finalize, AggregatorFacts(**facts), start=start, rule=rule)


def with_cohort_check(
    wrapper: Aggregator, inner: Aggregator, number: Callable = lambda num_slots: num_slots
) -> Aggregator:
    """Returns a wrapper that refuses the cohorts that its inner aggregator refuses.

    Args:
      wrapper: the aggregator around `inner`.
      inner: the aggregator that is wrapped.
      number: (num_slots) -> the number of messages that `inner` gets if the wrapper gets one for each slot.

    Guarantees: a wrapper refuses a cohort that is too small for its rule
    (tests/aggregation/robust/test_pre_aggregation.py::test_wrappers_refuse_what_their_rule_refuses).
    """

    def init(update_spec, num_slots):
        # Only the checks of `inner` are wanted: nothing is computed.
        jax.eval_shape(partial(inner.init, update_spec, number(num_slots)))
        return wrapper.init(update_spec, num_slots)

    return wrapper._replace(init=init)
