"""TOML files of configs: reading one, by its path or by an example's name, overriding its options, writing it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedjax_sim.config.value_kinds import Words, problem

__all__ = ["ConfigError", "config_file", "inline", "override", "places_set", "read_document", "unset", "written"]

EXAMPLES = Path(__file__).parents[1] / "examples"  # experiments/ of the repository
MAX_BYTES = 1 << 20  # of a config file


class ConfigError(ValueError):
    """Wrong input; `problems` and the text have one line per problem."""

    def __init__(self, problems: Iterable[str]):
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


def config_file(path: str | Path) -> Path:
    """The file at a path, or that of an example by its name.

    >>> config_file("quickstart").name
    'quickstart.toml'
    """
    path, example = Path(path), EXAMPLES / f"{path}.toml"
    return example if example.is_file() and not path.is_file() else path


def read_document(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file, or of an example by its name.

    Raises: ConfigError.
    """
    path = config_file(path)
    try:
        data = path.read_bytes() if path.stat().st_size <= MAX_BYTES else None
    except OSError as error:
        hint = f"Examples have names: {', '.join(sorted(one.stem for one in EXAMPLES.glob('*.toml')))}."
        raise ConfigError([problem(str(path), "a TOML file", Words(error.strerror or str(error)), hint)]) from error
    if data is None:
        raise ConfigError([problem(str(path), f"at most {MAX_BYTES} bytes", path.stat().st_size)])
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        words = str(error)
        hint = "A key or table may be given once." if "overwrite" in words or "twice" in words else ""
        raise ConfigError([problem(str(path), "TOML", Words(words), hint)]) from error


def override(document: dict, overrides: Iterable[str]) -> Iterable[str]:
    """Sets each `a.b=c` in the document, and yields problems."""
    seen = set()
    for text in overrides:
        name, equals, value = text.partition("=")
        keys = [key.strip() for key in name.split(".")]
        if not equals or not all(re.fullmatch(r"[A-Za-z0-9_-]+", key) for key in keys):
            yield problem("--set", "table.option=value", text)
            continue
        path = ".".join(keys)
        if path in seen:
            yield problem(path, "one --set", text, "The same option is set twice.")
            continue
        seen.add(path)
        try:
            parsed = tomllib.loads(f"value = {value}")
            if len(parsed) != 1:
                raise ValueError("more than one value")
            value = parsed["value"]
        except (ValueError, RecursionError):
            value = value.strip()
            if not value or value[0] in "[{\"'" or "\n" in value:
                yield problem(path, "a TOML value", value)
                continue
        table = document
        for depth, key in enumerate(keys[:-1], 1):
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                yield problem(".".join(keys[:depth]), "a table", table)
                break
        else:
            table[keys[-1]] = value


def unset(document: dict, places: Iterable[str]) -> Iterable[str]:
    """Takes each table or option out of the document, and yields problems.

    >>> document = {"downlink": {"quantize": {"bits": 8}}, "seed": 1}
    >>> list(unset(document, ["downlink.quantize"])), document
    ([], {'downlink': {}, 'seed': 1})
    >>> list(unset(document, ["model"]))
    ["--unset model: expected a table or option of the file, got nothing of that name. It has 'downlink', 'seed'."]
    """
    for place in places:
        *tables, last = place.split(".")
        table: Any = document
        for key in tables:
            table = table.get(key) if isinstance(table, dict) else None
        if isinstance(table, dict) and last in table:
            del table[last]
        else:
            known = ", ".join(map(repr, table)) if isinstance(table, dict) else ""
            hint = f"It has {known}." if known else ""
            yield problem(f"--unset {place}", "a table or option of the file", Words("nothing of that name"), hint)


def places_set(overrides: Iterable[str]) -> set[str]:
    """The places in the config that are set.

    >>> places_set(["run.rounds = 5"])
    {'run.rounds'}
    """
    return {".".join(key.strip() for key in text.partition("=")[0].split(".")) for text in overrides}


def written(tables: Mapping[str, Any]) -> str:
    """TOML that reads back to these tables; None is written as "none".

    Guarantees: tests/config/test_document.py::test_toml_round_trip.
    """
    return "\n".join(_lines(tables)).strip() + "\n"


def _lines(table: Mapping[str, Any], path: str = "") -> Iterable[str]:
    yield from (f"{key} = {inline(value)}" for key, value in table.items() if not isinstance(value, dict))
    for key, value in table.items():
        if isinstance(value, dict):
            yield from ("", f"[{path}{key}]", *_lines(value, f"{path}{key}."))


def inline(value: Any) -> str:
    """A value, or a table, as TOML in one line.

    >>> inline({"name": "adam", "learning_rate": 0.1})
    '{name = "adam", learning_rate = 0.1}'
    """
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(inline, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {inline(one)}' for key, one in value.items())}}}"
    words = {None: '"none"', True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)
