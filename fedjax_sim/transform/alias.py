"""Integers drawn from a law by Walker's alias method, within 2^-63 of the law in total variation.

A draw takes k random bits for one of the table's 2^k cells and 64 bits for one of the two integers in that cell. The
table's masses are multiples of 2^-(64+k), computed on the host with 60 decimal digits; the distance of 2^-63 includes
the tail that the table leaves out. That distance, times numbers and messages, is added to delta
(`discrete.IntegerNoise.sum_error`).

References: Walker 1977; Vose 1991.
"""

from __future__ import annotations

import functools
import math
from decimal import Context, Decimal, localcontext

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, prng
from fedjax_sim.types import Array, PyTree

__all__ = ["TAIL", "alias_table", "draw_integers", "tail_of"]

TAIL = 67 * math.log(2)  # minus the logarithm of the mass in one tail, at most


def draw_integers(key: Array, like: PyTree, cells: np.ndarray) -> PyTree:
    """Independent integers shaped like the leaves of `like`, from the table of `alias_table`; leaf i draws from
    fold_in(key, i).

    Guarantees: they follow the law (tests/transform/test_discrete.py::test_draws_follow_their_law).
    """
    high, low, alias = (jnp.asarray(x) for x in cells)
    number = cells.shape[1]

    def draw(key, shape):
        words = jax.random.bits(prng.fast(key), (3, *shape), jnp.uint32)
        cell, first, second = engine.computed_once(words, key)  # drawn once, though each is read twice
        cell = (cell >> (32 - (number.bit_length() - 1))).astype(jnp.int32)
        here = high[cell]
        stays = (first < here) | ((first == here) & (second < low[cell]))
        return jnp.where(stays, cell, alias[cell].astype(jnp.int32)) - number // 2

    leaves, structure = jax.tree.flatten(like)
    return structure.unflatten([draw(jax.random.fold_in(key, i), x.shape) for i, x in enumerate(leaves)])


def tail_of(law: str, std: float) -> int:
    """K with P(|X| > K) <= 2^-66: sub-Gaussian (Canonne et al. 2020), or by Bernstein's inequality for Skellam."""
    share = TAIL / 3 if law == "skellam" else 0
    return math.ceil(share + math.sqrt(share**2 + 2 * TAIL * std**2))


def _masses(law: str, std: float) -> list[Decimal]:
    """Unnormalised masses of 0, ..., K, to some 50 digits: exp(-k^2 / 2 std^2), or the Bessel function I_k(std^2)."""
    tail, variance = tail_of(law, std), Decimal(std) * Decimal(std)
    if law == "discrete_gaussian":
        ratio, step, masses = (-1 / (2 * variance)).exp(), (-1 / variance).exp(), [Decimal(1)]
        for _ in range(tail):
            masses.append(masses[-1] * ratio)
            ratio *= step
        return masses
    above, here, masses = Decimal(0), Decimal(1), {}
    for k in range(2 * tail + 20, 0, -1):  # Miller's recurrence: downwards, the solution that decays wins
        above, here = here, above + 2 * k / variance * here
        masses[k - 1] = here
    return [masses[k] for k in range(tail + 1)]


@functools.lru_cache(maxsize=8)
def alias_table(law: str, std: float) -> np.ndarray:
    """[3, 2^k] uint32: for each cell the high and the low half of a 64-bit threshold, and an alias.

    Cell j stands for the integer j - 2^(k-1). A draw that falls into cell j returns that integer if its 64 bits are
    below the threshold, and the alias's integer otherwise; 0 stands for the threshold 2^64 of a cell that is its own
    alias.

    Args:
      law: "discrete_gaussian" or "skellam".
      std: the discrete Gaussian's sigma, or the square root of Skellam's variance.

    Guarantees: within 2^-63 of the law in total variation (tests/transform/test_discrete.py::test_tables_are_exact).
    """
    with localcontext(Context(prec=60)):
        half = _masses(law, std)
        tail = len(half) - 1
        number = 1 << max(1, (2 * tail).bit_length())
        scale = number * 2**64 / (2 * sum(half) - half[0])
        masses = [0] * number
        for k, mass in enumerate(half):
            masses[number // 2 + k] = masses[number // 2 - k] = int(mass * scale)
    full = 2**64
    masses[number // 2] += number * full - sum(masses)
    alias, kept = list(range(number)), masses
    small = [j for j in range(number) if kept[j] < full]
    large = [j for j in range(number) if kept[j] > full]
    while small and large:
        j, source = small.pop(), large[-1]
        alias[j] = source
        kept[source] -= full - kept[j]
        if kept[source] <= full:
            large.pop()
            if kept[source] < full:
                small.append(source)
    kept = [0 if x == full else x for x in kept]  # a full cell is its own alias
    return np.array([[x >> 32 for x in kept], [x & 0xFFFFFFFF for x in kept], alias], np.uint32)
