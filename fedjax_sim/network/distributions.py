"""This module holds laws of a number over clients, such as their speed. A client's draw depends on its id alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.prng import counter_bits, hashed
from fedjax_sim.types import Array
from fedjax_sim.validate import NonNegative, Number, Positive

# Digits of pi. They make three different hashes of one key.
FIRST = 0x243F6A88
SECOND = 0x85A308D3


class Distribution(NamedTuple):
    """The law of a non-negative number that differs between clients, given by its quantile function.

    Guarantees: Quantiles rise, lie within the bounds, and are the same on the host as in a round
    (tests/laws/test_network.py::test_distributions).
    """

    # (u in (0, 1) of any shape) -> values of that shape, non-decreasing in u. A JAX array gives float32. A NumPy array
    # gives float64 on the host, for theory.
    quantile: Callable
    least: float  # no draw is smaller
    most: float  # no draw is larger

    def draw(self, key: Array, ids: Array) -> Array:
        """Draws the numbers of the clients `ids`: the same in every round with the same key.

        Args:
          key: one key.
          ids: [c] integers.

        Returns: [c] float32.

        Guarantees: Draws have the stated law, and do not depend on slots
        (tests/network/test_distributions.py::test_draws_have_the_law, ::test_a_draw_belongs_to_the_client).
        """
        return self.quantile(unit_draws(key, ids))


def as_distribution(name: str, value: Distribution | float) -> Distribution:
    """Returns a distribution unchanged, and a number as a constant distribution.

    Args:
      name: of the argument, for errors.
      value: a `Distribution`, or a number >= 0.

    Raises: TypeError for a value that is neither; ValueError for a number that is negative or not finite.
    """
    if isinstance(value, Distribution):
        return value
    validate.in_range(name, value, 0, hint="Or give a distribution over clients.")
    return constant(value)


def unit_draws(key: Array, ids: Array, slots: Array | None = None) -> Array:
    """Draws uniform float32 numbers from (0, 1), one for each id, or for each pair of id and slot.

    Draws are the middles of 2^23 equal cells, so that neither 0 nor 1 occurs.

    Args:
      key: one key.
      ids: [c] integers.
      slots: [] or [c] integers, for example of time; None = draws that do not change.

    Returns: [c] float32.

    Guarantees: Draws are uniform, and independent between ids and slots
    (tests/network/test_distributions.py::test_unit_draws_are_uniform).

    >>> unit_draws(jax.random.key(0), jnp.arange(3)).shape
    (3,)
    """
    bits = counter_bits(key, ids)
    # Each slot has a key of its own: two random words that are hashed from the key and the slot.
    if slots is not None:
        words = jax.random.key_data(key)
        slots = jnp.broadcast_to(slots, ids.shape).astype(jnp.uint32)
        bits = hashed((hashed(words ^ jnp.uint32(FIRST), slots), hashed(words ^ jnp.uint32(SECOND), slots)), bits)
    return ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)


def _checked(name: str, value: float, quantile: Callable, least: float, most: float) -> Distribution:
    """The distribution; refuses a law whose smallest or largest draw float32 cannot hold."""
    if not (least == most == 0 or validate.SMALLEST <= least <= most <= validate.LARGEST):
        validate.fail(name, "draws between 1.2e-38 and 3.4e+38", value, f"They span {least:.3g} to {most:.3g}.")
    return Distribution(quantile, least, most)


def _array_modules(u: Any) -> tuple[Any, Any]:
    """Returns numpy and scipy.special for NumPy arrays, and JAX's modules for other arrays."""
    if isinstance(u, np.ndarray):
        from scipy import special

        return np, special
    return jnp, jax.scipy.special


@validate.named_arguments
def constant(value: NonNegative) -> Distribution:
    """Makes the law of a number that is equal for all clients.

    Args:
      value: at least 0, in the unit of the quantity.

    Guarantees: The value is the same on the host and in a round (tests/laws/test_network.py::test_distributions).

    >>> constant(2.0).draw(jax.random.key(0), jnp.arange(2)).tolist()
    [2.0, 2.0]
    """
    return _checked("value", value, lambda u: _array_modules(u)[0].full_like(u, value), value, value)


