"""This module applies an aggregator to the messages of one round, without clients that train."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.types import Aggregator, Array, Cohort, Received, Round


def released(aggregator: Aggregator, key: Array, messages: Array, chunk: int | None = None) -> Array:
    """Returns the aggregate of messages in an aggregator's first round.

    The messages come from clients 0 to m - 1, who fill the slots in this order, and have weight 1.

    Args:
      aggregator: the rule under study.
      key: the random key of the aggregator.
      messages: [m, d].
      chunk: messages that are accumulated at once, a divisor of m; None accumulates all at once.

    Returns: [d] the aggregate.
    """
    m = messages.shape[0]
    spec = jax.ShapeDtypeStruct(messages.shape[1:], messages.dtype)
    slots = jnp.arange(m, dtype=jnp.int32)
    everyone = jnp.ones(m, bool)
    state = () if aggregator.start is None else aggregator.start(spec)
    round = Round(Cohort(slots, everyone, everyone), state=state)
    size = m if chunk is None else chunk

    def accumulate_chunk(i, carry):
        chunk_slots, chunk_messages = (jax.lax.dynamic_slice_in_dim(x, i * size, size) for x in (slots, messages))
        # Slot and client id are the same number here.
        received = Received(chunk_messages, jnp.ones(size), chunk_slots, chunk_slots)
        return aggregator.accumulate(key, round, carry, received)

    carry = aggregator.init(spec, m)
    # A single chunk needs no loop.
    carry = accumulate_chunk(0, carry) if chunk is None else jax.lax.fori_loop(0, m // size, accumulate_chunk, carry)
    return aggregator.finalize(key, round, carry)[0]
