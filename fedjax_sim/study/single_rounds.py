"""What an aggregator makes of one round's messages."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.types import Aggregator, Array, Received, Round

__all__ = ["released"]


def released(aggregator: Aggregator, key: Array, messages: Array) -> Array:
    """[d] what becomes of messages [m, d] of weight 1, from clients 0 to m - 1, in an aggregator's first round."""
    m, spec = messages.shape[0], jax.ShapeDtypeStruct(messages.shape[1:], messages.dtype)
    slots, everyone = jnp.arange(m, dtype=jnp.int32), jnp.ones(m, bool)
    state = () if aggregator.start is None else aggregator.start(spec)
    round = Round(slots, everyone, everyone, state=state)
    carry = aggregator.accumulate(key, round, aggregator.init(spec, m), Received(messages, jnp.ones(m), slots, slots))
    return aggregator.finalize(key, round, carry)[0]
