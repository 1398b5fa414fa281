"""Reads text files that others wrote: their encoding, delimiters, comments, codes of missing values. Writes CSV."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_sim import validate
from fedjax_sim.files.regular_files import content_of, opened
from fedjax_sim.text.printable import printable

# The first of these wins a draw: names with a comma in them are more usual than names with a semicolon or a tab.
DELIMITERS = ("\t", ";", ",")
MISSING = ("", "nan", "NaN", "<NA>", "NaT")  # what missing values become when Python or pandas writes them
# First bytes of a file that is no text -> how it becomes text.
CONVERSIONS = (
    (b"\xff\xfe", "It is UTF-16: save it as UTF-8 (in Excel: 'CSV UTF-8')."),
    (b"\xfe\xff", "It is UTF-16: save it as UTF-8 (in Excel: 'CSV UTF-8')."),
    (
        b"\x80",
        "It looks like a pickle, which runs code when it is read. Where you trust it, load it and write text.",
    ),
    (b"\x1f\x8b", "It is compressed: unpack it with gunzip."),
    (b"PK", "It is an archive or a workbook: unpack it, or save its sheet as 'CSV UTF-8'."),
    (b"PAR1", "It is a Parquet file: write it as text, pandas.read_parquet(path).to_csv(...)."),
    (b"\x89HDF", "It is an HDF5 file: population.tff_hdf5 and tff_text read those of TensorFlow Federated."),
)


def text_of(name: str, path: str | os.PathLike, what: str = "text in UTF-8") -> str:
    """Returns the whole text of a file in UTF-8, with or without a byte order mark; line ends of any kind become one.

    Args:
      name: the file's name in errors.
      path: of the file.
      what: the kind of text that is expected, for errors.

    Raises: ValueError that says how to convert the file, if it is of a known kind that is no text.

    Guarantees: a byte order mark is no part of the text, and a file of another kind is refused with advice
    (tests/files/test_text_files.py::test_marks_and_no_text).
    """
    path = Path(os.fspath(path)).expanduser()
    try:
        text = content_of(path).decode("utf-8-sig")
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError) as error:
        _unreadable(name, what, path, error)
        raise


def table_rows(
    name: str,
    path: str | os.PathLike,
    *,
    delimiter: str = "auto",
    comments: Iterable[str] = (),
    spaces: bool = False,
) -> Iterator[tuple[int, list[str]]]:
    """Yields (the number of its line, the texts of its values) for each line of a table that has values.

    Args:
      name: the file's name in errors.
      path: of a file in UTF-8, with or without a byte order mark, values quoted or not, any line ends. Spaces around
        values do not count, and lines without a value are left out.
      delimiter: the character between values; "space": any spaces and tabs; "auto": the character among comma,
        semicolon and tab that is most often in the first line, outside quotes, or the one that Excel's `sep=;` in the
        first line names. A line whose quotes are open goes on in the next line.
      comments: a line that begins with one of these texts is left out, unless it is inside a quoted value.
      spaces: whether "auto" takes "space" for a first line with spaces and none of the three characters.

    Raises: ValueError for a file that cannot be read, and for another delimiter.

    Guarantees:
      A table in every style has the same rows (tests/files/test_text_files.py::test_styles_of_one_table).
      Lines have their numbers (tests/files/test_text_files.py::test_lines_have_their_numbers).
      Values may have several lines (tests/files/test_text_files.py::test_line_ends_in_quotes).
    """
    _check_delimiter(delimiter)
    prefixes = tuple(comments)
    try:
        with io.TextIOWrapper(opened(Path(path).expanduser()), newline="", encoding="utf-8-sig") as file:
            head: list[str] = []
            if delimiter == "auto":
                head, first = _head(file, prefixes)
                excel_line = re.fullmatch(r"sep=(.)", first.strip("\r\n"))
                # Excel's first line names the delimiter, and is no row; empty lines keep the others' numbers.
                if excel_line is not None:
                    head = ["\n"] * len(head)
                    _check_delimiter(excel_line[1])
                delimiter = excel_line[1] if excel_line is not None else _delimiter_of(first, spaces)
            lines: Iterator[str] = (line for line, _ in _lines(itertools.chain(head, file), prefixes, delimiter))
            if delimiter == "space":
                lines = (re.sub(r"[ \t]+", " ", line.strip()) + "\n" for line in lines)
                delimiter = " "
            reader = csv.reader(lines, delimiter=delimiter, strict=True, skipinitialspace=True)
            for row in reader:
                cells = [cell.strip() for cell in row]
                if any(cells):
                    yield reader.line_num, cells
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        _unreadable(name, "a CSV file in UTF-8", path, error)


def number(place: str, text: str, missing: Sequence[str] = (), hint: str = "") -> float:
    """Returns the finite number in a cell, in the digits 0 to 9; NaN for a code of a missing value.

    Args:
      place: where the cell is, for errors, such as "a.csv:2".
      text: the cell.
      missing: codes of missing values, which match as texts or as numbers.
      hint: what to do about a cell that is no number, for errors.

    Raises: ValueError that names the place, with the hint.

    >>> number("a.csv:2", "-9.0", missing=["?", "-9"]), number("a.csv:2", "1e3")
    (nan, 1000.0)
    """
    text = text.strip()
    value = validate.decimal(text)
    if is_code(text, missing):
        return math.nan
    if not math.isfinite(value):
        advice = hint
        if re.fullmatch(r"[+-]?[0-9]+,[0-9]+", text):
            advice = "Decimals are written with a point."
        elif re.fullmatch(r"|\?|n\.?/?a\.?|nan|null|none|-", text, re.I):
            codes = json.dumps([*missing, text], ensure_ascii=False)
            advice = f"If it stands for a missing value, say so: missing = {codes}."
        elif math.isinf(value) or re.fullmatch(r"[+-]?inf(inity)?", text, re.I):
            advice = "It is not finite: correct it, or drop the row."
        validate.fail(place, " or ".join(["a finite number", *map(repr, missing)]), text, advice)
    return value


def says_missing(text: str) -> bool:
    """Returns whether a text is what a missing value becomes when it is written: nothing, or Python's or pandas' text.

    >>> [says_missing(text) for text in ("", "NaN", "<NA>", "NA")]
    [True, True, True, False]
    """
    return text.strip() in MISSING


def is_code(text: str, codes: Sequence[str]) -> bool:
    """Returns whether a text is one of the codes of missing values that a user states.

    Args:
      text: a value.
      codes: such as "?" or "-9". A number matches however it is written, and a code that says missing (`says_missing`)
        matches every text that does.

    >>> is_code("-9.0", ["?", "-9"]), is_code("", ["nan"]), is_code("", ["?"])
    (True, True, False)
    """
    text = text.strip()
    if text in codes:
        return True
    value = validate.decimal(text)
    means_nothing = says_missing(text) or text.lower() == "nan"
    return any(
        value == validate.decimal(code) or (means_nothing and (says_missing(code) or code.lower() == "nan"))
        for code in codes
    )


def csv_text(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    r"""Returns a table as CSV with printable texts, which a terminal may show; a value that a row lacks is empty.

    Args:
      names: of the columns.
      rows: values by the names of their columns.

    >>> csv_text(["name", "loss"], [{"name": "a\x1b[2J", "loss": 0.5}])
    'name,loss\na\\x1b[2J,0.5\n'
    """
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, names, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return printable(text.getvalue())


def check_missing(missing: Sequence[str]) -> tuple[str, ...]:
    """Returns the codes of missing values as texts, such as ("?", "-9").

    Raises: TypeError for anything but a list of texts.
    """
    if isinstance(missing, str) or not all(isinstance(code, str) for code in missing):
        validate.fail("missing", "a list of texts", missing, "Numbers too: ['?', '-9'].", TypeError)
    return tuple(code.strip() for code in missing)


def one_column(header: Sequence[str], delimiter: str) -> str:
    """Returns a hint if a header has a single column, which another delimiter would explain; otherwise an empty text.

    >>> one_column(["a|b"], "auto")
    "The first line has one value. If values are not separated by commas, semicolons or tabs, name it: delimiter = '|'."
    """
    if len(header) != 1:
        return ""
    likely = next((mark for mark in ("|", ":", ";", ",", "\t") if mark in header[0]), "space")
    between = "commas, semicolons or tabs" if delimiter == "auto" else repr(delimiter)
    finding = f"The first line has one value. If values are not separated by {between}"
    return f"{finding}, name it: delimiter = {likely!r}."


def _lines(lines: Iterable[str], comments: tuple[str, ...], delimiter: str) -> Iterator[tuple[str, bool]]:
    """Yields (each line, with an empty one in the place of a comment; whether it ends inside a quoted value)."""
    is_open = False
    for line in lines:
        if comments and not is_open and line.lstrip().startswith(comments):
            line = "\n"
        if '"' in line:
            # A line that begins inside quotes is read as if it began with their opening quote.
            is_open = _ends_in_quotes('"' * is_open + line, delimiter)
        yield line, is_open


def _head(lines: Iterator[str], comments: tuple[str, ...]) -> tuple[list[str], str]:
    """Returns (all lines up to the end of the first with a value, that line, with further lines inside its quotes).

    Args:
      lines: of the file; no more are taken than are returned.
      comments: the texts with which a comment begins.
    """
    head: list[str] = []

    def read() -> Iterator[str]:
        for line in lines:
            head.append(line)
            yield line

    first = ""
    for line, is_open in _lines(read(), comments, "auto"):
        first = first + line if first.strip() else line
        if first.strip() and not is_open:
            break
    return head, first


def _quoted(delimiter: str) -> str:
    """Returns a pattern for quoted values: (text before the quote) "(the value)(the closing quote, if there is one)."""
    marks = {"auto": "".join(DELIMITERS), "space": " \t"}.get(delimiter, re.escape(delimiter))
    return rf'(^ *|[{marks}] *)"([^"]*(?:""[^"]*)*)("?)'


