"""The law of a number over clients, such as their speed: each client's draw is a function of its id alone."""

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

__all__ = ["Distribution", "as_distribution", "constant", "lognormal", "pareto", "tiers", "uniform", "unit_draws"]

FIRST, SECOND = 0x243F6A88, 0x85A308D3  # digits of pi: three hashes of one key differ


class Distribution(NamedTuple):
    """A non-negative number that differs between clients, by its quantile function.

    Guarantees: rising, within its bounds, and the same on the host as in a round
    (tests/laws/test_network.py::test_distributions).
    """

    quantile: Callable  # (u in (0, 1) of any shape) -> values of that shape, non-decreasing in u: float32 of a JAX
    # array; float64 of a NumPy array, on the host, for theory
    least: float  # no draw is below
    most: float  # nor above

    def draw(self, key: Array, ids: Array) -> Array:
        """The numbers of the clients `ids`: stable over rounds, as long as the key is.

        Guarantees: the stated law, and independent of slots
        (tests/network/test_distributions.py::test_draws_have_the_law, ::test_a_draw_belongs_to_the_client).
        """
        return self.quantile(unit_draws(key, ids))


def as_distribution(name: str, value: Distribution | float) -> Distribution:
    """A distribution as it is; a number as a constant.

    Raises: TypeError, ValueError for anything else.
    """
    if isinstance(value, Distribution):
        return value
    validate.in_range(name, value, 0, hint="Or give a distribution over clients.")
    return constant(value)


def unit_draws(key: Array, ids: Array, slots: Array | None = None) -> Array:
    """Float32 draws from (0, 1), one for each id, or each pair of id and slot: the middles of 2^23 equal cells.

    Args:
      key: one key.
      ids: [c] integers.
      slots: [] or [c] integers, of time, say; None = draws that stay.

    Guarantees: uniform, independent between ids and slots
    (tests/network/test_distributions.py::test_unit_draws_are_uniform).

    >>> unit_draws(jax.random.key(0), jnp.arange(3)).shape
    (3,)
    """
    bits = counter_bits(key, ids)
    if slots is not None:  # two random words for each slot: a key of its own
        words, slots = jax.random.key_data(key), jnp.broadcast_to(slots, ids.shape).astype(jnp.uint32)
        bits = hashed((hashed(words ^ jnp.uint32(FIRST), slots), hashed(words ^ jnp.uint32(SECOND), slots)), bits)
    return ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)


def _checked(name: str, value: float, quantile: Callable, least: float, most: float) -> Distribution:
    """Refuses a law whose smallest or largest draw float32 cannot hold."""
    if not (least == most == 0 or validate.SMALLEST <= least <= most <= validate.LARGEST):
        validate.fail(name, "draws between 1.2e-38 and 3.4e+38", value, f"They span {least:.3g} to {most:.3g}.")
    return Distribution(quantile, least, most)


def _home(u: Any) -> tuple[Any, Any]:
    """Where a quantile is computed: (numpy, its special functions) of NumPy arrays, JAX's of others."""
    if isinstance(u, np.ndarray):
        from scipy import special

        return np, special
    return jnp, jax.scipy.special


@validate.named_arguments
def constant(value: NonNegative) -> Distribution:
    """All clients are alike.

    Args:
      value: at least 0, in the unit of what it describes.

    Guarantees: the value on the host and in a round (tests/laws/test_network.py::test_distributions).

    >>> constant(2.0).draw(jax.random.key(0), jnp.arange(2)).tolist()
    [2.0, 2.0]
    """
    return _checked("value", value, lambda u: _home(u)[0].full_like(u, value), value, value)


@validate.named_arguments
def lognormal(median: Positive, sigma: Annotated[float, Number(0, 16)]) -> Distribution:
    """median * exp(sigma Z), Z standard normal: speeds and bandwidths that spread over orders of magnitude.

    Args:
      median: above 0.
      sigma: of the logarithm, at least 0; 1 puts two thirds of the clients within a factor of 2.7.

    Guarantees: that law (tests/network/test_distributions.py::test_draws_have_the_law).

    >>> lognormal(100.0, 0.0).draw(jax.random.key(0), jnp.arange(2)).tolist()
    [100.0, 100.0]
    """
    widest = math.exp(5.3 * sigma)  # no draw of (0, 1) is further than 5.3 standard deviations out

    def quantile(u):
        home, special = _home(u)
        return median * home.exp(sigma * special.ndtri(u))

    return _checked("sigma", sigma, quantile, median / widest, median * widest)


@validate.named_arguments
def pareto(minimum: Positive, shape: Positive) -> Distribution:
    """P(X > x) = (minimum / x)^shape from the minimum on: a few clients are much larger than all others.

    Args:
      minimum: above 0.
      shape: above 0; the mean is minimum * shape / (shape - 1), infinite up to 1. Draws end at the quantile 1 - 2^-24.

    Guarantees: that law (tests/network/test_distributions.py::test_draws_have_the_law).

    >>> bool((pareto(3.0, 2.0).draw(jax.random.key(0), jnp.arange(9)) >= 3).all())
    True
    """
    most = minimum * 2.0 ** min(24 / shape, 512)
    return _checked("shape", shape, lambda u: minimum * (1 - u) ** (-1 / shape), minimum, most)


@validate.named_arguments
def uniform(low: Positive, high: float) -> Distribution:
    """All values between two bounds are equally likely.

    Args:
      low, high: above 0, low <= high.

    Guarantees: that law (tests/network/test_distributions.py::test_draws_have_the_law).

    >>> uniform(2.0, 2.0).draw(jax.random.key(0), jnp.arange(2)).tolist()
    [2.0, 2.0]
    """
    validate.in_range("high", high, low)
    return _checked("high", high, lambda u: low + (high - low) * u, low, high)


def tiers(shares: Sequence[float], values: Sequence[float]) -> Distribution:
    """A few kinds of clients: a share of them has each value.

    Args:
      shares: of the clients, above 0, with sum 1.
      values: one for each share, above 0.

    Raises: ValueError, TypeError for lists of different lengths, or shares that are not all clients.

    Guarantees: those shares (tests/network/test_distributions.py::test_tiers_have_their_shares).

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
    order = np.argsort(values, kind="stable")
    ends = np.cumsum(np.asarray(shares, np.float64)[order])[:-1].astype(np.float32)
    levels = np.asarray(values, np.float64)[order]

    def quantile(u):
        home, _ = _home(u)
        kind = sum(((u > end).astype(np.int32) for end in ends), home.zeros(u.shape, np.int32))
        return home.asarray(levels, u.dtype)[kind]

    return _checked("values", max(values), quantile, float(levels[0]), float(levels[-1]))
