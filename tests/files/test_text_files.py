"""The reader of text files: every style of one table is one table, and what is no text says how to become it."""

import csv
import io
import itertools
import math
import re

import numpy as np
import pytest

from fedjax_sim.config.document import ConfigError, load
from fedjax_sim.files import text_files
from fedjax_sim.files.text_files import number, table_rows, text_of
from tests.refusals import refused

TABLE = [["id", "down, up", 'a "name", of, it, all'], ["1", "2.5", "x"], ["-9", "", "y;z"], ["?", "1e3", "#3"]]


def styled(delimiter, start, end, quoting, blank):
    """The table as a program would write it that uses this delimiter."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, quoting=quoting, lineterminator=end)
    for row in TABLE:
        writer.writerow(row)
        text.write(blank + end)
    return start + text.getvalue().encode()


def test_styles_of_one_table(tmp_path):
    """Fault: a mark, a line end, a quoted delimiter or a comment that becomes part of a value, or shifts a column."""
    path = tmp_path / "table"
    quotes, marks = (csv.QUOTE_MINIMAL, csv.QUOTE_ALL), (b"", b"\xef\xbb\xbf")
    for delimiter, start, end, quoting, blank in itertools.product(
        ",;\t|", marks, ("\n", "\r\n", "\r"), quotes, ("", "  ")
    ):
        path.write_bytes(styled(delimiter, start, end, quoting, blank))
        given = delimiter if delimiter == "|" else "auto"
        assert [cells for _, cells in table_rows("path", path, delimiter=given)] == TABLE, (delimiter, start, end)
    path.write_text('\ufeff# by hand\n\n "a"   "b"\t"c"\n  1\t\t2 3  \n% and more\n4 5 6', encoding="utf-8")
    expected = [["a", "b", "c"], ["1", "2", "3"], ["4", "5", "6"]]
    assert [cells for _, cells in table_rows("path", path, delimiter="space", comments="#%")] == expected
    path.write_text("1 2\n3  4\n")
    assert [cells for _, cells in table_rows("path", path, spaces=True)] == [["1", "2"], ["3", "4"]]
    assert [cells for _, cells in table_rows("path", path)] == [["1 2"], ["3  4"]]
    path.write_text("# by hand\nsep=|\r\na|b\r\n1,5|2\r\n")  # Excel's
    assert list(table_rows("path", path, comments="#")) == [(3, ["a", "b"]), (4, ["1,5", "2"])]
    path.write_text("")
    assert list(table_rows("path", path)) == []


def test_line_ends_in_quotes(tmp_path):
    """Faults: a delimiter guessed from half a header; a line of a value that is taken for a comment, or a quote in a
    value that is not quoted, after which comments are values."""
    path = tmp_path / "table"
    for mark in ";\t,":
        path.write_text(f'# by hand, of 2\n"dose, or\n# of,,, ""them\n"{mark}b{mark}c\n1{mark} "x\n# y\n"{mark}3\n#4\n')
        expected = [(4, ['dose, or\n# of,,, "them', "b", "c"]), (7, ["1", "x\n# y", "3"])]
        assert list(table_rows("path", path, comments="#")) == expected, mark
    path.write_text('size (5");b\n# c\n1;2, "x\n#\n"a""";#\n')
    table = [(1, ['size (5")', "b"]), (3, ["1", '2, "x']), (5, ['a"', "#"])]
    assert list(table_rows("path", path, comments="#")) == table
    path.write_text('a|"b\n#"\n#\n1|2\n')
    assert list(table_rows("path", path, comments="#", delimiter="|")) == [(2, ["a", "b\n#"]), (4, ["1", "2"])]
    path.write_text('\ta\t"b\n#c"\n#\n1 2\n')
    assert list(table_rows("path", path, comments="#", delimiter="space")) == [(2, ["a", "b\n#c"]), (4, ["1", "2"])]


def read_by_csv(text):
    """The rows of Python's own reader, to which a comment can only be the first line that it asks for in a row."""
    begins = True

    def lines():
        nonlocal begins
        for line in io.StringIO(text, newline=""):
            is_comment, begins = begins and line.lstrip().startswith("#"), False
            yield "\n" if is_comment else line

    reader, rows = csv.reader(lines(), delimiter=";", strict=True, skipinitialspace=True), []
    for row in reader:
        rows.append((reader.line_num, [cell.strip() for cell in row]))
        begins = True
    return [row for row in rows if any(row[1])]


