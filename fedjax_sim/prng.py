"""Keys by name and by identity: random bits are addressed by (seed, round, stage name, client id)."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.types import Array

__all__ = ["client_key", "shuffled", "stream"]


def stream(key: Array, name: str) -> Array:
    """The key of a stage of a round, by the stage's name.

    Guarantees: stages named differently share no stream (tests/test_prng.py::test_stage_names_do_not_collide).

    >>> import jax
    >>> key = jax.random.key(0)
    >>> bool((stream(key, "sampling") == stream(key, "client")).all())
    False
    """
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def client_key(key: Array, id: Array) -> Array:
    """The key of client `id` in a stage: independent of chunk, slot, padding, device and batch mates.

    Raises: ValueError for generators whose bits under vmap come from the first key of the batch (rbg, unsafe_rbg)
    (tests/test_prng.py::test_generators_that_mix_clients_are_refused).
    """
    if jax.random.key_impl(key) in ("rbg", "unsafe_rbg"):
        hint = "Under vmap its draws depend on batch mates: use jax.random.key(seed, impl='threefry2x32')."
        validate.fail("key", "a threefry key", jax.random.key_impl(key), hint)
    return jax.random.fold_in(key, id)


def shuffled(key: Array, positions: Array, mask: Array) -> Array:
    """Rows standing at `positions` of a random order of the rows where `mask` is True.

    Args:
      key: one client's key.
      positions: [b] int32 in [0, n); positions at or past the number of valid rows give arbitrary rows.
      mask: [n] bool, the valid rows.

    Returns: [b] int32 row indices.

    Guarantees: positions 0..valid-1 enumerate the valid rows once each, in a uniformly random order
    (tests/test_prng.py::test_shuffled_is_a_uniform_permutation).
    """
    n = mask.shape[0]
    bits = jax.random.bits(key, (n,), jnp.uint32) >> 1
    bits = jnp.where(mask, bits, jnp.uint32(1) << 31)  # invalid rows sort behind every valid one
    if n > 512:
        return jnp.argsort(bits, stable=True)[jnp.minimum(positions, n - 1)].astype(jnp.int32)
    # Counting smaller keys costs n^2 vector operations; XLA:CPU sorts short rows an order of magnitude slower.
    row = jnp.arange(n)
    before = (bits[None, :] < bits[:, None]) | ((bits[None, :] == bits[:, None]) & (row[None, :] < row[:, None]))
    rank = before.sum(axis=1)
    return jnp.argmax(rank[None, :] == positions[:, None], axis=1).astype(jnp.int32)
