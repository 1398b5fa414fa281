"""Writes the undo journal of client memory on disk: old records, synced to the disk before they are overwritten.

A journal belongs to the version of a commit, and follows the journal of the commit before. It consists of a head and
batches of old records, each with its SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MAGIC = b"FEDJAXUN"
# magic, mark of the file, version, version and bytes of the journal before (-1: none)
HEAD = struct.Struct("<8s16sqqQ")
# version, 1 for the last batch of its version, rows, rows that are no holes
BATCH_HEADER = struct.Struct("<qqqQ")
DIGEST = hashlib.sha256().digest_size
START = HEAD.size + DIGEST


class MemoryFileError(RuntimeError):
    """Client memory on disk that cannot be written, read, trusted, or brought back to a checkpoint."""


class Batch(NamedTuple):
    """Old records that were appended together."""

    reached: int  # the version after the write; if more of its batches were to follow, the version before it
    ids: np.ndarray  # [k] int64
    records: np.ndarray  # [k, record bytes] uint8; zeros for holes
    end: int  # byte where the batch ends


class Journal:
    """The old records of the rows that were overwritten since a version, in the order of writing.

    Args:
      path: of the journal.
      file: its file descriptor.
      version: the version of the commit.
      before: (version, used bytes) of the journal before; (-1, 0) without one.
      record_bytes: the size of a record.
    """

    def __init__(self, path: Path, file: int, version: int, before: tuple[int, int], record_bytes: int):
        self.path = path
        self.file = file
        self.version = version
        self.before = before
        self.record_bytes = record_bytes
        self.reached, self.end = version, START  # the version after the last write; bytes that count

    @classmethod
    def create(cls, path: Path, mark: bytes, version: int, before: tuple[int, int], record_bytes: int) -> Journal:
        """Creates an empty journal, and syncs it and its directory entry.

        The arguments are the class's; `mark` identifies the run's file.
        """
        path.unlink(missing_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        head = HEAD.pack(MAGIC, mark, version, *before)
        write_at(file, head + hashlib.sha256(head).digest(), 0)
        os.fsync(file)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        return cls(path, file, version, before, record_bytes)

    @classmethod
    def open(cls, path: Path, mark: bytes, version: int, used: int, record_bytes: int) -> Journal:
        """Opens the journal of a version and checks every hash.

        Args:
          path, mark, version, record_bytes: as for `create`.
          used: the bytes that must be whole. Behind them are batches that were being written when the run stopped:
            whole batches count, and the first that is not whole ends the journal.

        Raises: MemoryFileError for a journal that is missing, damaged, too short, or of another run or version.
        """
        try:
            file = os.open(path, os.O_RDWR)
        except OSError as error:
            raise MemoryFileError(f"{path}: could not be opened ({error.strerror or error}).") from error
        size = os.fstat(file).st_size
        if size < max(START, used):
            raise MemoryFileError(f"{path}: expected {max(START, used):,} bytes or more, got {size:,}: truncated.")
        head = os.pread(file, START, 0)
        if hashlib.sha256(head[:-DIGEST]).digest() != head[-DIGEST:]:
            raise MemoryFileError(f"{path}: its SHA-256 does not match its bytes: damaged.")
        magic, stored_mark, stored_version, before_version, before_used = HEAD.unpack(head[:-DIGEST])
        if (magic, stored_mark, stored_version) != (MAGIC, mark, version):
            raise MemoryFileError(f"{path}: expected the journal of version {version} of this run, got another.")
        journal = cls(path, file, version, (before_version, before_used), record_bytes)
        for batch in journal.batches(size):
            journal.reached = batch.reached
            journal.end = batch.end
        if journal.end < used:
            raise MemoryFileError(f"{path}: its SHA-256 does not match its bytes: damaged.")
        return journal

    def append(self, version: int, last: bool, ids: np.ndarray, there: np.ndarray, records: np.ndarray) -> None:
        """Appends old records; if there is at least one, they are on the disk when this returns.

        Args:
          version: the version that the write starts from.
          last: whether this is the last batch of the write.
          ids: [k] int64, the clients.
          there: [k] bool, False for holes.
          records: [k, record bytes]; those of holes are not stored.
        """
        head = BATCH_HEADER.pack(version, last, len(ids), int(there.sum()))
        batch = b"".join([head, ids.tobytes(), there.astype(np.uint8).tobytes(), records[there].tobytes()])
        write_at(self.file, batch + hashlib.sha256(batch).digest(), self.end)
        if len(ids):
            self.sync()
        self.reached, self.end = version + last, self.end + len(batch) + DIGEST

    def batches(self, end: int | None = None) -> Iterator[Batch]:
        """Yields the batches up to a byte, or up to the first that is not whole.

        Args:
          end: a position in the file, in bytes; None: the end of the last whole batch.
        """
        place = START
        end = self.end if end is None else end
        while place + BATCH_HEADER.size <= end:
            version, last, count, num_stored = BATCH_HEADER.unpack(os.pread(self.file, BATCH_HEADER.size, place))
            # 8 bytes for each id, and 1 that tells whether its record is stored.
            body = BATCH_HEADER.size + 9 * count + num_stored * self.record_bytes
            if not 0 <= num_stored <= count or place + body + DIGEST > end:
                return
            data = read_at(self.file, body + DIGEST, place)
            if hashlib.sha256(data[:body]).digest() != data[body:]:
                return
            ids = np.frombuffer(data[BATCH_HEADER.size : BATCH_HEADER.size + 8 * count], "<i8")
            is_stored = (
                np.frombuffer(data[BATCH_HEADER.size + 8 * count : BATCH_HEADER.size + 9 * count], np.uint8) != 0
            )
            records = np.zeros((count, self.record_bytes), np.uint8)
            stored = np.frombuffer(data[BATCH_HEADER.size + 9 * count : body], np.uint8)
            records[is_stored] = stored.reshape(num_stored, self.record_bytes)
            place += body + DIGEST
            yield Batch(version + last, ids, records, place)

    def sync(self) -> None:
        """Returns when the journal's bytes and length are on the disk."""
        # Where the system has it, `fdatasync` leaves out the file's times.
        getattr(os, "fdatasync", os.fsync)(self.file)

    def close(self) -> None:
        """Closes the file."""
        os.close(self.file)


def read_at(file: int, count: int, place: int) -> memoryview:
    """Reads `count` bytes from byte `place` on; fewer at the file's end."""
    data = memoryview(bytearray(count))
    done = 0
    # The system may read fewer bytes than it is asked for.
    while done < count and (num_read := os.preadv(file, [data[done:]], place + done)):
        done += num_read
    return data[:done]


def write_at(file: int, data: Any, place: int) -> None:
    """Writes all of `data` at byte `place`; raises OSError when the disk is full, after a short write too."""
    view = memoryview(data).cast("B")
    while view:
        num_written = os.pwrite(file, view, place)
        view = view[num_written:]
        place = place + num_written
