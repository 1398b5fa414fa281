"""A Feistel network is a bijection whose bits stay, and cycle walks end where steps one by one end."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import engine, sampling
from fedjax_sim.engine.feistel import feistel, walked
from fedjax_sim.engine.jaxpr import walk

WORDS = np.random.default_rng(0).integers(0, 2**32, (8, 2), np.uint32)


@pytest.fixture(params=["cpu", "cuda"])
def target(request):
    with engine.compiling_for(request.param):
        yield request.param


def hashed(words, x):
    for word in words:
        x = (x + word) * np.uint32(0x9E3779B1)
        x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
        x = x ^ (x >> 16)
    return x


def by_hand(rows, columns, x):
    """NumPy's network with `WORDS`, round by round."""
    left, right = np.divmod(x, np.uint32(columns))
    for i, words in enumerate(WORDS):
        if i % 2:
            right = (right + (hashed(words, left) >> 1)) % np.uint32(columns)
        else:
            left = (left + (hashed(words, right) >> 1)) % np.uint32(rows)
    return left * np.uint32(columns) + right


@pytest.mark.parametrize("rows, columns", [(41, 37), (46_409, 46_273)])
def test_the_network_is_that_of_its_rounds(rows, columns, target):
    """Catches rounds in another order, and other bits than those of the runs before: cohorts follow from them."""
    x = np.arange(1000, dtype=np.uint32) + np.uint32(rows * columns - 1000)
    found = jax.jit(feistel, static_argnums=(1, 2))(WORDS, rows, columns, x)
    np.testing.assert_array_equal(found, by_hand(rows, columns, x))


@pytest.mark.default_rows("33")
@pytest.mark.parametrize("beyond", [1, 2, 3, 16, 33])
@pytest.mark.parametrize("number", [1, 40])
def test_walks_by_loop_and_by_table(beyond, number, target):
    """The network adds 1, so a walk from the last number visits all beyond. Catches a table with a turn too few."""
    size = 40

    def network(x):
        return (x + 1) % (size + beyond)

    x = np.arange(size - number, size, dtype=np.uint32)
    found = jax.jit(lambda x, size: walked(network, x, size, beyond))(x, np.uint32(size))
    np.testing.assert_array_equal(found, (x + 1) % size)


def test_a_gpu_never_waits_for_a_draw():
    """Catches a loop whose length the host must ask for, in a cohort's draw and in an order of examples."""
    draws = {
        "cohort": functools.partial(sampling.uniform(10_001, 4).sample, state=()),
        "order": lambda key: engine.shuffle(key, jnp.ones(100, bool))(jnp.int32(0), jnp.arange(2)),
    }
    for name, draw in draws.items():
        for platform, loops in (("cpu", True), ("cuda", False)):
            with engine.compiling_for(platform):
                names = {equation.primitive.name for equation in walk(jax.make_jaxpr(draw)(jax.random.key(0)))}
            assert ("while" in names) == loops, (name, platform)
