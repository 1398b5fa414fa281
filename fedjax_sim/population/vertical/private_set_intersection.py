"""Which rows of several parties' tables are the same individuals: exact ids, keyed hashes, Diffie-Hellman."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim import validate

__all__ = ["Alignment", "align_diffie_hellman", "align_exact", "align_keyed", "check_records", "linked"]

KEY_BYTES = 16  # least length of a secret key
CURVE_PRIME, CURVE_A = 2**255 - 19, 486662  # Curve25519: y^2 = x^3 + A x^2 + x (RFC 7748)


class Alignment(NamedTuple):
    """For each row of party 0, who holds the labels, the row of the same individual at every party.

    `views` says what the protocol told whom: who -> what -> values. It is what they *received*, beside their own table.
    """

    links: np.ndarray  # [n_0, P] int64: a row at party p, or -1 where it has none; column 0 is 0 .. n_0 - 1
    views: Mapping[str, Mapping[str, Any]]

    @property
    def rows(self) -> np.ndarray:
        """[n, P] int64: the rows of individuals whom all parties have, in the order of party 0's table."""
        return self.links[(self.links >= 0).all(1)]

    @property
    def overlap(self) -> float:
        """The share of party 0's individuals whom all parties have."""
        return len(self.rows) / len(self.links)


def check_records(name: str, tables: Sequence[Sequence[Any]], kind: type, what: str) -> list[list[Any]]:
    """The parties' lists of records; refuses fewer than two parties, an empty one, other types and duplicates.

    Guarantees: tests/population/vertical/test_private_set_intersection.py::test_what_cannot_be_aligned_is_refused.
    """
    for shown, one in ((name, tables), *((f"{name}[{p}]", table) for p, table in enumerate(tables or ()))):
        if isinstance(one, str) or not isinstance(one, Iterable):
            validate.fail(shown, "records in a list", one, "Each party has a list of its own.", TypeError)
    tables = [list(table) for table in tables]
    if len(tables) < 2:
        validate.fail(name, "the records of two parties at least", len(tables))
    for p, table in enumerate(tables):
        if not table:
            validate.fail(f"{name}[{p}]", "a record at least", "none")
        seen: dict[Hashable, int] = {}
        for row, record in enumerate(table):
            if not isinstance(record, kind) or not record:
                validate.fail(f"{name}[{p}][{row}]", what, record, error=TypeError)
            if record in seen:
                hint = "One individual, one row: aggregate or drop them before alignment."
                validate.fail(
                    f"{name}[{p}]", f"distinct records, but row {row} repeats row {seen[record]}", record, hint
                )
            seen[record] = row
    return tables


def linked(tokens: Sequence[Sequence[Hashable]], views: Mapping[str, Mapping[str, Any]]) -> Alignment:
    """The alignment of equal tokens.

    Raises: ValueError where no individual is at all parties, with the number that each pair shares.
    """
    places = [{token: row for row, token in enumerate(table)} for table in tokens]
    links = np.array([[place.get(token, -1) for place in places] for token in tokens[0]], np.int64)
    return checked_overlap(Alignment(links, views))


def checked_overlap(alignment: Alignment) -> Alignment:
    """The alignment, if it holds somebody."""
    if not len(alignment.rows):
        shared = (alignment.links[:, 1:] >= 0).sum(0).tolist()
        hint = f"Party 0 shares {shared} individuals with parties 1, 2, ... Check that ids have one spelling."
        validate.fail("ids", "an individual whom all parties have", "an empty overlap", hint)
    return alignment


def align_exact(ids: Sequence[Sequence[str]]) -> Alignment:
    """By ids that everybody knows, in the clear: a coordinator sees all of them.

    Args:
      ids: of each party's rows, P >= 2 lists of distinct texts; party 0 holds the labels.

    Returns: `Alignment`. Views: the coordinator has all ids; each party the positions of the common rows in its table.

    Raises: ValueError for duplicates, an empty table and an empty overlap; TypeError for ids that are no texts.

    Guarantees: exactly the overlap, in any order of the rows
    (tests/population/vertical/test_private_set_intersection.py::test_exactly_the_overlap).

    >>> align_exact([["ann", "bob", "cyd"], ["cyd", "ann"]]).rows.tolist()
    [[0, 1], [2, 0]]
    """
    tables = check_records("ids", ids, str, "an id as text")
    return _with_positions(linked(tables, {"coordinator": {"ids": tables}}))


def _with_positions(alignment: Alignment) -> Alignment:
    """With what each party learns from a coordinator: which of its own rows are common, and in which order."""
    told = {f"party {p}": {"positions": rows} for p, rows in enumerate(alignment.rows.T)}
    return alignment._replace(views=dict(alignment.views) | told)


