"""This module checks that a population obeys `types.Population`.

It also computes what follows from `size` and `client(id)` alone, such as the number of examples of each client.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.types import Array, ClientData, Population

__all__ = ["check_client", "check_population", "counted", "num_rows", "sizes_of", "visitable"]

ENUMERABLE = 1 << 24  # clients that can be visited one by one
REGISTER = "Write @jax.tree_util.register_dataclass above it, with size as a static field."


def check_population(population: Any) -> None:
    """Refuses an object that is not a population, before anything is compiled.

    Raises: TypeError or ValueError if `size` or `client(id)` is missing, or if the object is not a pytree of arrays.
      The same if its size is traced or not a positive integer, or if a client is not a `ClientData` of real numbers.

    Guarantees: eleven objects that break the protocol, such as one whose size is a leaf or one with complex numbers,
    raise an error that says what is wrong (tests/population/test_protocol.py::test_what_is_no_population_is_refused).
    """
    if not isinstance(population, Population):
        hint = "Of a data set, take its .train." if hasattr(population, "train") else "It needs size and client(id)."
        validate.fail("population", "a Population", type(population).__name__, hint, TypeError)
    for path, leaf in jax.tree.leaves_with_path(population):
        # A class that was not registered as a pytree is one opaque leaf.
        if leaf is population:
            validate.fail("population", "a pytree dataclass", type(population).__name__, REGISTER, TypeError)
        if not isinstance(leaf, jax.Array) and np.asarray(leaf).dtype.kind not in "biufcV":  # V: bfloat16
            name = "population" + jax.tree_util.keystr(path)
            validate.fail(name, "an array of numbers", type(leaf).__name__, "Make other fields static.", TypeError)

    # A size that is a leaf of the pytree becomes a tracer inside eval_shape, which shows that it is not static.
    def client(population, id):
        if isinstance(population.size, jax.core.Tracer):
            validate.fail("population.size", "a static integer", "a leaf of the pytree", REGISTER, TypeError)
        validate.integer("population.size", population.size)
        return population.client(id)

    check_client("population.client", jax.eval_shape(client, population, jax.ShapeDtypeStruct((), jnp.int32)))


def check_client(name: str, data: Any) -> None:
    """Refuses anything but `ClientData` with a mask [n] bool and leaves [n, ...] of real numbers.

    Args:
      name: the name of `data` in error messages.
      data: arrays, or their `jax.ShapeDtypeStruct`s.
    """
    if not isinstance(data, ClientData) or getattr(data.mask, "dtype", None) != jnp.bool_ or data.mask.ndim != 1:
        validate.fail(name, "ClientData(examples [n, ...], mask [n] bool)", data, error=TypeError)
    leaves = jax.tree.leaves(data.examples)
    shapes = [x.shape for x in leaves]
    if not shapes or any(shape[:1] != data.mask.shape for shape in shapes):
        validate.fail(name, f"leaves of {data.mask.shape[0]} rows like the mask", shapes)
    for leaf in leaves:
        if not any(jnp.issubdtype(leaf.dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)):
            hint = "Split complex features into two real ones."
            validate.fail(name, "examples of bool, integer or float", str(leaf.dtype), hint, TypeError)
    if data.pull is not None and data.pull.shape:
        hint = "Groups pool the rows of clients who train alike: constrain nobody, or let the clients train."
        validate.fail(f"{name}.pull", "one number of one client", data.pull.shape, hint)


def num_rows(population: Population) -> int:
    """Returns the number of rows of each client's arrays, padding included, without reading any data.

    >>> from fedjax_sim.population import quadratics
    >>> num_rows(quadratics(max_examples=1).train)
    1
    """
    return jax.eval_shape(population.client, jax.ShapeDtypeStruct((), jnp.int32)).mask.shape[0]


def visitable(population: Population) -> None:
    """Refuses a population with more than 2^24 clients, which is too many to visit them one by one."""
    hint = "Too many clients to visit one by one."
    validate.integer("population.size", population.size, 1, ENUMERABLE, hint=hint)


def counted(population: Population) -> Array:
    """Counts the examples of each client, [N] int32, in the masks of all clients.

    Raises: ValueError for more than 2^24 clients.
    """
    visitable(population)

    def count(id):
        return population.client(id).mask.sum(dtype=jnp.int32)

    # A map in batches holds the data of at most 4,096 clients at a time.
    ids = jnp.arange(population.size, dtype=jnp.int32)
    return jax.lax.map(count, ids, batch_size=min(population.size, 4096))


def sizes_of(population: Population) -> Array:
    """Returns the number of examples per client, [N] int32: the population's `sizes`, or `counted` where it has none.

    Guarantees: a population that does not state `sizes` gets the numbers that a built-in population of the same clients
    states (tests/population/test_protocol.py::test_size_and_client_are_enough_to_look_at).
    """
    sizes = getattr(population, "sizes", None)
    return counted(population) if sizes is None else sizes
