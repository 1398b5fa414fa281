"""This module writes and reads the native store, a folder that holds a population. Loading a store runs no code.

The folder has one `.npy` file per leaf, `offsets.npy` and `manifest.json`. The manifest declares names, shapes, dtypes,
sizes and SHA-256 sums. A file is checked against the manifest before it is mapped. The sum is checked only if the whole
file is read into memory, or on request. A store is written to a temporary folder, which is renamed once all of it is on
the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import pathlib
import re
import secrets
import shutil
from typing import BinaryIO, NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim import validate
from fedjax_sim.files.regular_files import content_of, json_of, opened
from fedjax_sim.population.arrays import checked_examples, checked_offsets
from fedjax_sim.population.population import Stored, stored
from fedjax_sim.types import PyTree

SCHEMA = 1
LEAF_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # of a leaf, which is also the name of its file
LARGEST_MANIFEST = 1 << 20  # bytes


class Mapped(NamedTuple):
    """A `Mapped` is one array of a store, mapped read-only."""

    array: np.ndarray
    map: mmap.mmap
    start: int  # where the data begin in the file, in bytes


class CheckedStore(NamedTuple):
    """A `CheckedStore` is a store whose declarations have been checked against its files."""

    directory: pathlib.Path
    digest: str  # SHA-256 of the manifest, which holds the sums of the files
    leaves: dict[str, Mapped]  # [total, ...]
    offsets: np.ndarray  # [N + 1] int64


def _check_name(name) -> None:
    """Refuses a leaf name that is not a plain file name, so that no manifest can point outside of its folder."""
    if not (isinstance(name, str) and LEAF_NAME.fullmatch(name)) or name == "offsets":
        hint = "Name leaves like {'x': ..., 'y': ...}; 'offsets' is taken."
        validate.fail("leaf name", "letters, digits, '_' and '-'", name, hint)


def _digest(path: pathlib.Path) -> str:
    """Returns the SHA-256 sum of a file."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: pathlib.Path) -> None:
    """Waits until a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_store(directory: str | os.PathLike, examples: dict[str, PyTree], offsets: ArrayLike) -> None:
    """Writes a population to a folder. The population may be larger than memory, since leaves may be memory maps.

    Args:
      directory: the folder to make. It must not exist.
      examples: dict from a plain name to an array [total, ...].
      offsets: [N + 1] integers, as in `stored`.
    Raises: FileExistsError for an existing folder; ValueError and TypeError as `stored`.
    Guarantees: the folder appears complete or not at all
    (tests/population/test_native_store.py::test_a_failed_write_leaves_nothing).

    >>> import numpy as np, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_store(pathlib.Path(folder) / "toy", {"y": np.array([3, 4])}, [0, 1, 2])
    ...     read_store(pathlib.Path(folder) / "toy").size
    2
    """
    directory = pathlib.Path(directory).absolute()
    if os.path.lexists(directory):
        validate.fail("directory", "a folder that does not exist", str(directory), "", FileExistsError)
    if not isinstance(examples, dict) or any(isinstance(x, (dict, list, tuple)) for x in examples.values()):
        validate.fail("examples", "a flat dict of arrays", type(examples).__name__, "Like {'x': x}.", TypeError)
    for name in examples:
        _check_name(name)
    examples, total = checked_examples("examples", examples)
    # The kind "V" marks bfloat16 and the like, which NumPy would write as raw bytes without their type.
    if any(x.dtype.kind == "V" for x in examples.values()):
        validate.fail("examples", "dtypes that .npy can hold", "an extension type", "Use float16 or float32.")
    arrays = {**examples, "offsets": checked_offsets("offsets", offsets, total)}
    directory.parent.mkdir(parents=True, exist_ok=True)
    # The temporary folder lies beside the final one, on the same file system, so that renaming it is atomic.
    temporary = directory.parent / f".{directory.name}.{secrets.token_hex(8)}.partial"
    temporary.mkdir()
    try:
        files = {}
        for name, array in arrays.items():
            path = temporary / f"{name}.npy"
            with path.open("xb") as file:
                np.save(file, np.ascontiguousarray(array), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            facts = {"shape": list(array.shape), "dtype": array.dtype.name, "bytes": path.stat().st_size}
            files[name] = {**facts, "sha256": _digest(path)}
        manifest = temporary / "manifest.json"
        manifest.write_text(json.dumps({"schema": SCHEMA, "files": files}, indent=1))
        # Everything must be on the disk before the new name is, or a crash could leave a store without its data.
        _sync(manifest)
        _sync(temporary)
        os.rename(temporary, directory)
    except BaseException:  # an interrupt too must leave no temporary folder
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary)
        raise
    _sync(directory.parent)


def _manifest(directory: pathlib.Path) -> tuple[dict, str]:
    """Reads the manifest and checks the type and range of every value in it.

    Args:
      directory: the store. Its manifest has at most `LARGEST_MANIFEST` bytes.

    Returns: name of each file without ".npy" -> its declared "shape" (1 to 32 counts), "dtype" (a bool, integer or
      float type), "bytes" (of the file) and "sha256"; and the SHA-256 sum of the manifest itself, as hexadecimal text.

    Raises: ValueError that names the entry.
    """
    path = directory / "manifest.json"
    if not path.is_file() or path.stat().st_size > LARGEST_MANIFEST:
        validate.fail(str(path), f"a manifest of at most {LARGEST_MANIFEST} bytes", "none", "Use write_store.")
    text = content_of(path, LARGEST_MANIFEST)
    try:
        manifest = json_of(text)
    except ValueError:
        validate.fail(str(path), "JSON", text[:40])
    if not isinstance(manifest, dict) or set(manifest) != {"schema", "files"} or manifest["schema"] != SCHEMA:
        validate.fail(str(path), f"schema {SCHEMA} with 'schema' and 'files'", manifest, "From another version?")
    files = manifest["files"]
    if not isinstance(files, dict) or "offsets" not in files or len(files) < 2:
        validate.fail(f"{path}: files", "'offsets' and a leaf at least", files)
    for name, facts in files.items():
        if name != "offsets":
            _check_name(name)
        if not isinstance(facts, dict) or set(facts) != {"shape", "dtype", "bytes", "sha256"}:
            validate.fail(f"{path}: {name}", "shape, dtype, bytes and sha256", facts)
        shape = facts["shape"]
        # `type(n) is int` rather than isinstance, because JSON's true and false would pass as integers.
        if (
            not isinstance(shape, list)
            or not shape
            or not all(type(n) is int and n >= 0 for n in shape)
            or len(shape) > 32
        ):
            validate.fail(f"{path}: {name}.shape", "a list of 1 to 32 counts", shape)
        if type(facts["bytes"]) is not int or not isinstance(facts["sha256"], str):
            validate.fail(f"{path}: {name}", "an integer size and a hexadecimal sum", facts)
        if not re.fullmatch(r"bool|u?int(8|16|32|64)|float(16|32|64)", str(facts["dtype"])):
            validate.fail(f"{path}: {name}.dtype", "a bool, integer or float type", facts["dtype"])
        dtype = np.dtype(facts["dtype"])
        if name != "offsets" and jax.dtypes.canonicalize_dtype(dtype) != dtype:
            validate.fail(f"{path}: {name}.dtype", "at most 32 bits", dtype.name, "Enable jax_enable_x64.")
    return files, hashlib.sha256(text).hexdigest()


def array_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Reads the header of an array in NumPy's format.

    Args:
      file: opened for bytes; it is read up to the header's end.

    Returns: its shape, whether it is in Fortran's order, and its dtype.

    Raises: ValueError for another format, a later version than 2, and a dtype of objects.
    """
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        shape, is_fortran, dtype = readers[np.lib.format.read_magic(file)](file)
    except (KeyError, SyntaxError, TypeError, RecursionError, MemoryError, EOFError) as error:
        raise ValueError(f"no header of an array ({error})") from error
    if dtype.hasobject:
        raise ValueError("objects, which code would have to make")
    return shape, is_fortran, dtype


