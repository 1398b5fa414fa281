"""Permutes a range of integers by a keyed network, which is evaluated at some places only."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim.engine.platform import target
from fedjax_sim.prng import hashed
from fedjax_sim.types import Array

FEISTEL_ROUNDS = 8  # rounds of a Feistel network, an even number


def feistel(words: Array, rows: Array | int, columns: Array | int, x: Array) -> Array:
    """Applies a Feistel network: a bijection of [0, rows * columns).

    Each round shifts one half of x by a keyed hash of the other half. On a CPU the rounds are a loop. XLA:CPU would
    make a kernel of each round in straight-line code, which takes up to three times as long.

    Args:
      words: [r, 2] uint32, two random words for each of r rounds, r even.
      rows, columns: the grid's sides, each below 2^16; x = left * columns + right.
      x: uint32 of any shape, in [0, rows * columns).

    References: Luby and Rackoff 1988.
    """

    def two_rounds(halves, words):
        # The halves take turns: a round changes one, and leaves the other for the inverse.
        left, right = halves
        left = jax.lax.rem(left + _shift(words[0], right), jnp.full_like(left, rows))
        right = jax.lax.rem(right + _shift(words[1], left), jnp.full_like(right, columns))
        return (left, right), None

    width = jnp.full_like(x, columns)
    halves = jax.lax.div(x, width), jax.lax.rem(x, width)
    pairs = words.reshape(-1, 2, 2)
    (left, right), _ = jax.lax.scan(two_rounds, halves, pairs, unroll=1 if target() == "cpu" else len(pairs))
    return left * width + right


def _shift(word: Array, half: Array) -> Array:
    """Returns a shift of 31 bits: a half is below 2^16, so their sum does not wrap and the shift is invertible."""
    return hashed(word, half) >> 1


def walked(network: Callable, x: Array, size: Array | int, beyond: int) -> Array:
    """Applies a bijection of [0, size) that is made from one of a larger range, by cycle walking.

    `network` is applied until the result is below `size`. Each walk ends, because its cycle contains its start, which
    is below `size`.

    A walk that leaves [0, size) reads in a table where it returns. On a CPU, few numbers walk in a loop of unknown
    length instead, for which a GPU would wait for the host.

    Args:
      network: a bijection of a range that contains [0, size).
      x: uint32 in [0, size).
      size: the end of the range.
      beyond: at least how many numbers of the larger range are `size` or more.

    Guarantees: both ways give the same numbers (tests/engine/test_feistel.py::test_walks_by_loop_and_by_table), and a
    GPU needs no loop (::test_a_gpu_never_waits_for_a_draw).

    References: Black and Rogaway 2002, section 4.
    """
    if not beyond:
        return network(x)
    limit = jnp.uint32(size)
    # A table costs as much as a turn of the loop for `beyond` numbers more.
    if target() == "cpu" and beyond > x.size:

        def walk_on(state):
            y, is_outside = state
            y = jnp.where(is_outside, network(y), y)
            return y, y >= limit

        # All numbers take the first step, so that the network stands in the program once.
        return jax.lax.while_loop(lambda state: state[1].any(), walk_on, (x, jnp.ones_like(x, bool)))[0]
    outside = limit + jnp.arange(beyond, dtype=jnp.uint32)
    images = network(jnp.concatenate([outside, x.reshape(-1)]))
    returns = images[:beyond]  # of the walks from outside, after a step

    def followed(y, returns):
        return jnp.where(y < limit, y, returns[jnp.minimum(y - limit, beyond - 1)])

    # Each turn doubles the steps of these walks, which visit each number outside at most once.
    for _ in range((beyond - 1).bit_length()):
        returns = followed(returns, returns)
    return followed(images[beyond:], returns).reshape(x.shape)
