"""Tables of measured numbers: columns of a CSV file by name, each value checked."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_sim import text_files, validate
from fedjax_sim.types import FilePath

__all__ = ["MOST_ROWS", "SECONDS", "Table", "columns", "factor", "numbers", "parted"]

MOST_ROWS = 1 << 18  # programs hold the table
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}


class Table(NamedTuple):
    """Some columns of a file: what is asked for -> its texts, row by row, and the rows' numbers below the header."""

    texts: dict[str, list[str]]
    rows: list[int]


def columns(
    path: FilePath,
    names: Mapping[str, str],
    *,
    delimiter: str = "auto",
    missing: Sequence[str] = (),
    sample_rows: int | None = None,
    seed: int = 0,
    first: Mapping[str, int | None] | None = None,
    way_out: str = "",
) -> Table:
    """The texts of some columns.

    Args:
      path: of a file with a header, as `text_files.table_rows` reads it.
      names: what is asked for -> the column's name in the file.
      delimiter: as in `text_files.table_rows`.
      missing: texts that stand for a missing value; rows with one in a column that is asked for are left out.
      sample_rows: so many rows at random, without replacement and in the file's order; None for all of them.
      seed: of that choice.
      first: what is asked for -> of how many distinct texts, as they first appear; rows with others are left out.
      way_out: what errors say of more than 2^18 rows.

    Raises: ValueError for a file that cannot be read, a column that is not there or twice, a row of another length, no
    rows, or more than 2^18 of which none are left out.

    Guarantees: tests/network/test_measured.py::test_wrong_files, ::test_a_file_of_another_style; rows are equally
    likely to be in a sample (::test_samples_of_rows).
    """
    codes = text_files.check_missing(missing)
    rows = text_files.table_rows("path", path, delimiter=delimiter)
    _, header = next(rows, (0, []))
    if not header:
        validate.fail("path", "a CSV file with a header", path, "The file is empty.")
    for option, name in names.items():
        if header.count(name) != 1:
            hint = text_files.one_column(header, delimiter)
            validate.fail(option, f"one of the file's columns {', '.join(header)}", name, hint)
    if sample_rows is not None:
        validate.integer("sample_rows", sample_rows, 1, MOST_ROWS)
        validate.integer("seed", seed, 0)
    places = [header.index(name) for name in names.values()]
    found = _whole(rows, header, places, codes)
    for option, most in (first or {}).items():
        if most is not None:
            found = _of_first(found, list(names).index(option), most)
    kept, count = _kept(found, sample_rows, seed)
    if not 1 <= count <= (MOST_ROWS if sample_rows is None else count):
        validate.fail("path", f"1 to {MOST_ROWS} rows below the header", count, way_out if count else "")
    texts = {option: [values[i] for _, values in kept] for i, option in enumerate(names)}
    return Table(texts, [i for i, _ in kept])


def _whole(
    rows: Iterator[tuple[int, list[str]]], header: list[str], places: list[int], missing: tuple[str, ...]
) -> Iterator[tuple[int, list[str]]]:
    """(number of the row, the values at some places) of each row, without the rows that lack one of them."""
    for i, (_, row) in enumerate(rows, 1):
        if len(row) != len(header):
            validate.fail("path", f"{len(header)} values in row {i}", len(row))
        values = [row[place] for place in places]
        if not any(value in missing for value in values):
            yield i, values


def _of_first(rows: Iterator[tuple[int, list[str]]], place: int, most: int) -> Iterator[tuple[int, list[str]]]:
    """The rows whose text at this place is one of the first so many distinct ones."""
    known: set[str] = set()
    for number, values in rows:
        if len(known) < most:
            known.add(values[place])
        if values[place] in known:
            yield number, values


def _kept(
    rows: Iterator[tuple[int, list[str]]], sample_rows: int | None, seed: int
) -> tuple[list[tuple[int, list[str]]], int]:
    """(the first 2^18 rows, or so many of all at random, in their order; the number of all rows)."""
    rng, count = np.random.default_rng(seed), 0
    most = MOST_ROWS if sample_rows is None else sample_rows
    kept: list[tuple[int, list[str]]] = []
    for count, row in enumerate(rows, 1):
        if count <= most:
            kept.append(row)
        elif sample_rows is not None and (place := int(rng.integers(count))) < most:  # Vitter's algorithm R
            kept[place] = row
    return sorted(kept, key=lambda row: row[0]), count


def numbers(option: str, table: Table, least: float = 0.0, *, above: bool = False, hint: str = "") -> np.ndarray:
    """A column as [rows] float64: finite numbers of at least `least`, or above it.

    Raises: ValueError that names the first wrong row.
    """
    found = np.empty(len(table.rows))
    for i, text in enumerate(table.texts[option]):
        found[i] = validate.decimal(text)
        if not (math.isfinite(found[i]) and (found[i] > least or (found[i] == least and not above))):
            rule = f"a finite number {'>' if above else '>='} {least:.15g} in row {table.rows[i]}"
            validate.fail(option, rule, text, "" if math.isfinite(found[i]) else hint)
    return found


def parted(unit: str) -> tuple[str | None, str]:
    """(the number before a unit, the unit).

    >>> parted("2.5e6 flops/s"), parted("ms")
    (('2.5e6', 'flops/s'), (None, 'ms'))
    """
    number, name = re.fullmatch(r"\s*([\d.]+(?:[eE][+-]?\d+)?)?\s*(.*?)\s*", str(unit)).groups()
    return number, name


def factor(option: str, unit: str, units: Mapping[str, float]) -> float:
    """The number of base units in a unit such as "Mbit/s" or "2.5e6 flops/s".

    Raises: ValueError for an unknown unit, or a number before it that is not positive.

    >>> factor("unit", "2 ms", {"s": 1.0, "ms": 0.001})
    0.002
    """
    number, name = parted(unit)
    validate.one_of(option, name, units, hint="A number may stand before it: '2.5 ...'.")
    try:
        times = float(number or 1)
    except ValueError:
        times = math.nan
    if not 0 < times * units[name] < math.inf:
        validate.fail(option, "a positive number before the unit", unit)
    return times * units[name]
