"""This module reads columns of measured numbers from a CSV file, by name, and checks each value."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.files import text_files
from fedjax_sim.types import FilePath

MOST_ROWS = 1 << 18  # compiled programs hold the table as a constant
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}


class Table(NamedTuple):
    """A `Table` holds some columns of a file.

    Args:
      texts: option -> the texts of its column, row by row.
      rows: the numbers of these rows, counted from 1 below the header.
    """

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
    """Reads the texts of some columns of a CSV file.

    Args:
      path: of a file with a header, as `text_files.table_rows` reads it.
      names: option -> the name of its column in the file.
      delimiter: as in `text_files.table_rows`.
      missing: texts that stand for a missing value. Rows with a missing value in one of the columns are left out.
      sample_rows: the size of a random sample of rows, without replacement and in the order of the file; None for all
        rows.
      seed: of that sample.
      first: option -> a number. Only rows whose text is one of the first so many distinct texts of the column are kept.
        None: all.
      way_out: the hint of the error for more than 2^18 rows.

    Returns: `Table`.

    Raises: ValueError for a file that cannot be read, a column that is missing or occurs twice, a row of another
    length, no rows, or more than 2^18 rows of which none are left out.

    Guarantees: Wrong files are refused (tests/network/test_measured.py::test_wrong_files,
    ::test_a_file_of_another_style). Rows are equally likely to be in a sample (::test_samples_of_rows).
    """
    missing_texts = text_files.check_missing(missing)
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
    column_indices = [header.index(name) for name in names.values()]
    # Rows are filtered and sampled by generators, so that a file larger than memory can be read.
    complete_rows = _complete_rows(rows, header, column_indices, missing_texts)
    for option, num_distinct in (first or {}).items():
        if num_distinct is not None:
            complete_rows = _with_first_texts(complete_rows, list(names).index(option), num_distinct)
    selected, count = _selected(complete_rows, sample_rows, seed)
    # A sample may come from any number of rows; without a sample, the number of rows is limited.
    if not 1 <= count <= (MOST_ROWS if sample_rows is None else count):
        validate.fail("path", f"1 to {MOST_ROWS} rows below the header", count, way_out if count else "")
    texts = {option: [values[index] for _, values in selected] for index, option in enumerate(names)}
    return Table(texts, [number for number, _ in selected])


def _complete_rows(
    rows: Iterator[tuple[int, list[str]]], header: list[str], column_indices: list[int], missing: tuple[str, ...]
) -> Iterator[tuple[int, list[str]]]:
    """Yields (number of the row, its values at some indices) for each row that has all of these values."""
    for number, (_, row) in enumerate(rows, 1):
        if len(row) != len(header):
            validate.fail("path", f"{len(header)} values in row {number}", len(row))
        values = [row[index] for index in column_indices]
        if not any(text_files.is_code(value, missing) for value in values):
            yield number, values


def _with_first_texts(
    rows: Iterator[tuple[int, list[str]]], index: int, num_distinct: int
) -> Iterator[tuple[int, list[str]]]:
    """Yields the rows whose text at an index is one of the first `num_distinct` distinct texts."""
    first_texts: set[str] = set()
    for number, values in rows:
        if len(first_texts) < num_distinct:
            first_texts.add(values[index])
        if values[index] in first_texts:
            yield number, values


def _selected(
    rows: Iterator[tuple[int, list[str]]], sample_rows: int | None, seed: int
) -> tuple[list[tuple[int, list[str]]], int]:
    """Selects rows in one pass, so that a file may be larger than memory.

    Args:
      rows: (number of the row, counted from 1 below the header; the texts of its columns).
      sample_rows: the size of a random sample without replacement, in which all rows are equally likely, or of all rows
        if there are fewer. None selects the first 2^18 rows.
      seed: of the sample.

    Returns: the selected rows in the order of the file, and the number of all rows.
    """
    rng = np.random.default_rng(seed)
    count = 0
    capacity = MOST_ROWS if sample_rows is None else sample_rows
    reservoir: list[tuple[int, list[str]]] = []
    for count, row in enumerate(rows, 1):
        if count <= capacity:
            reservoir.append(row)
        # Vitter's algorithm R: a sample in one pass, without knowing the number of rows.
        elif sample_rows is not None and (slot := int(rng.integers(count))) < capacity:
            reservoir[slot] = row
    return sorted(reservoir, key=lambda row: row[0]), count


def numbers(option: str, table: Table, least: float = 0.0, *, above: bool = False, hint: str = "") -> np.ndarray:
    """Reads a column as [rows] float64: finite numbers >= `least`, or > `least` if `above`.

    Args:
      option: of the column.
      table: as from `columns`.
      least: the bound.
      above: whether the bound itself is refused.
      hint: of the error for a text that is no finite number.

    Raises: ValueError that names the first wrong row.
    """
    values = np.empty(len(table.rows))
    for row, text in enumerate(table.texts[option]):
        values[row] = validate.decimal(text)
        if not (math.isfinite(values[row]) and (values[row] > least or (values[row] == least and not above))):
            rule = f"a finite number {'>' if above else '>='} {least:.15g} in row {table.rows[row]}"
            validate.fail(option, rule, text, "" if math.isfinite(values[row]) else hint)
    return values


def parted(unit: str) -> tuple[str | None, str]:
    """Splits a unit into (the number before it, or None; the unit).

    >>> parted("2.5e6 flops/s"), parted("ms")
    (('2.5e6', 'flops/s'), (None, 'ms'))
    """
    match = re.fullmatch(r"\s*([\d.]+(?:[eE][+-]?\d+)?)?\s*(.*?)\s*", str(unit), re.DOTALL)
    assert match is not None, "every text matches"
    number, name = match.groups()
    return number, name


def factor(option: str, unit: str, units: Mapping[str, float]) -> float:
    """Returns the number of base units in a unit such as "Mbit/s" or "2.5e6 flops/s".

    Args:
      option: of the unit, for errors.
      unit: a known unit, with or without a number before it.
      units: unit -> number of base units.

    Raises: ValueError for an unknown unit, or a number before it that is not positive.

    >>> factor("unit", "2 ms", {"s": 1.0, "ms": 0.001})
    0.002
    """
    number, name = parted(unit)
    validate.one_of(option, name, units, hint="A number may stand before it: '2.5 ...'.")
    try:
        multiple = float(number or 1)
    except ValueError:
        multiple = math.nan
    if not 0 < multiple * units[name] < math.inf:
        validate.fail(option, "a positive number before the unit", unit)
    return multiple * units[name]