def test_quotes_are_open_where_csv_says(tmp_path):
    """Fault: a quote that opens or closes elsewhere than for Python's reader: comments are values, or values erased."""
    path, rng = tmp_path / "table", np.random.default_rng(0)
    pieces = ['"', '""', ';"', '\n"', ";", ",", "a", "#", " ", "\n", "\n#", "\r\n"]
    num_rows_with_lines = 0
    for _ in range(1000):
        text = "".join(rng.choice(pieces, 12))
        path.write_text(text, newline="")
        try:
            expected = read_by_csv(text)
        except csv.Error:
            continue
        assert list(table_rows("path", path, delimiter=";", comments="#")) == expected, text
        num_rows_with_lines += any("\n#" in cell for _, row in expected for cell in row)
    assert num_rows_with_lines > 20


def test_lines_have_their_numbers(tmp_path):
    """Fault: an error that names the number of another line, behind comments, empty lines or a quoted line end."""
    path = tmp_path / "table"
    path.write_text('# c\na,b\n\n1,"x\ny"\n# d\n,\n2,3\n')
    assert [line for line, _ in table_rows("path", path, comments=["#"])] == [2, 5, 8]


@pytest.mark.parametrize("delimiter", ["", "ab", "a", "1", '"', "\n", ".", "-", 3])
def test_wrong_delimiters(tmp_path, delimiter):
    """Fault: a delimiter that cuts numbers."""
    (tmp_path / "table").write_text("a,b\n")
    with refused("delimiter", value=delimiter, rule="one character"):
        list(table_rows("path", tmp_path / "table", delimiter=delimiter))


@pytest.mark.parametrize(
    "data, told",
    [
        (b"\x80\x04\x95", "pickle, which runs code when it is read. Where you trust it"),
        ("a,b\n".encode("utf-16"), "UTF-16: save it as UTF-8"),
        (b"\x1f\x8b\x08\x00", "gunzip"),
        (b"PK\x03\x04\xff", "a workbook"),
        (b"PAR1\x15\xff", r"pandas.read_parquet\(path\).to_csv"),
        (b"\x89HDF\r\n", "tff_hdf5"),
        ("größe\n".encode("latin-1"), "another encoding, save it as UTF-8"),
    ],
)
def test_marks_and_no_text(tmp_path, data, told):
    """Faults: a byte order mark that stays, a pickle that is read, and an error that says nothing about what to do."""
    path = tmp_path / "file"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb")
    assert text_of("path", path) == "a\nb"
    path.write_bytes(data)
    for read in (text_of, lambda name, path: list(table_rows(name, path))):
        with pytest.raises(ValueError, match=f"path: .*file.*UnicodeDecodeError.*{told}"):
            read("path", path)
    with refused("path", rule="UTF-8", hint="FileNotFoundError"):
        text_of("path", tmp_path / "none")


@pytest.mark.parametrize(
    "text, missing",
    [
        ("-9", ["-9"]),
        (" -9.00 ", ["?", "-9"]),
        ("?", ["?"]),
        ("", [""]),
        ("nan", [""]),
        ("<NA>", ["nan"]),
        ("", ["NaN"]),
    ],
)
def test_codes_of_missing_values(text, missing):
    """Fault: a code that is a number where it is written in another way; a word that is taken for a code; an empty cell
    that is not what "nan" is."""
    assert math.isnan(number("here", text, missing))
    for word in ("nan", "x", "1_0", "٣", "inf", ""):
        # What missing values become when they are written is one thing, whichever of these texts is the code.
        if not text_files.says_missing(word) or not any(map(text_files.says_missing, missing)):
            with pytest.raises(ValueError, match="here: expected a finite number or "):
                number("here", word, missing)
    assert number("here", "-9.1", missing) == -9.1


def test_advice_keeps_the_codes():
    """Catches advice that, followed to the letter, brings an earlier error back, and infinity as a word."""
    with pytest.raises(ValueError, match=re.escape('missing = ["", "?"].')):
        number("here", "?", [""])
    for text in ("inf", "-Infinity", "1e999"):
        with pytest.raises(ValueError, match="It is not finite"):
            number("here", text, hint="A category.")
    with pytest.raises(ValueError, match="Decimals are written with a point"):
        number("here", "1,5")
    assert text_files.one_column(["a", "b"], "auto") == ""


def test_a_config_with_a_byte_order_mark(tmp_path):
    """Fault: a config that an editor of Windows wrote, refused at its first character."""
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf[run]\nrounds = 7\n")
    assert load(str(path), ["data.name=quadratics"]).tables["run"]["rounds"] == 7
    path.write_bytes(b"\xff\xfe[run]")
    with pytest.raises(ConfigError, match="expected TOML"):
        load(str(path), [])
