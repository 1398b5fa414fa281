"""The undo journal of client memory on disk: old records, written and synced before they are overwritten.

A journal belongs to a version, that of a commit, and follows the journal of the commit before. It is a head and batches
of old records, each with its SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Journal", "MemoryFileError", "read_at", "write_at"]

MAGIC = b"FEDJAXUN"
HEAD = struct.Struct("<8s16sqqQ")  # magic, mark, version, version and bytes of the journal before (-1: none)
BATCH = struct.Struct("<qqqQ")  # version, 1 where it is the last of its version, rows, rows that are no holes
DIGEST = hashlib.sha256().digest_size
START = HEAD.size + DIGEST


class MemoryFileError(RuntimeError):
    """Client memory on disk that cannot be written, read, trusted, or brought back to a checkpoint."""


class Batch(NamedTuple):
    """Old records that were appended at once."""

    reached: int  # the version after the write; the one before it where more of its batches were to follow
    ids: np.ndarray  # [k] int64
    records: np.ndarray  # [k, record bytes] uint8; zeros for holes
    end: int  # byte where it ends


class Journal:
    """The old records of the rows that were overwritten since a version, in the order of writing."""

    def __init__(self, path: Path, file: int, version: int, before: tuple[int, int], record_bytes: int):
        self.path = path
        self.file = file
        self.version = version
        self.before = before
        self.record_bytes = record_bytes
        self.reached, self.end = version, START  # the version after the last write; bytes that count

    @classmethod
    def create(cls, path: Path, mark: bytes, version: int, before: tuple[int, int], record_bytes: int) -> Journal:
        """An empty journal, synced with its directory entry; `before` is (version, bytes) of the one before."""
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

        The first `used` bytes must be whole. Behind them are batches that were being written when the run stopped:
        whole ones count, and the first that is not ends the journal.
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
        magic, found, named, *before = HEAD.unpack(head[:-DIGEST])
        if (magic, found, named) != (MAGIC, mark, version):
            raise MemoryFileError(f"{path}: expected the journal of version {version} of this run, got another.")
        journal = cls(path, file, version, tuple(before), record_bytes)
        for batch in journal.batches(size):
            journal.reached = batch.reached
            journal.end = batch.end
        if journal.end < used:
            raise MemoryFileError(f"{path}: its SHA-256 does not match its bytes: damaged.")
        return journal

    def append(self, version: int, last: bool, ids: np.ndarray, there: np.ndarray, records: np.ndarray) -> None:
        """Appends the old records [k, ...] of `ids`, holes except where `there`; if k > 0, synced when it returns.

        `version` is the one that the write starts from, `last` whether this is the write's last batch.
        """
        head = BATCH.pack(version, last, len(ids), int(there.sum()))
        parts = [head, ids.tobytes(), there.astype(np.uint8).tobytes(), records[there].tobytes()]
        batch = b"".join(parts)
        write_at(self.file, batch + hashlib.sha256(batch).digest(), self.end)
        if len(ids):
            self.sync()
        self.reached, self.end = version + last, self.end + len(batch) + DIGEST

    def batches(self, end: int | None = None) -> Iterator[Batch]:
        """The batches up to a byte, or up to the first that is not whole."""
        place = START
        end = self.end if end is None else end
        while place + BATCH.size <= end:
            version, last, count, there = BATCH.unpack(os.pread(self.file, BATCH.size, place))
            body = BATCH.size + 9 * count + there * self.record_bytes
            if not 0 <= there <= count or place + body + DIGEST > end:
                return
            data = read_at(self.file, body + DIGEST, place)
            if hashlib.sha256(data[:body]).digest() != data[body:]:
                return
            ids = np.frombuffer(data[BATCH.size : BATCH.size + 8 * count], "<i8")
            holds = np.frombuffer(data[BATCH.size + 8 * count : BATCH.size + 9 * count], np.uint8) != 0
            records = np.zeros((count, self.record_bytes), np.uint8)
            old = np.frombuffer(data[BATCH.size + 9 * count : body], np.uint8)
            records[holds] = old.reshape(there, self.record_bytes)
            place += body + DIGEST
            yield Batch(version + last, ids, records, place)

    def sync(self) -> None:
        """Returns when the journal's bytes and length are on the disk."""
        getattr(os, "fdatasync", os.fsync)(self.file)

    def close(self) -> None:
        """Closes the file."""
        os.close(self.file)


def read_at(file: int, count: int, place: int) -> memoryview:
    """`count` bytes, or fewer at the file's end."""
    data = memoryview(bytearray(count))
    done = 0
    while done < count and (got := os.preadv(file, [data[done:]], place + done)):
        done += got
    return data[:done]


def write_at(file: int, data: Any, place: int) -> None:
    """Writes all of `data` at byte `place`; raises OSError when the disk is full, after a short write too."""
    view = memoryview(data).cast("B")
    while view:
        done = os.pwrite(file, view, place)
        view = view[done:]
        place = place + done
