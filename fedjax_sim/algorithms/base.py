"""Centralised optimisers in the form that Mime needs: statistics s, a direction U(g, s), and an update of s by g."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate

__all__ = ["RULES", "BaseOptimizer", "base_optimizer"]

RULES = ("sgd", "momentum", "rmsprop", "adam")


class BaseOptimizer(NamedTuple):
    """A centralised optimiser in three functions."""

    start: Callable  # (params) -> s before the first round
    direction: Callable  # (gradient, s) -> U, before the learning rate; s stays as it is
    track: Callable  # (gradient, s) -> s after this gradient


def base_optimizer(
    rule: str, *, momentum: float = 0.9, second_decay: float = 0.99, adaptivity: float = 1e-3
) -> BaseOptimizer:
    """SGD, momentum, RMSProp or Adam.

    With b1 = momentum (0 for sgd and rmsprop) and b2 = second_decay, the direction is m' = b1 m + (1 - b1) g, for
    rmsprop and adam divided by sqrt(v) + adaptivity; `track` sets m <- b1 m + (1 - b1) g and v <- b2 v + (1 - b2) g^2.
    optax's heavy-ball momentum, which has no factor (1 - b1), equals this one at a learning rate 1 / (1 - b1) times as
    large. The paper does not fix s at the start: here m = 0 and v = adaptivity^2, as in Reddi et al. 2021.

    Args:
      rule: "sgd", "momentum", "rmsprop" or "adam".
      momentum, second_decay: b1 and b2, in [0, 1).
      adaptivity: positive.

    References: Karimireddy et al. 2021 (Mime), algorithm 1, which takes any such optimiser.

    >>> import jax.numpy as jnp
    >>> base = base_optimizer("momentum", momentum=0.5)
    >>> s = base.track(jnp.float32(4.0), base.start(jnp.float32(0.0)))
    >>> float(s["first"]), float(base.direction(jnp.float32(1.0), s))
    (2.0, 1.5)
    """
    validate.one_of("rule", rule, RULES)
    validate.in_range("momentum", momentum, 0, 1, open_high=True)
    validate.in_range("second_decay", second_decay, 0, 1, open_high=True)
    validate.positive("adaptivity", adaptivity)
    has_first, has_second = rule in ("momentum", "adam"), rule in ("rmsprop", "adam")

    def blended(first, gradient):
        def one(m, g):
            wide = tree.common_dtype(m, g)
            return ((momentum * m).astype(wide) + ((1 - momentum) * g).astype(wide)).astype(m.dtype)

        return jax.tree.map(one, first, gradient)

    def start(params):
        first = {"first": tree.zeros_like(params)} if has_first else {}
        second = {"second": jax.tree.map(lambda p: jnp.full_like(p, adaptivity**2), params)} if has_second else {}
        return first | second

    def direction(gradient, statistics):
        step = blended(statistics["first"], gradient) if has_first else gradient
        if has_second:
            step = jax.tree.map(lambda u, v: u / (jnp.sqrt(v) + adaptivity), step, statistics["second"])
        return step

    def track(gradient, statistics):
        def second(v, g):
            wide = tree.common_dtype(v, g)
            return ((second_decay * v).astype(wide) + ((1 - second_decay) * g * g).astype(wide)).astype(v.dtype)

        first = {"first": blended(statistics["first"], gradient)} if has_first else {}
        return first | ({"second": jax.tree.map(second, statistics["second"], gradient)} if has_second else {})

    return BaseOptimizer(start, direction, track)
