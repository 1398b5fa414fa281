"""Sums pytrees over clients, so that totals do not depend on order, chunk, padding or the number of devices.

`engine.arithmetic.exact_sum` explains how the sum of one array works, and bounds its error. This module has the sums of
all leaves of a pytree, and combines them over devices.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.engine.all_messages.rows import Rows, merged_rows
from fedjax_sim.engine.arithmetic import exact_sum
from fedjax_sim.engine.arithmetic.exact_sum import BLOCK, MAX_CHUNK as MAX_CHUNK, ExactSum as ExactSum
from fedjax_sim.engine.arithmetic.mode import is_fast
from fedjax_sim.engine.platform import target
from fedjax_sim.types import Array, PyTree

if TYPE_CHECKING:
    from typing_extensions import TypeIs  # in `typing` from Python 3.13

MAX_CLIENTS = 1 << 26  # before a high word could overflow
MAX_DEVICES = 1 << 10  # before a sum over devices of low words, each below 2^20, could overflow
# Up to this number, each device has a place of its own in the array that is summed over devices. For more devices,
# words that are spread over all bins are less to send.
MOST_PLACES = 8


@partial(jax.tree_util.register_dataclass, meta_fields=["spec", "structure"], data_fields=["parts"])
@dataclasses.dataclass(frozen=True)
class ExactSums:
    """The sums over clients of the leaves of a pytree.

    Leaves of at most 2,048 coordinates share one `ExactSum`. Many programs have many small leaves, such as metrics, and
    with shared sums such a program is shorter and compiles sooner.

    Guarantees:
      Each leaf has the bits of a sum of its own
      (tests/engine/arithmetic/test_exact_sums.py::test_leaves_that_share_a_sum).
    """

    # The sum of each group of leaves, see `_groups`; arrays in fast arithmetic
    parts: tuple[ExactSum, ...] | tuple[Array, ...]
    spec: tuple[jax.ShapeDtypeStruct, ...]  # of the leaves
    structure: jax.tree_util.PyTreeDef  # pyright: ignore[reportInvalidTypeForm]  # jaxlib states no types


def _groups(spec: tuple[jax.ShapeDtypeStruct, ...]) -> list[list[int]]:
    """Returns, for each sum, the indices of the leaves that share it."""
    return tree.leaf_groups(spec, [tree.at_least_float32(leaf.dtype) for leaf in spec])


def _is_sum(x: Any) -> TypeIs[ExactSum]:
    return isinstance(x, ExactSum)


def _are_sums(parts: tuple[ExactSum, ...] | tuple[Array, ...]) -> TypeIs[tuple[ExactSum, ...]]:
    return all(map(_is_sum, parts))


def zeros(spec: PyTree) -> ExactSums:
    """Returns sums of no messages.

    Args:
      spec: arrays or specs with the shapes and dtypes of one message. float64 leaves keep four bins, others two.
    """

    leaves, structure = jax.tree.flatten(spec)
    leaves = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    groups = [[leaves[index] for index in indices] for indices in _groups(leaves)]
    # Leaves that share a sum are laid one behind the other in a flat array.
    shapes = [group[0].shape if len(group) == 1 else (sum(math.prod(x.shape) for x in group),) for group in groups]
    specs = [(tuple(shape), group[0].dtype) for shape, group in zip(shapes, groups, strict=True)]
    if is_fast():
        parts = tuple(jnp.zeros(shape, tree.at_least_float32(dtype)) for shape, dtype in specs)
    else:
        parts = tuple(exact_sum.empty(shape, dtype) for shape, dtype in specs)
    return ExactSums(parts, leaves, structure)


def add(acc: ExactSums, values: PyTree) -> ExactSums:
    """Adds a chunk of messages to the sums.

    Messages must be computed once before they come here (`barrier.computed_once`), as the messages of `engine.fold`
    are. A sum or a difference that is still to be computed may be fused into the addition here, and may then be rounded
    differently in another program. A product may still be to be computed, because it is rounded alike in every program.

    Args:
      acc: the sums.
      values: c messages, leaves [c, ...], with c <= MAX_CHUNK.

    Raises:
      ValueError: for messages of other shapes, or for too many.

    Guarantees:
      Any order, chunking or padding with zeros gives the same bits
      (tests/engine/arithmetic/test_exact_sums.py::test_any_order_and_chunking_gives_the_same_bits).
      A value that is not finite makes the total NaN, and never a wrong number (::test_non_finite_values_poison).

    >>> acc = add(zeros(jnp.zeros(2)), jnp.array([[1e8, 1.0], [1.0, 2.0], [-1e8, 3.0]]))
    >>> total(acc).tolist()
    [1.0, 6.0]
    """
    leaves = acc.structure.flatten_up_to(values)
    messages = []
    for leaf, spec in zip(leaves, acc.spec, strict=True):
        if leaf.shape[1:] != spec.shape:
            validate.fail("values", f"messages of shape {spec.shape}", leaf.shape[1:])
    for indices in _groups(acc.spec):
        group = [leaves[index] for index in indices]
        if len(group) > 1:
            dtype = tree.common_dtype(jnp.float32, *group)
            group = [jnp.concatenate([x.reshape(x.shape[0], -1).astype(dtype) for x in group], axis=1)]
        messages += group
    if _are_sums(acc.parts):
        parts = exact_sum.add_messages(list(acc.parts), messages) if messages else []
    else:
        # In fast arithmetic the parts are arrays of floats.
        parts = [_with_floats(part, x.astype(part.dtype)) for part, x in zip(acc.parts, messages, strict=True)]
    return dataclasses.replace(acc, parts=tuple(parts))


def _with_floats(part: Array, messages: Array) -> Array:
    """Returns a sum of floats, and of messages [c, ...] of its shape."""
    if target() == "cpu" and len(messages) <= BLOCK:
        # XLA:CPU vectorises no reduction over rows: with one, an MLP's round in fast arithmetic took 1.1 of the time.
        rows = messages.reshape(len(messages), -1)
        return exact_sum.over_messages(jnp.add, part.reshape(-1), rows).reshape(part.shape)
    return part + messages.sum(0)


def summed(values: PyTree) -> PyTree:
    """Returns the exact total of messages.

    Args:
      values: messages, leaves [c, ...], for any number c of them.

    Guarantees:
      The total has the bits that `add` gives
      (tests/engine/arithmetic/test_exact_sums.py::test_more_messages_than_a_chunk).

    >>> summed(jnp.array([1e8, 1.0, -1e8])).item()
    1.0
    """
    acc = zeros(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), values))
    for first in range(0, jax.tree.leaves(values)[0].shape[0], MAX_CHUNK):
        acc = add(acc, jax.tree.map(lambda x, first=first: x[first : first + MAX_CHUNK], values))
    return total(acc)


def merge(a: PyTree, b: PyTree) -> PyTree:
    """Returns the sums over the union of two disjoint sets of messages, from the sums of both.

    Two exact sums may keep different bins, so that their words cannot simply be added. Here they are merged.

    Args:
      a, b: pytrees of the same structure. Exact sums and `Rows` in them are merged; other leaves are added.
    """

    def merged_leaf(x, y):
        return merged_rows(x, y) if isinstance(x, Rows) else exact_sum.merge_two(x, y) if _is_sum(x) else x + y

    return jax.tree.map(merged_leaf, a, b, is_leaf=lambda x: isinstance(x, (ExactSum, Rows)))


def combine(carry: PyTree, axis: str) -> PyTree:
    """Combines the sums of all devices of a mesh axis, in one collective: a sum of integers.

    The words of two devices may belong to different bins, so that they cannot simply be added. Up to eight devices each
    write their words to a place of their own, and merge all words after the collective. More devices spread their words
    over all bins. An all-gather is not used: on XLA:CPU it is fifteen times slower than an all-reduce.

    Args:
      carry: the sums of one device. Leaves that are not exact sums are summed as they are.
      axis: the name of the mesh axis, of at most 1,024 devices.

    Guarantees:
      There is one collective, whatever the number of leaves (tests/test_compilation.py::test_one_collective_a_round).
      Both ways give the bits of one device
      (tests/engine/arithmetic/test_exact_sums.py::test_devices_combine_to_the_bits_of_one).
    """
    leaves, structure = jax.tree.flatten(carry, is_leaf=_is_sum)
    joined_sums, split = exact_sum.concatenated([x for x in leaves if _is_sum(x)])
    combined = _combined_leaves([*joined_sums, *(x for x in leaves if not _is_sum(x))], axis)
    sums = iter(split(combined[: len(joined_sums)]))
    others = iter(combined[len(joined_sums) :])
    return structure.unflatten([next(sums) if _is_sum(x) else next(others) for x in leaves])


def _combined_leaves(leaves: list[ExactSum | Array], axis: str) -> list[ExactSum | Array]:
    """Combines sums, and arrays, over the devices of a mesh axis, in one collective.

    Args:
      leaves: the leaves of one device's carry: exact sums in normal form, and arrays of any dtype, which are added.
      axis: the name of the mesh axis, of D devices. With D <= MOST_PLACES, sums and small counters of 32 bits are sent
        as words, each device's in a place of its own; else sums are spread over all bins, and counters go as int32.

    Returns: the leaves of all devices together, in the same order and in the same dtypes.
    """
    number = jax.lax.axis_size(axis)
    # A few counters go into the places too: a sum over processes takes a turn for each array. Without places they join
    # the words in one collective, which is of int32.
    dtypes = [None if _is_sum(x) else x.dtype for x in leaves]
    leaves = [x.astype(jnp.int32) if not _is_sum(x) and _is_counter(x) else x for x in leaves]
    has_place = [number <= MOST_PLACES and (_is_sum(x) or _is_counter(x)) for x in leaves]
    words = [
        exact_sum.packed_words(x) if _is_sum(x) else (x,)
        for x, is_placed in zip(leaves, has_place, strict=True)
        if is_placed
    ]
    summed_leaves = [
        exact_sum.spread_out(x) if _is_sum(x) else x
        for x, is_placed in zip(leaves, has_place, strict=True)
        if not is_placed
    ]
    if words:
        # All words go into one array. A device writes them to its own row, and zeros to the rows of other devices, so
        # that the sum holds the words of each.
        flat = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(words)])
        is_this_device = jnp.arange(number) == jax.lax.axis_index(axis)
        flat, summed_leaves = jax.lax.psum((jnp.where(is_this_device[:, None], flat[None], 0), summed_leaves), axis)
        words = _unpacked(flat, words)
    else:
        summed_leaves = jax.lax.psum(summed_leaves, axis)
    words = iter(words)
    summed_leaves = iter(summed_leaves)
    combined = []
    for leaf, dtype, is_placed in zip(leaves, dtypes, has_place, strict=True):
        if _is_sum(leaf):
            combined.append(
                exact_sum.sum_over_devices(next(words), number, leaf.shape)
                if is_placed
                else exact_sum.kept_bins(next(summed_leaves), leaf)
            )
        elif is_placed:
            combined.append(next(words)[0].sum(0, dtype=leaf.dtype).astype(dtype))
        else:
            combined.append(next(summed_leaves).astype(dtype))
    return combined


def _is_counter(x: Array) -> bool:
    """Returns whether an array holds a few integers of 32 bits, whose sums modulo 2^32 are those of int32 words."""
    return x.dtype in (jnp.int32, jnp.uint32) and x.size <= tree.MAX_GROUPED_LEAF


def _unpacked(flat: Array, like: PyTree) -> PyTree:
    """Returns the words of all devices, leaves [D, ...] as in `like`, from one array [D, total]."""
    leaves, structure = jax.tree.flatten(like)
    parts = []
    start = 0
    for x in leaves:
        parts.append(flat[:, start : start + x.size].reshape(-1, *x.shape))
        start += x.size
    return structure.unflatten(parts)


def total(acc: ExactSums) -> PyTree:
    """Returns the sums as floats: float64 for float64 leaves, else float32.

    A coordinate is NaN if a value was added to it that is not finite.

    Args:
      acc: the sums of a pytree's leaves.
    """
    leaves: list = [None] * len(acc.spec)
    parts = exact_sum.sums_as_floats(list(acc.parts)) if _are_sums(acc.parts) else acc.parts
    for part, indices in zip(parts, _groups(acc.spec), strict=True):
        flat = part.reshape(-1)
        start = 0
        # Leaves that share the sum are cut out of it in their order.
        for index in indices:
            shape = acc.spec[index].shape
            leaves[index] = flat[start : start + math.prod(shape)].reshape(shape)
            start += math.prod(shape)
    return acc.structure.unflatten(leaves)
