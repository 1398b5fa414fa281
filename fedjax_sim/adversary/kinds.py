"""The kinds of attacks, by what attackers know of the honest messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import tree
from fedjax_sim.engine.all_messages.all_messages import SideBySide
from fedjax_sim.engine.all_messages.messages import columnwise
from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.engine.arithmetic.rewriter import pairwise_sum
from fedjax_sim.types import Array, PyTree


class Honest(NamedTuple):
    """An `Honest` holds what attackers in a `Together` attack know of the honest messages of a round."""

    mean: PyTree  # the unweighted mean
    std: PyTree  # the sample standard deviation at each coordinate, with the divisor number - 1
    number: Array  # [] float32, the honest messages that arrived
    attackers: Array  # [] float32, the messages from attackers that arrived


class Alone(NamedTuple):
    """An attack in which each attacker sees only its own honest message."""

    send: Callable  # (key, update, weight) -> (update, weight), for ONE attacker; the key is the client's in this round


class Together(NamedTuple):
    """An attack in which all attackers send the same message."""

    send: Callable  # (key, Honest) -> update; with `start` (key, Honest, memory) -> (update, next memory)
    start: Callable | None = None  # (update_spec) -> what attackers remember before the first round; None = nothing


class Omniscient(NamedTuple):
    """An attack in which attackers see every honest message."""

    # (key, SideBySide, attackers [m] bool, aggregate) -> Messages, of which only those of attackers are changed.
    # `aggregate(Messages) -> update` is what the server would make of any messages.
    send: Callable


def dot(a: PyTree, b: PyTree) -> Array:
    """Computes the inner product of two messages, [] float32 at least, with additions in a fixed order."""
    widened = lambda x: x.astype(tree.at_least_float32(x.dtype))  # noqa: E731
    products = jax.tree.map(lambda x, y: (widened(x) * widened(y)).reshape(1, -1), a, b)
    # By halves, for a plain sum of more than 2^24 numbers would be left to the compiler.
    return jnp.asarray(sum(pairwise_sum(x, (1,))[0] for x in jax.tree.leaves(products)))


def honest_moments(cohort: SideBySide, bad: Array) -> Honest:
    """Computes the moments of the honest messages, with squares about the mean.

    Args:
      cohort: all messages.
      bad: [m] bool, the messages from attackers.
    """
    is_honest = cohort.arrived & ~bad
    number = is_honest.sum().astype(jnp.float32)

    def moments(values, honest):
        wide = values.astype(tree.at_least_float32(values.dtype))
        is_row = honest[:, None] > 0
        mean = exact_sums.summed(jnp.where(is_row, wide, 0)) / jnp.maximum(number, 1).astype(wide.dtype)
        differences = jnp.where(is_row, wide - mean[None], 0)
        squares = differences * differences
        variance = exact_sums.summed(squares) / jnp.maximum(number - 1, 1).astype(wide.dtype)
        return mean, jnp.sqrt(variance)

    weights = is_honest.astype(jnp.float32)
    mean = columnwise(cohort.messages, lambda x, honest: moments(x, honest)[0], weights)
    std = columnwise(cohort.messages, lambda x, honest: moments(x, honest)[1], weights)
    return Honest(mean, std, number, bad.sum().astype(jnp.float32))
