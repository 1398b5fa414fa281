"""Detects damage and edits of a run's files by checksums: SHA-256 of logs that grow, and of files that are replaced.

A log's checksum is in every checkpoint, with the number of bytes that it covers. The other files are listed in
`SHA256SUMS`, in the format of `sha256sum`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedjax_sim.files.regular_files import content_of, opened
from fedjax_sim.running.files import CheckpointError, write_atomically

SUMS = "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64})  ([\w.-]+)")
PIECE_BYTES = 1 << 20


class GrowingFile:
    """A log that a run appends to, and that no other process may change.

    Its checksum is of the bytes that were passed to `append`, not of bytes read back from the disk. So errors of the
    disk are detected.

    Guarantees: a file that vanished or was changed by another process is an error, and is never started anew
    (tests/running/test_checksums.py::test_a_file_that_vanished_is_not_begun_anew).
    """

    def __init__(self, path: Path):
        self.path = path
        self.bytes = 0
        self._sha = hashlib.sha256()

    def create(self) -> None:
        """Creates the empty file."""
        self.path.touch()

    def append(self, data: bytes) -> None:
        """Adds bytes to the end."""
        file = self._open(os.O_WRONLY | os.O_APPEND)
        try:
            view = memoryview(data)
            # The system may write fewer bytes than it is given.
            while view:
                view = view[os.write(file, view) :]
        finally:
            os.close(file)
        self.bytes += len(data)
        self._sha.update(data)

    def mark(self) -> dict[str, Any]:
        """Returns {"bytes", "sha256"} of the content, for a checkpoint's meta; the content is then on disk."""
        file = self._open(os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
        return {"bytes": self.bytes, "sha256": self._sha.hexdigest()}

    def check_there(self) -> None:
        """Raises CheckpointError unless the file has the length that this run has written."""
        os.close(self._open(os.O_RDONLY))

    def matches(self, mark: dict[str, Any]) -> bool:
        """Returns whether the file begins with the bytes of a mark."""
        return self._sha256_of_first(mark["bytes"]).hexdigest() == mark["sha256"]

    def go_back(self, mark: dict[str, Any]) -> None:
        """Truncates the file to a mark that `matches`, and continues from there."""
        self.bytes, self._sha = mark["bytes"], self._sha256_of_first(mark["bytes"])
        os.truncate(self.path, self.bytes)

    def _sha256_of_first(self, count: int) -> Any:
        """Returns the hash of the first `count` bytes; of fewer bytes where the file is shorter."""
        sha = hashlib.sha256()
        try:
            with opened(self.path) as file:
                while count and (piece := file.read(min(count, PIECE_BYTES))):
                    sha.update(piece)
                    count -= len(piece)
        except FileNotFoundError:
            # A missing file counts as empty, so that no mark of a byte or more matches.
            pass
        return sha

    def _open(self, flags: int) -> int:
        """Opens the file; raises CheckpointError if it is missing, or has another length than this run wrote.

        Args:
          flags: of `os.open`, such as `os.O_RDONLY`. None of them creates the file.

        Returns: the number of the open file, which the caller closes.
        """
        try:
            file = os.open(self.path, flags)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: could not be opened while the run was writing to it ({error.strerror or error}). Was "
                "its folder deleted or moved? The run has stopped; start it again in a new folder."
            ) from error
        if (size := os.fstat(file).st_size) != self.bytes:
            os.close(file)
            raise CheckpointError(
                f"{self.path}: expected the {self.bytes:,} bytes that this run wrote, got {size:,}. Something else "
                "writes to it, or the folder was replaced: stop that, then resume from the last checkpoint."
            )
        return file


def write(path: str | Path, data: bytes) -> Path:
    """Writes a file of a run's folder atomically; its checksum is listed first.

    Args:
      path: of the file, whose folder holds the list.
      data: the whole new content.

    Returns: the path.

    Guarantees: killed at any moment, the list fits the file, old or new
    (tests/running/test_checksums.py::test_killed_while_writing).
    """
    path = Path(path)
    listed = _read_list(path.parent)
    # Until the file is replaced the list holds both checksums, so that it fits the file whenever the process is killed.
    # The checksum of a file that was changed from outside is not added: it stays an error until it is replaced.
    digests_now = [_sha256_of_file(path)] if path.is_file() else []
    listed[path.name] = [digest for digest in listed.get(path.name, []) if digest in digests_now] + [_sha256_of(data)]
    _write_list(path.parent, listed)
    write_atomically(path, [data])
    listed[path.name] = [_sha256_of(data)]
    _write_list(path.parent, listed)
    return path


def remove(folder: str | Path, names: Iterable[str]) -> None:
    """Removes files from a run's folder and from its list; missing files are ignored.

    Guarantees: killed at any moment, the list fits the files that remain
    (tests/running/test_checksums.py::test_killed_while_writing).
    """
    folder = Path(folder)
    removed = set(names)
    # The files go first: a name in the list without a file is allowed, a file without its checksum is not.
    for name in removed:
        (folder / name).unlink(missing_ok=True)
    listed = _read_list(folder)
    if removed & listed.keys():
        _write_list(folder, {name: digests for name, digests in listed.items() if name not in removed})


def is_listed(path: Path) -> bool:
    """Returns whether the run wrote this file, even if the file is gone now."""
    return path.name in _read_list(path.parent)


def check_files(folder: str | Path, names: Iterable[str], *, needed: bool = False) -> None:
    """Raises CheckpointError for a file that is not as `write` left it.

    Args:
      folder, names: the folder, and the names of the files in it.
      needed: whether a file that is missing, or has no checksum in the list, is an error too. If False, a folder
        without a list has nothing to check, and files may be missing.

    Guarantees: every flipped, cut or deleted byte is found
    (tests/running/test_checksums.py::test_every_changed_byte_is_found).
    """
    folder = Path(folder)
    if not needed and not (folder / SUMS).exists():
        return
    listed = _read_list(folder)
    for name in names:
        path = folder / name
        if needed and not (path.is_file() and name in listed):
            missing = f"{name} in {SUMS}" if path.is_file() else "the file that the run wrote"
            raise CheckpointError(f"{path}: expected {missing}, got none: deleted. Put it back from a copy.")
        if path.is_file() and _sha256_of_file(path) not in listed.get(name, []):
            raise CheckpointError(
                f"{path}: expected the file that the run wrote, got one with another SHA-256: damaged or edited. Put "
                f"it back from a copy; if the change is meant, write its new SHA-256 into {folder / SUMS}."
            )


def _write_list(folder: Path, listed: dict[str, list[str]]) -> None:
    """Writes the list of checksums by file name."""
    lines = [f"{digest}  {name}\n" for name, digests in listed.items() for digest in dict.fromkeys(digests)]
    write_atomically(folder / SUMS, ["".join(lines).encode()])


def _sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sha256_of_file(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_list(folder: Path) -> dict[str, list[str]]:
    """Reads the list of a folder's checksums.

    Args:
      folder: the run's folder.

    Returns: by file name its SHA-256, each of 64 hex digits, in the order of the list. A file has two where its write
      was interrupted. The result is {} for a folder without a list.

    Raises: CheckpointError for a line that is no checksum with a name.
    """
    try:
        lines = content_of(folder / SUMS).decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    listed: dict[str, list[str]] = {}
    for line in lines:
        match = LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(
                f"{folder / SUMS}: expected lines of a SHA-256 and a name, got {line[:80]!r}: damaged. Check the "
                "folder's files by other means, then write the list again: sha256sum NAMES > SHA256SUMS."
            )
        listed.setdefault(match[2], []).append(match[1])
    return listed
