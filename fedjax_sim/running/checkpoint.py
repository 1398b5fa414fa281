"""Checkpoints: everything a run needs to continue, in one file that is written atomically.

A file is `magic, total length, header length, JSON header, leaves as little-endian bytes, SHA-256 of all before`.
Loading runs no code and allocates no more than the file's actual length.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import socket
import struct
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.types import PyTree
from fedjax_sim.validate import fail, integer

__all__ = ["CheckpointError", "RunLocked", "latest", "lock", "newest_meta", "restore", "save", "write_atomically"]

MAGIC = b"FEDJAXCK"
SCHEMA = 2
PREFIX = struct.Struct("<8sQQ")  # magic, bytes of the whole file, bytes of the header
DIGEST = hashlib.sha256().digest_size
NAME = re.compile(r"round_(\d{8,10})\.ckpt")
TEMPORARY = re.compile(r"\..+\.\d+\.tmp")  # names of the temporary files of `write_atomically`


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, is damaged, or does not belong to this run."""


class RunLocked(RuntimeError):
    """Another process is writing to this run's folder."""


def write_atomically(path: str | Path, parts: Iterable[bytes]) -> Path:
    """Writes a temporary file, syncs it, renames it over `path`, and syncs the folder.

    Guarantees: killed at any moment, `path` holds its old bytes or all of its new ones
    (tests/running/test_checkpoint.py::test_killed_between_any_two_system_calls).
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.unlink(missing_ok=True)
        with open(aside, "xb", buffering=0) as file:
            for part in parts:
                view = memoryview(part).cast("B")
                while view:
                    view = view[os.write(file.fileno(), view) :]
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return path


def save(directory: str | Path, round: int, state: PyTree, meta: dict[str, Any], *, keep: int = 2) -> Path:
    """Commits a round's state and meta as `directory/round_00000012.ckpt`, then removes older checkpoints.

    Args:
      directory: the run's checkpoint folder, created if absent; hold its `lock` while the run writes there.
      round: rounds done so far, in [0, 2^31).
      state: any pytree of arrays, typed PRNG keys, numbers, None and empty nodes. A 64-bit leaf must keep its value in
        the dtype JAX gives it.
      meta: what JSON can hold (string keys, lists for tuples): the configuration's hash, the log's offset, ...
      keep: how many checkpoints up to this round are kept, >= 1.

    Returns: the file's path.

    Raises: CheckpointError if writing fails (the old files stay intact); TypeError or ValueError for a leaf or a meta
      that cannot be stored.

    Guarantees: after kill -9 at any moment `latest` gives the old checkpoint or the new one, complete
    (tests/running/test_checkpoint.py::test_killed_between_any_two_system_calls); the older one is removed only after
    the new one is on disk (test_keep_drops_only_after_the_commit).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save(folder, 3, {"w": np.ones(2, np.float32)}, {"seed": 7})
    ...     state, meta = restore(latest(folder), {"w": np.zeros(2, np.float32)})
    >>> path.name, state["w"].tolist(), meta
    ('round_00000003.ckpt', [1.0, 1.0], {'seed': 7, 'round': 3})
    """
    integer("round", round, 0)
    integer("keep", keep)
    directory = Path(directory)
    entries, arrays = [], []
    for name, leaf in _leaves(state).items():
        array, entry = _to_host(name, leaf)
        entries.append({"path": name, **entry})
        arrays.append(array)
    try:
        header = json.dumps({"schema": SCHEMA, "leaves": entries, "meta": {**meta, "round": int(round)}}).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(f"meta: expected what JSON can hold, got {meta!r:.120}. {error}.") from error
    path = directory / f"round_{round:08d}.ckpt"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(".round_*.ckpt.*.tmp"):
            leftover.unlink(missing_ok=True)
        write_atomically(path, _encode(header, arrays))
        past = [older for older in _list(directory) if _round(older) <= round]
        for older in past[keep:]:
            older.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{path}: could not be written ({error.strerror or error}). Earlier checkpoints are intact: free space or "
            "choose a writable folder, then resume."
        ) from error
    return path


def restore(path: str | Path, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
    """State and meta of a checkpoint, after verifying its bytes and comparing its leaves with `like`.

    Args:
      path: a checkpoint file, usually `latest(directory)`.
      like: a state of this run, or its shapes and dtypes (`jax.eval_shape`); gives the tree structure.

    Returns: (state, meta): leaves are JAX arrays on the default device, or NumPy arrays where `like` has NumPy arrays,
      bit for bit those saved, dtypes and weak types included; meta has the round under "round".

    Raises: CheckpointError if a byte is wrong or absent, or if paths, shapes or dtypes differ, with the difference.

    Guarantees: what `save` wrote comes back bit for bit
    (tests/running/test_checkpoint.py::test_roundtrip_is_bit_exact); every flipped byte and every truncation is detected
    (test_every_flipped_byte_is_detected, test_every_truncation_is_detected); another structure is refused
    (test_another_structure_is_refused_with_a_diff).
    """
    path = Path(path)
    header, payload = _read(path)
    wanted = {name: _kind(name, leaf) for name, leaf in _leaves(like).items()}
    difference = _difference({entry["path"]: entry["kind"] for entry in header["leaves"]}, wanted)
    if difference:
        hint = "Resume with the configuration that wrote it, or start in a new folder."
        raise CheckpointError("\n  ".join([f"{path}: does not fit this run:", *difference, hint]))
    leaves, offset, targets = {}, 0, _leaves(like)
    for entry in header["leaves"]:
        raw = payload[offset : offset + entry["bytes"]]
        try:
            leaves[entry["path"]] = _restored(raw, entry, targets[entry["path"]])
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: leaf {entry['path']} is malformed ({error}).") from error
        offset += entry["bytes"]
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in wanted]), header["meta"]


def latest(
    directory: str | Path, *, allow_previous: bool = False, check: Callable[[Path, dict], None] | None = None
) -> Path | None:
    """The newest checkpoint of a folder, verified; None if there is none.

    Args:
      allow_previous: if the newest is damaged, fall back to the newest intact one, with a warning.
      check: (path, meta) -> None, raising CheckpointError where other files that the checkpoint needs are damaged.

    Raises: CheckpointError if the newest is damaged and falling back is not allowed, or if none is intact.

    Guarantees: a damaged checkpoint is never returned, and an older one only when asked for
    (tests/running/test_checkpoint.py::test_latest_falls_back_only_when_asked).
    """
    damaged: list[str] = []
    for path in _list(Path(directory)):
        try:
            header, _ = _read(path)
            if check is not None:
                check(path, header["meta"])
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        if damaged and not allow_previous:
            raise CheckpointError(
                f"{damaged[0]} The newest intact one is {path.name}: pass allow_previous=True to continue from it."
            )
        if damaged:
            warnings.warn(f"{' '.join(damaged)} Continuing from {path.name}.", RuntimeWarning, stacklevel=2)
        return path
    if damaged:
        raise CheckpointError(f"{damaged[0]} No earlier checkpoint in {directory} is intact: start a new run.")
    return None


def newest_meta(directory: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """Path and meta of the newest checkpoint whose header can be read; its leaves are not read, and not verified."""
    for path in _list(Path(directory)):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError, struct.error):
            with open(path, "rb") as file:
                _, _, length = PREFIX.unpack(file.read(PREFIX.size))
                header = json.loads(file.read(min(length, path.stat().st_size)))
            if header["schema"] == SCHEMA:
                return path, dict(header["meta"])
    return None


@contextlib.contextmanager
def lock(directory: str | Path) -> Iterator[None]:
    """Locks a run's folder while the block runs; the kernel releases it when the process ends, however it ends.

    Temporary files of a killed holder are removed.

    Raises: RunLocked at once if another process holds it; CheckpointError if the folder cannot be locked.

    Guarantees: two runs never write in one folder (tests/running/test_checkpoint.py::test_lock_excludes_a_second_run);
    no temporary file is left (::test_a_lock_cleans_up).
    """
    import fcntl  # POSIX only: everything else in this file works without it

    path = Path(directory) / ".lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), "rb+", buffering=0)
    except OSError as error:
        raise CheckpointError(f"{path}: could not be opened ({error.strerror or error}).") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = file.read(200).decode(errors="replace").strip() or "another process"
            hint = "Wait for that run to end, or choose another folder."
            raise RunLocked(f"{directory}: held by {holder}. {hint}") from error
        except OSError as error:
            raise CheckpointError(f"{path}: could not be locked ({error.strerror or error}).") from error
        with contextlib.suppress(OSError):  # the holder's name is for messages only: a full disk may refuse it
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        for leftover in path.parent.glob(".*.tmp"):
            if TEMPORARY.fullmatch(leftover.name):
                leftover.unlink(missing_ok=True)
        yield


def _round(path: Path) -> int:
    return int(NAME.fullmatch(path.name)[1])


def _list(directory: Path) -> list[Path]:
    """Checkpoints of a folder, newest first."""
    try:
        found = [path for path in directory.iterdir() if NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: could not be read ({error.strerror or error}).") from error
    return sorted(found, key=_round, reverse=True)


def _leaves(tree: PyTree) -> dict[str, Any]:
    """Leaves by path; None and empty nodes have none."""
    pairs = [(jax.tree_util.keystr(path) or "state", leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    if len(dict(pairs)) != len(pairs):
        fail("state", "leaves with different paths", [name for name, _ in pairs])
    return dict(pairs)


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _kind(name: str, leaf: Any) -> str:
    """Dtype and shape as text, e.g. `float32[2, 3]`."""
    if _is_key(leaf):
        return f"{leaf.dtype}{list(leaf.shape)}"
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    if not (jnp.issubdtype(dtype, np.number) or dtype == np.bool_):
        fail(f"state{name}", "an array or a number", leaf, error=TypeError)
    return f"{jax.dtypes.canonicalize_dtype(dtype).name}{list(np.shape(leaf))}"


def _to_host(name: str, leaf: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """A leaf as a NumPy array in the dtype JAX holds it, and its entry in the header."""
    entry: dict[str, Any] = {"kind": _kind(name, leaf)}
    if _is_key(leaf):
        entry["key"] = str(jax.random.key_impl(leaf))
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    held = array
    if array.dtype != (dtype := jax.dtypes.canonicalize_dtype(array.dtype)):
        with np.errstate(all="ignore"):
            held = array.astype(dtype)
            exact = type(leaf) in (float, complex) or np.array_equal(held.astype(array.dtype), array, equal_nan=True)
        if not exact:
            fail(f"state{name}", f"values that {dtype.name} holds exactly", leaf, f"JAX keeps no {array.dtype} here.")
    if getattr(leaf, "weak_type", False) or type(leaf) in (int, float, complex):
        entry["weak"] = True
    return held, {**entry, "bytes": held.nbytes}


def _restored(raw: np.ndarray, entry: dict[str, Any], target: Any) -> jax.Array | np.ndarray:
    """The leaf of a header's entry; its kind equals that of `target`, so shape and dtype are taken from there."""
    spec = jax.eval_shape(jax.random.key_data, target) if _is_key(target) else target
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(spec.dtype if hasattr(spec, "dtype") else np.asarray(spec).dtype))
    if raw.nbytes != math.prod(np.shape(spec)) * dtype.itemsize:
        raise ValueError(f"{raw.nbytes} bytes for {entry['kind']}")
    array = raw.copy().view(dtype).reshape(np.shape(spec))
    array = array.byteswap() if sys.byteorder == "big" else array
    if isinstance(target, np.ndarray):
        return array
    array = jnp.asarray(array)
    if _is_key(target):
        keys = jax.random.wrap_key_data(array, impl=str(entry.get("key")))
        if keys.dtype != target.dtype:
            raise ValueError(f"{keys.dtype} in place of {target.dtype}")
        return keys
    if entry.get("weak") and dtype.kind in "ifc":
        return jnp.full(array.shape, dtype.type(0).item()).at[...].set(array)  # keeps the weak type of a literal
    return array


