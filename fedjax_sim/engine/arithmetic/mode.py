"""Chooses the arithmetic of a traced program: the same bits on any devices, or the compiler's own, which is faster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from fedjax_sim import validate

# The setting is part of JAX's trace context: a program traced in one arithmetic is not reused for the other.
_fast = jax.make_user_context(False)


@contextlib.contextmanager
def fast_arithmetic(is_on: bool = True) -> Iterator[None]:
    """Traces programs inside the block with the arithmetic of the compiler, instead of the reproducible one.

    Sums over clients are then float sums, in the order of slots and devices. Products, quotients and sums are rounded
    as the compiler chooses. So the last bits of a result depend on the number of devices, on the chunk and on the order
    of the cohort. Random draws do not: keys and integers are the same in both arithmetics.

    A round has derivatives only inside the block. Outside of it a sum over clients is a sum of integers. A derivative
    through that sum would be zero, so it is an error. A function that `jax.jit` has traced outside is traced anew
    inside.

    Args:
      is_on: False returns to reproducible arithmetic, for a block inside of a fast one.

    Raises:
      TypeError: for another value, such as the words of `run.arithmetic`.

    Guarantees:
      A round has the right derivatives inside the block
      (tests/engine/arithmetic/test_exact_sums.py::test_derivatives).
      Results of both arithmetics differ by rounding alone (tests/laws/test_fast_arithmetic.py).

    >>> import jax, jax.numpy as jnp
    >>> from fedjax_sim import engine
    >>> with engine.fast_arithmetic():
    ...     slope = jax.grad(lambda x: engine.exact_sums.summed(x * x).sum())(jnp.ones((3, 1)))
    >>> slope.ravel().tolist()
    [2.0, 2.0, 2.0]
    """
    validate.truth("is_on", is_on)
    with _fast(bool(is_on)):
        yield


def is_fast() -> bool:
    """Returns whether the caller is inside of `fast_arithmetic()`."""
    return _fast.value