def _ends_in_quotes(line: str, delimiter: str) -> bool:
    """Returns whether a quoted value is open at the end of a line; a quote inside another value is a character.

    >>> [_ends_in_quotes(line, "auto") for line in ('1;"a', '1;"a;""', '1;"a";b', '5";a')]
    [True, True, False, False]
    """
    return any(not closing for _, _, closing in re.findall(_quoted(delimiter), line))


def _check_delimiter(delimiter: str) -> None:
    """Refuses a delimiter that numbers, names or quotes may contain."""
    if delimiter in ("auto", "space"):
        return
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter.isalnum() or delimiter in '"\r\n .+-_':
        validate.fail("delimiter", "'auto', 'space', or one character such as ';' or a tab", delimiter)


def _delimiter_of(line: str, spaces: bool) -> str:
    """Returns the delimiter of a table by its first line; of two that are as frequent, the first of `DELIMITERS`."""
    # A delimiter inside quotes is none.
    bare = re.sub(_quoted("auto"), r"\1", line.strip("\r\n"))
    counts = [bare.count(mark) for mark in DELIMITERS]
    if spaces and not any(counts) and re.search(r"\S +\S", bare):
        return "space"
    return DELIMITERS[counts.index(max(counts))] if any(counts) else ","


def _unreadable(name: str, what: str, path: str | os.PathLike, error: Exception) -> None:
    """Raises the error of a file that is no text, with the way to convert it."""
    path = Path(os.fspath(path)).expanduser()
    hint = ""
    if isinstance(error, UnicodeDecodeError):
        with opened(path) as file:
            start = file.read(4)
        conversions = (words for mark, words in CONVERSIONS if start.startswith(mark))
        hint = next(conversions, "If it is text in another encoding, save it as UTF-8.")
    validate.fail(name, what, os.fspath(path), f"{type(error).__name__}: {error}. {hint}".strip())
