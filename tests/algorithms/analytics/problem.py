"""Clients with few rows each, padding that holds NaN, and the pooled rows for NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import population, sampling
from fedjax_sim.types import ClientData

NUM_CLIENTS, ROWS, WIDTH, CATEGORIES = 30, 5, 2, 4
_rng = np.random.default_rng(11)
SIZES = _rng.integers(0, ROWS + 1, NUM_CLIENTS)  # some clients hold nothing
MASK = np.arange(ROWS) < SIZES[:, None]
Y = _rng.integers(0, CATEGORIES, (NUM_CLIENTS, ROWS)).astype(np.int32)
# Four clouds of rows, by category.
X = (np.array([[0, 0], [4, 0], [0, 4], [4, 4]])[Y] + _rng.normal(size=(NUM_CLIENTS, ROWS, WIDTH))).astype(np.float32)
EVERYBODY = sampling.full(NUM_CLIENTS)


def _read(arrays, id):
    return ClientData({"x": arrays["x"][id], "y": arrays["y"][id]}, arrays["mask"][id])


def people(x=X, y=Y, mask=MASK):
    """The clients as a population."""
    spoiled = np.where(mask[..., None], x, np.nan).astype(np.float32)
    arrays = {"x": jnp.array(spoiled), "y": jnp.array(np.where(mask, y, 77)), "mask": jnp.array(mask)}
    return population.generated(NUM_CLIENTS, _read, arrays)


def pooled():
    """All real rows and their labels."""
    return X[MASK], Y[MASK]


def rounds(algorithm, num_rounds, *, params=(), data=None, seed=0):
    """(estimates after each round, infos)."""
    data = people() if data is None else data
    state = algorithm.init(jax.random.key(0), params, data)
    step = jax.jit(algorithm.step)
    estimates, infos = [], []
    for t in range(num_rounds):
        state, info = step(jax.random.fold_in(jax.random.key(seed), t), state, data)
        estimates.append(jax.device_get(algorithm.params(state)))
        infos.append(jax.device_get(info))
    return estimates, infos


def repeated(algorithm, num_rounds, num_runs, *, data, seed=0):
    """The last estimates of independent runs, leaves [runs, ...], in one program."""
    state = algorithm.init(jax.random.key(0), (), data)

    @jax.jit
    def program(keys, state, data):
        def run(key):
            keys = jax.random.split(key, num_rounds)
            last, _ = jax.lax.scan(lambda state, key: (algorithm.step(key, state, data)[0], None), state, keys)
            return algorithm.params(last)

        return jax.lax.map(run, keys)

    return jax.device_get(program(jax.random.split(jax.random.key(seed), num_runs), state, data))
