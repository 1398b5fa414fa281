"""Which entries of an update are sent, and what they cost: shared by the sparse transforms.

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
from fedjax_sim.transform.chain import Whole
from fedjax_sim.types import Array, PyTree, Wire

__all__ = [
    "amount",
    "indexed_wire",
    "kept",
    "largest_mask",
    "masks_of",
    "numbers_of_entries",
    "payload",
    "random_mask",
    "squared",
]

PAIRED = 64  # entries up to which random positions come from comparing all pairs of hashes


# ---- how many


@validate.named_arguments
def amount(share: float | None, count: int | None, scope: Literal["vector", "leaf"], what: str) -> Callable[[int], int]:
    """A function size -> how many of so many entries (or blocks) are sent, from exactly one of a share and a count.

    Args:
      share: in (0, 1], rounded up to whole entries; or `count`, at least 1.
      scope: "vector" or "leaf": what `size` counts.
      what: the entries' name in errors.

    Raises: ValueError, TypeError for other values, and from the function for a count above a vector's size.

    Guarantees: tests/transform/test_sparsify.py::test_wrong_amounts, ::test_wire_is_counted_exactly.
    """
    if (share is None) == (count is None):
        validate.fail("share, count", "exactly one of the two", (share, count))
    if count is not None:
        validate.integer("count", count)
    else:
        validate.in_range("share", share, 0, 1, open_low=True)

    def number(size: int) -> int:
        if count is None:
            return math.ceil(validate.as_written(share) * size)
        if count > size and scope == "vector":
            validate.fail("count", f"at most the update's {size} {what}", count)
        return min(count, size)

    return number


def numbers_of_entries(update: PyTree, scope: str) -> list[int]:
    """Numbers of entries to choose from: of the whole update, or of each leaf.

    Guarantees: tests/transform/test_sparsify.py::test_wire_is_counted_exactly.
    """
    sizes = [math.prod(jnp.shape(x)) for x in jax.tree.leaves(update)]
    return [sum(sizes)] if scope == "vector" else sizes


def _index_bits(size: int) -> int:
    return (size - 1).bit_length() if size else 0


def _set_bits(size: int, number: int) -> int:
    """Bits of a set: ceil(log2 C(size, number)) up to 2,000 members, beyond that at most two bits more."""
    number = min(number, size - number)
    if number <= 2000:
        return (math.comb(size, number) - 1).bit_length()
    logarithm = math.lgamma(size + 1) - math.lgamma(number + 1) - math.lgamma(size - number + 1)
    return math.ceil(logarithm / math.log(2) * (1 + 1e-12)) + 1


def payload(update_spec: PyTree, wire: Wire, values: int) -> Wire:
    """The wire of `values` numbers of an update, each as wide as its widest leaf; of a `Whole`, at most its code.

    Guarantees: tests/transform/test_sparsify.py::test_wire_is_counted_exactly.
    """
    values = min(values, wire.values)
    width = max((8 * x.dtype.itemsize for x in jax.tree.leaves(update_spec)), default=0)
    if isinstance(wire, Whole):
        kind = Wire if values * width < wire.payload_bits else Whole
        return kind(values, min(values * width, wire.payload_bits), wire.side_bits)
    if wire.payload_bits != 8 * tree.num_bytes(update_spec):  # another member has made them narrower
        width = -(-wire.payload_bits // max(wire.values, 1))
    return Wire(values, min(values * width, wire.payload_bits), wire.side_bits)


def indexed_wire(update_spec: PyTree, wire: Wire, values: int, chosen: list[tuple[int, int]]) -> Wire:
    """The wire of `values` numbers and their indices: for each (size, number) of `chosen`, `number` places among
    `size`.

    Under the entropy code the places are a set, whose order costs nothing.

    Guarantees: tests/transform/test_sparsify.py::test_wire_is_counted_exactly.
    """
    sent = payload(update_spec, wire, values)
    indices = sum(number * _index_bits(size) for size, number in chosen)
    coded = sent.bits + sum(_set_bits(size, number) for size, number in chosen)
    return sent._replace(side_bits=sent.side_bits + indices, coded_bits=coded)


# ---- which


def masks_of(choose: Callable, scope: str, key: Array | None, update: PyTree) -> PyTree:
    """True for the entries that are sent. `choose(key, vector [d]) -> [d] bool` is called for d >= 1 only.

    Guarantees: clients, and leaves of a client, choose independently
    (tests/transform/test_sparsify.py::test_clients_choose_independently).
    """
    leaves, structure = jax.tree.flatten(update)
    wide = [jnp.ravel(x).astype(tree.at_least_float32(jnp.result_type(x))) for x in leaves]
    if scope == "leaf":
        keys = [None if key is None else jax.random.fold_in(key, i) for i in range(len(leaves))]
        masks = [choose(k, x) if x.size else jnp.zeros(0, bool) for k, x in zip(keys, wide, strict=True)]
    else:
        whole = jnp.concatenate([jnp.zeros(0), *wide])
        ends = np.cumsum([x.size for x in wide])[:-1]
        masks = jnp.split(choose(key, whole) if whole.size else jnp.zeros(0, bool), ends)
    return structure.unflatten([mask.reshape(jnp.shape(x)) for mask, x in zip(masks, leaves, strict=True)])


def kept(update: PyTree, masks: PyTree) -> PyTree:
    """The update with zeros where a mask is False, and NaN where such an entry is not finite (x - x).

    Zeros there would hide a broken update from the engine, which drops it.

    Guarantees: tests/transform/test_sparsify.py::test_broken_updates_are_seen.
    """
    return jax.tree.map(lambda x, mask: jnp.where(mask, x, x - x), update, masks)


def squared(update: PyTree, masks: PyTree | None = None) -> Array:
    """Sum of the squares of the entries whose mask is False (None: of all), in float64 for NumPy arrays.

    Guarantees: tests/transform/test_sparsify.py::test_errors_by_hand.
    """
    leaves, total = jax.tree.leaves(update), 0.0
    for x, mask in zip(leaves, [False] * len(leaves) if masks is None else jax.tree.leaves(masks), strict=True):
        library = np if isinstance(x, np.ndarray) else jnp
        rest = library.where(mask, 0, x.astype(tree.at_least_float32(x.dtype)))
        total = total + library.sum(rest * rest)
    return total


def random_mask(key: Array, size: int, number: int) -> Array:
    """[size] bool with `number` True, every such set equally likely.

    Guarantees: tests/transform/test_sparsify.py::test_random_positions_are_uniform.
    """
    if size <= PAIRED or 4 * number > size:  # distinct counters have distinct hashes: no ties
        bits = prng.counter_bits(key, jnp.arange(size, dtype=jnp.uint32))
        if size > PAIRED:
            return engine.top_k_mask(bits, number)
        return (bits[None, :] > bits[:, None]).sum(1, dtype=jnp.int32) < number
    words = prng.counter_bits(key, jnp.arange(2 * prng.ROUNDS, dtype=jnp.uint32)).reshape(prng.ROUNDS, 2)
    side = math.isqrt(size - 1) + 1
    network = functools.partial(prng.feistel, words, side, -(-size // side))
    chosen = prng.walked(network, jnp.arange(number, dtype=jnp.uint32), size).astype(jnp.int32)
    return jnp.zeros(size, bool).at[chosen].set(True, unique_indices=True)


def largest_mask(x: Array, number: int) -> Array:
    """True for the `number` largest magnitudes; among equal ones for those of lowest index.

    Guarantees: tests/transform/test_sparsify.py::test_largest_entries_survive_unchanged.
    """
    if engine.target() == "cpu" and number > 64 + x.size // 100:  # measured: the mask is faster
        return engine.top_k_mask(x, number)
    return jnp.zeros(x.size, bool).at[engine.top_k(x, number)[1]].set(True, unique_indices=True)
