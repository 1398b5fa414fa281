"""Shows text from outside: control and invisible characters become visible escapes, ordinary Unicode stays."""

from __future__ import annotations

import re
from typing import Any

# Controls (C0, DEL, C1), marks that turn the direction of text, characters without a width, separators of lines and
# paragraphs, halves of surrogate pairs, and the invisible tags of plane 14.
_HIDDEN = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\ud800-\udfff\U000e0000-\U000e007f"
)
# Joiners shape letters and emoji. Beside ASCII they only hide.
_LONE_JOINER = r"(?<![^\x00-\x7f])[\u200c\u200d]|[\u200c\u200d](?![^\x00-\x7f])"
_UNSAFE = re.compile(f"[{_HIDDEN}]|{_LONE_JOINER}")


def printable(value: Any) -> str:
    r"""Returns the text of a value, in which control and invisible characters are Python's escapes.

    Escaped are control characters except tabs and line feeds, marks of direction, characters without a width, line and
    paragraph separators, and lone surrogates. Backslashes stay, so text that is escaped already does not change.

    Args:
      value: anything; `str` makes its text.

    Guarantees:
      A terminal or a browser acts on no character of the result, and ordinary letters and emoji stay
      (tests/text/test_printable.py::test_what_is_escaped).
      Every command, error and page shows strings from outside in this form
      (tests/command/test_hostile_text.py::test_no_command_shows_it_raw).

    >>> printable("\x1b[31mred\u202e"), printable("é 中文 👩‍🔬")
    ('\\x1b[31mred\\u202e', 'é 中文 👩‍🔬')
    """
    return _UNSAFE.sub(_escape, str(value))


def printable_line(value: Any) -> str:
    r"""Returns the printable text of a value in one line: tabs and line feeds are escaped, too.

    >>> printable_line("a\nloss 0.0")
    'a\\nloss 0.0'
    """
    return printable(value).replace("\n", r"\n").replace("\t", r"\t")


def _escape(match: re.Match[str]) -> str:
    """Returns a character as Python writes it in a string."""
    return match[0].encode("unicode_escape").decode("ascii")
