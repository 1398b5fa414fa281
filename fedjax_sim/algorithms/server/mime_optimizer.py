"""Centralised optimisers in the form that Mime needs: statistics s, a direction U(g, s), and an update of s by g.

They are not optax transformations, because the `update` of optax mixes the gradient into its moments before it uses
them, where the paper's U leaves the statistics as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.validate import ShareBelowOne

OPTIMIZER_RULES = ("sgd", "momentum", "rmsprop", "adam")


class BaseOptimizer(NamedTuple):
    """A `BaseOptimizer` is a centralised optimiser in three functions."""

    start: Callable  # (params) -> s before the first round
    direction: Callable  # (gradient, s) -> U, before the learning rate; s stays as it is
    track: Callable  # (gradient, s) -> s after this gradient


@validate.named_arguments
def base_optimizer(
    rule: Literal["sgd", "momentum", "rmsprop", "adam"],
    *,
    momentum: ShareBelowOne | None = None,
    second_decay: float | None = None,
    adaptivity: float | None = None,
) -> BaseOptimizer:
    """Makes SGD, momentum, RMSProp or Adam as three functions of gradient and statistics.

    The statistics are the first moment m and the second moment v. With b1 = momentum (0 for sgd and rmsprop) and b2 =
    second_decay, the direction is m' = b1 m + (1 - b1) g. For rmsprop and adam it is divided by sqrt(v) + adaptivity.
    `track` sets m <- b1 m + (1 - b1) g and v <- b2 v + (1 - b2) g^2. optax's heavy-ball momentum has no factor
    (1 - b1): at the same learning rate its steps are 1 / (1 - b1) times as long. The paper does not fix s at the start;
    here m = 0 and v = adaptivity^2, as in Reddi et al. 2021.

    Args:
      rule: "sgd", "momentum", "rmsprop" or "adam".
      momentum, second_decay: b1 and b2, in [0, 1); None = 0.9 and 0.99.
      adaptivity: positive; None = 1e-3.

    Raises: ValueError for numbers out of range, and for numbers that the rule does not use.

    Guarantees: the models and statistics of Mime with momentum and Adam, and of MimeLite with momentum, equal a NumPy
    transcription of the paper up to rounding (tests/oracles/test_mime.py::test_matches_the_paper); each of the three
    numbers changes a run of Mime or is refused
    (tests/laws/test_options.py::test_every_option_changes_something_or_is_refused).

    References: Karimireddy et al. 2021 (Mime), algorithm 1, which takes any such optimiser.

    >>> import jax.numpy as jnp
    >>> base = base_optimizer("momentum", momentum=0.5)
    >>> s = base.track(jnp.float32(4.0), base.start(jnp.float32(0.0)))
    >>> float(s["first"]), float(base.direction(jnp.float32(1.0), s))
    (2.0, 1.5)
    """
    has_first = rule in ("momentum", "adam")
    has_second = rule in ("rmsprop", "adam")
    momentum = _value_or_default("momentum", momentum, 0.9, rule, has_first)
    second_decay = _value_or_default("second_decay", second_decay, 0.99, rule, has_second)
    adaptivity = _value_or_default("adaptivity", adaptivity, 1e-3, rule, has_second)
    validate.in_range("momentum", momentum, 0, 1, open_high=True)
    validate.in_range("second_decay", second_decay, 0, 1, open_high=True)
    validate.positive("adaptivity", adaptivity)

    def new_first_moment(first, gradient):
        def leaf(m, g):
            # The gradient may be wider than the model: the sum is rounded once, to the dtype of m.
            wide = tree.common_dtype(m, g)
            return ((momentum * m).astype(wide) + ((1 - momentum) * g).astype(wide)).astype(m.dtype)

        return jax.tree.map(leaf, first, gradient)

    def new_second_moment(second, gradient):
        def leaf(v, g):
            wide = tree.common_dtype(v, g)
            return ((second_decay * v).astype(wide) + ((1 - second_decay) * g * g).astype(wide)).astype(v.dtype)

        return jax.tree.map(leaf, second, gradient)

    def start(params):
        first = {"first": tree.zeros_like(params)} if has_first else {}
        second = {"second": jax.tree.map(lambda p: jnp.full_like(p, adaptivity**2), params)} if has_second else {}
        return first | second

    def direction(gradient, statistics):
        step = new_first_moment(statistics["first"], gradient) if has_first else gradient
        if has_second:
            step = jax.tree.map(lambda u, v: u / (jnp.sqrt(v) + adaptivity), step, statistics["second"])
        return step

    def track(gradient, statistics):
        first = {"first": new_first_moment(statistics["first"], gradient)} if has_first else {}
        second = {"second": new_second_moment(statistics["second"], gradient)} if has_second else {}
        return first | second

    return BaseOptimizer(start, direction, track)


def _value_or_default(name: str, value: float | None, default: float, rule: str, is_used: bool) -> float:
    """The value, or its default where it is None; raises ValueError for a value that the rule would not read."""
    if value is not None and not is_used:
        validate.fail(name, f"None for the rule {rule!r}", value, "That rule has none: leave it out, or take 'adam'.")
    return default if value is None else value
