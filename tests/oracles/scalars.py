"""One-dimensional quadratics h (w - a)^2 / 2 and the point to which an algorithm converges on them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import population
from fedjax_sim.engine import Plan

CURVATURES, CENTERS = (1.0, 10.0), (0.0, 1.0)  # the optimum sum h_i a_i / sum h_i is 10/11, the mean centre 1/2
OPTIONS = {"plan": Plan(2, 2), "mesh": None}


def loss(w, example, key):
    """h (w - a)^2 / 2 for every example."""
    return example["h"] * (w - example["a"]) ** 2 / 2


def clients(curvatures=CURVATURES, centers=CENTERS, counts=(1, 1)):
    """Client i holds counts[i] copies of its quadratic."""
    return population.from_clients(
        [
            {"h": np.full(n, h, np.float32), "a": np.full(n, a, np.float32)}
            for h, a, n in zip(curvatures, centers, counts, strict=True)
        ]
    )


def converged(algorithm, data, *, num_rounds: int, start: float = 0.3) -> tuple[float, list[float]]:
    """(w after the rounds, w after each round); one scan."""
    state = algorithm.init(jax.random.key(0), jnp.float32(start), data)

    @jax.jit
    def run(state, data):
        def body(state, key):
            state, _ = algorithm.step(key, state, data)
            return state, algorithm.params(state)

        return jax.lax.scan(body, state, jax.random.split(jax.random.key(1), num_rounds))

    state, path = run(state, data)
    return float(algorithm.params(state)), np.asarray(path, np.float64).tolist()
