"""Which arithmetic a program is traced with: one whose results are the same bits on any devices, or the fastest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

__all__ = ["fast_arithmetic", "is_fast"]

_fast = jax.make_user_context(False)  # what JAX has traced in one arithmetic it does not take for the other


@contextlib.contextmanager
def fast_arithmetic(is_on: bool = True) -> Iterator[None]:
    """What is traced inside the block uses the arithmetic of the compiler; with `is_on=False`, the reproducible one.

    Sums over clients are float sums, in the order of slots and devices. Products, quotients and sums are rounded as the
    compiler chooses. So the last bits of a result depend on the number of devices, on the chunk and on the order of the
    cohort. Random draws do not: keys and integers are the same in both arithmetics.

    A round has derivatives only here. Outside of the block a sum over clients is a sum of integers, and a derivative
    through it is an error: it would be zero. A function that `jax.jit` has traced outside is traced anew inside.

    Guarantees: tests/engine/arithmetic/test_exact_sums.py::test_derivatives; results of both arithmetics differ by
    rounding alone (tests/laws/test_fast_arithmetic.py).

    >>> import jax, jax.numpy as jnp
    >>> from fedjax_sim import engine
    >>> with engine.fast_arithmetic():
    ...     slope = jax.grad(lambda x: engine.exact_sums.summed(x * x).sum())(jnp.ones((3, 1)))
    >>> slope.ravel().tolist()
    [2.0, 2.0, 2.0]
    """
    with _fast(is_on):
        yield


def is_fast() -> bool:
    """Whether this is inside of `fast_arithmetic()`."""
    return _fast.value
