"""This module finds which rows of several parties' tables belong to the same individuals.

Parties compare their ids in the clear, as keyed hashes, or by a Diffie-Hellman protocol. This is host code.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim import validate

KEY_BYTES = 16  # least length of a secret key
# Curve25519 is y^2 = x^3 + A x^2 + x modulo this prime (RFC 7748).
CURVE_PRIME = 2**255 - 19
CURVE_A = 486662


class Alignment(NamedTuple):
    """An alignment says, for each row of party 0, which row of every other party is the same individual.

    Party 0 holds the labels. `views` records what the protocol revealed to each participant: everything that the
    participant *received*, in addition to its own table.
    """

    links: np.ndarray  # [n_0, P] int64: the row at party p, or -1 if it has none. Column 0 is 0, ..., n_0 - 1.
    views: Mapping[str, Mapping[str, Any]]  # participant -> kind of message -> values

    @property
    def rows(self) -> np.ndarray:
        """[n, P] int64, the rows of individuals whom all parties have, in the order of party 0's table."""
        return self.links[(self.links >= 0).all(1)]

    @property
    def overlap(self) -> float:
        """The share of party 0's individuals whom all parties have, in (0, 1]."""
        return len(self.rows) / len(self.links)


def check_records(name: str, tables: Sequence[Sequence[Any]], kind: type, what: str) -> list[list[Any]]:
    """Returns the parties' records as lists of lists, after checks.

    Args:
      name: the name of `tables` in error messages.
      tables: the records of each party.
      kind: the type of a record.
      what: a description of a record, for error messages.

    Raises: ValueError for fewer than two parties, a party without records, and duplicates. TypeError for tables that
      are texts or not iterable, for records of another type, and for empty records.

    Guarantees: repeated records, a party without records, a single party, a text or a number in place of a table, and
    numbers in place of texts are refused
    (tests/population/vertical/test_private_set_intersection.py::test_what_cannot_be_aligned_is_refused).
    """
    # A single text is iterable too, and would be read as a table of letters.
    for where, records in ((name, tables), *((f"{name}[{p}]", table) for p, table in enumerate(tables or ()))):
        if isinstance(records, str) or not isinstance(records, Iterable):
            validate.fail(where, "records in a list", records, "Each party has a list of its own.", TypeError)
    tables = [list(table) for table in tables]
    if len(tables) < 2:
        validate.fail(name, "the records of two parties at least", len(tables))
    for p, table in enumerate(tables):
        if not table:
            validate.fail(f"{name}[{p}]", "a record at least", "none")
        first_row: dict[Hashable, int] = {}  # record -> the row where it occurs first
        for row, record in enumerate(table):
            if not isinstance(record, kind) or not record:
                validate.fail(f"{name}[{p}][{row}]", what, record, error=TypeError)
            if record in first_row:
                hint = "One individual, one row: aggregate or drop them before alignment."
                validate.fail(
                    f"{name}[{p}]", f"distinct records, but row {row} repeats row {first_row[record]}", record, hint
                )
            first_row[record] = row
    return tables


def linked(tokens: Sequence[Sequence[Hashable]], views: Mapping[str, Mapping[str, Any]]) -> Alignment:
    """Returns the alignment that links rows with equal tokens.

    Args:
      tokens: of each party, one token for each row.
      views: as in `Alignment`.
    Raises: ValueError if no individual is at all parties, with the number that each other party shares with party 0.
    """
    # A dict per party finds the row of each token in constant time.
    row_of_token = [{token: row for row, token in enumerate(table)} for table in tokens]
    links = np.array([[rows.get(token, -1) for rows in row_of_token] for token in tokens[0]], np.int64)
    return checked_overlap(Alignment(links, views))


def checked_overlap(alignment: Alignment) -> Alignment:
    """Returns the alignment, and refuses it if no individual is at all parties."""
    if not len(alignment.rows):
        shared = (alignment.links[:, 1:] >= 0).sum(0).tolist()
        hint = f"Party 0 shares {shared} individuals with parties 1, 2, ... Check that ids have one spelling."
        validate.fail("ids", "an individual whom all parties have", "an empty overlap", hint)
    return alignment


def align_exact(ids: Sequence[Sequence[str]]) -> Alignment:
    """Aligns rows by ids in the clear: a coordinator receives and compares the ids of all parties.

    Args:
      ids: the ids of each party's rows, P >= 2 lists of distinct texts. Party 0 holds the labels.

    Returns: `Alignment`. Views: the coordinator receives all ids. Each party receives the positions of the common rows
      in its own table.

    Raises: ValueError for duplicates, an empty table and an empty overlap. TypeError for ids that are not texts.

    Guarantees: it finds exactly the overlap, in any order of the rows
    (tests/population/vertical/test_private_set_intersection.py::test_exactly_the_overlap).

    >>> align_exact([["ann", "bob", "cyd"], ["cyd", "ann"]]).rows.tolist()
    [[0, 1], [2, 0]]
    """
    tables = check_records("ids", ids, str, "an id as text")
    return _with_positions(linked(tables, {"coordinator": {"ids": tables}}))


def _with_positions(alignment: Alignment) -> Alignment:
    """Adds the view of each party: a coordinator tells the party which of its rows are common, and in which order."""
    party_views = {f"party {p}": {"positions": rows} for p, rows in enumerate(alignment.rows.T)}
    return alignment._replace(views=dict(alignment.views) | party_views)


