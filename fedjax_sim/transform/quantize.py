"""Uniform quantisers round updates to evenly spaced levels (see `grid`).

They differ in what sets the distance between levels: a fixed range or the largest magnitude (`quantize`), the largest
magnitude (`terngrad`), or the norm (`qsgd`).
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from fedjax_sim import validate
from fedjax_sim.transform.grid import LARGEST, SCALE_BITS, SMALLEST, Grid, grid_wire, quantizer
from fedjax_sim.types import UpdateTransform
from fedjax_sim.validate import Integer


def _check_scope(scope: str, block_size: int | None) -> None:
    """Checks that a block size is given for blocks, and only for blocks."""
    validate.one_of("scope", scope, ("leaf", "vector", "block"))
    if scope == "block":
        if block_size is None:
            validate.fail("block_size", "an integer with scope='block'", None, "How many numbers share a scale?")
        validate.integer("block_size", block_size)
    elif block_size is not None:
        validate.fail("block_size", f"None with scope={scope!r}", block_size, "Only blocks have a size: scope='block'.")


@validate.named_arguments
def quantize(
    bits: Annotated[int, Integer(1, 16)] = 8,
    *,
    range: float | None = None,
    scope: str = "leaf",
    block_size: int | None = None,
    rounding: Literal["stochastic", "nearest"] = "stochastic",
    keeps_zeros: bool = True,
    integers: bool = False,
) -> UpdateTransform:
    """Rounds every number to one of evenly spaced levels, coded in `bits` bits.

    Args:
      bits: b, in [1, 16]; at least 2 if zeros are kept.
      range: s > 0: levels are in [-s, s]; numbers outside are clipped, and their share is the metric `clipped_share`.
        None: s is the largest magnitude in an update's `scope`, which is sent in 32 bits. Scales below 1e-30 count as
        1e-30.
      scope: which numbers share a scale: each "leaf", the whole "vector", or a "block" of `block_size` numbers of a
        leaf.
      block_size: the numbers of a block; None for other scopes.
      rounding: "stochastic": to one of the two levels around a number, with the number as the mean; or "nearest".
      keeps_zeros: True: 2^b - 1 levels at the multiples of s / (2^(b-1) - 1), with zero among them. False: the
        textbook's 2^b levels at -s + k Delta, where Delta = 2s / (2^b - 1); a zero then costs Delta^2 / 4.
      integers: True: send int32 in a unit that all clients share, for sums of integers. The unit is Delta, or Delta / 2
        (odd integers) if zero is no level; the server multiplies by it. This needs a range.

    Returns: a transform whose messages are decoded floats, float32 or wider whatever the leaves' dtype, or int32.

    Raises: ValueError or TypeError for arguments out of range, and for options that contradict each other.

    Guarantees:
      - stochastic rounding is unbiased within the range, and `squared_error` is exact: sum u (1 - u) Delta^2 at
        positions u between levels, plus what clipping costs
        (tests/transform/test_quantize.py::test_mean_and_error_match_the_declared_ones)
      - with a fixed range it is stated to be biased, since numbers may be outside (::test_clipped_share)
      - numbers have at most 2^bits values, and bits are counted exactly (::test_number_of_values, ::test_wire_bits)
      - clients round independently, so the error of a mean of m messages falls as 1/m
        (::test_rounding_is_independent_over_clients)
      - integers decode to the same numbers (::test_integers_decode_to_the_message)
      - updates that are not finite are visible, as floats or in `clipped_share` (::test_nonfinite_updates_are_seen)
      - messages are unbiased for leaves of any float type (tests/laws/test_facts.py::test_unbiased_in_every_dtype)

    References: Suresh, Yu, Kumar and McMahan 2017, section 2; Konecny et al. 2016.

    >>> import jax, jax.numpy as jnp
    >>> message, _, measured = quantize(3, range=3.0).on_client(jax.random.key(0), jnp.array([-9.0, 0.0, 2.0]), (), ())
    >>> message.tolist(), float(measured["clipped_share"].total)
    ([-3.0, 0.0, 2.0], 1.0)
    """
    for name, value in (("keeps_zeros", keeps_zeros), ("integers", integers)):
        validate.truth(name, value)
    if keeps_zeros and bits == 1:
        validate.fail("bits", "at least 2 with keeps_zeros=True", bits, "Two levels leave none for zero.")
    _check_scope(scope, block_size)
    if range is not None:
        validate.in_range("range", range, SMALLEST, LARGEST)
        if scope != "leaf":
            validate.fail(
                "scope", "no scope beside a fixed range", scope, "All numbers of all clients share the range."
            )
    elif integers:
        validate.fail(
            "range", "a number with integers=True", None, "Integers add up only in a unit that clients share."
        )
    offset = 0.0 if keeps_zeros else 0.5  # in units: without zero, levels are at half units
    top = 2.0 ** (bits - 1) - (0.5 if offset else 1.0)
    grid = Grid(top, offset, range, scope, block_size, nearest=rounding == "nearest")
    return quantizer(grid, grid_wire(grid, bits), integers=integers)


def terngrad() -> UpdateTransform:
    """Rounds each number at random to -s, 0 or s, with the number as the mean (TernGrad).

    s is the largest magnitude of the leaf.

    Guarantees:
      - the message is unbiased, with error sum |x| (s - |x|) exactly
        (tests/transform/test_quantize.py::test_mean_and_error_match_the_declared_ones)
      - a number costs two bits, and log2(3) bits under an entropy code (::test_wire_bits)

    References: Wen et al. 2017 (TernGrad), section 3.
    """

    def coded_bits(values, sizes, side_bits):
        return math.ceil(values * math.log2(3)) + side_bits

    grid = Grid(1.0)
    return quantizer(grid, grid_wire(grid, 2, coded_bits))


@validate.named_arguments
def qsgd(
    levels: Annotated[int, Integer(1, 32767)], *, scope: str = "vector", block_size: int | None = None
) -> UpdateTransform:
    """Rounds each number at random to a multiple of norm / levels, with the number as the mean (QSGD).

    Args:
      levels: s, the levels on each side of zero, in [1, 32767].
      scope: which numbers share a norm: the whole "vector", each "leaf", or a "block" (QSGD's bucket).
      block_size: the numbers of a block; None for other scopes.

    Raises: ValueError or TypeError for arguments out of range.

    Guarantees:
      - the message is unbiased, and the stated error is exact
        (tests/transform/test_quantize.py::test_mean_and_error_match_the_declared_ones)
      - the error is at most min(n / s^2, sqrt(n) / s) |x|^2 over n numbers
        (::test_qsgd_error_is_below_the_papers_bound)
      - `coded_bits` bounds the expected length under Elias gamma codes, dense or sparse, for any update
        (::test_qsgd_coded_bits_bound_a_real_code)

    References: Alistarh, Grubic, Li, Tomioka and Vojnovic 2017 (QSGD), section 3, theorem 3.2 (there with Elias omega
    codes and a term o(1)).
    """
    _check_scope(scope, block_size)
    grid = Grid(float(levels), scope=scope, block_size=block_size, by_norm=True)

    def coded_bits(values, sizes, side_bits):
        return math.ceil(sum(_elias_bits(n, levels) for n in sizes)) + side_bits

    return quantizer(grid, grid_wire(grid, (2 * levels).bit_length(), coded_bits))


def _elias_bits(n: int, s: int) -> float:
    """Bounds the expected bits of n integers l_i = +-s |x_i| / |x|, rounded at random, over all x.

    E sum |l_i| <= s sqrt(n), which also bounds the number of non-zeros, and E sum l_i^2 <= v = s^2 +
    min(n / 4, s sqrt(n)). A gamma code of k takes at most 2 log2(k) + 1 bits. The dense code sends each |l_i| + 1, and
    a sign for each l_i that is not zero. The sparse code sends the number of non-zeros, then for each of them the
    distance from the last non-zero, the sign and |l_i|. Jensen's inequality bounds both codes.

    Args:
      n: at least 0, the numbers that share a norm |x|.
      s: at least 1, the levels on each side of zero.

    Returns: bits, of the shorter code; the norm itself is not counted.
    """
    if n == 0:
        return 0.0
    magnitudes = s * math.sqrt(n)
    v = s**2 + min(n / 4, s * math.sqrt(n))
    signs = min(n, magnitudes)
    dense = n + n * math.log2(1 + (v + 2 * magnitudes) / n) + signs
    # The bound of the sparse code has its maximum at this number of non-zeros.
    worst_count = (n * n * v) ** (1 / 3) * 2 ** (1 - 1 / math.log(2))
    k = min(signs, worst_count)
    sparse = SCALE_BITS + k * (3 + 2 * math.log2(n / k) + math.log2(v / k))
    return min(dense, sparse)