def _encode(header: bytes, arrays: list[np.ndarray]) -> Iterator[bytes]:
    """The file's bytes, part by part, ending in the hash of all parts before."""
    total = PREFIX.size + len(header) + sum(array.nbytes for array in arrays) + DIGEST
    digest = hashlib.sha256()
    swap = sys.byteorder == "big"
    leaves = (np.ascontiguousarray(array.byteswap() if swap else array).reshape(-1).view(np.uint8) for array in arrays)
    for part in (PREFIX.pack(MAGIC, total, len(header)), header, *leaves):
        digest.update(part)
        yield part
    yield digest.digest()


def _read(path: Path) -> tuple[dict[str, Any], np.ndarray]:
    """Header and leaf bytes of a file whose length and hash are right."""
    try:
        data = memoryview(path.read_bytes())
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
        header = json.loads(bytes(body[:header_length]))
        schema = header["schema"]
        if schema == SCHEMA:
            sizes = [entry["bytes"] for entry in header["leaves"]]
            texts = [text for entry in header["leaves"] for text in (entry["path"], entry["kind"])]
            valid = all(type(size) is int and size >= 0 for size in sizes) and all(type(text) is str for text in texts)
            if not valid or sum(sizes) != len(body) - header_length or not isinstance(header["meta"], dict):
                raise ValueError("its parts do not add up")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: malformed header ({error}).") from error
    if schema != SCHEMA:
        raise CheckpointError(f"{path}: expected schema {SCHEMA}, got {schema!r}: written by another version.")
    return header, np.asarray(body[header_length:])


def _difference(found: dict[str, str], wanted: dict[str, str], most: int = 20) -> list[str]:
    """Lines that describe how a file's leaves differ from a run's; empty if they do not."""
    lines = [f"{name}: missing in the file, {kind} in this run" for name, kind in wanted.items() if name not in found]
    lines += [f"{name}: {kind} in the file, not in this run" for name, kind in found.items() if name not in wanted]
    both = [name for name in wanted if name in found and found[name] != wanted[name]]
    lines += [f"{name}: {found[name]} in the file, {wanted[name]} in this run" for name in both]
    return lines[:most] + ([f"... and {len(lines) - most} more"] if len(lines) > most else [])