def _map(path: pathlib.Path, shape: list[int], dtype: str, num_bytes: int) -> Mapped:
    """Maps one `.npy` file, after its size and its header have been checked against the manifest.

    Args:
      path: of the file, which is no link.
      shape, dtype: of the array, as the manifest declares them.
      num_bytes: of the whole file with its header, as the manifest declares them.

    Raises: ValueError for a file that is missing, of another size, in another order than C's, or of another array.
    """
    if path.is_symlink() or not path.is_file():
        validate.fail(str(path), "a regular file", "none", "The store is incomplete: copy it again.")
    expected_dtype = np.dtype(dtype)
    data_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    file_bytes = path.stat().st_size
    if file_bytes != num_bytes or data_bytes >= file_bytes:
        rule = f"a file of {num_bytes} bytes that holds {dtype}{shape}"
        validate.fail(str(path), rule, f"{file_bytes} bytes", "Truncated, or another store's file.")
    with opened(path) as file:
        # The header is read here rather than by np.load, which could unpickle objects from a foreign file.
        try:
            header = array_header(file)
        except ValueError:
            validate.fail(str(path), "a .npy file of version 1 or 2", "another header", "Use write_store.")
        if header != (tuple(shape), False, expected_dtype) or expected_dtype.hasobject:
            validate.fail(str(path), f"a header that says {dtype}{shape} in C order", header, "Mixed stores?")
        start = file.tell()
        if start + data_bytes != file_bytes:
            validate.fail(str(path), f"{start + data_bytes} bytes", f"{file_bytes} bytes", "Truncated or padded.")
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return Mapped(np.ndarray(tuple(shape), expected_dtype, memory, start), memory, start)


