"""Reads and writes files of compiled programs, in a folder that only the user can write to.

What lies there is run, so a file is read only if it is the user's own and as it was written.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from fedjax_sim.running.checkpoint_format import SCHEMA, encoded, read_file, to_host
from fedjax_sim.running.environment import private_folder
from fedjax_sim.running.files import CheckpointError, write_atomically

MOST_BYTES = 1 << 30  # of all files together


def folder() -> Path | None:
    """Returns the folder of compiled programs; None if the user turned it off, or it is not the user's alone.

    Guarantees: nothing is written to a folder that others may write to, or read from it
    (tests/running/test_program_files.py::test_a_shared_folder_is_not_used).
    """
    return None if os.environ.get("FEDJAX_SIM_CACHE") == "off" else private_folder("executables")


def read_program(name: str) -> tuple[dict, list[np.ndarray]] | None:
    """Returns (meta, arrays) of a file; None if there is none that may be used.

    A file that is damaged, that was written under another name, or that others own or may write to, is not used. It
    stays, so that whoever compiles the program sees that it is to be written again. Reading runs no code.

    Args:
      name: of the file, in the folder of programs.

    Guarantees: every changed byte is found, and so are every other length and every other name
    (tests/running/test_program_files.py::test_damage, ::test_files_of_others, ::test_a_file_has_its_name).
    """
    if (place := folder()) is None:
        return None
    path = place / name
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise CheckpointError(f"{path}: others may have written it.")
        header, content = read_file(path)
        if header["name"] != name:
            raise CheckpointError(f"{path}: it was written as {header['name']}.")
        arrays, start = [], 0
        for entry in header["leaves"]:
            end = start + entry["bytes"]
            arrays.append(content[start:end].copy().view(jnp.dtype(entry["dtype"])).reshape(entry["shape"]))
            start = end
        with contextlib.suppress(OSError):  # a file system may be read-only
            os.utime(path)  # so that what is read goes last when room is made
        return header["meta"], arrays
    except (CheckpointError, OSError, LookupError, TypeError, ValueError):
        return None


def write_program(name: str, meta: dict, arrays: list[np.ndarray]) -> bool:
    """Writes a file whole or not at all, and makes room for it; returns whether it was written.

    Args:
      name: of the file.
      meta: JSON-able values.
      arrays: of numbers.

    Guarantees: of two processes that write a file at once, one's file is there, whole
    (tests/running/test_program_files.py::test_two_write_at_once).
    """
    if (place := folder()) is None:
        return False
    entries = [
        {"path": str(i), **to_host(str(i), x)[1], "dtype": x.dtype.name, "shape": x.shape} for i, x in enumerate(arrays)
    ]
    header = json.dumps({"schema": SCHEMA, "name": name, "leaves": entries, "meta": meta}).encode()
    try:
        path = write_atomically(place / name, encoded(header, arrays))
        path.chmod(0o600)  # whatever others may do with files that the user makes
        make_room(MOST_BYTES)
    except OSError:
        return False
    return True


def make_room(most_bytes: int) -> None:
    """Removes the files that were read longest ago, until the others take at most `most_bytes`.

    Args:
      most_bytes: of all files together, at least 0.

    Guarantees: what was read last stays (tests/running/test_program_files.py::test_the_oldest_go_first).
    """
    if (place := folder()) is None:
        return
    files = []
    for path in place.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process makes room, too
            status = path.lstat()
            files.append((status.st_mtime_ns, status.st_size, path))
    excess = sum(size for _, size, _ in files) - most_bytes
    for _, size, path in sorted(files):
        if excess <= 0:
            break
        path.unlink(missing_ok=True)
        excess -= size
