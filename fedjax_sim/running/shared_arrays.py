"""Arrays of a job over several processes: replicated, gathered, and sent by process 0.

With one process every function here returns its argument.
"""

from __future__ import annotations

from typing import Any, TypeVar

from fedjax_sim.running.processes import several

__all__ = ["broadcast", "replicated", "whole"]

T = TypeVar("T")


def _is_key(leaf: Any) -> bool:
    import jax

    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def replicated(tree: T) -> T:
    """Arrays that are equal on every process, as arrays replicated over all devices; global ones are not changed."""
    if not several():
        return tree
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from fedjax_sim import engine

    place = NamedSharding(engine.device_mesh(), PartitionSpec())  # JAX refuses two meshes in one program

    def leaf(x):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return x
        if _is_key(x):
            return jax.random.wrap_key_data(leaf(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        return jax.make_array_from_process_local_data(place, np.asarray(x), np.shape(x))

    return jax.tree.map(leaf, tree)


def whole(tree: T) -> T:
    """Arrays over all devices as local ones; those sharded over processes are gathered, so all processes must call."""
    if not several():
        return tree
    import jax
    from jax.experimental import multihost_utils

    def leaf(x):
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return x
        if _is_key(x):
            return jax.random.wrap_key_data(leaf(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        if x.is_fully_replicated:
            return x.addressable_data(0)
        return jax.numpy.asarray(multihost_utils.process_allgather(x, tiled=True))

    return jax.tree.map(leaf, tree)


def broadcast(tree: T) -> T:
    """Process 0's arrays on every process, bit for bit (they are sent as bytes: a sum would lose the sign of zero).

    On the other processes `tree` gives shapes and dtypes: arrays, or specs.
    """
    if not several():
        return tree
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    def leaf(x):
        if _is_key(x):
            return jax.random.wrap_key_data(leaf(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        spec = isinstance(x, jax.ShapeDtypeStruct)
        host = np.zeros(x.shape, x.dtype) if spec else np.ascontiguousarray(x)
        if not host.size:
            return x
        sent = multihost_utils.broadcast_one_to_all(host.reshape(-1).view(np.uint8))
        value = np.asarray(sent).view(host.dtype).reshape(np.shape(x))
        if not isinstance(x, jax.Array):
            return value
        return jax.lax.full_like(x, 0).at[...].set(value) if x.weak_type else jax.numpy.asarray(value)

    return jax.tree.map(leaf, tree)
