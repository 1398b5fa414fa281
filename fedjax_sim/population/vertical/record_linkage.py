"""Private record linkage: names with errors, compared as keyed Bloom filters of their parts."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Annotated

import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.vertical.private_set_intersection import Alignment, check_key, check_records, checked_overlap
from fedjax_sim.validate import Integer, PositiveInt, PositiveShare

__all__ = ["align_similar", "bloom_filters", "dice"]

BLOCK = 1024  # rows compared at once


@validate.named_arguments
def bloom_filters(
    records: Sequence[Sequence[str]],
    key: bytes,
    *,
    num_bits: Annotated[int, Integer(8)] = 1000,
    num_hashes: PositiveInt = 15,
    gram: PositiveInt = 2,
) -> np.ndarray:
    """Each record as one Bloom filter of the q-grams of its fields, a cryptographic long-term key (CLK).

    A field is put in lower case, padded with gram - 1 blanks on both sides and cut into its distinct q-grams. A q-gram
    sets the bits (h_1 + i h_2) mod L, i = 0 .. k - 1, of two HMACs under the key, which differ by field: equal names in
    two fields set different bits.

    Args:
      records: [n] records of equally many fields, texts; an empty field sets no bit.
      key: at least 16 bytes, of the parties, and of nobody who compares the filters.
      num_bits: L, at least 8. num_hashes: k, at least 1. gram: q, at least 1.

    Returns: [n, L] bool.

    Guarantees: the bits set follow L (1 - (1 - 1 / L)^(k t)) for t q-grams
    (tests/population/vertical/test_record_linkage.py::test_how_full_a_filter_is); another key, other bits
    (::test_filters).

    References: Schnell, Bachteler and Reiher 2009, sections 2 and 3 (Bloom filters, double hashing); 2011 (one filter
    for all fields). Filters without differential privacy were broken by their frequencies (Kuzu et al. 2011): they
    are no guarantee.

    >>> bloom_filters([("ann",)], b"sixteen bytes...", num_bits=64, num_hashes=1).shape
    (1, 64)
    """
    check_key(key)
    filters, known, pad = np.zeros((len(records), num_bits), bool), {}, " " * (gram - 1)
    for row, record in enumerate(records):
        if isinstance(record, str) or len(record) != len(records[0]) or not all(isinstance(x, str) for x in record):
            validate.fail(f"records[{row}]", f"{len(records[0])} fields, texts", record, error=TypeError)
        for place, field in enumerate(record):
            padded = f"{pad}{field.strip().lower()}{pad}" if field.strip() else ""
            for start in range(len(padded) - gram + 1):
                token = place, padded[start : start + gram]
                if token not in known:
                    known[token] = _bits(token, key, num_bits, num_hashes)
                filters[row, known[token]] = True
    return filters


def _bits(token: tuple[int, str], key: bytes, num_bits: int, num_hashes: int) -> list[int]:
    raw = hmac.digest(key, f"{token[0]}\0{token[1]}".encode(), "sha256")
    first, second = int.from_bytes(raw[:16], "big"), int.from_bytes(raw[16:], "big")
    return [(first + i * second) % num_bits for i in range(num_hashes)]


def dice(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """[n, m] Dice coefficients 2 |a and b| / (|a| + |b|) of all pairs of filters [n, L] and [m, L]; 0 for empty ones.

    >>> dice(np.array([[True, True, False]]), np.array([[True, False, True], [True, True, False]])).tolist()
    [[0.5, 1.0]]
    """
    both = one.astype(np.float32) @ other.astype(np.float32).T  # integers below 2^24: exact
    return 2 * both / np.maximum(one.sum(1)[:, None] + other.sum(1)[None], 1)


@validate.named_arguments
def align_similar(
    records: Sequence[Sequence[Sequence[str]]],
    key: bytes,
    *,
    threshold: PositiveShare = 0.8,
    num_bits: int = 1000,
    num_hashes: int = 15,
    gram: int = 2,
) -> Alignment:
    """Record linkage without ids: filters of names, dates and the like, compared by a linkage unit.

    The unit links each party's records to those of party 0, one to one: pairs of a Dice coefficient of `threshold` or
    more, the most similar first, equal ones by their rows. A lower threshold finds more pairs that are the same person,
    and more that are not: those rows then train on somebody else's features.

    Args:
      records: of each party's rows, P >= 2 lists of distinct tuples of texts; party 0 holds the labels.
      key, num_bits, num_hashes, gram: as in `bloom_filters`; the unit does not have the key.
      threshold: in (0, 1].

    Returns: `Alignment`. Views: the linkage unit has all filters; each party the positions of the common rows.

    Raises: as `align_exact`; ValueError, TypeError for options out of range.

    Guarantees: exactly the overlap where records have no errors (tests/population/vertical/test_record_linkage.py::
    test_without_errors_it_is_exact); with them the pairs that the similarities of q-grams say (::test_errors); one
    person is linked once (::test_one_to_one); the unit sees filters alone (::test_what_each_party_sees).

    References: Schnell, Bachteler and Reiher 2009.

    >>> tables = [[("ann", "1980"), ("bob", "1975")], [("anne", "1980"), ("eve", "1999")]]
    >>> align_similar(tables, b"sixteen bytes...", threshold=0.7).rows.tolist()
    [[0, 0]]
    """
    tables = check_records("records", records, tuple, "a tuple of texts")
    how = {"num_bits": num_bits, "num_hashes": num_hashes, "gram": gram}
    for p, table in enumerate(tables):
        if len(table[0]) != len(tables[0][0]):
            hint = "A field is compared with the one at its place: give those that all parties have, in one order."
            validate.fail(f"records[{p}]", f"{len(tables[0][0])} fields, as party 0 has", len(table[0]), hint)
    filters = [bloom_filters(table, key, **how) for table in tables]
    links = np.full((len(tables[0]), len(tables)), -1, np.int64)
    links[:, 0] = np.arange(len(links))
    for p in range(1, len(tables)):
        for row, other in _pairs(filters[0], filters[p], threshold):
            links[row, p] = other
    found = checked_overlap(Alignment(links, {"linkage unit": {"filters": filters}}))
    return found._replace(
        views=dict(found.views) | {f"party {p}": {"positions": rows} for p, rows in enumerate(found.rows.T)}
    )


def _pairs(one: np.ndarray, other: np.ndarray, threshold: float) -> list[tuple[int, int]]:
    """One-to-one pairs of rows at or above the threshold, the most similar first."""
    found = []
    for start in range(0, len(one), BLOCK):
        similar = dice(one[start : start + BLOCK], other)
        rows, columns = np.nonzero(similar >= threshold)
        found.append(np.stack([-similar[rows, columns], rows + start, columns]))
    scores, rows, columns = np.concatenate(found, axis=1)
    taken, used, pairs = set(), set(), []
    for i in np.lexsort((columns, rows, scores)):
        row, column = int(rows[i]), int(columns[i])
        if row not in taken and column not in used:
            taken.add(row)
            used.add(column)
            pairs.append((row, column))
    return pairs
