"""Per-client memory in a sparse file: only a cohort's rows move, and any commit can be gone back to.

`NAME.mem` holds a head and then one record for each client: the bytes of its state, exclusive-or'ed with the initial
state, and a checksum that is never zero. A client never written is a hole, which reads as the initial state and takes
no disk; a bit for each client, kept in every checkpoint, says who was written, for a disk that loses a record leaves
zeros too. Rows are read and written by position instead of through a mapping: mapped pages count as memory of the
process, and a full disk would kill it where a write is refused with an error.

Before a row is overwritten for the first time since a commit, its old record goes into the undo journal
`NAME.mem.undo_VERSION` of that commit (`engine/journal.py`). Going back to a commit restores the records of its journal
and of all later ones. A version counts the writes (`put`) since the run began, one a round.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import struct
import threading
import zlib
from pathlib import Path

import jax
import numpy as np

from fedjax_sim.engine.journal import Journal, MemoryFileError, read_at, write_at
from fedjax_sim.types import PyTree

__all__ = ["MemoryFile", "MemoryFileError"]

MAGIC = b"FEDJAXMM"
SCHEMA = 1
HEAD = struct.Struct("<8sQQQ16s32sL")  # magic, schema, clients, record bytes, mark, layout digest, CRC of those
PLACE, PLACE_AT = struct.Struct("<QQL"), 512  # newest journal's version, its bytes, CRC; a sector is written whole
START = 4096  # where the records begin
WRITTEN = 1 << 32  # in a record's checksum, which is zero in a hole
PIECE_BYTES = 1 << 24  # rows handled at once


class MemoryFile:
    """The rows of `num_clients` clients who all start from `client_state`; opened by its first use or by `resume`.

    Guarantees: a row never written reads as the initial state and takes no disk
    (tests/engine/test_disk.py::test_rows_come_back_and_holes_take_no_disk); from any moment it goes back to any commit
    that its journals reach (::test_killed_between_any_two_system_calls); a flipped or missing byte of a row or journal
    is found when it is read (::test_damage_is_found), and so is a record that was lost or put back to zeros
    (::test_a_lost_record_is_no_hole).
    """

    _rows: int | None = None  # file descriptor
    _journal: Journal | None = None

    def __init__(self, path: str | Path, client_state: PyTree, num_clients: int):
        self.path, self.num_clients = Path(path), num_clients
        leaves, self.structure = jax.tree.flatten(client_state)
        leaves = [np.ascontiguousarray(x).reshape(np.shape(x)) for x in leaves]
        self.specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        self.initial = np.concatenate([x.reshape(-1).view(np.uint8) for x in leaves])
        self.row_bytes = len(self.initial)
        self.record_bytes = -(-self.row_bytes // 8) * 8 + 8
        kinds = json.dumps([[str(x.dtype), list(x.shape)] for x in leaves]).encode()
        self.layout = hashlib.sha256(kinds + self.initial.tobytes()).digest()
        self.version, self.mark = 0, b""
        self._forget()
        self.written = np.zeros_like(self._kept)  # a bit for each client that is no hole
        self._arrived = 0  # devices that have written their share of the next version
        self._lock = threading.RLock()
        self._failure: Exception | None = None

    # What a round does, called from compiled code by every device for its share of the cohort.

    def read(self, version: int, ids: np.ndarray, leaves: list[np.ndarray]) -> None:
        """Fills `leaves` [k, ...] with the rows of clients `ids`; an id outside [0, N) gives the initial state."""
        with self._lock:
            self._at(version)
        for leaf, part in zip(leaves, self._leaves(self.initial[None]), strict=True):
            leaf[...] = part
        known = np.flatnonzero((ids >= 0) & (ids < self.num_clients))
        step = max(1, PIECE_BYTES // self.record_bytes)
        for begin in range(0, len(known), step):
            here = known[begin : begin + step]
            rows = self._records(ids[here])[:, : self.row_bytes]
            rows ^= self.initial
            for leaf, part in zip(leaves, self._leaves(rows), strict=True):
                leaf[here] = part

    def write(self, version: int, ids: np.ndarray, leaves: list[np.ndarray], shares: int = 1) -> None:
        """Writes the rows of clients `ids` (distinct) and, with the last of `shares` calls, ends the version."""
        with self._lock:
            self._at(version)
            step = max(1, PIECE_BYTES // self.record_bytes)
            for begin in range(0, max(len(ids), 1), step):
                piece = slice(begin, begin + step)
                last = begin + step >= len(ids) and self._arrived + 1 == shares
                self._journal_old(version, last, ids[piece].astype(np.int64))
                self._write_records(ids[piece], self._as_records(ids[piece], [leaf[piece] for leaf in leaves]))
                _set(self.written, ids[piece])
            self._arrived += 1
            if self._arrived == shares:
                self._arrived, self.version = 0, version + 1

    def fail(self, error: Exception) -> None:
        """Keeps the first error of a device: raised there, it would leave the others waiting in a collective."""
        self._failure = self._failure or error

    @property
    def failed(self) -> bool:
        """Whether a device met an error; nothing is written from then on."""
        return self._failure is not None

    def check(self) -> None:
        """Raises what a device met."""
        if self._failure is not None:
            raise self._failure

    # What a run does around its rounds.

    def create(self) -> None:
        """A fresh file, every client at the initial state; one that is there is dropped with its journals."""
        for path in [self.path, *self._journals().values()]:
            path.unlink(missing_ok=True)
        self._open(create=True)

    def sync(self, version: int) -> None:
        """Every row on disk; before a checkpoint of `version` is written."""
        self._at(version)
        try:
            there = os.path.samestat(os.stat(self.path), os.fstat(self._rows))
        except FileNotFoundError:
            there = False
        if not there:
            raise MemoryFileError(f"{self.path}: deleted or replaced during the run; its rows cannot be resumed.")
        self._journal.sync()  # batches without a record are not, until here
        os.fsync(self._rows)

    def advance(self, keep: int) -> None:
        """Starts the journal of the present version, once its checkpoint is on disk; keeps the newest `keep`."""
        with self._lock:
            if self.version != self._journal.version:
                self._start_journal((self._journal.version, self._journal.end))
            for version in sorted(self._journals())[:-keep]:
                self._journal_path(version).unlink(missing_ok=True)

    def resume(self, version: int, mark: str, written: np.ndarray) -> None:
        """Opens the file and takes it back to `version`, one that a kept checkpoint has committed.

        Args:
          mark: that of the run's file, from the checkpoint's meta.
          written: what `written` was, from the checkpoint.

        Raises: MemoryFileError where the file or a journal is absent, damaged, too short, or of another run.
        """
        self._open(create=False)
        if self.mark.hex() != mark:
            raise MemoryFileError(f"{self.path}: expected the client memory of this run, got another run's.")
        self.written = np.array(written, np.uint8)
        chain, before = [], self._place()
        while before[0] >= 0 and (not chain or chain[-1].version > version):
            path = self._journal_path(before[0])
            chain.append(Journal.open(path, self.mark, *before, self.record_bytes))
            before = chain[-1].before
        newest, oldest = chain[0], chain[-1]
        self.version = version
        if newest.version < version and newest.reached == version:  # stopped between the checkpoint and its journal
            self._journal = newest
            return self._start_journal((newest.version, newest.end))
        if oldest.version != version:
            raise MemoryFileError(
                f"{self.path}: expected undo journals that lead to version {version}, got those of versions "
                f"{oldest.version} to {newest.reached}. A file of another time, or more checkpoints than journals?"
            )
        for journal in chain:
            for batch in journal.batches():
                self._write_records(batch.ids, batch.records)
        os.fsync(self._rows)
        self._journal = oldest
        os.ftruncate(oldest.file, oldest.end)
        self._forget()
        for batch in oldest.batches():
            _set(self._kept, batch.ids)
        self._set_place()
        os.fsync(self._rows)
        for later in chain[:-1]:
            later.close()
        for later, path in self._journals().items():
            if later > version:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Lets go of the files."""
        if os is None or os.close is None:  # the interpreter is going, and the files with it
            return
        if self._rows is not None:
            os.close(self._rows)
        if self._journal is not None:
            self._journal.close()
        self._rows = self._journal = None

    __del__ = close

    # Rows.

    def _leaves(self, rows: np.ndarray) -> list[np.ndarray]:
        """Bytes [k, row] as leaves [k, ...]."""
        parts, place = [], 0
        for spec in self.specs:
            size = math.prod(spec.shape) * spec.dtype.itemsize
            part = np.ascontiguousarray(rows[:, place : place + size]).reshape(-1).view(spec.dtype)
            parts.append(part.reshape(len(rows), *spec.shape))
            place += size
        return parts

    def _as_records(self, ids: np.ndarray, leaves: list[np.ndarray]) -> np.ndarray:
        records, place = np.zeros((len(ids), self.record_bytes), np.uint8), 0
        for leaf, spec in zip(leaves, self.specs, strict=True):
            size = math.prod(spec.shape) * spec.dtype.itemsize
            part = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
            records[:, place : place + size] = part.reshape(len(ids), size)
            place += size
        records[:, : self.row_bytes] ^= self.initial
        _checks(records)[:] = [_sum(id, record) for id, record in zip(ids.tolist(), records, strict=True)]
        return records

    def _records(self, ids: np.ndarray) -> np.ndarray:
        """[k, record bytes] uint8, verified."""
        records = np.empty((len(ids), self.record_bytes), np.uint8)
        for i in np.argsort(ids, kind="stable").tolist():  # in the order of the disk
            if os.preadv(self._rows, [records[i]], START + int(ids[i]) * self.record_bytes) != self.record_bytes:
                raise MemoryFileError(f"{self.path}: truncated; the record of client {ids[i]} is not there.")
        for id, record, found in zip(ids.tolist(), records, _checks(records).tolist(), strict=True):
            if found != _sum(id, record) and (found or record.any()):
                raise MemoryFileError(f"{self.path}: the checksum of client {id} does not match its bytes: damaged.")
        wrong = ids[(_checks(records) != 0) != _has(self.written, ids)]
        if len(wrong):
            raise MemoryFileError(
                f"{self.path}: the record of client {wrong[0]} was lost, or is one that this run never wrote: damaged. "
                "Go on from an earlier copy of the run's folder."
            )
        return records

    def _write_records(self, ids: np.ndarray, records: np.ndarray) -> None:
        for i in np.argsort(ids, kind="stable").tolist():
            write_at(self._rows, records[i], START + int(ids[i]) * self.record_bytes)

    def _at(self, version: int) -> None:
        if self._rows is None:
            self._open(create=True)
        if version != self.version:
            raise MemoryFileError(
                f"{self.path}: expected the state of version {self.version}, got one of version {version}. Memory on "
                "disk has one timeline: an older state cannot go on; resume from a checkpoint."
            )

    # Files.

    def _open(self, create: bool) -> None:
        size = START + self.num_clients * self.record_bytes
        fixed = (MAGIC, SCHEMA, self.num_clients, self.record_bytes)
        try:
            if create:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._rows = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
                os.ftruncate(self._rows, size)
                self.mark = secrets.token_bytes(16)
                write_at(self._rows, _with_crc(HEAD.pack(*fixed, self.mark, self.layout, 0)), 0)
                return self._start_journal((-1, 0))
            self._rows = os.open(self.path, os.O_RDWR)
        except OSError as error:
            raise MemoryFileError(
                f"{self.path}: could not be opened ({error.strerror or error}). Resume the run that it belongs to, or "
                "choose another folder."
            ) from error
        head = read_at(self._rows, HEAD.size, 0)
        if len(head) < HEAD.size or head[:8] != MAGIC or _with_crc(head) != head:
            raise MemoryFileError(f"{self.path}: expected a client memory, got a damaged one or another file.")
        *found, self.mark, layout, _ = HEAD.unpack(head)
        if (*found, layout) != (*fixed, self.layout):
            raise MemoryFileError(f"{self.path}: expected the memory of this algorithm and population, got another's.")
        if os.fstat(self._rows).st_size != size:
            raise MemoryFileError(f"{self.path}: expected {size:,} bytes, got {os.fstat(self._rows).st_size:,}.")

    def _place(self) -> tuple[int, int]:
        """Version and used bytes of the newest journal."""
        raw = read_at(self._rows, PLACE.size, PLACE_AT)
        if _with_crc(raw) != raw:
            raise MemoryFileError(f"{self.path}: its head is damaged.")
        return PLACE.unpack(raw)[:2]

    def _set_place(self) -> None:
        write_at(self._rows, _with_crc(PLACE.pack(self._journal.version, self._journal.end, 0)), PLACE_AT)

    # The journal.

    def _journal_path(self, version: int) -> Path:
        return self.path.with_name(f"{self.path.name}.undo_{version:08d}")

    def _journals(self) -> dict[int, Path]:
        pattern = re.compile(re.escape(self.path.name) + r"\.undo_(\d{8,10})")
        found = ((pattern.fullmatch(path.name), path) for path in self.path.parent.glob(f"{self.path.name}.undo_*"))
        return {int(name[1]): path for name, path in found if name}

    def _start_journal(self, before: tuple[int, int]) -> None:
        earlier = self._journal
        path = self._journal_path(self.version)
        self._journal = Journal.create(path, self.mark, self.version, before, self.record_bytes)
        self._set_place()
        os.fsync(self._rows)
        self._forget()
        if earlier is not None:
            earlier.close()

    def _forget(self) -> None:
        self._kept = np.zeros(-(-self.num_clients // 8), np.uint8)  # a bit for each client in the journal

    def _journal_old(self, version: int, last: bool, ids: np.ndarray) -> None:
        """Puts what is about to be overwritten into the journal, unless it is there already."""
        ids = ids[~_has(self._kept, ids)]
        records = self._records(ids)
        self._journal.append(version, last, ids, _checks(records) != 0, records)
        if len(ids):  # an empty batch is not on disk yet; it counts where it is found behind this place
            self._set_place()
        _set(self._kept, ids)


def _has(bits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """[k] bool of the bits at `ids`."""
    return (bits[ids >> 3] >> (ids & 7).astype(np.uint8)) & 1 != 0


def _set(bits: np.ndarray, ids: np.ndarray) -> None:
    np.bitwise_or.at(bits, ids >> 3, np.uint8(1) << (ids & 7).astype(np.uint8))


def _checks(records: np.ndarray) -> np.ndarray:
    return records.view("<u8")[:, -1]


def _sum(id: int, record: np.ndarray) -> int:
    return zlib.crc32(record[:-8], id & 0xFFFFFFFF) | WRITTEN


def _with_crc(raw: bytes | memoryview) -> bytes:
    """The bytes with their last four replaced by the CRC of those before."""
    return bytes(raw[:-4]) + zlib.crc32(raw[:-4]).to_bytes(4, "little")
