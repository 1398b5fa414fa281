"""Calls Python from inside of a compiled program, with NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback

from fedjax_sim.engine.platform import are_devices_absent
from fedjax_sim.types import AnyArray, Array

STAND_IN = "_moved_between_host_and_device"  # the function that stands for a call in programs for absent devices


def on_host(function: Callable, results: list, *arguments: AnyArray, vmap_method: str | None = None) -> list[Array]:
    """Calls `function(out, *arguments)` on the host with NumPy views, exactly once, when its arguments are computed.

    On a CPU the function gets the buffers themselves. JAX's other callbacks first copy larger arguments to a device,
    and XLA:CPU hangs when two devices wait for that. On a CPU the call has to be on one device, or inside `shard_map`.

    Args:
      function: fills the arrays `out`, shaped as `results`.
      results: arrays or specs.
      arguments: arrays that the function reads.
      vmap_method: "sequential" for a function that may be vmapped on a CPU, once for each row; None: it may not.

    Returns: the arrays that the function has filled.

    A compiler without its hardware makes no program that calls the host. Programs for absent devices
    (`engine.compiling_for`) have another one in its place, which reads the arguments and writes the results once.
    """
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
    if are_devices_absent():
        return jax.jit(_moved_between_host_and_device, static_argnums=0)(tuple(results), *arguments)
    if jax.default_backend() == "cpu":

        def on_buffers(context, out, *arguments):
            function([np.asarray(x) for x in out], *map(np.asarray, arguments))

        return buffer_callback(on_buffers, results, has_side_effect=True, vmap_method=vmap_method)(*arguments)

    def on_copies(*arguments):
        out = [np.empty(x.shape, x.dtype) for x in results]
        function(out, *map(np.asarray, arguments))
        return out

    return io_callback(on_copies, results, *arguments)


def _moved_between_host_and_device(results: tuple[jax.ShapeDtypeStruct, ...], *arguments: Array) -> list[Array]:
    """Returns arrays of these shapes that follow from all arguments; their values mean nothing."""
    total = sum(x.sum().astype(jnp.float32) for x in arguments)
    return [jnp.broadcast_to(total, x.shape).astype(x.dtype) for x in results]
