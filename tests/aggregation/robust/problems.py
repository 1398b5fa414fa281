"""What tests of robust rules share: a rule applied to messages, and attackers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import tree
from fedjax_sim.types import Received

KEY = jax.random.key(0)


def applied(aggregator, updates, weights=None, *, round=None, ids=None):
    """What an aggregator makes of updates (leaves [m, ...]) that arrive in two chunks, padding between them."""
    m = jax.tree.leaves(updates)[0].shape[0]
    weights = np.ones(m, np.float32) if weights is None else np.asarray(weights, np.float32)
    ids = np.arange(m) if ids is None else ids
    zeroed = jax.tree.map(lambda x: np.where(weights.reshape(-1, *[1] * (x.ndim - 1)) > 0, x, 0), updates)
    sent = jax.tree.map(jnp.asarray, zeroed), jnp.asarray(weights), jnp.asarray(ids, jnp.int32)
    update, metrics, *state = _compiled(aggregator)(round, *sent)
    return jax.tree.map(np.asarray, (update, metrics, *state))


@functools.lru_cache(maxsize=16)
def _compiled(aggregator):
    """One compiled function for each aggregator, for tests that apply it many times."""

    @jax.jit
    def run(round, updates, weights, ids):
        m, spec = len(weights), jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), updates)
        carry = aggregator.init(spec, m)
        for slots in (jnp.arange(m // 2), jnp.arange(m // 2, m)):
            chunk = tree.take_rows((updates, weights, ids), slots)
            carry = aggregator.accumulate(KEY, round, carry, Received(*chunk, slots))
        return aggregator.finalize(KEY, round, carry)

    return run


def adversaries(rng, honest, number):
    """Draws of `number` messages that attackers send, having seen the honest ones: far ones, near ones, all alike."""
    d, spread = honest.shape[1], honest.std(0)
    way = rng.integers(6)
    if way == 0:
        return np.full((number, d), rng.choice([-1, 1]) * 2.0 ** rng.integers(1, 99), np.float32)
    if way == 1:
        return rng.choice([-1, 1], (number, d)) * 2.0 ** rng.integers(-60, 99, (number, d)).astype(np.float32)
    if way == 2:
        return np.tile(honest.mean(0) + rng.normal() * spread, (number, 1))
    if way == 3:
        return np.tile(rng.choice([honest.min(0), honest.max(0)]), (number, 1))
    if way == 4:
        return honest[rng.integers(0, len(honest), number)] * rng.choice([-10, -1, 1, 10])
    return honest.mean(0) + rng.normal(size=(number, d)) * 3 * spread
