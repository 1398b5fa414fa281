"""Keeps per-client memory in a sparse file: only a cohort's rows move, and the file can be taken back to any commit.

Layout. `NAME.mem` holds a head and then one record for each client (`engine/client_memory/records.py`). The record of a
client that was never written is a hole: it takes no disk and reads as the initial state. A bit for each client tells
whether its record was written. The bits are kept in every checkpoint, because a disk that loses a record leaves zeros,
too.

Reading and writing. Rows are read and written by position and not through a memory mapping. Mapped pages would count
as the process's memory. And a full disk kills a process that writes through a mapping, where a plain write raises an
error.

Versions. A version counts the writes (`put`) since the run began, one a round. A commit is a version that has a
checkpoint. Before a row is overwritten for the first time since a commit, its old record goes into that commit's undo
journal `NAME.mem.undo_VERSION` (`engine/client_memory/journal.py`). Going back to a commit restores the records of its
journal and of all later ones.
"""

from __future__ import annotations

import os
import re
import secrets
import struct
import threading
from pathlib import Path

import numpy as np

from fedjax_sim.engine.client_memory.journal import Journal, MemoryFileError as MemoryFileError, read_at, write_at
from fedjax_sim.engine.client_memory.records import RecordFormat, checksums, has_bits, no_bits, set_bits, with_crc
from fedjax_sim.types import PyTree

MAGIC = b"FEDJAXMM"
SCHEMA = 1
HEAD = struct.Struct("<8sQQQ16s32sL")  # magic, schema, clients, record bytes, mark, layout digest, CRC of those
# The newest journal's version, its bytes, CRC. It changes with the journal, so it has a sector of its own.
PLACE, PLACE_AT = struct.Struct("<QQL"), 512
RECORDS_START = 4096  # byte where the records begin
PIECE_BYTES = 1 << 24  # bytes of rows that are handled at once


