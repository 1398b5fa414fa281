"""Replicates, gathers and sends the arrays of a job over several processes.

With one process, every function here returns its argument.
"""

from __future__ import annotations

from typing import TypeVar

from fedjax_sim.running.processes import current

T = TypeVar("T")


def on_all_devices(tree: T) -> T:
    """Returns arrays that are equal on every process as arrays replicated over all devices.

    Arrays that are already spread over the processes are not changed.

    Args:
      tree: arrays, numbers and keys.
    """
    if not current().several:
        return tree
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from fedjax_sim import engine
    from fedjax_sim.prng import is_key

    # The mesh is of all devices: JAX refuses two meshes in one program.
    mesh = engine.device_mesh()
    assert mesh is not None, "several processes have several devices"
    sharding = NamedSharding(mesh, PartitionSpec())

    def leaf(x):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return x
        if is_key(x):  # collectives take the key's integers
            return jax.random.wrap_key_data(leaf(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        return jax.make_array_from_process_local_data(sharding, np.asarray(x), np.shape(x))

    return jax.tree.map(leaf, tree)


def whole(tree: T) -> T:
    """Returns arrays over all devices as local ones.

    Arrays that are sharded over processes are gathered, which is a collective: all processes must call this.

    Args:
      tree: arrays, also such as are spread over processes; other leaves stay as they are.
    """
    if not current().several:
        return tree
    import jax
    from jax.experimental import multihost_utils

    from fedjax_sim.prng import is_key

    def leaf(x):
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return x
        if is_key(x):  # collectives take the key's integers
            return jax.random.wrap_key_data(leaf(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        if x.is_fully_replicated:
            return x.addressable_data(0)
        return jax.numpy.asarray(multihost_utils.process_allgather(x, tiled=True))

    return jax.tree.map(leaf, tree)


def broadcast(tree: T) -> T:
    """Returns process 0's arrays on every process, bit for bit.

    Arrays are sent as bytes: a broadcast of floats is a sum, which would lose the sign of zero.

    Args:
      tree: on process 0, the arrays. On the other processes it gives shapes and dtypes, as arrays or specs.
    """
    if not current().several:
        return tree
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    from fedjax_sim.prng import is_key

    def leaf(x):
        if is_key(x):  # collectives take the key's integers
            return jax.random.wrap_key_data(leaf(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        is_spec = isinstance(x, jax.ShapeDtypeStruct)
        host = np.zeros(x.shape, x.dtype) if is_spec else np.ascontiguousarray(x)
        # Empty arrays are equal everywhere, and there is nothing to send.
        if not host.size:
            return x
        received_bytes = multihost_utils.broadcast_one_to_all(host.reshape(-1).view(np.uint8))
        value = np.asarray(received_bytes).view(host.dtype).reshape(np.shape(x))
        if not isinstance(x, jax.Array):
            return value
        # An array that starts as a filled one keeps the weak type of `x`.
        return jax.lax.full_like(x, 0).at[...].set(value) if x.weak_type else jax.numpy.asarray(value)

    return jax.tree.map(leaf, tree)
