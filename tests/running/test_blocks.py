"""Compiled blocks of rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import algorithms, population, sampling
from fedjax_sim.running import blocks

KEY = jax.random.key(0)


def test_frozen_parameters_are_arguments(monkeypatch):
    """Catches frozen parameters that a program would hold, results that change, and a step that is traced twice."""
    frozen = jnp.asarray(np.random.default_rng(0).normal(size=(130, 130)) / 10, jnp.float32)
    rows = np.random.default_rng(1).normal(size=(12, 130)).astype(np.float32)
    clients = population.stored({"x": rows}, np.arange(0, 13, 3))

    def loss_fn(params, examples, key=None):
        return jnp.square(examples["x"] @ frozen - params[None]).mean(axis=1)

    algorithm = algorithms.fedavg(loss_fn, sampling.full(4), optax.sgd(0.1), num_steps=1)
    traces = []

    def step(*args):
        traces.append(1)
        return algorithm.step(*args)

    texts = []
    lower = jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self: texts.append(self.as_text()) or lower(self))
    start = algorithm.init(KEY, jnp.zeros(130), clients)
    expected, _ = jax.jit(algorithm.step)(jax.random.fold_in(KEY, 0), start, clients)
    block, state, people, _ = blocks.compiled_block(
        blocks.traced_round(algorithm._replace(step=step), KEY, start, clients), KEY, start, clients
    )
    state, _ = block(state, people, 0, 1)
    np.testing.assert_array_equal(algorithm.params(state), algorithm.params(expected))
    assert len(traces) == 1
    assert max(map(len, texts[-1].splitlines())) < frozen.nbytes and "tensor<130x130xf32>" in texts[-1]
