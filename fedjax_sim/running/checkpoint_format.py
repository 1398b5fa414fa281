"""Encodes and decodes a checkpoint: `magic, total length, header length, JSON header, leaves, SHA-256 of all before`.

Leaves are little-endian bytes. Loading runs no code, and allocates no more than the file's actual length.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.files.regular_files import content_of, json_of, opened
from fedjax_sim.prng import is_key
from fedjax_sim.running.files import CheckpointError
from fedjax_sim.types import PyTree
from fedjax_sim.validate import fail

MAGIC = b"FEDJAXCK"
SCHEMA = 2
PREFIX = struct.Struct("<8sQQ")  # magic, bytes of the whole file, bytes of the header
DIGEST = hashlib.sha256().digest_size


def leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """Returns a tree's leaves by path; None and empty nodes have no leaves.

    A root that is itself a leaf has the path "state".
    """
    pairs = [(jax.tree_util.keystr(path) or "state", leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    if len(dict(pairs)) != len(pairs):
        fail("state", "leaves with different paths", [name for name, _ in pairs])
    return dict(pairs)


def _dtype_of(leaf: Any) -> Any:
    """Returns the dtype of an array, of the spec of one, or of what NumPy makes an array of."""
    dtype = getattr(leaf, "dtype", None)  # None: a number of Python's own
    return np.asarray(leaf).dtype if dtype is None else dtype


def kind_of(name: str, leaf: Any) -> str:
    """Returns a leaf's dtype and shape as text, e.g. `float32[2, 3]`."""
    if is_key(leaf):
        return f"{leaf.dtype}{list(leaf.shape)}"
    dtype = _dtype_of(leaf)
    if not (jnp.issubdtype(dtype, np.number) or dtype == np.bool_):
        fail(f"state{name}", "an array or a number", leaf, error=TypeError)
    return f"{jax.dtypes.canonicalize_dtype(dtype).name}{list(np.shape(leaf))}"


