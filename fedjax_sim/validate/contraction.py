"""Checks by trial that a compressor is a contraction."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fedjax_sim.validate.errors import fail

# Test inputs are large: at small ones the error of a compressor with a fixed range would look larger than it is.
PROBE = 2.0**10
# The specs for which a compressor has passed, by the function that sends: a run makes its first state several times.
_passed: weakref.WeakKeyDictionary[Callable, set] = weakref.WeakKeyDictionary()


def contraction(name: str, send: Callable, spec: Any, *, hint: str = "") -> None:
    """Refuses a compressor Q unless E |Q(x) - x|^2 < |x|^2 on two inputs: all entries equal, and normal ones.

    A compressor with traced options passes. The trial of a function that has passed is not repeated.

    Args:
      name: the argument's name, for the error.
      send: (key, x) -> Q(x), of pytrees like `spec`; the same function for the same compressor.
      spec: shapes and dtypes of an update.
      hint: appended to the error.

    Raises: ValueError with the factor that was measured.
    """
    leaves, structure = jax.tree.flatten(spec)
    shapes = structure, *((x.shape, x.dtype) for x in leaves)
    if not any(x.size for x in leaves) or shapes in _passed.get(send, ()):
        return
    rng = np.random.default_rng(0)
    draws = 8  # of the compressor's randomness, for each input

    def probes(x):
        """Returns the two inputs of a leaf, [2, ...]."""
        return (PROBE * np.stack([np.ones(x.shape), rng.standard_normal(x.shape)])).astype(x.dtype)

    def inner(a, b):
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return sum((y.astype(jnp.float32) * x.astype(jnp.float32)).sum() for y, x in pairs)

    def excess(i, inputs):
        """Returns (|Q - x|^2 - |x|^2) / |x|^2, computed as |Q|^2 - 2 <Q, x>, so that a small Q does not cancel."""
        x = jax.tree.map(lambda probe: probe[i % 2], inputs)
        sent = send(jax.random.fold_in(jax.random.key(0), i), x)
        return inner(sent, jax.tree.map(lambda y, x: y - 2 * x.astype(y.dtype), sent, x)) / inner(x, x)

    # A part may be made while its user traces a program: the trial then runs outside of this trace.
    with jax.ensure_compile_time_eval():
        trial = jax.jit(lambda inputs: jax.lax.map(lambda i: excess(i, inputs), jnp.arange(2 * draws)))
        excesses = trial(jax.tree.map(probes, spec))
    if isinstance(excesses, Tracer):
        return
    largest = np.asarray(excesses).reshape(draws, 2).mean(0).max()
    # Not `largest >= 0`, so that a NaN fails.
    if not largest < 0:
        fail(name, "a compressor with E |Q(x) - x|^2 < |x|^2", f"{1 + largest:g} |x|^2", hint)
    _passed.setdefault(send, set()).add(shapes)