def align_keyed(ids: Sequence[Sequence[str]], key: bytes) -> Alignment:
    """Aligns rows by keyed hashes of the ids, a form of private set intersection.

    The parties hash their ids by HMAC-SHA256 under a common key, and a coordinator compares the hashes. The coordinator
    must not have the key, for a holder of the key can test any guess of an id. The coordinator learns how many
    individuals every set of parties shares. The parties learn the positions of the common rows.

    Args:
      ids: as in `align_exact`.
      key: at least 16 bytes, shared by the parties.

    Raises: as `align_exact`. ValueError also for a shorter key.

    Guarantees: it finds exactly the overlap
    (tests/population/vertical/test_private_set_intersection.py::test_exactly_the_overlap). The coordinator sees 32
    bytes for each individual, and no id (::test_what_each_party_sees).

    References: RFC 2104 (HMAC); Pinkas, Schneider and Zohner 2018, section 3.1 (hashing, and why it needs a key).

    >>> align_keyed([["ann", "bob"], ["bob"]], b"sixteen bytes...").rows.tolist()
    [[1, 0]]
    """
    tables = check_records("ids", ids, str, "an id as text")
    check_key(key)
    hashes = [[hmac.digest(key, id.encode(), "sha256") for id in table] for table in tables]
    return _with_positions(linked(hashes, {"coordinator": {"hashes": hashes}}))


def check_key(key: bytes) -> None:
    """Refuses a key that is not of type bytes, or too short to be a secret."""
    if not isinstance(key, bytes):
        validate.fail("key", "bytes", type(key).__name__, "secrets.token_bytes(32) draws one.", TypeError)
    if len(key) < KEY_BYTES:
        validate.fail("key", f"{KEY_BYTES} bytes at least", f"{len(key)} bytes", "secrets.token_bytes(32) draws one.")


def align_diffie_hellman(ids: Sequence[Sequence[str]], *, keys: Sequence[bytes] | None = None) -> Alignment:
    """Aligns rows without a coordinator or a shared key: every party blinds every id with a secret of its own.

    Each id is hashed to a point of Curve25519. The list of each party visits all parties in turn, and each of them
    multiplies the points by its secret. The result does not depend on the order of the parties. The finished lists are
    published, and equal points belong to equal ids.

    So a party learns which of its own individuals each other party has, where they stand in that party's list, and how
    long all lists are. With two parties this is the intersection and no more. All parties must follow the protocol. A
    party that adds guesses to its own list learns whether others have them.

    Args:
      ids: as in `align_exact`.
      keys: 32 secret bytes of each party. None draws them from the operating system. The result does not depend on
        the keys.

    Returns: `Alignment`. Views: each party receives the partly blinded lists that visit it, and all finished lists.

    Raises: as `align_exact`. ImportError without the package `cryptography` (extra `secagg`).

    Guarantees: it finds exactly the overlap, under any keys
    (tests/population/vertical/test_private_set_intersection.py::test_exactly_the_overlap). No party ever sees an id of
    another party, or the hash of such an id, without the blinding of another party (::test_what_each_party_sees).

    References: Meadows 1986; Huberman, Franklin and Hogg 1999 (commutative blinding); RFC 7748 (X25519).
    """
    tables = check_records("ids", ids, str, "an id as text")
    keys = [secrets.token_bytes(32) for _ in tables] if keys is None else list(keys)
    if len(keys) != len(tables) or any(not isinstance(key, bytes) or len(key) != 32 for key in keys):
        validate.fail("keys", f"{len(tables)} secrets of 32 bytes, one a party", [len(key) for key in keys])
    blinds = [_blind(key) for key in keys]
    num_parties = len(tables)
    received: list[dict[str, Any]] = [{} for _ in tables]
    published = []
    for owner, table in enumerate(tables):
        # The owner blinds its points before they leave, so that no other party can test guesses of ids on them.
        points = [blinds[owner](_point(id)) for id in table]
        for step in range(1, num_parties):
            other = (owner + step) % num_parties
            received[other] |= {f"blinded ids of party {owner}": points}
            points = [blinds[other](point) for point in points]
        published.append(points)
    views = {f"party {p}": received[p] | {"published": published} for p in range(num_parties)}
    return linked(published, views)


def _blind(key: bytes) -> Callable[[bytes], bytes]:
    """Returns the function that multiplies a point by the secret `key`."""
    try:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    except ImportError as missing:
        hint = "pip install 'fedjax_sim[secagg]'; alignment by keyed hashes needs no package, but a shared key."
        raise ImportError(f"cryptography: expected to be installed. {hint}") from missing
    secret = X25519PrivateKey.from_private_bytes(key)
    return lambda point: secret.exchange(X25519PublicKey.from_public_bytes(point))


def _point(id: str) -> bytes:
    """Hashes an id to a point of Curve25519, given by its x coordinate.

    The function hashes the id with rising counters until a hash lies on the curve. About half of all x belong to the
    curve's twist instead. A blinded point stays on the curve or on the twist, so a twist point would reveal one bit of
    the id.

    The curve is y^2 = x^3 + A x^2 + x modulo p = 2^255 - 19, with A = 486662.

    Args:
      id: of any length; its bytes in UTF-8 are hashed.

    Returns: x, in 32 bytes with the lowest first, below p.
    """
    for attempt in range(256):
        # The text before the id separates these hashes from any other use of SHA-256 on the same ids.
        raw = hashlib.sha256(b"fedjax_sim point %d\0" % attempt + id.encode()).digest()
        x = int.from_bytes(raw, "little") % 2**255 % CURVE_PRIME
        y_squared = x * (x * x + CURVE_A * x + 1) % CURVE_PRIME
        # Euler's criterion: x is on the curve if y^2 is a square modulo the prime.
        if pow(y_squared, (CURVE_PRIME - 1) // 2, CURVE_PRIME) == 1:
            return x.to_bytes(32, "little")
    raise AssertionError("256 hashes in a row were not on the curve: a chance of 2^-256")
