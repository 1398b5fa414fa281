"""Shamir's secret sharing in the prime field of 2^31 - 1 elements, for many secrets at once in compiled arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.aggregation.secure.ring import PRIME, Ring, multiplied, power
from fedjax_sim.types import AnyArray, Array

FIELD = Ring(31, prime=True)


def shares(key: Array, secrets: Array, threshold: int, num_holders: int) -> Array:
    """Splits each secret into shares for h holders, of which any `threshold` shares open the secret.

    Holder j's share is the value at j + 1 of a random polynomial of degree threshold - 1 whose value at 0 is the
    secret. So fewer shares are uniform, whatever the secret.

    Args:
      key: of the random polynomials.
      secrets: [n] uint32 below 2^31 - 1.
      threshold: at least 1 and at most h.
      num_holders: h.

    Returns: [n, h] uint32 shares.

    Guarantees: any `threshold` shares open the secret, in all subsets of small cases, and fewer shares are uniform
    (tests/aggregation/secure/test_shamir.py).

    References: Shamir 1979.
    """
    points = jnp.arange(1, num_holders + 1, dtype=jnp.uint32)[None]
    (random_coefficients,) = FIELD.draw(key, (threshold - 1, secrets.shape[0]))
    zeros = jnp.zeros((secrets.shape[0], num_holders), jnp.uint32)

    def horner_step(value, coefficient):
        return FIELD.add((multiplied(value, points),), (coefficient[:, None],))[0], None

    # Horner's rule takes the highest coefficient first and the constant, the secret, last.
    coefficients = jnp.concatenate([random_coefficients, secrets[None]])
    return jax.lax.scan(horner_step, zeros, coefficients)[0]


def reconstructed(held: Array, there: AnyArray, threshold: int) -> Array:
    """Opens secrets from the first `threshold` shares that holders send.

    Args:
      held: [n, h] uint32, the shares made by `shares`.
      there: [n, h] bool, the shares that the holders send.
      threshold: as in `shares`.

    Returns: [n] uint32 secrets; 0 where fewer than `threshold` shares are sent.

    Guarantees:
      - any `threshold` shares open (tests/aggregation/secure/test_shamir.py::test_any_threshold_of_shares_opens)
      - fewer shares give no number (::test_too_few_shares_open_nothing)

    >>> held = jax.jit(shares, static_argnums=(2, 3))(jax.random.key(0), jnp.array([7, 2**30], jnp.uint32), 2, 4)
    >>> known = jnp.array([[True, False, True, True], [False, True, False, False]])
    >>> jax.jit(reconstructed, static_argnums=2)(held, known, 2).tolist()
    [7, 0]
    """
    senders = jnp.argsort(~there, axis=1, stable=True)[:, :threshold]  # the first holders that send a share
    points = (senders + 1).astype(jnp.uint32)
    values = jnp.take_along_axis(held, senders, axis=1)

    def multiply_factor(j, products):
        """Computes Lagrange interpolation at 0: the value at x_i counts prod_{j != i} x_j / (x_j - x_i)."""
        point = points[:, j][:, None]
        difference = FIELD.add((jnp.broadcast_to(point, points.shape),), FIELD.negative((points,)))[0]
        is_other = difference != 0
        return tuple(
            jnp.where(is_other, multiplied(product, x), product)
            for product, x in zip(products, (point, difference), strict=True)
        )

    ones = jnp.ones(points.shape, jnp.uint32)
    numerators, denominators = jax.lax.fori_loop(0, threshold, multiply_factor, (ones, ones))
    inverses = power(denominators, PRIME - 2)  # x^(p - 2) is 1 / x, by Fermat
    terms = multiplied(values, multiplied(numerators, inverses))
    (secret,) = FIELD.total((terms.T,))
    return jnp.where(there.sum(1) >= threshold, secret, jnp.uint32(0))