def open_store(directory: str | os.PathLike, *, verify: bool) -> CheckedStore:
    """Checks and maps a store. With `verify` it also reads every byte and compares the SHA-256 sums.

    Args:
      directory: written by `write_store`.
      verify: True compares all sums; False compares that of the offsets alone.
    """
    directory = pathlib.Path(directory).absolute()
    if not directory.is_dir():
        validate.fail("directory", "a folder written by write_store", str(directory))
    files, digest = _manifest(directory)
    mapped = {}
    for name, facts in files.items():
        path = directory / f"{name}.npy"
        mapped[name] = _map(path, facts["shape"], facts["dtype"], facts["bytes"])
        # Offsets are read into memory anyway, so their sum is always checked.
        if (verify or name == "offsets") and _digest(path) != facts["sha256"]:
            validate.fail(str(path), f"SHA-256 {facts['sha256'][:16]}", "another", "The file was changed or damaged.")
    offsets = mapped.pop("offsets").array
    lengths = {name: len(leaf.array) for name, leaf in mapped.items()}
    if len(set(lengths.values())) != 1:
        validate.fail(str(directory), "leaves of one length", lengths)
    offsets = checked_offsets(str(directory / "offsets.npy"), offsets, next(iter(lengths.values())))
    return CheckedStore(directory, digest, mapped, offsets)


def read_store(directory: str | os.PathLike) -> Stored:
    """Reads a native store into memory and verifies every byte.

    Args:
      directory: a folder written by `write_store`.
    Raises: ValueError for a truncated, changed, foreign or missing file, and for names that are paths.
    Guarantees: no broken store loads (tests/population/test_native_store.py::test_broken_stores_are_refused).
    """
    opened = open_store(directory, verify=True)
    return stored({name: leaf.array for name, leaf in opened.leaves.items()}, opened.offsets)
