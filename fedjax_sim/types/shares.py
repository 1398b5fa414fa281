"""Compares and multiplies shares of whole numbers as if float32 did not round.

3 of 10 reach the share 0.3. A share of whole numbers, such as 7 / 13, is rounded to float32, and so is a product with
it. The results are off by a few units of the last place, which decides nothing unless a threshold or a whole number
stands right there. What differs from it by less than `TOLERANCE` of it counts as equal. On the host,
`validate.as_written` gives exact fractions.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from fedjax_sim.types.data import Array

TOLERANCE = 2.0**-21  # eight times the error of a product of two rounded float32 numbers


def reaches(shares: Array | np.ndarray, threshold: Array | float) -> Array | np.ndarray:
    """Returns whether float32 shares are at least the threshold, traceable.

    Args:
      shares: [...] float32, each the rounded quotient of two numbers, or a sum of such.
      threshold: of any sign.

    Returns: [...] bool.

    Guarantees: a share that equals the threshold as fractions reaches it
    (tests/laws/test_shares.py::test_a_share_reaches_its_threshold).

    >>> import numpy as np
    >>> fifth = np.float32(5) * (np.float32(1) / np.float32(25))  # one unit below 0.2
    >>> bool(fifth >= np.float32(0.2)), bool(reaches(fifth, 0.2)), bool(reaches(fifth, 0.2001))
    (False, True, False)
    """
    return shares >= threshold - abs(threshold) * TOLERANCE


def exceeds(shares: Array | np.ndarray, threshold: Array | float) -> Array | np.ndarray:
    """Returns whether float32 shares are larger than the threshold, traceable; the arguments are as in `reaches`.

    Guarantees: a share that equals the threshold as fractions does not exceed it
    (tests/laws/test_shares.py::test_a_share_reaches_its_threshold).
    """
    return shares > threshold + abs(threshold) * TOLERANCE


def product_of_share(share: Array, number: Array | int) -> Array:
    """Returns a share of a number, which is a whole number where it is one as fractions, traceable.

    Args:
      share: [...] floats in [0, 1].
      number: [...] integers >= 0.

    Returns: [...] in the share's dtype, to be rounded up or down.

    Guarantees: k / K of K steps are k steps, and shares with two decimals are exact
    (tests/laws/test_shares.py::test_a_share_of_steps).

    >>> import numpy as np
    >>> share = np.float32(7) / np.float32(13)
    >>> float(np.ceil(share * np.float32(13))), float(np.ceil(product_of_share(share, 13)))
    (8.0, 7.0)
    """
    product = share * jnp.asarray(number, jnp.asarray(share).dtype)
    nearest = jnp.round(product)
    # Narrower floats, such as bfloat16, have larger units.
    tolerance = max(TOLERANCE, 4 * float(jnp.finfo(product.dtype).eps))
    # Of products above 2^19 the tolerance would reach half of the way to the next whole number.
    is_whole = jnp.abs(product - nearest) <= jnp.minimum(tolerance * product, 0.25)
    return jnp.where(is_whole, nearest, product)


def steps_of_work(work: Array, steps: Array | int) -> Array:
    """Returns the local steps that clients with partial work take, at least 1 and at most all, traceable.

    Args:
      work: as `Cohort.work`: [...] shares in (0, 1] of the steps (floats), rounded up, or numbers of steps (integers).
      steps: [...] integers, of the whole local work.

    Returns: [...] int32.

    Guarantees: k / K of K steps are k steps, for clients that train, for their operations and for their time
    (tests/laws/test_shares.py::test_a_share_of_steps).

    >>> steps_of_work(jnp.float32([0.25, 1.0]), 10).tolist(), steps_of_work(jnp.array([3, 11]), 10).tolist()
    ([3, 10], [3, 10])
    """
    # The dtype tells a number of steps from a share of them.
    if not jnp.issubdtype(work.dtype, jnp.integer):
        work = jnp.ceil(product_of_share(work, steps)).astype(jnp.int32)
    return jnp.clip(work, 1, steps)
