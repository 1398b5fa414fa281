"""Writes the tables of a config as TOML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from fedjax_sim.text.printable import printable


def written(tables: Mapping[str, Any]) -> str:
    """Returns TOML that reads back to these tables; None is written as "none".

    Guarantees: every value is read back as it was (tests/config/test_document.py::test_toml_round_trip).
    """
    return "\n".join(_lines(tables)).strip() + "\n"


def _lines(table: Mapping[str, Any], path: str = "") -> Iterable[str]:
    """Yields the lines of a table: first its values, then the tables inside it, as TOML requires."""
    yield from (f"{_key(key)} = {inline(value)}" for key, value in table.items() if not isinstance(value, dict))
    for key, value in table.items():
        if isinstance(value, dict):
            place = f"{path}{_key(key)}"
            yield from ("", f"[{place}]", *_lines(value, f"{place}."))


def _key(name: str) -> str:
    """Returns a key as TOML: a name with dots, such as "data.alpha" of a grid, needs quotes."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else inline(name)


def inline(value: Any) -> str:
    """Returns a value, or a table, as TOML in one line.

    Args:
      value: None, a truth value, a number, a text, or a list or dict of these.

    >>> inline({"name": "adam", "learning_rate": 0.1})
    '{name = "adam", learning_rate = 0.1}'
    """
    if isinstance(value, str):
        # JSON's text is TOML's, except for the delete character. Whoever reads the file sees hidden characters escaped.
        text = json.dumps(value, ensure_ascii=False)
        hidden = [c for c in set(text) if printable(c) != c and not "\ud800" <= c <= "\udfff"]  # TOML has no surrogates
        return text if printable(text) == text else text.translate({ord(c): f"\\U{ord(c):08X}" for c in hidden})
    if isinstance(value, list):
        return f"[{', '.join(map(inline, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_key(key)} = {inline(inner)}' for key, inner in value.items())}}}"
    words = {None: '"none"', True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)
