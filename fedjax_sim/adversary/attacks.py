"""Published attacks on aggregation by who sees its own message, or mean and standard deviation of the honest ones."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree, validate
from fedjax_sim.adversary.kinds import Alone, Together, dot
from fedjax_sim.validate import Finite, Integer, Positive

__all__ = [
    "alie",
    "forged_weight",
    "free_rider",
    "gaussian_noise",
    "inner_product",
    "large_value",
    "scaled",
    "scaled_to",
    "sign_flip",
    "stale",
]


# ---- alone


@validate.named_arguments
def scaled(factor: Finite) -> Alone:
    """Its own update times a factor.

    That is model replacement with a factor of (cohort's weight) / (own weight x server's rate), and training on data of
    the attacker's (Bagdasaryan et al. 2020, section 3.2).

    >>> import jax, jax.numpy as jnp
    >>> scaled(-10.0).send(jax.random.key(0), jnp.array([1.0, 2.0]), 3.0)[0].tolist()
    [-10.0, -20.0]
    """
    return Alone(lambda key, update, weight: (tree.scaled(update, factor), weight))


@validate.named_arguments
def scaled_to(norm: Positive) -> Alone:
    """Its own update at the norm that a defence lets pass: train-and-scale. A zero update stays zero.

    Args:
      norm: positive, the L2 norm of the message.

    Guarantees: `aggregation.norm_bounding` of a thousandth more lets it pass
    (tests/adversary/test_constrained.py::test_scaled_to_a_bound).

    References: Bagdasaryan et al. 2020, section 4.3 (train-and-scale, S / |X - G|).

    >>> import jax, jax.numpy as jnp
    >>> scaled_to(10.0).send(jax.random.key(0), jnp.array([3.0, 4.0]), 1.0)[0].tolist()
    [6.0, 8.0]
    """

    def send(key, update, weight):
        length = jnp.sqrt(dot(update, update))
        factor = engine.divide(jnp.float32(norm), jnp.where(length > 0, length, 1))  # rounded to no narrower dtype
        return jax.tree.map(lambda x: (x * factor).astype(x.dtype), update), weight

    return Alone(send)


def sign_flip() -> Alone:
    """Minus its own update."""
    return scaled(-1.0)


def free_rider() -> Alone:
    """Nothing: a zero update, with the weight of an honest one."""
    return scaled(0.0)


@validate.named_arguments
def large_value(value: Finite) -> Alone:
    """The same number at each coordinate.

    Args:
      value: up to 2^99 in magnitude; messages of 2^100 are lost.
    """
    return Alone(lambda key, update, weight: (jax.tree.map(lambda x: jnp.full_like(x, value), update), weight))


@validate.named_arguments
def gaussian_noise(std: Positive) -> Alone:
    """Normal noise in place of an update, of its own in each round (Blanchard et al. 2017, section 5).

    Args:
      std: positive, of each coordinate.
    """

    def send(key, update, weight):
        leaves, structure = jax.tree.flatten(update)
        keys = jax.random.split(key, len(leaves))
        drawn = [jax.random.normal(k, x.shape, jnp.float32) * std for k, x in zip(keys, leaves, strict=True)]
        return structure.unflatten([y.astype(x.dtype) for x, y in zip(leaves, drawn, strict=True)]), weight

    return Alone(send)


@validate.named_arguments
def forged_weight(factor: Positive, attack: Alone | None = None) -> Alone:
    """A weight (number of examples) that is a lie; the update is its own, or another attack's.

    Args:
      factor: positive, of its honest weight.
    """
    if attack is not None:
        validate.part("attack", attack, Alone)

    def send(key, update, weight):
        update, weight = (update, weight) if attack is None else attack.send(key, update, weight)
        return update, weight * factor

    return Alone(send)


# ---- together: one message, from the honest ones' mean and standard deviation


@validate.named_arguments
def alie(z: Finite | None = None) -> Together:
    """A little is enough: mean - z std at each coordinate.

    Args:
      z: None = the largest that hides: with n messages, f of them attackers', and s = floor(n / 2 + 1) - f honest
        ones to be won over, Phi^-1((n - f - s) / (n - f)).

    Guarantees: the paper's z (tests/adversary/test_attacks.py::test_alie). In front of a rule that only sums, the
    deviations come from sums of squares, with a relative error of some 2^-23 (mean / std)^2: 1 % at a ratio of 300.

    References: Baruch, Baruch and Goldberg 2019, algorithm 3 and equation 1.
    """

    def send(key, honest):
        n = honest.number + honest.attackers
        won = jnp.floor(n / 2 + 1) - honest.attackers
        share = engine.divide(honest.number - won, jnp.maximum(honest.number, 1))
        reach = jax.scipy.stats.norm.ppf(jnp.clip(share, 0.5, 1 - 2.0**-20)) if z is None else jnp.float32(z)
        return jax.tree.map(lambda m, s: m - reach.astype(m.dtype) * s, honest.mean, honest.std)

    return Together(send)


@validate.named_arguments
def stale(delay: Annotated[int, Integer(1, 1000)] = 1) -> Together:
    """Replay: the mean of the honest messages of an earlier round, which was honest then.

    Args:
      delay: rounds that it is late, at least 1; the honest means of as many rounds are remembered, and zero is sent in
        the first ones. A round that is skipped is not remembered.

    Guarantees: NumPy's means of earlier rounds (tests/adversary/test_attacks.py::test_stale).
    """

    def start(update_spec):
        wide = lambda x: tree.at_least_float32(x.dtype)  # noqa: E731
        return jax.tree.map(lambda x: jnp.zeros((delay, *x.shape), wide(x)), update_spec)

    def send(key, honest, memory):
        oldest = jax.tree.map(lambda x, m: x[0].astype(m.dtype), memory, honest.mean)
        return oldest, jax.tree.map(lambda x, m: jnp.concatenate([x[1:], m[None].astype(x.dtype)]), memory, honest.mean)

    return Together(send, start)


@validate.named_arguments
def inner_product(epsilon: Positive = 0.1) -> Together:
    """Inner product manipulation, "fall of empires": minus epsilon times the honest mean.

    Args:
      epsilon: positive; below 1 it hides among the honest messages, above it reverses the mean of few.

    References: Xie, Koyejo and Gupta 2020, section 4.
    """
    return Together(lambda key, honest: tree.scaled(honest.mean, -epsilon))
