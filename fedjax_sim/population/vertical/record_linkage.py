"""Private record linkage aligns names that contain errors. Keyed Bloom filters of parts of the names are compared."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Annotated

import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.vertical.private_set_intersection import Alignment, check_key, check_records, checked_overlap
from fedjax_sim.validate import Integer, PositiveInt, PositiveShare

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
    """Encodes each record as one Bloom filter of the q-grams of its fields, a cryptographic long-term key (CLK).

    A field is put in lower case, padded with q - 1 blanks on both sides, and cut into its distinct q-grams. A q-gram
    sets the bits (h_1 + i h_2) mod L for i = 0, ..., k - 1. Here h_1 and h_2 are the halves of an HMAC under the key.
    The HMAC covers the position of the field, so equal names in two fields set different bits.

    Args:
      records: [n] records, each with the same number of fields. A field is a text. An empty field sets no bit.
      key: at least 16 bytes. The parties have the key, and anybody who compares the filters must not have it.
      num_bits: L, at least 8.
      num_hashes: k, at least 1.
      gram: q, at least 1. With q = 2 the field "ann" has the q-grams " a", "an", "nn" and "n ".

    Returns: [n, L] bool.

    Guarantees: the expected number of bits set is L (1 - (1 - 1 / L)^(k t)) for t q-grams
    (tests/population/vertical/test_record_linkage.py::test_how_full_a_filter_is). Another key sets other bits
    (::test_filters).

    References: Schnell, Bachteler and Reiher 2009, sections 2 and 3 (Bloom filters, double hashing); 2011 (one filter
    for all fields). Kuzu et al. 2011 broke such filters by their frequencies. Without differential privacy they
    guarantee nothing.

    >>> bloom_filters([("ann",)], b"sixteen bytes...", num_bits=64, num_hashes=1).shape
    (1, 64)
    """
    check_key(key)
    filters = np.zeros((len(records), num_bits), bool)
    bits_of_token = {}  # (field, q-gram) -> bits, since most q-grams occur in many records
    pad = " " * (gram - 1)
    for row, record in enumerate(records):
        if isinstance(record, str) or len(record) != len(records[0]) or not all(isinstance(x, str) for x in record):
            validate.fail(f"records[{row}]", f"{len(records[0])} fields, texts", record, error=TypeError)
        for field_number, field in enumerate(record):
            # Blanks at both ends give first and last letters q-grams of their own.
            padded = f"{pad}{field.strip().lower()}{pad}" if field.strip() else ""
            for start in range(len(padded) - gram + 1):
                token = field_number, padded[start : start + gram]
                if token not in bits_of_token:
                    bits_of_token[token] = _bits(token, key, num_bits, num_hashes)
                filters[row, bits_of_token[token]] = True
    return filters


def _bits(token: tuple[int, str], key: bytes, num_bits: int, num_hashes: int) -> list[int]:
    """Returns the bits that a token (number of the field, q-gram) sets, by double hashing."""
    raw = hmac.digest(key, f"{token[0]}\0{token[1]}".encode(), "sha256")
    first_hash = int.from_bytes(raw[:16], "big")
    second_hash = int.from_bytes(raw[16:], "big")
    return [(first_hash + i * second_hash) % num_bits for i in range(num_hashes)]


def dice(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns the Dice coefficients 2 |a and b| / (|a| + |b|) of all pairs of filters, in [0, 1].

    Args:
      one: [n, L] bool.
      other: [m, L] bool.
    Returns: [n, m]. The coefficient of two empty filters is 0.

    >>> dice(np.array([[True, True, False]]), np.array([[True, False, True], [True, True, False]])).tolist()
    [[0.5, 1.0]]
    """
    # A product of floats is much faster than one of integers. It is exact, since all values are integers below 2^24.
    num_common = one.astype(np.float32) @ other.astype(np.float32).T
    return 2 * num_common / np.maximum(one.sum(1)[:, None] + other.sum(1)[None], 1)


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
    """Aligns rows without ids: a linkage unit compares Bloom filters of names, dates of birth and the like.

    The unit links each party's records to the records of party 0, one to one. It links pairs whose Dice coefficient is
    `threshold` or more, the most similar pair first. Pairs of equal similarity are linked in the order of their rows. A
    lower threshold finds more pairs that are the same person, but also more pairs that are not. Their rows then train
    on the features of another person.

    Args:
      records: of each party's rows, P >= 2 lists of distinct tuples of texts. Party 0 holds the labels.
      key, num_bits, num_hashes, gram: as in `bloom_filters`. The unit does not have the key.
      threshold: in (0, 1].

    Returns: `Alignment`. Views: the linkage unit receives all filters. Each party receives the positions of the common
      rows.

    Raises: as `align_exact`. ValueError or TypeError also for options out of range.

    Guarantees: it finds exactly the overlap if records have no errors (tests/population/vertical/test_record_linkage.py
    ::test_without_errors_it_is_exact). With errors it finds the pairs that the similarities of q-grams imply
    (::test_errors). Each person is linked once (::test_one_to_one). The unit sees filters alone
    (::test_what_each_party_sees).

    References: Schnell, Bachteler and Reiher 2009.

    >>> tables = [[("ann", "1980"), ("bob", "1975")], [("anne", "1980"), ("eve", "1999")]]
    >>> align_similar(tables, b"sixteen bytes...", threshold=0.7).rows.tolist()
    [[0, 0]]
    """
    tables = check_records("records", records, tuple, "a tuple of texts")
    filter_options = {"num_bits": num_bits, "num_hashes": num_hashes, "gram": gram}
    for p, table in enumerate(tables):
        if len(table[0]) != len(tables[0][0]):
            hint = "A field is compared with the one at its place: give those that all parties have, in one order."
            validate.fail(f"records[{p}]", f"{len(tables[0][0])} fields, as party 0 has", len(table[0]), hint)
    filters = [bloom_filters(table, key, **filter_options) for table in tables]
    # From here on the code does what the linkage unit does, which has the filters only.
    links = np.full((len(tables[0]), len(tables)), -1, np.int64)
    links[:, 0] = np.arange(len(links))
    for p in range(1, len(tables)):
        for row, other_row in _pairs(filters[0], filters[p], threshold):
            links[row, p] = other_row
    alignment = checked_overlap(Alignment(links, {"linkage unit": {"filters": filters}}))
    party_views = {f"party {p}": {"positions": rows} for p, rows in enumerate(alignment.rows.T)}
    return alignment._replace(views=dict(alignment.views) | party_views)


