"""Quadratic nodes f_i(x) = h_i (x - c_i)^2 / 2 on a small graph, and runs over them, for the tests of gossip."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import network, population

KEY = jax.random.key(3)
N, RATE = 8, 0.2
_rng = np.random.default_rng(4)
CENTERS = _rng.normal(1, 2, size=N).astype(np.float32).astype(np.float64)
CURVATURES = _rng.uniform(0.5, 1.5, size=N).astype(np.float32).astype(np.float64)
OPTIMUM = (CURVATURES * CENTERS).sum() / CURVATURES.sum()
RING = network.metropolis(network.ring(N))
START = {"w": jnp.zeros(1)}
IDS = jnp.arange(N, dtype=jnp.int32)


def clients():
    """The population of these nodes."""
    return population.quadratic_population(CURVATURES, CENTERS)


def gradient(x):
    """[N] of each node at its own model."""
    return CURVATURES * (x - CENTERS)


def run(made, rounds, data=None, start=START, key=KEY):
    """(state, [info]) after some rounds."""
    data = clients() if data is None else data
    state, step, infos = made.init(key, start, data), jax.jit(made.step), []
    for t in range(rounds):
        state, info = step(jax.random.fold_in(key, t), state, data)
        infos.append(jax.device_get(info))
    return state, infos


def models(made, state):
    """[N] the nodes' own models."""
    return np.asarray(made.evaluated.personal(state, IDS)["w"], np.float64)[:, 0]


def weights(mixing, rounds, key=KEY):
    """[W of each round], and who was up: what the algorithms draw from the rounds' keys."""
    from fedjax_sim.prng import stream

    keys = [stream(jax.random.fold_in(key, t), "network") for t in range(rounds)]
    tables, links = jax.tree.map(jnp.asarray, mixing.tables), jax.jit(mixing.links)
    up = [np.asarray(links(own, jnp.int32(t), tables).up) for t, own in enumerate(keys)]
    return [network.matrix_of(mixing, own, t).toarray() for t, own in enumerate(keys)], up
