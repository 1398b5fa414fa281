"""Published attacks on aggregation by attackers with little knowledge.

They see their own honest message, or the mean and the standard deviation of the honest messages.
"""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.adversary.kinds import Alone, Together, dot
from fedjax_sim.validate import Finite, Integer, Positive

# ---- attackers that see only their own honest message


@validate.named_arguments
def scaled(factor: Finite) -> Alone:
    """Sends the attacker's own update times a factor.

    With the factor (cohort's weight) / (own weight x server's learning rate), and training on data of the attacker's
    choice, this is model replacement (Bagdasaryan et al. 2020, section 3.2).

    Args:
      factor: a finite number.

    >>> import jax, jax.numpy as jnp
    >>> scaled(-10.0).send(jax.random.key(0), jnp.array([1.0, 2.0]), 3.0)[0].tolist()
    [-10.0, -20.0]
    """
    return Alone(lambda key, update, weight: (tree.scaled(update, factor), weight))


@validate.named_arguments
def scaled_to(norm: Positive) -> Alone:
    """Sends the attacker's own update, scaled to a norm that a defence lets pass (train-and-scale).

    Args:
      norm: positive, the L2 norm of the message. A zero update stays zero.

    Guarantees: `aggregation.norm_bounding` with a bound larger by a thousandth does not shorten the message
    (tests/adversary/test_constrained.py::test_scaled_to_a_bound).

    References: Bagdasaryan et al. 2020, section 4.3 (train-and-scale, S / |X - G|).

    >>> import jax, jax.numpy as jnp
    >>> scaled_to(10.0).send(jax.random.key(0), jnp.array([3.0, 4.0]), 1.0)[0].tolist()
    [6.0, 8.0]
    """

    def send(key, update, weight):
        own_norm = jnp.sqrt(dot(update, update))
        # The factor stays float32: rounded to a leaf's narrower dtype, it could exceed the bound.
        factor = jnp.float32(norm) / jnp.where(own_norm > 0, own_norm, 1)
        return jax.tree.map(lambda x: (x * factor).astype(x.dtype), update), weight

    return Alone(send)


def sign_flip() -> Alone:
    """Sends minus the attacker's own update."""
    return scaled(-1.0)


def free_rider() -> Alone:
    """Sends a zero update, with the weight of an honest message."""
    return scaled(0.0)


@validate.named_arguments
def large_value(value: Finite) -> Alone:
    """Sends the same number at each coordinate.

    Args:
      value: up to 2^99 in magnitude; a message that reaches 2^100 counts as lost.
    """
    return Alone(lambda key, update, weight: (jax.tree.map(lambda x: jnp.full_like(x, value), update), weight))


@validate.named_arguments
def gaussian_noise(std: Positive) -> Alone:
    """Sends normal noise in place of an update, drawn anew in each round (Blanchard et al. 2017, section 5).

    Args:
      std: positive, the standard deviation of each coordinate.
    """

    def send(key, update, weight):
        leaves, structure = jax.tree.flatten(update)
        keys = jax.random.split(key, len(leaves))
        noise = [jax.random.normal(k, x.shape, jnp.float32) * std for k, x in zip(keys, leaves, strict=True)]
        return structure.unflatten([y.astype(x.dtype) for x, y in zip(leaves, noise, strict=True)]), weight

    return Alone(send)


@validate.named_arguments
def forged_weight(factor: Positive, attack: Alone | None = None) -> Alone:
    """Reports a forged weight (number of examples), with the attacker's own update or that of another attack.

    Args:
      factor: positive; the forged weight over the honest weight.
      attack: the attack that makes the update; None = the attacker's own update.
    """
    if attack is not None:
        validate.part("attack", attack, Alone)

    def send(key, update, weight):
        update, weight = (update, weight) if attack is None else attack.send(key, update, weight)
        return update, weight * factor

    return Alone(send)


# ---- attackers that send one message together, made from the mean and standard deviation of the honest messages


@validate.named_arguments
def alie(z: Finite | None = None) -> Together:
    """All attackers send mean - z std at each coordinate, which is hard to tell from honest messages (ALIE).

    ALIE stands for "a little is enough".

    Args:
      z: None = the largest z that hides. With n messages, of which f are from attackers, a majority of n needs
        s = floor(n / 2 + 1) - f honest clients on the attackers' side; z = Phi^-1((n - f - s) / (n - f)).

    Guarantees: the message is the paper's, with its z (tests/adversary/test_attacks.py::test_alie). For an aggregator
    that only sums, the deviations come from sums of squares, with a relative error of about 2^-23 (mean / std)^2: 1 %
    at a ratio of 300.

    References: Baruch, Baruch and Goldberg 2019, algorithm 3 and equation 1.
    """

    def send(key, honest):
        n = honest.number + honest.attackers
        num_needed = jnp.floor(n / 2 + 1) - honest.attackers  # s
        share = (honest.number - num_needed) / jnp.maximum(honest.number, 1)
        num_stds = jax.scipy.stats.norm.ppf(jnp.clip(share, 0.5, 1 - 2.0**-20)) if z is None else jnp.float32(z)
        return jax.tree.map(lambda m, s: m - num_stds.astype(m.dtype) * s, honest.mean, honest.std)

    return Together(send)


@validate.named_arguments
def stale(delay: Annotated[int, Integer(1, 1000)] = 1) -> Together:
    """All attackers send the mean of the honest messages of an earlier round (replay).

    Args:
      delay: how many rounds the message is late, in [1, 1000]. The honest means of as many rounds are remembered; in
        the first rounds zero is sent. A round that is skipped is not remembered.

    Guarantees: the attackers send the mean of the honest messages of the earlier round, as in NumPy up to rounding
    (tests/adversary/test_attacks.py::test_stale).
    """

    def start(update_spec):
        wide_dtype = lambda x: tree.at_least_float32(x.dtype)  # noqa: E731
        return jax.tree.map(lambda x: jnp.zeros((delay, *x.shape), wide_dtype(x)), update_spec)

    def send(key, honest, memory):
        # The memory is a queue: row 0 is the oldest mean, and this round's mean is appended.
        oldest = jax.tree.map(lambda x, m: x[0].astype(m.dtype), memory, honest.mean)
        append = lambda x, m: jnp.concatenate([x[1:], m[None].astype(x.dtype)])  # noqa: E731
        return oldest, jax.tree.map(append, memory, honest.mean)

    return Together(send, start)


@validate.named_arguments
def inner_product(epsilon: Positive = 0.1) -> Together:
    """All attackers send minus epsilon times the honest mean (inner product manipulation, "fall of empires").

    Args:
      epsilon: positive. Below 1 the message hides among the honest messages; above 1 it reverses the mean of a small
        cohort.

    References: Xie, Koyejo and Gupta 2020, section 4.
    """
    return Together(lambda key, honest: tree.scaled(honest.mean, -epsilon))