def _pairs(filters: np.ndarray, other_filters: np.ndarray, threshold: float) -> list[tuple[int, int]]:
    """Returns one-to-one pairs of rows whose similarity reaches the threshold. The most similar are chosen first.

    Args:
      filters: [n, L] bool, the filters of one party's records.
      other_filters: [m, L] bool, those of the other party.
      threshold: in (0, 1], the least Dice coefficient of a pair.

    Returns: (row, other row) of each pair, by falling similarity; of equal ones the lower rows first.
    """
    candidates = []
    for start in range(0, len(filters), BLOCK):  # the similarities of all pairs at once may not fit into memory
        similarities = dice(filters[start : start + BLOCK], other_filters)
        rows, other_rows = np.nonzero(similarities >= threshold)
        candidates.append(np.stack([-similarities[rows, other_rows], rows + start, other_rows]))
    negative_similarities, rows, other_rows = np.concatenate(candidates, axis=1)
    linked_rows = set()
    linked_other_rows = set()
    pairs = []
    # The last key of lexsort counts first: by falling similarity, and for equal ones by rows.
    for i in np.lexsort((other_rows, rows, negative_similarities)):
        row = int(rows[i])
        other_row = int(other_rows[i])
        if row not in linked_rows and other_row not in linked_other_rows:
            linked_rows.add(row)
            linked_other_rows.add(other_row)
            pairs.append((row, other_row))
    return pairs
