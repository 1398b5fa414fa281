"""Compressors of single numbers.

A number is reduced to its sign (`scaled_sign`), to sign and exponent (`natural_compression`), or to a narrower float
(`cast`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, prng, validate
from fedjax_sim.transform.chain import stateless
from fedjax_sim.transform.grid import (
    SCALE_BITS,
    SMALLEST,
    RotatableError,
    largest_magnitude_along,
    leafwise,
    leaves_of,
    sum_along,
    with_clipped_share,
)
from fedjax_sim.types import Array, PyTree, UpdateTransform, Wire

MANTISSA, EXPONENT = 23, 0x7F800000  # of a float32: the number of bits, and the mask
LEAST_NORMAL = 2.0**-126  # the smallest normal float32


def scaled_sign(*, scope: Literal["vector", "leaf"] = "vector") -> UpdateTransform:
    """Sends the sign of each number, times the mean magnitude: one bit for each number.

    Of all messages of signs times one scale, this is the nearest to the update. It is biased, and stalls without
    `error_feedback`. Zeros become positive, unless all numbers are zero.

    Args:
      scope: what shares a mean: the whole "vector", or each "leaf".

    Guarantees:
      - the error is exactly |x|^2 - |x|_1^2 / d, so the transform contracts by 1 - |x|_1^2 / (d |x|^2) <= 1 - 1/d, and
        no message is longer than its update (tests/transform/test_sign.py::test_sign_contracts_as_declared)
      - a bit for each number, and a scale, are sent (::test_wire_bits)

    References: Karimireddy, Rebjock, Stich and Jaggi 2019 (EF-signSGD); Seide, Fu, Droppo, Li and Yu 2014.

    >>> import jax, jax.numpy as jnp
    >>> scaled_sign().on_client(jax.random.key(0), jnp.array([3.0, -1.0, 0.0, 4.0]), (), ())[0].tolist()
    [2.0, -2.0, 2.0, 2.0]
    """
    return signs(lambda xp, size, peak, mean, square: peak * mean, lambda square, size: square / 2, scope)


@validate.named_arguments
def signs(
    scale: Callable, after_rotation: Callable, scope: Literal["vector", "leaf"] = "vector", **facts
) -> UpdateTransform:
    """Makes a transform that sends signs times a scale.

    Args:
      scale: (xp, size, peak, mean of |x| / peak, mean of (x / peak)^2) -> the scale, where xp is NumPy or jax.numpy and
        peak is the largest magnitude.
      after_rotation: (|x|^2, size) -> a bound on the expected squared error after a random rotation, for `rotated`.
      scope: what shares a scale: the whole "vector", or each "leaf".
      facts: fields of `TransformFacts`.

    Guarantees: messages have the error that the transform states
    (tests/transform/test_sign.py::test_sign_contracts_as_declared), and its bits (::test_wire_bits).
    """

    def scales(xp, leaves):
        groups = [leaves] if scope == "vector" else [[x] for x in leaves]
        scales_of_leaves = []
        for group in groups:
            size = max(sum(x.size for x in group), 1)
            # Numbers are divided by the largest magnitude, so that sums and squares neither overflow nor vanish.
            peak = functools.reduce(xp.maximum, [largest_magnitude_along(xp, x) for x in group], SMALLEST)
            ratios = [xp.abs(x) * (1 / peak) for x in group]
            mean, square = (sum(sum_along(xp, f(x)) for x in ratios) * (1 / size) for f in (lambda x: x, xp.square))
            scales_of_leaves += [scale(xp, size, peak, mean, square)] * len(group)
        return scales_of_leaves

    def message(keys, leaves):
        return [jnp.where(x < 0, -s, s) + jnp.zeros_like(x) for x, s in zip(leaves, scales(jnp, leaves), strict=True)]

    def squared_error(update):
        leaves, xp = leaves_of(update)
        pairs = zip(leaves, scales(xp, leaves), strict=True)
        return sum((xp.square(xp.abs(x) - s).sum() for x, s in pairs), 0.0)

    def wire(update_spec: PyTree, wire_in: Wire) -> Wire:
        sizes = [math.prod(x.shape) for x in jax.tree.leaves(update_spec)]
        num_scales = 1 if scope == "vector" else sum(n > 0 for n in sizes)
        return Wire(sum(sizes), sum(sizes), SCALE_BITS * num_scales)

    return stateless(
        lambda key, update: leafwise(message, key, update),
        wire=wire,
        squared_error=RotatableError(squared_error, after_rotation),
        exact_error=True,
        **facts,
    )


def natural_compression() -> UpdateTransform:
    """Rounds each number at random to one of the two powers of two around it, with the number as the mean.

    A message has the sign and the exponent of each number, 9 bits. Magnitudes below 2^-126 become 0 or 2^-126, and
    magnitudes above 2^127 become 2^127.

    Guarantees:
      - the message is unbiased, with an error of exactly (|x| - a)(2a - |x|) for a <= |x| < 2a, which is at most
        |x|^2 / 8, also for the smallest floats (tests/transform/test_sign.py::test_natural_compression_is_unbiased)
      - powers of two stay as they are (::test_powers_of_two_stay)
      - a number costs 9 bits (::test_wire_bits)

    References: Horvath, Ho, Horvath, Sahu, Canini and Richtarik 2019, section 2.

    >>> import jax, jax.numpy as jnp
    >>> natural_compression().on_client(jax.random.key(0), jnp.array([-0.5, 0.0, 8.0]), (), ())[0].tolist()
    [-0.5, 0.0, 8.0]
    """

    def compressed(key: Array, x: Array) -> Array:
        """Rounds float32 numbers of any shape to powers of two at random; infinities and NaN stay."""
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        sign = bits & jnp.uint32(1 << 31)
        magnitude = bits & jnp.uint32((1 << 31) - 1)
        # A random mantissa is added: it carries into the exponent with probability mantissa / 2^23, which rounds up.
        random_mantissa = prng.dither(key, x.shape) >> (32 - MANTISSA)
        power = (magnitude + random_mantissa) & jnp.uint32(EXPONENT)
        power = jnp.minimum(power, jnp.uint32(254 << MANTISSA))  # 2^127, the largest power that is finite
        power = jnp.where(magnitude < EXPONENT, power, magnitude)  # infinities and NaN stay
        return jax.lax.bitcast_convert_type(sign | power, jnp.float32)

    def message(key, update):
        return leafwise(lambda keys, leaves: list(map(compressed, keys, leaves)), key, update)

    def squared_error(update):
        leaves, xp = leaves_of(update)
        error = 0.0
        for x in map(xp.abs, leaves):
            low = xp.ldexp(xp.ones_like(x), xp.frexp(x)[1] - 1)  # the power of two below
            low = xp.where(x < LEAST_NORMAL, 0, low)
            error += ((x - low) * (xp.where(low > 0, 2 * low, LEAST_NORMAL) - x)).sum()
        return error

    def wire(update_spec: PyTree, wire_in: Wire) -> Wire:
        return Wire(wire_in.values, 9 * wire_in.values, wire_in.side_bits)

    error = RotatableError(squared_error, lambda square, size: square / 8 + size * LEAST_NORMAL**2)
    return stateless(message, wire=wire, unbiased=True, squared_error=error, exact_error=True)


@validate.named_arguments
def cast(dtype: Literal["bfloat16", "float16"] = "bfloat16") -> UpdateTransform:
    """Rounds each number to the nearest number of a narrower float, 16 bits.

    Args:
      dtype: "bfloat16" or "float16". With "float16", numbers beyond +-65504 become +-65504, and the metric
        `clipped_share` has their share.

    Raises: ValueError for a dtype that is neither of the two.

    Guarantees:
      - each number becomes the nearest representable one, which is finite for a finite number
        (tests/transform/test_sign.py::test_cast_is_the_nearest_number)
      - `squared_error` is exact (::test_cast_error_is_exact)
      - a number costs 16 bits (::test_wire_bits)

    References: Kalamkar et al. 2019 (bfloat16).

    >>> import jax, jax.numpy as jnp
    >>> cast("float16").on_client(jax.random.key(0), jnp.array([0.1, 1e6]), (), ())[0].tolist()
    [0.0999755859375, 65504.0]
    """
    narrow = jnp.dtype(dtype)
    largest = float(jnp.finfo(narrow).max)

    def message(keys, leaves):
        def nearest(x):
            x = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
            # Rounded here in both arithmetics: compilers may leave out a conversion to a narrower type and back.
            return engine.rounded_here(x.astype(narrow), x).astype(jnp.float32)

        return list(map(nearest, leaves))

    def sent(key, update):
        # A leaf of 16 bits is sent in the narrow dtype; others are decoded to float32, or to a wider dtype of the leaf.
        wide = leafwise(message, key, update)
        return jax.tree.map(lambda y, x: y.astype(narrow) if x.dtype.itemsize == 2 else y, wide, update)

    def squared_error(update):
        leaves, xp = leaves_of(update)
        if xp is np:
            return sum((np.square(np.clip(x, -largest, largest).astype(narrow) - x).sum() for x in leaves), 0.0)
        return sum((xp.square(x - y).sum() for x, y in zip(leaves, message(None, leaves), strict=True)), 0.0)

    def wire(update_spec: PyTree, wire_in: Wire) -> Wire:
        return wire_in._replace(payload_bits=min(16 * wire_in.values, wire_in.payload_bits), coded_bits=None)

    transform = stateless(sent, wire=wire, squared_error=squared_error, exact_error=True)
    return with_clipped_share(transform, largest) if dtype == "float16" else transform
