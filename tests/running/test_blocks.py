"""Compiled blocks of rounds."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import algorithms, population, sampling, types
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


class Info(NamedTuple):
    """An entry of two arrays, as a `Count` is."""

    number: jax.Array
    unit: jax.Array


def test_infos_come_back_as_they_went():
    """Catches log rows that are taken apart in another order, or into other shapes or dtypes."""

    def step(key, state, population):
        number = state + 1
        words = jnp.arange(6, dtype=jnp.uint32).reshape(3, 2) + number.astype(jnp.uint32)
        info = {
            "loss": 0.5 * number,
            "used": number,
            "bytes": Info(number * 7, words),
            "half": (number * 0.25).astype(jnp.bfloat16),
            "done": number > 1,
            "nothing": jnp.zeros((0, 2)),
            "norms": jnp.array([1.0, jnp.nan]) * number,
        }
        return number, info

    algorithm = types.Algorithm(init=lambda *_: jnp.int32(0), step=step, params=lambda state: state)
    start, rounds = jnp.int32(0), 3
    block, state, people, _ = blocks.compiled_block(blocks.traced_round(algorithm, KEY, start, ()), KEY, start, ())
    state, found = block(state, people, 0, rounds)
    _, expected = jax.lax.scan(lambda state, _: step(KEY, state, ()), jnp.int32(0), length=rounds)
    assert int(state) == rounds and jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.shape == (blocks.MAX_BLOCK, *y.shape[1:]) and x.dtype == y.dtype
        assert x[:rounds].tobytes() == np.asarray(y).tobytes()
