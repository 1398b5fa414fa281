"""Sums over clients that do not depend on order, chunk, padding or the number of devices.

`engine.arithmetic.exact_sum` explains how one such sum works, and bounds its error. Here are the sums of a pytree, and
over devices.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.engine.all_messages.rows import Rows, merged_rows
from fedjax_sim.engine.arithmetic import exact_sum
from fedjax_sim.engine.arithmetic.exact_sum import MAX_CHUNK, ExactSum
from fedjax_sim.engine.arithmetic.mode import is_fast
from fedjax_sim.types import Array, PyTree

__all__ = [
    "MAX_CHUNK",
    "MAX_CLIENTS",
    "MAX_DEVICES",
    "ExactSum",
    "ExactSums",
    "add",
    "combine",
    "merge",
    "summed",
    "total",
    "zeros",
]

MAX_CLIENTS = 1 << 26  # before a high word could overflow
MAX_DEVICES = 1 << 10  # before a sum of low words could
SMALL = 1 << 9  # coordinates of a leaf that shares its sum with others
PLACES = 8  # devices with a place each in a sum of words; for more, words spread over all bins are less to send


@partial(jax.tree_util.register_dataclass, meta_fields=["spec", "structure"], data_fields=["parts"])
@dataclasses.dataclass(frozen=True)
class ExactSums:
    """The sums of a tree's leaves. Small leaves share one `ExactSum`: the program is shorter, and compiles sooner.

    Guarantees: each leaf has the bits that it has alone
    (tests/engine/arithmetic/test_exact_sums.py::test_leaves_that_share_a_sum).
    """

    parts: tuple[ExactSum | Array, ...]  # one a group, see `_groups`
    spec: tuple[jax.ShapeDtypeStruct, ...]  # of the leaves
    structure: jax.tree_util.PyTreeDef


def _groups(spec: tuple[jax.ShapeDtypeStruct, ...]) -> list[list[int]]:
    """For each sum, the indices of the leaves that share it."""
    together: dict = {}
    for place, x in enumerate(spec):
        shared = math.prod(x.shape) <= SMALL
        together.setdefault(tree.at_least_float32(x.dtype) if shared else place, []).append(place)
    return list(together.values())


def _is_sum(x) -> bool:
    return isinstance(x, ExactSum)


def zeros(spec: PyTree) -> ExactSums:
    """Empty sums for leaves of these shapes; float64 leaves keep four bins, others two."""

    def part(shape, dtype):
        if is_fast():
            return jnp.zeros(shape, tree.at_least_float32(dtype))
        return exact_sum.empty(shape, dtype)

    leaves, structure = jax.tree.flatten(spec)
    leaves = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    groups = [[leaves[place] for place in places] for places in _groups(leaves)]
    shapes = [group[0].shape if len(group) == 1 else (sum(math.prod(x.shape) for x in group),) for group in groups]
    parts = tuple(part(tuple(shape), group[0].dtype) for shape, group in zip(shapes, groups, strict=True))
    return ExactSums(parts, leaves, structure)


def add(acc: ExactSums, values: PyTree) -> ExactSums:
    """Adds a chunk of messages, leaves [c, ...], c <= MAX_CHUNK.

    Messages must be computed once (`barrier.computed_once`), as those that `engine.fold` hands over are: a sum or a
    difference that is still to be computed may be fused into the addition here, and then be rounded otherwise in
    another program. A product may be: it is rounded alike in every program.

    Guarantees: any order, chunking or padding with zeros gives the same bits
    (tests/engine/arithmetic/test_exact_sums.py::test_any_order_and_chunking_gives_the_same_bits); a value that is not
    finite makes the total NaN, never a wrong number (::test_non_finite_values_poison).
    """
    leaves, messages = acc.structure.flatten_up_to(values), []
    for x, like in zip(leaves, acc.spec, strict=True):
        if x.shape[1:] != like.shape:
            validate.fail("values", f"messages of shape {like.shape}", x.shape[1:])
    for places in _groups(acc.spec):
        group = [leaves[place] for place in places]
        if len(group) > 1:
            dtype = tree.common_dtype(jnp.float32, *group)
            group = [jnp.concatenate([x.reshape(x.shape[0], -1).astype(dtype) for x in group], axis=1)]
        messages += group
    if all(map(_is_sum, acc.parts)):
        parts = exact_sum.add_messages(list(acc.parts), messages) if messages else []
    else:
        parts = [part + x.astype(part.dtype).sum(0) for part, x in zip(acc.parts, messages, strict=True)]
    return dataclasses.replace(acc, parts=tuple(parts))


def summed(values: PyTree) -> PyTree:
    """The exact total of messages, leaves [c, ...], of any number c.

    Guarantees: the bits of `add` (tests/engine/arithmetic/test_exact_sums.py::test_more_messages_than_a_chunk).
    """
    acc = zeros(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), values))
    for first in range(0, jax.tree.leaves(values)[0].shape[0], MAX_CHUNK):
        acc = add(acc, jax.tree.map(lambda x, first=first: x[first : first + MAX_CHUNK], values))
    return total(acc)


def merge(a: PyTree, b: PyTree) -> PyTree:
    """The sum over the union of two disjoint sets of messages, from the sums of both; other leaves are added."""

    def one(x, y):
        return merged_rows(x, y) if isinstance(x, Rows) else exact_sum.merge_two(x, y) if _is_sum(x) else x + y

    return jax.tree.map(one, a, b, is_leaf=lambda x: isinstance(x, (ExactSum, Rows)))


def combine(carry: PyTree, axis: str) -> PyTree:
    """`merge` over the devices of a mesh axis (at most 1,024), in one collective: a sum of integers.

    Words of two devices may stand for different bins, so they cannot simply be added. Up to eight devices each write
    their words to a place of their own, and merge all after the collective; more devices spread their words over all
    bins. Leaves that are no exact sums are summed as they are.

    Guarantees: one collective, whatever the number of leaves (tests/test_compilation.py::test_one_collective_a_round);
    both ways give the bits of one device
    (tests/engine/arithmetic/test_exact_sums.py::test_devices_combine_to_the_bits_of_one).
    """
    leaves, structure = jax.tree.flatten(carry, is_leaf=_is_sum)
    leaves = [exact_sum.normal_form(x) if _is_sum(x) else x for x in leaves]
    number = jax.lax.axis_size(axis)
    apart = [number <= PLACES and (_is_sum(x) or (x.dtype == jnp.int32 and x.ndim == 0)) for x in leaves]
    words = [exact_sum.packed_words(x) if _is_sum(x) else (x,) for x, own in zip(leaves, apart, strict=True) if own]
    sent = [exact_sum.spread_out(x) if _is_sum(x) else x for x, own in zip(leaves, apart, strict=True) if not own]
    if words:  # one array: a sum over processes takes a turn for each
        flat = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(words)])
        mine = jnp.arange(number) == jax.lax.axis_index(axis)
        flat, sent = jax.lax.psum((jnp.where(mine[:, None], flat[None], 0), sent), axis)
        words = _unpacked(flat, words)
    else:
        sent = jax.lax.psum(sent, axis)
    words, sent = iter(words), iter(sent)
    merged = []
    for like, own in zip(leaves, apart, strict=True):
        x = next(words) if own else next(sent)
        if _is_sum(like):
            merged.append(exact_sum.merged(x, number, like.shape) if own else exact_sum.kept_bins(x, like))
        else:
            merged.append(x[0].sum(0, dtype=like.dtype) if own else x)
    return structure.unflatten(merged)


def _unpacked(flat: Array, like: PyTree) -> PyTree:
    """The devices' words, leaves [D, ...] as in `like`, from one array [D, total]."""
    leaves, structure = jax.tree.flatten(like)
    parts, start = [], 0
    for x in leaves:
        parts.append(flat[:, start : start + x.size].reshape(-1, *x.shape))
        start += x.size
    return structure.unflatten(parts)


def total(acc: ExactSums) -> PyTree:
    """The sums as floats (float64 for float64 leaves, else float32); NaN where a poisoned value was added."""
    leaves: list = [None] * len(acc.spec)
    for part, places in zip(acc.parts, _groups(acc.spec), strict=True):
        flat, start = (exact_sum.sum_as_float(part) if _is_sum(part) else part).reshape(-1), 0
        for place in places:
            shape = acc.spec[place].shape
            leaves[place] = flat[start : start + math.prod(shape)].reshape(shape)
            start += math.prod(shape)
    return acc.structure.unflatten(leaves)
