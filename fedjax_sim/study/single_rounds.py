"""What an aggregator makes of one round's messages."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.types import Aggregator, Array, Cohort, Received, Round

__all__ = ["released"]


def released(aggregator: Aggregator, key: Array, messages: Array, chunk: int | None = None) -> Array:
    """[d] what becomes of messages [m, d] of weight 1, from clients 0 to m - 1, in an aggregator's first round.

    Args:
      chunk: messages that are accumulated at once, a divisor of m; None: all.
    """
    m, spec = messages.shape[0], jax.ShapeDtypeStruct(messages.shape[1:], messages.dtype)
    slots, everyone = jnp.arange(m, dtype=jnp.int32), jnp.ones(m, bool)
    state = () if aggregator.start is None else aggregator.start(spec)
    round = Round(Cohort(slots, everyone, everyone), state=state)
    size = m if chunk is None else chunk

    def some(i, carry):
        here, some = (jax.lax.dynamic_slice_in_dim(x, i * size, size) for x in (slots, messages))
        return aggregator.accumulate(key, round, carry, Received(some, jnp.ones(size), here, here))

    carry = aggregator.init(spec, m)
    carry = some(0, carry) if chunk is None else jax.lax.fori_loop(0, m // size, some, carry)
    return aggregator.finalize(key, round, carry)[0]
