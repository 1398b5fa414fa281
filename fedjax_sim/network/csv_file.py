"""Tables of measured numbers: columns of a CSV file by name, each value checked."""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedjax_sim import validate
from fedjax_sim.types import FilePath

__all__ = ["MOST_ROWS", "SECONDS", "columns", "factor", "numbers", "parted", "rows_of"]

MOST_ROWS = 1 << 18  # programs hold the table
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}


def rows_of(option: str, path: FilePath) -> Iterator[tuple[int, list[str]]]:
    """(number of its line, the texts of its values) of each line of a CSV file that is not empty, one after the other.

    Args:
      option: what errors call the file.
      path: of a file in UTF-8, with or without a mark of it at its beginning, with commas between values, quoted or
        not, and any line ends; spaces before values do not count.

    Raises: ValueError for a file that cannot be read.

    Guarantees: tests/network/test_measured.py::test_a_file_of_another_style, ::test_wrong_files.
    """
    try:
        with Path(os.fspath(path)).expanduser().open(newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file, strict=True, skipinitialspace=True)
            yield from ((lines.line_num, row) for row in lines if row)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        validate.fail(option, "a CSV file in UTF-8", os.fspath(path), f"{type(error).__name__}: {error}")


def columns(path: str, names: Mapping[str, str]) -> dict[str, list[str]]:
    """The texts of some columns.

    Args:
      path: of a file with a header, as `rows_of` reads it; spaces around names and values do not count.
      names: what is asked for -> the column's name in the file.

    Returns: what is asked for -> its texts, row by row, without empty lines.

    Raises: ValueError for a file that cannot be read, a column that is not there or twice, a row of another length, no
    rows or more than 2^18.

    Guarantees: tests/network/test_measured.py::test_wrong_files, ::test_a_file_of_another_style.
    """
    rows = [row for _, row in rows_of("path", path)]
    if not rows:
        validate.fail("path", "a CSV file with a header", path, "The file is empty.")
    header, rows = [name.strip() for name in rows[0]], rows[1:]
    for option, name in names.items():
        if header.count(name) != 1:
            hint = "" if len(header) > 1 else "Values are separated by commas."
            validate.fail(option, f"one of the file's columns {', '.join(header)}", name, hint)
    if not 1 <= len(rows) <= MOST_ROWS:
        validate.fail("path", f"1 to {MOST_ROWS} rows below the header", len(rows))
    for i, row in enumerate(rows):
        if len(row) != len(header):
            validate.fail("path", f"{len(header)} values in row {i + 1}", len(row))
    return {option: [row[header.index(name)].strip() for row in rows] for option, name in names.items()}


def numbers(option: str, texts: Sequence[str], least: float = 0.0, *, above: bool = False) -> np.ndarray:
    """The column as [rows] float64: finite numbers of at least `least`, or above it.

    Raises: ValueError that names the first wrong row.
    """
    found = np.empty(len(texts))
    for i, text in enumerate(texts):
        found[i] = validate.decimal(text)
        if not (math.isfinite(found[i]) and (found[i] > least or (found[i] == least and not above))):
            rule = f"a finite number {'>' if above else '>='} {least:.15g} in row {i + 1}"
            validate.fail(option, rule, text)
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
