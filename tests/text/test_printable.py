"""Text from outside: what is escaped, what stays, and that nothing else prints."""

import ast
import io
import sys
import unicodedata

import pytest

from fedjax_sim.config.value_kinds import ConfigError, Words, problem
from fedjax_sim.files.regular_files import opened
from fedjax_sim.running import terminal
from fedjax_sim.running.files import CheckpointError
from fedjax_sim.text.printable import printable, printable_line
from fedjax_sim.validate import InvalidArgument, InvalidType, fail
from tests.test_architecture import FILES, label, parsed

HIDDEN = {*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {0x09, 0x0A}
HIDDEN |= {0xAD, 0x061C, 0x200B, 0x200E, 0x200F, 0x2028, 0x2029, 0x2060, 0xFEFF, 0xD800, 0xDFFF, 0xE0041}
ORDINARY = "é ñ ß Ω 中文 日本語 العربية فارسی‌ها עברית हिन्दी क्‍ष 👩‍🔬 🏳️‍🌈 e\u0301 €\t\n\\x1b <b> [red]x[/] :smile:"


def test_what_is_escaped():
    """Faults: a control or mark of direction that a terminal acts on; letters of another script that are escaped."""
    assert printable(ORDINARY) == ORDINARY
    for code in HIDDEN:
        shown = printable(f"a{chr(code)}b")
        assert shown.isascii() and shown.isprintable(), hex(code)
        assert printable(shown) == shown
        assert ast.literal_eval(f'"{shown}"') == f"a{chr(code)}b"
    # No control and no lone surrogate is missing in the list above.
    for code in range(sys.maxunicode + 1):
        if unicodedata.category(chr(code)) in ("Cc", "Cs", "Zl", "Zp"):
            assert (printable(chr(code)) != chr(code)) == (chr(code) not in "\t\n"), hex(code)
    assert printable("ad\u200dmin") == "ad\\u200dmin"
    assert printable_line("a\nb\tc\x00") == "a\\nb\\tc\\x00"


def test_streams_and_consoles(monkeypatch):
    """Faults: a stream, a cell or a styled text that lets ESC through; markup that is acted on; rows that break."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with terminal.escaped_output():
        print("a\x1b[2J", "[red]x[/] :smile:")
        grid = terminal.grid("\x9bhead", show_header=True)
        grid.add_row("one\nloss 0.0\x1b[31m")
        console = terminal.console(width=60, force_terminal=True, color_system="truecolor")
        console.print(grid)
        console.print("[red]y[/] :smile:\u202e", style="bold")
        assert not hasattr(sys.stdout, "buffer")
    assert sys.stdout is out
    text = out.getvalue()
    assert "a\\x1b[2J [red]x[/] :smile:\n" in text and "\\x9bhead" in text and "one\\nloss 0.0\\x1b[31m" in text
    # The console's own style is the one control sequence.
    assert text.count("\x1b") == text.count("\x1b[1m") + text.count("\x1b[0m") > 0
    assert "[red]y[/] :smile:\\u202e" in text


def test_an_encoding_without_letters(monkeypatch):
    """Fault: a terminal in ASCII that ends a run by an error of encoding."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    with terminal.escaped_output():
        print("é\udc80")
    assert raw.getvalue() == b"\\xe9\\udc80\n"


@pytest.mark.parametrize("kind", [CheckpointError, ConfigError, InvalidArgument, InvalidType, OSError])
def test_errors_of_python(kind):
    """Fault: an error that a notebook shows with a name's control characters."""
    with pytest.raises(kind) as raised:
        if kind in (InvalidArgument, InvalidType):
            fail("x\x1b", "a \x9b", "\u202e", "hint\x07\nnext", TypeError if kind is InvalidType else ValueError)
        if kind is ConfigError:
            raise ConfigError([problem("x\x1b", "a \x9b", Words("\u202e"), "hint\x07")])
        if kind is CheckpointError:
            raise CheckpointError("x\x1b\u202e")
        opened("/tmp/\x1b\u202e")
    assert "\\x1b" in str(raised.value) and "\\u202e" in str(raised.value)
    assert printable(raised.value) == str(raised.value)


def users_of(module: str, *but: str) -> list[str]:
    """Returns the files that import a module."""
    found = []
    for path in FILES:
        if module not in path.read_text(encoding="utf-8"):
            continue
        for node in ast.walk(parsed(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            if module in names and path.name not in but:
                found.append(label(path))
    return found


@pytest.mark.parametrize("module", ["rich.console", "rich.table"])
def test_one_place_makes_consoles(module):
    """Fault: a command with a console of its own, which acts on markup and control characters."""
    assert users_of(module, "terminal.py") == []


def test_one_place_escapes_html():
    """Fault: a page that escapes markup alone."""
    assert users_of("html", "html.py") == []