def to_host(name: str, leaf: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns a leaf as a NumPy array in the dtype JAX holds it, and its entry in the header.

    Args:
      name: the leaf's path in the state, for errors.
      leaf: an array, a number of Python, or a random key.

    Raises: ValueError for a 64-bit value that the narrower dtype does not hold exactly.
    """
    entry: dict[str, Any] = {"kind": kind_of(name, leaf)}
    if is_key(leaf):
        # A key is stored as its integers, with the name of the generator that they belong to.
        entry["key"] = str(jax.random.key_impl(leaf))
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    held = array
    if array.dtype != (dtype := jax.dtypes.canonicalize_dtype(array.dtype)):
        with np.errstate(all="ignore"):
            held = array.astype(dtype)
            # JAX rounds Python's own floats too: only arrays and NumPy's numbers must be exact.
            exact = type(leaf) in (float, complex) or np.array_equal(held.astype(array.dtype), array, equal_nan=True)
        if not exact:
            fail(f"state{name}", f"values that {dtype.name} holds exactly", leaf, f"JAX keeps no {array.dtype} here.")
    # A literal has a weak type: it takes the dtype of the array that it meets.
    if getattr(leaf, "weak_type", False) or type(leaf) in (int, float, complex):
        entry["weak"] = True
    return held, {**entry, "bytes": held.nbytes}


def restored(raw: np.ndarray, entry: dict[str, Any], target: Any) -> jax.Array | np.ndarray:
    """Returns the leaf that a header's entry describes.

    Args:
      raw: the leaf's bytes.
      entry: the leaf's entry in the header.
      target: a leaf of the same kind, which gives shape and dtype.

    Raises: ValueError for another number of bytes, or for keys of another generator.
    """
    spec = jax.eval_shape(jax.random.key_data, target) if is_key(target) else target
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(_dtype_of(spec)))
    if raw.nbytes != math.prod(np.shape(spec)) * dtype.itemsize:
        raise ValueError(f"{raw.nbytes} bytes for {entry['kind']}")
    array = raw.copy().view(dtype).reshape(np.shape(spec))
    array = array.byteswap() if sys.byteorder == "big" else array
    if isinstance(target, np.ndarray):
        return array
    array = jnp.asarray(array)
    if is_key(target):
        keys = jax.random.wrap_key_data(array, impl=str(entry.get("key")))
        if keys.dtype != target.dtype:
            raise ValueError(f"{keys.dtype} in place of {target.dtype}")
        return keys
    if entry.get("weak") and dtype.kind in "ifc":
        # An array that starts as a literal keeps the literal's weak type.
        return jnp.full(array.shape, dtype.type(0).item()).at[...].set(array)
    return array


def encoded(header: bytes, arrays: list[np.ndarray]) -> Iterator[bytes | memoryview]:
    """Yields the file's bytes part by part, ending in the hash of all parts before."""
    total = PREFIX.size + len(header) + sum(array.nbytes for array in arrays) + DIGEST
    digest = hashlib.sha256()
    swap = sys.byteorder == "big"
    leaves = (
        np.ascontiguousarray(array.byteswap() if swap else array).reshape(-1).view(np.uint8).data for array in arrays
    )
    for part in (PREFIX.pack(MAGIC, total, len(header)), header, *leaves):
        digest.update(part)
        yield part
    yield digest.digest()


def read_file(path: Path) -> tuple[dict[str, Any], np.ndarray]:
    """Reads the header and the leaf bytes of a file, after checking its length and its hash.

    Args:
      path: of a checkpoint.
    """
    try:
        data = memoryview(content_of(path))
    except OSError as error:
        raise CheckpointError(f"{path}: could not be read ({error.strerror or error}).") from error
    if len(data) < PREFIX.size + DIGEST or data[: len(MAGIC)] != MAGIC:
        raise CheckpointError(f"{path}: expected a checkpoint, got a file without its magic (or a truncated one).")
    _, total, header_length = PREFIX.unpack(data[: PREFIX.size])
    if total != len(data):
        raise CheckpointError(f"{path}: expected {total:,} bytes, got {len(data):,}: truncated or damaged.")
    if hashlib.sha256(data[:-DIGEST]).digest() != data[-DIGEST:]:
        raise CheckpointError(f"{path}: its SHA-256 does not match its bytes: damaged.")
    body = data[PREFIX.size : -DIGEST]
    try:
        header = json_of(bytes(body[:header_length]))
        schema = header["schema"]
        if schema == SCHEMA:
            sizes = [entry["bytes"] for entry in header["leaves"]]
            texts = [text for entry in header["leaves"] for text in (entry["path"], entry["kind"])]
            # A right hash does not prove a right header: another program may have written the file.
            valid = all(type(size) is int and size >= 0 for size in sizes) and all(type(text) is str for text in texts)
            if not valid or sum(sizes) != len(body) - header_length or not isinstance(header["meta"], dict):
                raise ValueError("its parts do not add up")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: malformed header ({error}).") from error
    if schema != SCHEMA:
        raise CheckpointError(f"{path}: expected schema {SCHEMA}, got {schema!r}: written by another version.")
    return header, np.asarray(body[header_length:])


def meta_of(path: Path) -> dict[str, Any] | None:
    """Returns the meta in a file's header without verifying it; None if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, struct.error):
        with opened(path) as file:
            _, _, length = PREFIX.unpack(file.read(PREFIX.size))
            header = json_of(file.read(min(length, path.stat().st_size)))
        if header["schema"] == SCHEMA:
            return dict(header["meta"])
    return None


def difference(found: dict[str, str], wanted: dict[str, str], most: int = 20) -> list[str]:
    """Returns lines that describe how a file's leaves differ from a run's; an empty list if they do not differ.

    Args:
      found: the kinds of the file's leaves, by path.
      wanted: the kinds of the run's leaves, by path.
      most: how many differences are listed.

    >>> difference({"['w']": "float32[2]"}, {"['w']": "float32[3]", "['b']": "float32[]"})
    ["['b']: missing in the file, float32[] in this run", "['w']: float32[2] in the file, float32[3] in this run"]
    """
    lines = [f"{name}: missing in the file, {kind} in this run" for name, kind in wanted.items() if name not in found]
    lines += [f"{name}: {kind} in the file, not in this run" for name, kind in found.items() if name not in wanted]
    both = [name for name in wanted if name in found and found[name] != wanted[name]]
    lines += [f"{name}: {found[name]} in the file, {wanted[name]} in this run" for name in both]
    return lines[:most] + ([f"... and {len(lines) - most} more"] if len(lines) > most else [])
