"""The check of a compressor by trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.validate.errors import fail

__all__ = ["contraction"]

PROBE = 2.0**10  # magnitude of test inputs: large, or the error of a compressor with a fixed range would look larger


def contraction(name: str, send: Callable, spec: Any, *, hint: str = "") -> None:
    """Refuses a compressor Q unless E |Q(x) - x|^2 < |x|^2 on two inputs: all entries equal, and normal ones.

    A compressor with traced options passes.

    Args:
      send: (key, x) -> Q(x), of pytrees like `spec`.
      spec: shapes and dtypes of an update.
    """
    if not any(x.size for x in jax.tree.leaves(spec)):
        return
    rng = np.random.default_rng(0)
    draws = 8

    def probes(x):  # [2, ...]: the two inputs
        return (PROBE * np.stack([np.ones(x.shape), rng.standard_normal(x.shape)])).astype(x.dtype)

    def inner(a, b):
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return sum((y.astype(jnp.float32) * x.astype(jnp.float32)).sum() for y, x in pairs)

    def excess(i, both):  # (|Q - x|^2 - |x|^2) / |x|^2, as |Q|^2 - 2 <Q, x>: no cancellation for a small Q
        x = jax.tree.map(lambda probe: probe[i % 2], both)
        sent = send(jax.random.fold_in(jax.random.key(0), i), x)
        return inner(sent, jax.tree.map(lambda y, x: y - 2 * x.astype(y.dtype), sent, x)) / inner(x, x)

    with jax.ensure_compile_time_eval():
        tried = jax.jit(lambda both: jax.lax.map(lambda i: excess(i, both), jnp.arange(2 * draws)))
        more = tried(jax.tree.map(probes, spec))
    if not isinstance(more, jax.core.Tracer) and not (more := np.asarray(more).reshape(draws, 2).mean(0).max()) < 0:
        fail(name, "a compressor with E |Q(x) - x|^2 < |x|^2", f"{1 + more:g} |x|^2", hint)