@validate.named_arguments
def lognormal(median: Positive, sigma: Annotated[float, Number(0, 16)]) -> Distribution:
    """Makes the law of median * exp(sigma Z), with Z standard normal, for speeds and bandwidths that spread widely.

    Args:
      median: above 0.
      sigma: standard deviation of the logarithm, at least 0. With sigma = 1, two thirds of the clients lie within a
        factor of 2.7 of the median.

    Guarantees: Draws have this law (tests/network/test_distributions.py::test_draws_have_the_law).

    >>> lognormal(100.0, 0.0).draw(jax.random.key(0), jnp.arange(2)).tolist()
    [100.0, 100.0]
    """
    # No draw of `unit_draws` is further than 5.3 standard deviations from the median.
    largest_factor = math.exp(5.3 * sigma)

    def quantile(u):
        numpy_module, special = _array_modules(u)
        return median * numpy_module.exp(sigma * special.ndtri(u))

    return _checked("sigma", sigma, quantile, median / largest_factor, median * largest_factor)


@validate.named_arguments
def pareto(minimum: Positive, shape: Positive) -> Distribution:
    """Makes the law P(X > x) = (minimum / x)^shape from the minimum on: a few clients are much larger than all others.

    Args:
      minimum: above 0.
      shape: above 0. The mean is minimum * shape / (shape - 1), and infinite for shapes up to 1. Draws end at the
        quantile 1 - 2^-24.

    Guarantees: Draws have this law (tests/network/test_distributions.py::test_draws_have_the_law).

    >>> bool((pareto(3.0, 2.0).draw(jax.random.key(0), jnp.arange(9)) >= 3).all())
    True
    """
    # The quantile 1 - 2^-24. Past 2^512 the law is refused anyway, and 2.0 ** 1024 would overflow in Python.
    most = minimum * 2.0 ** min(24 / shape, 512)
    return _checked("shape", shape, lambda u: minimum * (1 - u) ** (-1 / shape), minimum, most)


@validate.named_arguments
def uniform(low: Positive, high: float) -> Distribution:
    """Makes the law under which all values between two bounds are equally likely.

    Args:
      low, high: above 0, with low <= high.

    Guarantees: Draws have this law (tests/network/test_distributions.py::test_draws_have_the_law).

    >>> uniform(2.0, 2.0).draw(jax.random.key(0), jnp.arange(2)).tolist()
    [2.0, 2.0]
    """
    validate.in_range("high", high, low)
    return _checked("high", high, lambda u: low + (high - low) * u, low, high)


def tiers(shares: Sequence[float], values: Sequence[float]) -> Distribution:
    """Makes the law of a few kinds of clients: a share of the clients has each value.

    Args:
      shares: of the clients, above 0, with sum 1.
      values: one for each share, above 0.

    Raises: ValueError, TypeError for lists of different lengths, and for shares whose sum is not 1.

    Guarantees: Clients have these shares (tests/network/test_distributions.py::test_tiers_have_their_shares).

    >>> sorted(set(tiers([0.5, 0.5], [1.0, 4.0]).draw(jax.random.key(0), jnp.arange(50)).tolist()))
    [1.0, 4.0]
    """
    validate.sequence("shares", shares)
    validate.sequence("values", values)
    if len(shares) != len(values):
        validate.fail("values", f"{len(shares)} numbers, one a share", list(values))
    for name, numbers in (("shares", shares), ("values", values)):
        for i, number in enumerate(numbers):
            validate.positive(f"{name}[{i}]", number)
    if not abs(math.fsum(shares) - 1) < 1e-6:
        validate.fail("shares", "numbers with sum 1", list(shares))
    # A quantile function must not decrease, so values are sorted.
    order = np.argsort(values, kind="stable")
    upper_quantiles = np.cumsum(np.asarray(shares, np.float64)[order])[:-1].astype(np.float32)
    sorted_values = np.asarray(values, np.float64)[order]

    def quantile(u):
        numpy_module, _ = _array_modules(u)
        kind = sum(((u > end).astype(np.int32) for end in upper_quantiles), numpy_module.zeros(u.shape, np.int32))
        return numpy_module.asarray(sorted_values, u.dtype)[kind]

    return _checked("values", max(values), quantile, float(sorted_values[0]), float(sorted_values[-1]))
