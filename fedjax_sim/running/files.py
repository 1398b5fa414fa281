"""Writes a run's files atomically, and locks its folder. Imports no JAX."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from fedjax_sim.text.printable import printable

TEMPORARY = re.compile(r"\..+\.\d+\.tmp")  # names of the temporary files of `write_atomically`


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, is damaged, or does not belong to this run."""

    def __str__(self) -> str:
        return printable(super().__str__())


class RunLocked(RuntimeError):
    """Another process is writing to this run's folder."""


def write_atomically(path: str | Path, parts: Iterable[bytes | memoryview]) -> Path:
    """Writes a temporary file, syncs it, renames it over `path`, and syncs the folder.

    Args:
      path: of the file, new or old.
      parts: its new bytes, one part after the other.

    Raises: OSError, with `path` as its file.

    Guarantees: killed at any moment, `path` holds its old bytes or all of its new ones
    (tests/running/test_checkpoint.py::test_killed_between_any_two_system_calls).
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb", buffering=0) as file:
            for part in parts:
                view = memoryview(part).cast("B")
                # The system may write fewer bytes than it is given.
                while view:
                    view = view[os.write(file.fileno(), view) :]
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        error.filename = str(path)  # a full disk has no name of a file, and the temporary one says nothing
        error.filename2 = None
        raise
    # The rename is on disk only when the folder is.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return path


@contextlib.contextmanager
def lock(directory: str | Path) -> Iterator[None]:
    """Locks a run's folder while the block runs; the kernel releases the lock when the process ends, however it ends.

    Temporary files of a killed holder are removed.

    Args:
      directory: the run's folder, which is made if it is missing.

    Raises: RunLocked at once if another process holds the lock; CheckpointError if the folder cannot be locked.

    Guarantees:
      Two runs never write in one folder (tests/running/test_checkpoint.py::test_lock_excludes_a_second_run).
      No temporary file is left (tests/running/test_checkpoint.py::test_a_lock_cleans_up).
    """
    import fcntl  # exists on POSIX only; everything else in this file works without it

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
        # The holder's name is for messages only, so a full disk may refuse it.
        with contextlib.suppress(OSError):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        for leftover in path.parent.glob(".*.tmp"):
            if TEMPORARY.fullmatch(leftover.name):
                leftover.unlink(missing_ok=True)
        yield
