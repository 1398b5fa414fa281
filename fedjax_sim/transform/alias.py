"""Draws integers from a distribution by Walker's alias method, within 2^-63 of it in total variation.

A draw takes k random bits to choose one of the table's 2^k cells, and 64 bits to choose one of the two integers of that
cell. The masses in the table are multiples of 2^-(64+k), computed on the host with 60 decimal digits. The distance of
2^-63 includes the tail that the table leaves out. For an accountant, this distance, times the numbers of a message and
times the messages, is added to delta (`discrete.IntegerNoise.sum_error`).

References: Walker 1977; Vose 1991.
"""

from __future__ import annotations

import functools
import math
from decimal import Context, Decimal, localcontext

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import prng
from fedjax_sim.types import Array, PyTree

TAIL = 67 * math.log(2)  # each tail that the table leaves out has a mass of at most exp(-TAIL) = 2^-67


def draw_integers(key: Array, like: PyTree, cells: np.ndarray) -> PyTree:
    """Draws independent integers in the shapes of the leaves of `like`.

    Args:
      key: leaf i draws from fold_in(key, i).
      like: leaves with shapes.
      cells: the table, from `alias_table`.

    Returns: the structure of `like`, leaves int32.

    Guarantees: the integers follow the distribution
    (tests/transform/test_discrete.py::test_draws_follow_their_law).
    """
    threshold_high, threshold_low, alias = (jnp.asarray(x) for x in cells)
    num_cells = cells.shape[1]

    def draw(key, shape):
        words = jax.random.bits(prng.fast(key), (3, *shape), jnp.uint32)
        cell, first, second = jax.lax.optimization_barrier(words)  # drawn once, though each is read twice
        cell = (cell >> (32 - (num_cells.bit_length() - 1))).astype(jnp.int32)
        # 64 random bits, as two words, are compared with the threshold of the cell.
        high = threshold_high[cell]
        is_below = (first < high) | ((first == high) & (second < threshold_low[cell]))
        return jnp.where(is_below, cell, alias[cell].astype(jnp.int32)) - num_cells // 2

    leaves, structure = jax.tree.flatten(like)
    keys = prng.fold_in(key, jnp.arange(len(leaves)))
    return structure.unflatten([draw(k, x.shape) for k, x in zip(keys, leaves, strict=True)])


def tail_of(law: str, std: float) -> int:
    """Computes a K with P(|X| > K) <= 2^-66.

    The bound is sub-Gaussian for the discrete Gaussian (Canonne et al. 2020), and Bernstein's inequality for Skellam.

    Args:
      law: "discrete_gaussian" or "skellam".
      std: as in `alias_table`.

    Guarantees: tables that end at K are within 2^-63 of the law in total variation, at std 3/4 and 3
    (tests/transform/test_discrete.py::test_tables_are_exact).
    """
    share = TAIL / 3 if law == "skellam" else 0
    return math.ceil(share + math.sqrt(share**2 + 2 * TAIL * std**2))


def _masses(law: str, std: float) -> list[Decimal]:
    """Computes unnormalised masses of 0, ..., K, to some 50 digits, in the caller's decimal context.

    Up to a common factor the mass of k is exp(-k^2 / (2 std^2)) for the discrete Gaussian, and the Bessel function
    I_k(std^2) for Skellam.

    Args:
      law: "discrete_gaussian" or "skellam".
      std: as in `alias_table`.

    Returns: K + 1 masses, where K is `tail_of(law, std)`.
    """
    tail = tail_of(law, std)
    variance = Decimal(std) * Decimal(std)
    if law == "discrete_gaussian":
        # The ratio of neighbouring masses, exp(-(2 k + 1) / 2 std^2), changes by a constant factor.
        ratio = (-1 / (2 * variance)).exp()
        ratio_step = (-1 / variance).exp()
        masses = [Decimal(1)]
        for _ in range(tail):
            masses.append(masses[-1] * ratio)
            ratio *= ratio_step
        return masses
    # Miller's recurrence for Bessel functions runs downwards from far beyond the tail: in this direction errors die
    # out.
    mass_above = Decimal(0)
    mass = Decimal(1)
    bessel_masses = {}
    for k in range(2 * tail + 20, 0, -1):
        mass_above, mass = mass, mass_above + 2 * k / variance * mass
        bessel_masses[k - 1] = mass
    return [bessel_masses[k] for k in range(tail + 1)]


@functools.lru_cache(maxsize=8)
def alias_table(law: str, std: float) -> np.ndarray:
    """Computes the table for draws by the alias method.

    Cell j stands for the integer j - 2^(k-1). A draw that falls into cell j returns this integer if its 64 bits are
    below the threshold of the cell, and otherwise the integer of the alias. A cell whose threshold is 2^64 is its own
    alias, and its threshold is stored as 0.

    Args:
      law: "discrete_gaussian" or "skellam".
      std: the discrete Gaussian's sigma, or the square root of Skellam's variance.

    Returns: [3, 2^k] uint32: for each cell the high and the low half of a 64-bit threshold, and the alias's cell.

    Guarantees: the table is within 2^-63 of the distribution in total variation, at std 3/4 and 3
    (tests/transform/test_discrete.py::test_tables_are_exact).
    """
    with localcontext(Context(prec=60)):
        # Of the integers 0, 1, ..., tail; the distribution is symmetric.
        half_masses = _masses(law, std)
        tail = len(half_masses) - 1
        num_cells = 1 << max(1, (2 * tail).bit_length())
        scale = num_cells * 2**64 / (2 * sum(half_masses) - half_masses[0])
        masses = [0] * num_cells
        for integer, mass in enumerate(half_masses):
            masses[num_cells // 2 + integer] = masses[num_cells // 2 - integer] = int(mass * scale)
    full = 2**64
    masses[num_cells // 2] += num_cells * full - sum(masses)  # what rounding down left over goes to the integer 0
    # Vose's construction: each cell below the mean mass is filled up by one cell above it, its alias.
    alias = list(range(num_cells))
    thresholds = masses
    small = [j for j in range(num_cells) if thresholds[j] < full]
    large = [j for j in range(num_cells) if thresholds[j] > full]
    while small and large:
        cell = small.pop()
        source = large[-1]
        alias[cell] = source
        thresholds[source] -= full - thresholds[cell]
        if thresholds[source] <= full:
            large.pop()
            if thresholds[source] < full:
                small.append(source)
    thresholds = [0 if x == full else x for x in thresholds]  # a full cell is its own alias
    return np.array([[x >> 32 for x in thresholds], [x & 0xFFFFFFFF for x in thresholds], alias], np.uint32)
