"""Shamir's secret sharing in the prime field of 2^31 - 1 elements, for many secrets at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.aggregation.secure.ring import PRIME, Ring, multiplied, power
from fedjax_sim.types import Array

__all__ = ["opened", "shares"]

FIELD = Ring(31, prime=True)


def shares(key: Array, secrets: Array, threshold: int, num_holders: int) -> Array:
    """[n, h] uint32: the shares of secrets [n] for h holders, of which any `threshold` open a secret.

    Holder j's share is the value at j + 1 of a polynomial of degree threshold - 1, random but for its value at 0, the
    secret: fewer shares are uniform, whatever the secret.

    Args:
      secrets: [n] uint32 below 2^31 - 1.

    Guarantees: any `threshold` shares open the secret, all subsets of small cases, and fewer are uniform
    (tests/aggregation/secure/test_shamir.py).

    References: Shamir 1979.
    """
    points = jnp.arange(1, num_holders + 1, dtype=jnp.uint32)[None]
    (random,) = FIELD.draw(key, (threshold - 1, secrets.shape[0]))
    value = jnp.zeros((secrets.shape[0], num_holders), jnp.uint32)

    def step(value, coefficient):
        return FIELD.add((multiplied(value, points),), (coefficient[:, None],))[0], None

    return jax.lax.scan(step, value, jnp.concatenate([random, secrets[None]]))[0]


def opened(held: Array, there: Array, threshold: int) -> Array:
    """[n] uint32: the secrets, from the first `threshold` shares that are there; 0 where there are fewer.

    Args:
      held: [n, h] uint32, of `shares`.
      there: [n, h] bool, which of them the holders send.

    Guarantees: tests/aggregation/secure/test_shamir.py::test_any_threshold_of_shares_opens; too few give no number
    (::test_too_few_shares_open_nothing).

    >>> held = shares(jax.random.key(0), jnp.array([7, 2**30], jnp.uint32), 2, 4)
    >>> opened(held, jnp.array([[True, False, True, True], [False, True, False, False]]), 2).tolist()
    [7, 0]
    """
    first = jnp.argsort(~there, axis=1, stable=True)[:, :threshold]
    points = (first + 1).astype(jnp.uint32)
    values = jnp.take_along_axis(held, first, axis=1)

    def factor(j, carry):
        """Lagrange at 0: share i counts prod_{j != i} x_j / (x_j - x_i)."""
        other = points[:, j][:, None]
        gap = FIELD.add((jnp.broadcast_to(other, points.shape),), FIELD.negative((points,)))[0]
        apart = gap != 0
        return tuple(
            jnp.where(apart, multiplied(found, x), found) for found, x in zip(carry, (other, gap), strict=True)
        )

    one = jnp.ones(points.shape, jnp.uint32)
    above, below = jax.lax.fori_loop(0, threshold, factor, (one, one))
    terms = multiplied(values, multiplied(above, power(below, PRIME - 2)))
    (secret,) = FIELD.total((terms.T,))
    return jnp.where(there.sum(1) >= threshold, secret, jnp.uint32(0))