class MemoryFile:
    """The rows of `num_clients` clients who all start from `client_state`.

    The file is opened by the first use, or by `resume`.

    Args:
      path: of the file; journals lie beside it.
      client_state: the initial state of every client, a pytree of arrays.
      num_clients: N.

    Guarantees:
      A row that was never written reads as the initial state and takes no disk
      (tests/engine/client_memory/test_disk.py::test_rows_come_back_and_holes_take_no_disk).
      From any moment the file goes back to any commit that its journals reach
      (tests/engine/client_memory/test_disk.py::test_killed_between_any_two_system_calls).
      A flipped or missing byte of a row or journal is found when it is read
      (tests/engine/client_memory/test_disk.py::test_damage_is_found).
      A record that was lost or put back to zeros is found
      (tests/engine/client_memory/test_disk.py::test_a_lost_record_is_no_hole).
    """

    _rows: int | None = None  # file descriptor
    _journal: Journal | None = None

    def __init__(self, path: str | Path, client_state: PyTree, num_clients: int):
        self.path = Path(path)
        self.num_clients = num_clients
        self.format = RecordFormat(client_state)
        self.version, self.mark = 0, b""
        self.written = no_bits(num_clients)  # bits of the clients whose record is no hole
        self._kept = no_bits(num_clients)  # bits of the clients whose old record is in the journal
        self._arrived = 0  # devices that have written their share of the next version
        self._lock = threading.RLock()  # devices call from threads of their own
        self._failure: Exception | None = None

    # What a round does: compiled code calls it on every device, for its share of the cohort.

    def read(self, version: int, ids: np.ndarray, leaves: list[np.ndarray]) -> None:
        """Fills `leaves` [k, ...] with the rows of clients `ids`; an id outside [0, N) gives the initial state.

        Args:
          version: the version of the state that is read; it must be the file's.
          ids: [k] integers.
          leaves: arrays that are filled in place.

        Raises: MemoryFileError for another version, and for damaged or missing records.
        """
        with self._lock:
            self._check_version(version)
        for leaf, part in zip(leaves, self.format.initial_leaves(), strict=True):
            leaf[...] = part
        present = np.flatnonzero((ids >= 0) & (ids < self.num_clients))
        step = max(1, PIECE_BYTES // self.format.record_bytes)
        for begin in range(0, len(present), step):
            piece = present[begin : begin + step]
            for leaf, part in zip(leaves, self.format.decode(self._records(ids[piece])), strict=True):
                leaf[piece] = part

    def write(self, version: int, ids: np.ndarray, leaves: list[np.ndarray], shares: int = 1) -> None:
        """Writes the rows of clients `ids` (distinct) and, with the last of `shares` calls, ends the version.

        Args:
          version: the version of the state that is written over; it must be the file's.
          ids: [k] integers in [0, N).
          leaves: the new rows, [k, ...].
          shares: how many devices write a part of this version.

        Raises: MemoryFileError for another version; OSError for a full disk.
        """
        with self._lock:
            self._check_version(version)
            step = max(1, PIECE_BYTES // self.format.record_bytes)
            # A share without clients is a batch too: the journal learns from it that the version is complete.
            for begin in range(0, max(len(ids), 1), step):
                piece = slice(begin, begin + step)
                is_last = begin + step >= len(ids) and self._arrived + 1 == shares
                # Old records are on the disk before they are overwritten.
                self._save_old(version, is_last, ids[piece].astype(np.int64))
                self._write_records(ids[piece], self.format.encode(ids[piece], [leaf[piece] for leaf in leaves]))
                set_bits(self.written, ids[piece])
            self._arrived += 1
            if self._arrived == shares:
                self._arrived = 0
                self.version = version + 1

    def fail(self, error: Exception) -> None:
        """Keeps the first error of a device; an error raised at once would leave the others waiting in a collective."""
        self._failure = self._failure or error

    @property
    def failed(self) -> bool:
        """Whether a device met an error; after an error nothing is written."""
        return self._failure is not None

    def check(self) -> None:
        """Raises the error that a device met, if any."""
        if self._failure is not None:
            raise self._failure

    # What a run does around its rounds.

    def create(self) -> None:
        """Creates a fresh file with every client at the initial state; an old file is deleted with its journals."""
        for path in [self.path, *self.journals().values()]:
            path.unlink(missing_ok=True)
        self._open(create=True)

    def sync(self, version: int) -> None:
        """Brings every row to the disk; called before a checkpoint of `version` is written.

        Args:
          version: of the state, which must be that of the file.

        Raises: MemoryFileError for a file that was deleted or replaced, or of another version.
        """
        self._check_version(version)
        try:
            is_same_file = os.path.samestat(os.stat(self.path), os.fstat(self._open_rows))
        except FileNotFoundError:
            is_same_file = False
        if not is_same_file:
            raise MemoryFileError(f"{self.path}: deleted or replaced during the run; its rows cannot be resumed.")
        # Batches without records are written without a sync.
        self._open_journal.sync()
        os.fsync(self._open_rows)

    def advance(self, keep: int) -> None:
        """Starts the journal of this version, whose checkpoint is on disk by now; keeps the newest `keep` journals."""
        with self._lock:
            journal = self._open_journal
            if self.version != journal.version:
                self._start_journal((journal.version, journal.end))
            for version in sorted(self.journals())[:-keep]:
                self._journal_path(version).unlink(missing_ok=True)

    def resume(self, version: int, mark: str, written: np.ndarray) -> None:
        """Opens the file and takes it back to `version`, which a kept checkpoint has committed.

        Args:
          version: the version of the checkpoint.
          mark: the mark of the run's file, hexadecimal, from the checkpoint's meta.
          written: the attribute of that name at the commit, from the checkpoint.

        Raises: MemoryFileError where the file or a journal is absent, damaged, too short, or of another run.
        """
        self._open(create=False)
        if self.mark.hex() != mark:
            raise MemoryFileError(f"{self.path}: expected the client memory of this run, got another run's.")
        self.written = np.array(written, np.uint8)
        # Journals from the newest back to the one that starts at the version, or before it.
        chain: list[Journal] = []
        before = self._place()
        while before[0] >= 0 and (not chain or chain[-1].version > version):
            path = self._journal_path(before[0])
            chain.append(Journal.open(path, self.mark, *before, self.format.record_bytes))
            before = chain[-1].before
        newest = chain[0]
        oldest = chain[-1]
        self.version = version
        # The run stopped between the checkpoint and its journal: nothing was written after the checkpoint.
        if newest.version < version and newest.reached == version:
            self._journal = newest
            return self._start_journal((newest.version, newest.end))
        if oldest.version != version:
            raise MemoryFileError(
                f"{self.path}: expected undo journals that lead to version {version}, got those of versions "
                f"{oldest.version} to {newest.reached}. A file of another time, or more checkpoints than journals?"
            )
        # From the newest journal back, so that the oldest record of a row is the last that is written.
        for journal in chain:
            for batch in journal.batches():
                self._write_records(batch.ids, batch.records)
        os.fsync(self._open_rows)
        self._journal = oldest
        # Batches behind the place where the run stopped are cut off.
        os.ftruncate(oldest.file, oldest.end)
        self._kept = no_bits(self.num_clients)
        for batch in oldest.batches():
            set_bits(self._kept, batch.ids)
        self._set_place()
        os.fsync(self._open_rows)
        for later in chain[:-1]:
            later.close()
        for later, path in self.journals().items():
            if later > version:
                path.unlink(missing_ok=True)

    def journals(self) -> dict[int, Path]:
        """Returns the undo journals that lie beside the file, by the version from which each of them starts."""
        pattern = re.compile(re.escape(self.path.name) + r"\.undo_(\d{8,10})")
        paths = self.path.parent.glob(f"{self.path.name}.undo_*")
        matches = ((pattern.fullmatch(path.name), path) for path in paths)
        return {int(match[1]): path for match, path in matches if match}

    def close(self) -> None:
        """Closes the files."""
        # While the interpreter ends, modules are gone before their objects; the system closes the files then.
        if os is None or os.close is None:
            return
        if self._rows is not None:
            os.close(self._rows)
        if self._journal is not None:
            self._journal.close()
        self._rows = self._journal = None

    __del__ = close

    # Rows.

    def _records(self, ids: np.ndarray) -> np.ndarray:
        """Reads the records of clients, and verifies them.

        Args:
          ids: [k] integers in [0, N), in any order.

        Returns: [k, record bytes] uint8, in the order of `ids`; zeros for a client that was never written.

        Raises: MemoryFileError for a record that is truncated, damaged or lost, or that this run never wrote.
        """
        size = self.format.record_bytes
        records = np.empty((len(ids), size), np.uint8)
        rows = self._open_rows
        # In the order of the disk, whatever the order of the cohort.
        for i in np.argsort(ids, kind="stable").tolist():
            if os.preadv(rows, [records[i].data], RECORDS_START + int(ids[i]) * size) != size:
                raise MemoryFileError(f"{self.path}: truncated; the record of client {ids[i]} is not there.")
        damaged = self.format.damaged(ids, records)
        if damaged is not None:
            raise MemoryFileError(f"{self.path}: the checksum of client {damaged} does not match its bytes: damaged.")
        # A record that was written is no hole, and a hole was not written.
        wrong = ids[(checksums(records) != 0) != has_bits(self.written, ids)]
        if len(wrong):
            raise MemoryFileError(
                f"{self.path}: the record of client {wrong[0]} was lost, or is one that this run never wrote: damaged. "
                "Go on from an earlier copy of the run's folder."
            )
        return records

    def _write_records(self, ids: np.ndarray, records: np.ndarray) -> None:
        """Writes records [k, record bytes] of clients `ids`, in the order of the disk."""
        rows = self._open_rows
        for i in np.argsort(ids, kind="stable").tolist():
            write_at(rows, records[i], RECORDS_START + int(ids[i]) * self.format.record_bytes)

    def _check_version(self, version: int) -> None:
        """Opens the file at its first use; raises MemoryFileError for a state that is not the file's."""
        if self._rows is None:
            self._open(create=True)
        if version != self.version:
            raise MemoryFileError(
                f"{self.path}: expected the state of version {self.version}, got one of version {version}. Memory on "
                "disk has one timeline: an older state cannot go on; resume from a checkpoint."
            )

    # Files.

    @property
    def _open_rows(self) -> int:
        """The descriptor of the file, which is open."""
        assert self._rows is not None, "the file is open"
        return self._rows

    @property
    def _open_journal(self) -> Journal:
        """The newest journal, which is open."""
        assert self._journal is not None, "the file is open"
        return self._journal

    def _open(self, create: bool) -> None:
        """Creates or opens the file, and compares its head with the run's.

        Args:
          create: True makes a new file, with a new mark and the first journal; a file that is there is refused. False
            opens one that is there, and reads its mark.

        Raises: MemoryFileError for a file that cannot be opened, is damaged, has another length, or belongs to another
          algorithm or population.
        """
        size = RECORDS_START + self.num_clients * self.format.record_bytes
        fixed = (MAGIC, SCHEMA, self.num_clients, self.format.record_bytes)
        try:
            if create:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._rows = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
                os.ftruncate(self._rows, size)
                self.mark = secrets.token_bytes(16)
                write_at(self._rows, with_crc(HEAD.pack(*fixed, self.mark, self.format.digest, 0)), 0)
                return self._start_journal((-1, 0))
            self._rows = os.open(self.path, os.O_RDWR)
        except OSError as error:
            raise MemoryFileError(
                f"{self.path}: could not be opened ({error.strerror or error}). Resume the run that it belongs to, or "
                "choose another folder."
            ) from error
        head = read_at(self._rows, HEAD.size, 0)
        if len(head) < HEAD.size or head[:8] != MAGIC or with_crc(head) != head:
            raise MemoryFileError(f"{self.path}: expected a client memory, got a damaged one or another file.")
        *stored, self.mark, layout, _ = HEAD.unpack(head)
        if (*stored, layout) != (*fixed, self.format.digest):
            raise MemoryFileError(f"{self.path}: expected the memory of this algorithm and population, got another's.")
        if os.fstat(self._rows).st_size != size:
            raise MemoryFileError(f"{self.path}: expected {size:,} bytes, got {os.fstat(self._rows).st_size:,}.")

    def _place(self) -> tuple[int, int]:
        """Returns version and used bytes of the newest journal."""
        raw = read_at(self._open_rows, PLACE.size, PLACE_AT)
        if with_crc(raw) != raw:
            raise MemoryFileError(f"{self.path}: its head is damaged.")
        return PLACE.unpack(raw)[:2]

    def _set_place(self) -> None:
        """Writes version and used bytes of the newest journal into the file."""
        journal = self._open_journal
        write_at(self._open_rows, with_crc(PLACE.pack(journal.version, journal.end, 0)), PLACE_AT)

    # The journal.

    def _journal_path(self, version: int) -> Path:
        """Returns the path of the undo journal that starts from a version."""
        return self.path.with_name(f"{self.path.name}.undo_{version:08d}")

    def _start_journal(self, before: tuple[int, int]) -> None:
        """Starts the journal of the file's version; `before` is (version, used bytes) of the newest one so far."""
        earlier = self._journal
        path = self._journal_path(self.version)
        self._journal = Journal.create(path, self.mark, self.version, before, self.format.record_bytes)
        self._set_place()
        os.fsync(self._open_rows)
        self._kept = no_bits(self.num_clients)
        if earlier is not None:
            earlier.close()

    def _save_old(self, version: int, last: bool, ids: np.ndarray) -> None:
        """Puts records that are about to be overwritten into the journal, unless it has them already."""
        # Only the record at the commit counts, so a row that is overwritten again needs none.
        ids = ids[~has_bits(self._kept, ids)]
        records = self._records(ids)
        self._open_journal.append(version, last, ids, checksums(records) != 0, records)
        # An empty batch may not be on disk yet. If it is, `Journal.open` finds it behind this place.
        if len(ids):
            self._set_place()
        set_bits(self._kept, ids)
