"""This module checks example arrays when a population is built: lengths, dtypes, finite features and int32 limits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.types import PyTree

SMALLEST_CLASS = 64  # rows of the smallest size class
CLASS_GROWTH = 4  # from one size class to the next
BLOCK_BYTES = 1 << 26  # of a leaf are read at once, since the leaf may be larger than memory


def _blocks(x: np.ndarray):
    """Yields the rows of `x` in blocks of about BLOCK_BYTES."""
    row_bytes = max(1, x.itemsize * (x[:1].size or 1))
    step = max(1, BLOCK_BYTES // row_bytes)
    return (x[i : i + step] for i in range(0, len(x), step))


def checked_leaf(name: str, leaf) -> np.ndarray:
    """Returns `leaf` as a NumPy array [total, ...] of a dtype that JAX keeps.

    Without x64 mode JAX would silently convert 64-bit leaves to 32 bits. This function converts them, and refuses a
    value that does not fit.

    Args:
      name: of the leaf, for errors.
      leaf: what NumPy reads as an array, whose first axis counts examples.

    Raises: TypeError for objects, strings and complex numbers; ValueError for NaN, infinity and overflow.
    """
    x = np.asarray(leaf)
    # JAX's predicate counts bfloat16 and other extension types as floating, whose NumPy kind is "V".
    is_floating = jnp.issubdtype(x.dtype, jnp.floating)
    if not (is_floating or x.dtype.kind in "biu"):
        hint = "Encode text as integer tokens; ragged lists need one array per client."
        validate.fail(name, "an array of bool, integer or float", x.dtype.name, hint, TypeError)
    if x.ndim == 0:
        validate.fail(name, "an array whose first axis counts examples", x)
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    if is_floating:
        limit = float(jnp.finfo(dtype).max)
        if not all(bool(np.isfinite(block).all()) for block in _blocks(x)):
            validate.fail(name, "finite features", "NaN or infinity", "Impute or drop those examples first.")
        if dtype != x.dtype and not all(bool((np.abs(block) <= limit).all()) for block in _blocks(x)):
            validate.fail(name, f"values that fit {dtype}", "larger ones", "Rescale, or enable jax_enable_x64.")
    elif dtype != x.dtype:
        low = np.iinfo(dtype).min
        high = np.iinfo(dtype).max
        if not all(low <= block.min() and block.max() <= high for block in _blocks(x) if block.size):
            validate.fail(name, f"integers that fit {dtype}", "larger ones", "Renumber them, or enable jax_enable_x64.")
    return np.asarray(x, dtype)


def checked_examples(name: str, examples: PyTree) -> tuple[PyTree, int]:
    """Checks every leaf, and that all leaves have one length. Returns the NumPy pytree and that length."""
    with_paths, structure = jax.tree.flatten_with_path(examples)
    if not with_paths:
        validate.fail(name, "a pytree of arrays [total, ...]", examples)
    # Errors name the leaf by its path, such as examples['x'].
    names = [name + jax.tree_util.keystr(path) for path, _ in with_paths]
    leaves = [checked_leaf(label, leaf) for label, (_, leaf) in zip(names, with_paths, strict=True)]
    lengths = {label: len(leaf) for label, leaf in zip(names, leaves, strict=True)}
    if len(set(lengths.values())) != 1:
        validate.fail(name, "leaves of one length", lengths, "Features and labels count the same examples.")
    return jax.tree.unflatten(structure, leaves), len(leaves[0])


def checked_offsets(name: str, offsets, total: int) -> np.ndarray:
    """Returns checked offsets [N + 1] int64. They go from 0 to `total` and never fall.

    Client i owns rows offsets[i] to offsets[i + 1], so equal neighbours are an empty client.

    Args:
      name: of the offsets, for errors.
      offsets: [N + 1] integers.
      total: the number of rows, at least 1.
    """
    offsets = np.asarray(offsets)
    if offsets.ndim != 1 or len(offsets) < 2 or offsets.dtype.kind not in "iu":
        shown = f"{offsets.dtype.name}{list(offsets.shape)}"
        validate.fail(name, "a 1-D integer array of N + 1 >= 2 positions", shown, "A population has a client at least.")
    offsets = offsets.astype(np.int64)
    if total == 0:
        validate.fail(name, "an example at least", "none")
    if offsets[0] != 0 or offsets[-1] != total:
        validate.fail(name, f"positions from 0 to {total}", f"{offsets[0]} to {offsets[-1]}", "Count rows, not bytes.")
    falls = np.flatnonzero(np.diff(offsets) < 0)
    if len(falls):
        validate.fail(name, "positions that never fall", f"a fall after client {falls[0]}", "Use a cumulative sum.")
    return offsets


def capacities(sizes: np.ndarray) -> tuple[int, ...]:
    """Returns the size classes of clients, as the most rows of a client in each class.

    Padding is cheaper if small clients are computed apart from large ones. The last class has the rows of the largest
    client. Of 64, 256, 1024, ... rows below that, a class exists if it holds a client that no smaller class holds.

    Args:
      sizes: [N] integers, the clients' numbers of rows.

    >>> capacities(np.array([5, 40])), capacities(np.array([5, 700])), capacities(np.array([700, 800]))
    ((40,), (64, 700), (800,))
    """
    sizes = np.sort(sizes)
    largest = int(sizes[-1])
    classes = []
    num_classified = 0  # clients that fit into a class so far
    rows = SMALLEST_CLASS
    while rows < largest:
        num_fitting = int(np.searchsorted(sizes, rows, side="right"))
        if num_fitting > num_classified:
            classes.append(rows)
        rows = rows * CLASS_GROWTH
        num_classified = num_fitting
    return (*classes, largest)
