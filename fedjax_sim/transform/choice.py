"""Functions that the sparse transforms share: which entries of an update are sent, and the bits that they cost.

Entries are chosen from the whole update as one vector (scope "vector") or from each leaf by itself (scope "leaf").
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, prng, tree, validate
from fedjax_sim.engine.feistel import FEISTEL_ROUNDS, feistel, walked
from fedjax_sim.transform.chain import Whole
from fedjax_sim.types import Array, PyTree, Wire

PAIRED = 64  # for at most this many entries, random positions come from comparing all pairs of hashes


# ---- how many


@validate.named_arguments
def amount(share: float | None, count: int | None, scope: Literal["vector", "leaf"], what: str) -> Callable[[int], int]:
    """Makes the function that says how many of `size` entries (or blocks) are sent, from a share or a count.

    Args:
      share: in (0, 1], rounded up to whole entries; None = `count` is given.
      count: at least 1; None = `share` is given.
      scope: "vector" or "leaf": what `size` counts.
      what: the name of the entries in errors.

    Returns: (size) -> number of entries that are sent. It raises ValueError for a count above a vector's size; from a
    leaf with fewer entries, all are sent.

    Raises: ValueError or TypeError unless exactly one of `share` and `count` is given, and in its range.

    Guarantees: shares outside of (0, 1], counts below 1, booleans, and both or none of the two are refused
    (tests/transform/test_sparsify.py::test_wrong_amounts); a share is taken as it is written, so 0.07 of 100 entries
    are 7, although 0.07 * 100 > 7 in floats (::test_wire_is_counted_exactly).
    """
    if (share is None) == (count is None):
        validate.fail("share, count", "exactly one of the two", (share, count))
    if count is not None:
        validate.integer("count", count)
    else:
        validate.in_range("share", share, 0, 1, open_low=True)

    def number(size: int) -> int:
        if count is None:
            assert share is not None, "one of the two is given"
            return math.ceil(validate.as_written(share) * size)  # 0.1 is a tenth, not the float next to it
        if count > size and scope == "vector":
            validate.fail("count", f"at most the update's {size} {what}", count)
        return min(count, size)

    return number


def numbers_of_entries(update: PyTree, scope: str) -> list[int]:
    """Returns the numbers of entries to choose from: one for the whole update, or one for each leaf.

    Guarantees: with the scope "leaf", `top_k` sends a tenth of each of two leaves, 90 + 10 numbers
    (tests/transform/test_sparsify.py::test_wire_is_counted_exactly).
    """
    sizes = [math.prod(jnp.shape(x)) for x in jax.tree.leaves(update)]
    return [sum(sizes)] if scope == "vector" else sizes


def _index_bits(size: int) -> int:
    """Computes the bits of an index below `size`."""
    return (size - 1).bit_length() if size else 0


def _set_bits(size: int, number: int) -> int:
    """The bits of a set: ceil(log2 C(size, number)) up to 2,000 members, beyond that at most two bits more."""
    number = min(number, size - number)  # the complement costs the same
    if number <= 2000:
        return (math.comb(size, number) - 1).bit_length()
    logarithm = math.lgamma(size + 1) - math.lgamma(number + 1) - math.lgamma(size - number + 1)
    return math.ceil(logarithm / math.log(2) * (1 + 1e-12)) + 1


def payload(update_spec: PyTree, wire: Wire, values: int) -> Wire:
    """Returns the wire of `values` numbers of an update, each as wide as the update's widest leaf.

    If an earlier transform has coded all numbers together (`Whole`), the numbers are sent as plain floats, or inside of
    the whole code if that is smaller.

    Args:
      update_spec: shapes and dtypes of the update.
      wire: of the incoming update.
      values: how many of the update's numbers are sent.

    Guarantees: bits are counted exactly (tests/transform/test_sparsify.py::test_wire_is_counted_exactly).
    """
    values = min(values, wire.values)
    width = max((8 * x.dtype.itemsize for x in jax.tree.leaves(update_spec)), default=0)
    if isinstance(wire, Whole):
        # Plain floats can be chosen from again by a later transform; numbers inside of the code cannot.
        kind = Wire if values * width < wire.payload_bits else Whole
        return kind(values, min(values * width, wire.payload_bits), wire.side_bits)
    if wire.payload_bits != 8 * tree.num_bytes(update_spec):  # an earlier member has made the numbers narrower
        width = -(-wire.payload_bits // max(wire.values, 1))
    return Wire(values, min(values * width, wire.payload_bits), wire.side_bits)


def indexed_wire(update_spec: PyTree, wire: Wire, values: int, chosen: list[tuple[int, int]]) -> Wire:
    """Returns the wire of `values` numbers and their indices.

    Under the entropy code the positions are a set, whose order costs nothing.

    Args:
      update_spec: shapes and dtypes of the update.
      wire: of the incoming update.
      values: how many of its numbers are sent.
      chosen: (size, number) pairs: of `size` positions, `number` are chosen.

    Guarantees: an index costs ceil(log2 size) bits, and under the entropy code the set of positions costs ceil(log2
    C(1000, 10)) bits for 10 of 1000 entries, and at most 2 bits more than that formula for 10^4 of 10^6
    (tests/transform/test_sparsify.py::test_wire_is_counted_exactly).
    """
    sent = payload(update_spec, wire, values)
    index_bits = sum(number * _index_bits(size) for size, number in chosen)
    coded_bits = sent.bits + sum(_set_bits(size, number) for size, number in chosen)
    return sent._replace(side_bits=sent.side_bits + index_bits, coded_bits=coded_bits)


# ---- which


def masks_of(choose: Callable, scope: str, key: Array | None, update: PyTree) -> PyTree:
    """Chooses the entries that are sent: returns masks with the structure of the update, True for these entries.

    Args:
      choose: (key, vector [d]) -> [d] bool; it is called for d >= 1 only.
      scope: "vector": choose from the whole update; "leaf": choose from each leaf.
      key: None for a choice without randomness.
      update: leaves of numbers.

    Guarantees: clients, and leaves of a client, choose independently
    (tests/transform/test_sparsify.py::test_clients_choose_independently).
    """
    leaves, structure = jax.tree.flatten(update)
    wide = [jnp.ravel(x).astype(tree.at_least_float32(jnp.result_type(x))) for x in leaves]
    if scope == "leaf":
        keys = [None] * len(leaves) if key is None else prng.fold_in(key, jnp.arange(len(leaves)))
        masks = [choose(k, x) if x.size else jnp.zeros(0, bool) for k, x in zip(keys, wide, strict=True)]
    else:
        vector = jnp.concatenate([jnp.zeros(0), *wide])  # the first is for an update without leaves
        ends = np.cumsum([x.size for x in wide])[:-1]
        masks = jnp.split(choose(key, vector) if vector.size else jnp.zeros(0, bool), ends)
    return structure.unflatten([mask.reshape(jnp.shape(x)) for mask, x in zip(masks, leaves, strict=True)])


def kept(update: PyTree, masks: PyTree) -> PyTree:
    """Replaces the entries of an update that are not sent by zeros, or by NaN if such an entry is not finite.

    A zero in place of an entry that is not finite would hide a broken update from the engine, which drops the update.

    Args:
      update: leaves of numbers.
      masks: from `masks_of`.

    Guarantees: an update with such an entry stays broken, whether the entry is sent or not
    (tests/transform/test_sparsify.py::test_broken_updates_are_seen).
    """
    # x - x is 0 for a finite x, and NaN for others.
    return jax.tree.map(lambda x, mask: jnp.where(mask, x, x - x), update, masks)


def squared(update: PyTree, masks: PyTree | None = None) -> Array | float:
    """Sums the squares of the entries that are not sent.

    Args:
      update: leaves of numbers; NumPy leaves are summed in float64.
      masks: from `masks_of`; None = no entry is sent.

    Guarantees: on four numbers the errors of `top_k` and `random_k` equal those by hand, in float64 for NumPy leaves
    (tests/transform/test_sparsify.py::test_errors_by_hand).
    """
    leaves = jax.tree.leaves(update)
    total = 0.0
    for x, mask in zip(leaves, [False] * len(leaves) if masks is None else jax.tree.leaves(masks), strict=True):
        library = np if isinstance(x, np.ndarray) else jnp
        not_sent = library.where(mask, 0, x.astype(tree.at_least_float32(x.dtype)))
        total = total + library.sum(not_sent * not_sent)
    return total


def random_mask(key: Array, size: int, number: int) -> Array:
    """Draws a random set: [size] bool with `number` times True, every such set equally likely.

    Args:
      key: of the draw.
      size: at least 1, static.
      number: in [0, size], static.

    Guarantees: the set has `number` entries in every draw, and entries and pairs of entries are drawn equally often
    within 6 standard deviations (tests/transform/test_sparsify.py::test_random_positions_are_uniform).
    """
    if size <= PAIRED or 4 * number > size:
        # The entries with the largest hashes are chosen. Distinct counters have distinct hashes, so there are no ties.
        bits = prng.counter_bits(key, jnp.arange(size, dtype=jnp.uint32))
        if size > PAIRED:
            return engine.top_k_mask(bits, number)
        return (bits[None, :] > bits[:, None]).sum(1, dtype=jnp.int32) < number
    # A random permutation of the positions (a Feistel network, walked until it is inside [0, size)) is evaluated at
    # `number` places only, so the number of hashes does not grow with `size`.
    words = prng.counter_bits(key, jnp.arange(2 * FEISTEL_ROUNDS, dtype=jnp.uint32)).reshape(FEISTEL_ROUNDS, 2)
    side = math.isqrt(size - 1) + 1
    columns = -(-size // side)
    network = functools.partial(feistel, words, side, columns)
    chosen = walked(network, jnp.arange(number, dtype=jnp.uint32), size, side * columns - size).astype(jnp.int32)
    return jnp.zeros(size, bool).at[chosen].set(True, unique_indices=True)


def largest_mask(x: Array, number: int) -> Array:
    """Marks the `number` largest magnitudes of a vector; among equal ones those of lowest index.

    Args:
      x: [d] floats.
      number: at most d.

    Returns: [d] bool.

    Guarantees: `top_k` sends the entries that come first in a stable NumPy sort by -|x|
    (tests/transform/test_sparsify.py::test_largest_entries_survive_unchanged).
    """
    if engine.target() == "cpu" and number > 64 + x.size // 100:  # measured: the mask is faster
        return engine.top_k_mask(x, number)
    return jnp.zeros(x.size, bool).at[engine.top_k(x, number)[1]].set(True, unique_indices=True)
