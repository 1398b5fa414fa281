"""The kinds of attacks, by what attackers know, and what those who act together know of the honest messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree
from fedjax_sim.engine.all_messages.all_messages import SideBySide
from fedjax_sim.engine.all_messages.messages import columnwise
from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.types import Array, PyTree

__all__ = ["Alone", "Honest", "Omniscient", "Together", "dot", "honest_moments"]


class Honest(NamedTuple):
    """What attackers who act together know of the honest messages of a round."""

    mean: PyTree  # unweighted
    std: PyTree  # of the sample: divided by number - 1
    number: Array  # [] float32 honest messages that arrived
    attackers: Array  # [] float32 messages from attackers that arrived


class Alone(NamedTuple):
    """An attack of each attacker by itself."""

    send: Callable  # (key, update, weight) -> (update, weight), for ONE attacker; key is the client's own in this round


class Together(NamedTuple):
    """An attack in which all attackers send the same message."""

    send: Callable  # (key, Honest) -> update; with `start` (key, Honest, memory) -> (update, next memory)
    start: Callable | None = None  # (update_spec) -> what attackers remember before the first round; None = nothing


class Omniscient(NamedTuple):
    """An attack by who sees every honest message."""

    send: Callable  # (key, SideBySide, attackers [m] bool, aggregate) -> Messages, of which only the
    # attackers' are changed; `aggregate(Messages) -> update` is what the server would make of them


def dot(a: PyTree, b: PyTree) -> Array:
    """[] the inner product of two messages, in float32 at least, added in one order."""
    wide = lambda x: x.astype(tree.at_least_float32(x.dtype))  # noqa: E731
    products = jax.tree.map(lambda x, y: (wide(x) * wide(y)).reshape(1, -1), a, b)
    return sum(engine.pairwise_sum(x, (1,))[0] for x in jax.tree.leaves(products))


def honest_moments(cohort: SideBySide, bad: Array) -> Honest:
    """The moments of the honest messages, squares about the mean."""
    honest = cohort.arrived & ~bad
    number = honest.sum().astype(jnp.float32)

    def moments(values, honest):
        wide, there = values.astype(tree.at_least_float32(values.dtype)), honest[:, None] > 0
        mean = engine.divide(exact_sums.summed(jnp.where(there, wide, 0)), jnp.maximum(number, 1).astype(wide.dtype))
        away = jnp.where(there, wide - mean[None], 0)
        squares = engine.rounded_here(away * away, engine.hidden_zero(honest))
        spread = engine.divide(exact_sums.summed(squares), jnp.maximum(number - 1, 1).astype(wide.dtype))
        return mean, jnp.sqrt(spread)

    weights = honest.astype(jnp.float32)
    mean = columnwise(cohort.messages, lambda x, honest: moments(x, honest)[0], weights)
    std = columnwise(cohort.messages, lambda x, honest: moments(x, honest)[1], weights)
    return Honest(mean, std, number, bad.sum().astype(jnp.float32))
