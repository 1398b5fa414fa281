"""What float64 transcriptions share: gradients of the laws' linear problem, and the batches that the library draws."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.engine import shuffle
from fedjax_sim.prng import client_key, stream
from tests.laws import problems as p

EPOCHS = {"num_epochs": 2, "batch_size": p.BATCH}
MOST_EPOCHS = 4


def gradient(w, id, rows=None):
    """Of the mean squared error of client `id`'s rows, all of its own by default."""
    rows = np.arange(p.SIZES[id]) if rows is None else rows
    features, targets = p.FEATURES[id][rows].astype(float), p.TARGETS[id][rows].astype(float)
    return features.T @ (features @ w - targets) / len(rows)


@jax.jit
def _orders(round_key):
    """[N, MOST_EPOCHS, rows] orders of every client's rows."""

    def one(id, size):
        order = shuffle(client_key(stream(round_key, "client"), id), jnp.arange(p.ROWS) < size)
        return jax.vmap(lambda epoch: order(epoch, jnp.arange(p.ROWS)))(jnp.arange(MOST_EPOCHS))

    return jax.vmap(one)(jnp.arange(p.NUM_CLIENTS), jnp.array(p.SIZES))


@functools.cache
def _orders_of(words):
    return np.asarray(_orders(jax.random.wrap_key_data(jnp.array(words, jnp.uint32))))


def batches(round_key, id, epochs=EPOCHS["num_epochs"]):
    """The rows of each local step, in their order."""
    n = int(p.SIZES[id])
    for order in _orders_of(tuple(np.asarray(jax.random.key_data(round_key)).tolist()))[id, :epochs, :n]:
        yield from (order[begin : begin + p.BATCH] for begin in range(0, n, p.BATCH))


def check(paper, federation, found, *, rounds=5, lost=(), rtol=2e-5, atol=2e-5):
    """`paper.round(key, ids)` beside the library, for cohorts of which some letters are lost.

    `found(algorithm, state)` and `paper.state()` give what must agree after every round. Returns the infos.
    """
    rng, state, infos = np.random.default_rng(1), None, []
    there = ~np.isin(np.arange(p.SLOTS), lost)
    for i in range(rounds):
        ids = rng.choice(p.NUM_CLIENTS, p.SLOTS, replace=False).astype(np.int32)
        state, info = federation.run(p.cohort(ids, reported=there), state=state, keys=[i])
        paper.round(jax.random.fold_in(jax.random.key(1), i), ids[there])
        for ours, theirs in zip(found(federation.algorithm, state), paper.state(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)
        infos += info
    return infos
