"""This module checks that a population obeys `types.Population`.

It also computes what follows from `size` and `client(id)` alone, such as the number of examples of each client.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fedjax_sim import validate
from fedjax_sim.types import Array, CheapReads, ClientData, Groups, Population, Subpopulation

ENUMERABLE = 1 << 24  # clients that can be visited one by one
OFFERS = (CheapReads, Groups, Subpopulation)  # what a population may offer besides `size` and `client(id)`
NOT_FOUND = object()
REGISTER = "Write @jax.tree_util.register_dataclass above it, with size as a static field."


def check_population(population: Any) -> None:
    """Refuses an object that is not a population, before anything is compiled.

    Args:
      population: anything.

    Raises: TypeError or ValueError if `size` or `client(id)` is missing, or if the object is not a pytree of arrays.
      The same if its size is traced or not a positive integer, or if a client is not a `ClientData` of real numbers.
      TypeError if the object, or one of its groups, has some but not all members of `CheapReads`, `Groups` or
      `Subpopulation`, or if it has size classes and no `capped` of its own.

    Guarantees: eleven objects that break the protocol, such as one whose size is a leaf or one with complex numbers,
      raise an error that says what is wrong (tests/population/test_protocol.py::test_what_is_no_population_is_refused).
      Of the three protocols every member is missed if it is missing (::test_a_part_of_a_protocol_is_refused), in groups
      too (::test_a_group_with_a_part_of_a_protocol_is_refused).
    """
    # Since Python 3.12 a class that inherits from a protocol is an instance of it, even without the fields.
    if not isinstance(population, Population) or not hasattr(population, "size"):
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
        if isinstance(population.size, Tracer):
            validate.fail("population.size", "a static integer", "a leaf of the pytree", REGISTER, TypeError)
        validate.integer("population.size", population.size)
        _check_offers("population", population)
        _check_groups("population", population, id)
        return population.client(id)

    check_client("population.client", jax.eval_shape(client, population, jax.ShapeDtypeStruct((), jnp.int32)))


def _check_offers(name: str, population: Population) -> None:
    """Refuses a population with a part of a protocol.

    Otherwise its members would not be used, and nobody would notice: empty places of a group would be clients.

    Args:
      name: of the population, for errors, such as "population.group".
      population: which may be traced. Its properties are computed, and none of its methods is called.

    Raises: TypeError for some but not all members of a protocol in `OFFERS`, and for size classes without a method
      `capped` of its own.
    """
    for protocol in OFFERS:
        own_names = {*vars(protocol), *inspect.get_annotations(protocol)}
        members = sorted(member for member in own_names if not member.startswith("_"))
        lookups = {member: _lookups(population, protocol, member) for member in members}
        missing = [member for member in members if not all(lookups[member])]
        if missing and any(any(answers) for answers in lookups.values()):
            rule = f"all members of types.{protocol.__name__} or none"
            hint = f"Let the class inherit from fedjax_sim.types.{protocol.__name__} and define what has no default; "
            hint += "a member that means something else takes another name."
            shown = f"{type(population).__name__} without {', '.join(missing)}"
            validate.fail(name, rule, shown, hint, TypeError)
    if isinstance(population, CheapReads) and population.capacities:
        if getattr(type(population), "capped", None) is CheapReads.capped:
            hint = "The default returns all rows, so short clients would be read as long ones."
            shown = f"{type(population).__name__} with capacities {population.capacities}"
            validate.fail(f"{name}.capped", "a method of its own beside size classes", shown, hint, TypeError)


def _lookups(population: Population, protocol: type, member: str) -> tuple[bool, bool]:
    """Tells whether a member is found without computing properties, as Python 3.12 looks, and by computing them.

    Python 3.11 computes them. A member counts only if both find it, so that all versions agree.
    """
    # A method that is None counts as no method, as in `isinstance`.
    if callable(getattr(protocol, member, None)) and getattr(population, member, None) is None:
        is_found = False
    else:
        is_found = hasattr(population, member)
    return inspect.getattr_static(population, member, NOT_FOUND) is not NOT_FOUND, is_found


def _check_groups(name: str, population: Population, id: Array) -> None:
    """Refuses groups that are not populations or have a part of a protocol, on all levels; called when traced."""
    if not isinstance(population, Groups):
        return
    name = f"{name}.group"
    group = population.group(id)
    if not isinstance(group, Population) or not hasattr(group, "size"):
        validate.fail(name, "a Population", type(group).__name__, "It needs size and client(id).", TypeError)
    _check_offers(name, group)
    _check_groups(name, group, id)


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


def count_of(population: Population, id: Array) -> Array:
    """Returns the number of examples of client `id`, [] int32: the population's `count`, or by its client's mask."""
    if isinstance(population, CheapReads):
        return population.count(id)
    return population.client(id).mask.sum(dtype=jnp.int32)


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
