"""The files and folders that a config names: where they are, and what is in them.

In memory a relative path is relative to the current folder, as everywhere in Python. In a file it is relative to the
file's folder: `rebased` goes from one to the other. A run's identity has no path, but what the path leads to
(`contents`).
"""

from __future__ import annotations

import copy
import functools
import hashlib
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedjax_sim.config import registry
from fedjax_sim.config.signatures import Part
from fedjax_sim.config.value_kinds import problem

__all__ = ["contents", "is_within", "named_paths", "rebased", "without_paths"]

AS_READ = "as it was read, see data_sha256"


def named_paths(tables: Mapping[str, Any]) -> dict[str, str]:
    """The path of every file and folder that a config names, by the option's place in the config.

    Args:
      tables: of a `Config`.

    Returns: {"devices.path": "phones.csv"}.

    Guarantees: tests/laws/test_files.py::test_every_path_is_found.
    """
    return dict(_named(tables))


def contents(tables: Mapping[str, Any], only: Iterable[str] = registry.TABLES) -> tuple[dict[str, str], list[str]]:
    """What is in the files that a config names.

    The files of [data] are read as a whole, so that the digest of the data covers what a run takes from them, and not
    what else is in a folder.

    Args:
      tables: of a `Config`.
      only: places in the config whose files are looked at; by default all.

    Returns: ({"devices.path": "SHA-256 ...", "data.directory": "as it was read, ..."}, a problem for each file that
    cannot be read).

    Guarantees: tests/laws/test_files.py::test_identity_is_content.
    """
    found = {}
    problems = []
    for place, name in _named(tables):
        if not is_within(place, only):
            continue
        if place.startswith("data."):
            found[place] = AS_READ
            continue
        path = Path(os.path.expanduser(name))
        try:
            if not path.is_file():  # a pipe is empty when it is read again
                raise OSError("There is none.")
            with path.open("rb") as file:
                found[place] = f"SHA-256 {hashlib.file_digest(file, 'sha256').hexdigest()}"
        except OSError as error:
            problems.append(problem(place, "a regular file that can be read", name, error.strerror or str(error)))
    return found, problems


def rebased(
    tables: Mapping[str, Any], start: str | Path, to: str | Path = ".", but: Iterable[str] = ()
) -> dict[str, Any]:
    """A copy of a config's tables whose relative paths lead from another folder to the same files.

    Args:
      tables: of a `Config`.
      start: the folder that relative paths are relative to.
      to: the folder that they will be relative to; by default the current one.
      but: places in the config of paths, or of tables with paths, that stay as they are.

    Guarantees: tests/config/test_files.py::test_paths_are_relative_to_their_file, ::test_a_run_and_its_data_move.
    """
    moved = copy.deepcopy(dict(tables))
    before = os.path.realpath(start)
    after = os.path.realpath(to)
    kept = set(but)
    if before == after:
        return moved
    for place, name in named_paths(tables).items():
        is_relative = name and not os.path.isabs(os.path.expanduser(name))
        if is_relative and not is_within(place, kept):
            options, key = _options(moved, place)
            options[key] = os.path.relpath(os.path.join(before, name), after)
    return moved


def without_paths(tables: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config's tables without the options that name a file or a folder."""
    rest = copy.deepcopy(dict(tables))
    for place in named_paths(tables):
        options, key = _options(rest, place)
        del options[key]
    return rest


def is_within(place: str, others: Iterable[str]) -> bool:
    """Whether a place in a config is one of these, or inside one of them.

    >>> is_within("devices.path", ["devices"]), is_within("devices.path", ["devices.pa"])
    (True, False)
    """
    return any(f"{place}.".startswith(f"{other}.") for other in others)


def _options(tables: dict[str, Any], place: str) -> tuple[dict[str, Any], str]:
    """(the table that holds an option, its name there)."""
    *outer, last = place.split(".")
    return functools.reduce(operator.getitem, outer, tables), last


def _named(tables: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(place in the config, path) of every option that names a file or a folder."""
    for table in registry.TABLES:
        given = tables.get(table, {})
        if table in registry.CHAINS:
            yield from _members(table, table, given)
        elif given:
            yield from _of_part(table, registry.parts_of_table(table)[given["name"]], given)
            yield from _members(table, table, {key: x for key, x in given.items() if key in registry.wrappers(table)})


def _members(table: str, place: str, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Those of wrappers, or of a chain's parts and what these wrap."""
    known = registry.wrappers(table) | (registry.parts_of_table(table) if table in registry.CHAINS else {})
    for name, options in given.items():
        if name in known and isinstance(options, dict):
            yield from _of_part(f"{place}.{name}", known[name], options)
            yield from _members(table, f"{place}.{name}", options)


def _of_part(place: str, part: Part, options: Mapping[str, Any], inside: bool = False) -> Iterator[tuple[str, str]]:
    kinds = registry.inside_options(part) if inside else part.options
    for key, value in options.items():
        if key not in kinds:
            continue
        if isinstance(value, dict) and (table := registry.chained(kinds[key].kind, value)):
            yield from _members(table, f"{place}.{key}", value)
        elif isinstance(value, dict):
            yield from _of_part(f"{place}.{key}", registry.named(kinds[key].kind)[value["name"]], value, True)
        elif registry.is_path(kinds[key]) and value is not None:
            yield f"{place}.{key}", value
