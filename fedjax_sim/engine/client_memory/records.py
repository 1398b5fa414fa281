"""Lays out the records of client memory on disk: a client's state as bytes with a checksum, and a bit for each client.

A record holds the bytes of a state, exclusive-or'ed with the bytes of the initial state. Behind them stands a checksum
of these bytes and of the client's id, which is never zero. A hole in a sparse file reads as zeros. So it reads as the
initial state, without a checksum.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib

import jax
import numpy as np

from fedjax_sim.types import PyTree

WRITTEN_BIT = 1 << 32  # a bit in the checksum of each record that is no hole, so that no checksum is zero


class RecordFormat:
    """Lays out the state of a client in a record, for clients who all start from `client_state`."""

    def __init__(self, client_state: PyTree):
        leaves, self.structure = jax.tree.flatten(client_state)
        leaves = [np.ascontiguousarray(x).reshape(np.shape(x)) for x in leaves]
        self.specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        self.initial = np.concatenate([x.reshape(-1).view(np.uint8) for x in leaves])
        self.row_bytes = len(self.initial)
        # The row, zeros up to a whole word, the checksum.
        self.record_bytes = -(-self.row_bytes // 8) * 8 + 8
        kinds = json.dumps([[str(x.dtype), list(x.shape)] for x in leaves]).encode()
        self.digest = hashlib.sha256(kinds + self.initial.tobytes()).digest()

    def encode(self, ids: np.ndarray, leaves: list[np.ndarray]) -> np.ndarray:
        """Returns states of clients `ids`, leaves [k, ...], as records [k, record bytes] uint8."""
        records = np.zeros((len(ids), self.record_bytes), np.uint8)
        place = 0
        for leaf, spec in zip(leaves, self.specs, strict=True):
            size = math.prod(spec.shape) * spec.dtype.itemsize
            part = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
            records[:, place : place + size] = part.reshape(len(ids), size)
            place += size
        # The initial state becomes zeros, as a hole has them.
        records[:, : self.row_bytes] ^= self.initial
        checksums(records)[:] = [_checksum(id, record) for id, record in zip(ids.tolist(), records, strict=True)]
        return records

    def decode(self, records: np.ndarray) -> list[np.ndarray]:
        """Returns records [k, record bytes] as leaves [k, ...]; the records' own bytes are overwritten."""
        rows = records[:, : self.row_bytes]
        rows ^= self.initial
        return self._leaves(rows)

    def initial_leaves(self) -> list[np.ndarray]:
        """Returns the initial state, leaves [1, ...]."""
        return self._leaves(self.initial[None])

    def _leaves(self, rows: np.ndarray) -> list[np.ndarray]:
        """Returns bytes [k, row] as leaves [k, ...]."""
        parts = []
        place = 0
        for spec in self.specs:
            size = math.prod(spec.shape) * spec.dtype.itemsize
            part = np.ascontiguousarray(rows[:, place : place + size]).reshape(-1).view(spec.dtype)
            parts.append(part.reshape(len(rows), *spec.shape))
            place += size
        return parts

    def damaged(self, ids: np.ndarray, records: np.ndarray) -> int | None:
        """Returns the first client whose record's checksum does not match its bytes; None if all match.

        A hole has no checksum, and no bytes that it could miss.
        """
        for id, record, stored in zip(ids.tolist(), records, checksums(records).tolist(), strict=True):
            if stored != _checksum(id, record) and (stored or record.any()):
                return id
        return None


def checksums(records: np.ndarray) -> np.ndarray:
    """Returns the checksums in records [k, record bytes], a view [k] uint64; 0 in a hole."""
    return records.view("<u8")[:, -1]


def _checksum(id: int, record: np.ndarray) -> int:
    """Returns the checksum of a record's bytes and of its client, never zero."""
    # The CRC begins with the client's id, so that the record of another client does not match.
    return zlib.crc32(record[:-8].data, id & 0xFFFFFFFF) | WRITTEN_BIT


def with_crc(raw: bytes | memoryview) -> bytes:
    """Returns the bytes with their last four replaced by the CRC of the bytes before."""
    return bytes(raw[:-4]) + zlib.crc32(raw[:-4]).to_bytes(4, "little")


def no_bits(num_clients: int) -> np.ndarray:
    """Returns a bit for each client, all zero, as uint8."""
    return np.zeros(-(-num_clients // 8), np.uint8)


def has_bits(bits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Returns the bits at `ids`, as [k] bool.

    >>> bits = no_bits(20)
    >>> set_bits(bits, np.array([3, 17]))
    >>> has_bits(bits, np.array([3, 4, 17])).tolist()
    [True, False, True]
    """
    # Byte id // 8, bit id % 8.
    return (bits[ids >> 3] >> (ids & 7).astype(np.uint8)) & 1 != 0


def set_bits(bits: np.ndarray, ids: np.ndarray) -> None:
    """Sets the bits at `ids`, in place."""
    # Unbuffered, since two ids may share a byte.
    np.bitwise_or.at(bits, ids >> 3, np.uint8(1) << (ids & 7).astype(np.uint8))