def align_keyed(ids: Sequence[Sequence[str]], key: bytes) -> Alignment:
    """Private set intersection with keyed hashing: HMAC-SHA256 under a key of the parties, compared by a coordinator.

    The coordinator must not have the key: whoever has it tests any guess. It learns how many individuals every set of
    parties shares. The parties learn the positions of the common rows.

    Args:
      ids: as in `align_exact`.
      key: at least 16 bytes, shared by the parties.

    Raises: as `align_exact`; ValueError for a shorter key.

    Guarantees: exactly the overlap
    (tests/population/vertical/test_private_set_intersection.py::test_exactly_the_overlap); the coordinator sees 32
    bytes an individual, and no id (::test_what_each_party_sees).

    References: RFC 2104 (HMAC); Pinkas, Schneider and Zohner 2018, section 3.1 (hashing, and why it needs a key).

    >>> align_keyed([["ann", "bob"], ["bob"]], b"sixteen bytes...").rows.tolist()
    [[1, 0]]
    """
    tables = check_records("ids", ids, str, "an id as text")
    check_key(key)
    hashes = [[hmac.digest(key, id.encode(), "sha256") for id in table] for table in tables]
    return _with_positions(linked(hashes, {"coordinator": {"hashes": hashes}}))


def check_key(key: bytes) -> None:
    """Refuses a key that is no bytes, or too short to be a secret."""
    if not isinstance(key, bytes):
        validate.fail("key", "bytes", type(key).__name__, "secrets.token_bytes(32) draws one.", TypeError)
    if len(key) < KEY_BYTES:
        validate.fail("key", f"{KEY_BYTES} bytes at least", f"{len(key)} bytes", "secrets.token_bytes(32) draws one.")


def align_diffie_hellman(ids: Sequence[Sequence[str]], *, keys: Sequence[bytes] | None = None) -> Alignment:
    """Private set intersection without a coordinator or a shared key: every party blinds every id with its own secret.

    Ids are hashed to points h of Curve25519; each list goes round, and each party multiplies its points by its secret,
    in any order the same result. The finished lists are published: equal points are equal ids. So a party learns which
    of its own individuals each other party has, and where in that party's list (with two parties the intersection and
    no more), and how long all lists are. Parties follow the protocol; one that adds guesses to its own list is told
    whether others have them.

    Args:
      ids: as in `align_exact`.
      keys: each party's 32 secret bytes; None draws them from the operating system. The result does not depend on them.

    Returns: `Alignment`. Views: each party has the lists as they came to it, and all finished ones.

    Raises: as `align_exact`; ImportError without the package `cryptography` (extra `secagg`).

    Guarantees: exactly the overlap
    (tests/population/vertical/test_private_set_intersection.py::test_exactly_the_overlap), under any keys; no party
    ever sees an id, or the hash of one, without a secret of another (::test_what_each_party_sees).

    References: Meadows 1986; Huberman, Franklin and Hogg 1999 (commutative blinding); RFC 7748 (X25519).
    """
    tables = check_records("ids", ids, str, "an id as text")
    keys = [secrets.token_bytes(32) for _ in tables] if keys is None else list(keys)
    if len(keys) != len(tables) or any(not isinstance(key, bytes) or len(key) != 32 for key in keys):
        validate.fail("keys", f"{len(tables)} secrets of 32 bytes, one a party", [len(key) for key in keys])
    blinds, number = [_blind(key) for key in keys], len(tables)
    received: list[dict[str, Any]] = [{} for _ in tables]
    published = []
    for owner, table in enumerate(tables):
        points = [blinds[owner](_point(id)) for id in table]
        for step in range(1, number):
            other = (owner + step) % number
            received[other] |= {f"blinded ids of party {owner}": points}
            points = [blinds[other](point) for point in points]
        published.append(points)
    views = {f"party {p}": received[p] | {"published": published} for p in range(number)}
    return linked(published, views)


def _blind(key: bytes) -> Callable[[bytes], bytes]:
    """(point) -> the point times the secret."""
    try:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    except ImportError as missing:
        hint = "pip install 'fedjax_sim[secagg]'; alignment by keyed hashes needs no package, but a shared key."
        raise ImportError(f"cryptography: expected to be installed. {hint}") from missing
    secret = X25519PrivateKey.from_private_bytes(key)
    return lambda point: secret.exchange(X25519PublicKey.from_public_bytes(point))


def _point(id: str) -> bytes:
    """The id as a point of Curve25519, by its x: the first of a chain of hashes that lies on the curve.

    Half of all x belong to the curve's twist, and blinding keeps a point where it is: a bit of each id would show.
    """
    for attempt in range(256):
        raw = hashlib.sha256(b"fedjax_sim point %d\0" % attempt + id.encode()).digest()
        x = int.from_bytes(raw, "little") % 2**255 % CURVE_PRIME
        square = x * (x * x + CURVE_A * x + 1) % CURVE_PRIME
        if pow(square, (CURVE_PRIME - 1) // 2, CURVE_PRIME) == 1:
            return x.to_bytes(32, "little")
    raise AssertionError("256 hashes in a row were not on the curve: a chance of 2^-256")
