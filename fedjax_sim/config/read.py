"""Reads what a user states, the first of three passes: a TOML file or an example, then `--unset` and `--set` over it.

Nothing here knows what the tables mean. `config.resolve` then finds the parts that they name, and `config.build` makes
these.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from fedjax_sim.config.value_kinds import ConfigError, Words, nearest_word, problem
from fedjax_sim.files.regular_files import content_of, toml_of

_PACKAGE = Path(__file__).parents[1]
_INSTALLED = _PACKAGE / "examples"
# A built package holds the examples (`setup.py`); a checkout has them beside the package.
EXAMPLES_FOLDER = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "experiments"
MAX_BYTES = 1 << 20  # the largest config file that is read
MOST_KEYS = 50  # tables inside one another on the way to an option


class Document(NamedTuple):
    """What a user states, layer over layer."""

    tables: dict[str, Any]  # as TOML has them
    folder: str | Path  # that relative paths of the file are relative to
    set_here: set[str]  # places that `--set` states: their relative paths are relative to the current folder
    problems: list[str]  # what could not be read, set or taken out


def read(path: str | Path | None, overrides: Iterable[str] = (), without: Iterable[str] = ()) -> Document:
    """Reads a file, takes out what is unwanted, and sets what is stated anew.

    Args:
      path: a TOML file, or an example's name; None for no file.
      overrides: texts `table.option=value`.
      without: places that are left out, such as "downlink".

    Raises: ConfigError for a file that cannot be read, that is too large, or that is no TOML, and for arguments of
      another type, such as one text in the place of a list.

    >>> document = read(None, ["run.rounds=5"])
    >>> document.tables, document.set_here, document.problems
    ({'run': {'rounds': 5}}, {'run.rounds'}, [])
    """
    if not isinstance(path, (str, os.PathLike, NoneType)):
        raise ConfigError([problem("path", "a path, an example's name or None", path)])
    overrides = _texts("overrides", overrides, "run.rounds=5")
    without = _texts("without", without, "downlink")
    tables = {} if path is None else read_document(path)
    problems = [*unset(tables, without), *override(tables, overrides)]
    folder = "." if path is None else config_file(path).parent
    return Document(tables, folder, places_set(overrides), problems)


def _texts(name: str, given: Iterable[str], example: str) -> list[str]:
    """Returns an argument as a list of texts; refuses one text alone, whose letters would be taken one by one."""
    is_list = isinstance(given, Iterable) and not isinstance(given, str)
    texts = list(given) if is_list else []
    if not is_list or not all(isinstance(text, str) for text in texts):
        raise ConfigError([problem(name, f"a list of texts, such as [{example!r}]", given)])
    return texts


def config_file(path: str | Path) -> Path:
    """Returns the file at a path; or the file of an example, if the path is an example's name and no file.

    >>> config_file("quickstart").name
    'quickstart.toml'
    """
    path, example = Path(path), EXAMPLES_FOLDER / f"{path}.toml"
    return example if example.is_file() and not path.is_file() else path


def read_document(path: str | Path) -> dict[str, Any]:
    """Reads the tables of a TOML file, or of an example by its name.

    Args:
      path: of a TOML file, or the name of an example.

    Raises: ConfigError for a file that cannot be read, that is too large, or that is no TOML.
    """
    path = config_file(path)
    try:
        content = content_of(path, MAX_BYTES)
    except OSError as error:
        names = sorted(example.stem for example in EXAMPLES_FOLDER.glob("*.toml"))
        hint = f"{nearest_word(path.stem, names)} Examples have names: {', '.join(names)}.".strip()
        raise ConfigError([problem(str(path), "a TOML file", Words(error.strerror or str(error)), hint)]) from error
    try:
        return toml_of(content.decode("utf-8-sig"))
    except ValueError as error:
        words = str(error)
        hint = "A key or table may be given once." if "overwrite" in words or "twice" in words else ""
        raise ConfigError([problem(str(path), "TOML", Words(words), hint)]) from error


def override(document: dict, overrides: Iterable[str]) -> Iterable[str]:
    """Sets each `a.b=c` in the document, and yields a problem for each that cannot be set.

    Args:
      document: tables by name, which are changed in place.
      overrides: as `--set` states them: the dotted path of an option, and a value in TOML or as plain text.

    Yields: sentences, as `problem` makes them.

    >>> document = {"run": {"rounds": 5}}
    >>> list(override(document, ["run.rounds=7", "model.name=mlp"])), document
    ([], {'run': {'rounds': 7}, 'model': {'name': 'mlp'}})
    """
    seen_paths = set()
    for text in overrides:
        name, equals, value = text.partition("=")
        keys = [key.strip() for key in name.split(".")]
        if not equals or len(keys) > MOST_KEYS or not all(re.fullmatch(r"[A-Za-z0-9_-]+", key) for key in keys):
            yield problem("--set", "table.option=value", text)
            continue
        if any("\ud800" <= character <= "\udfff" for character in text):
            yield problem("--set", "text in UTF-8", text, "A config cannot hold other bytes: rename the file.")
            continue
        path = ".".join(keys)
        if path in seen_paths:
            yield problem(path, "one --set", text, "The same option is set twice.")
            continue
        seen_paths.add(path)
        try:
            # A value with a line break could add keys of its own.
            parsed = toml_of(f"value = {value}")
            if len(parsed) != 1:
                raise ValueError("more than one value")
            value = parsed["value"]
        except ValueError:
            # Text needs no quotes, unless it starts as another kind of TOML value.
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
    """Takes each table or option out of the document, and yields a problem for each that the document does not have.

    Args:
      document: tables by name, which are changed in place.
      places: dotted paths of tables or options, as `--unset` states them.

    Yields: sentences, as `problem` makes them.

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
            names = ", ".join(map(repr, table)) if isinstance(table, dict) else ""
            hint = f"It has {names}." if names else ""
            yield problem(f"--unset {place}", "a table or option of the file", Words("nothing of that name"), hint)


def places_set(overrides: Iterable[str]) -> set[str]:
    """Returns the places in the config that the overrides set.

    >>> places_set(["run.rounds = 5"])
    {'run.rounds'}
    """
    return {".".join(key.strip() for key in text.partition("=")[0].split(".")) for text in overrides}
