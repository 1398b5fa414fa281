"""Finds the files and folders that a config names, and reads what a run's identity needs of their contents.

In memory a relative path is relative to the current folder, as everywhere in Python. In a file, a relative path is
relative to the file's folder: `rebased` converts between the two. A run's identity holds no path, but the content that
the path leads to (`contents`).
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
from fedjax_sim.config.lazy_parts import union
from fedjax_sim.config.signatures import Part
from fedjax_sim.config.value_kinds import problem
from fedjax_sim.files.regular_files import opened

AS_READ = "as it was read, see data_sha256"


def named_paths(tables: Mapping[str, Any]) -> dict[str, str]:
    """Returns the path of every file and folder that a config names, by the option's place in the config.

    Args:
      tables: the tables of a `Config`.

    Returns: {"devices.path": "phones.csv"}.

    Guarantees: the path options of every part are found (tests/laws/test_files.py::test_every_path_is_found).
    """
    return dict(_named(tables))


def contents(tables: Mapping[str, Any], only: Iterable[str] = registry.TABLES) -> tuple[dict[str, str], list[str]]:
    """Returns the digests of the files that a config names.

    The files of [data] have no digest here: the digest of the data that were read covers them. A digest of their folder
    would also cover files that a run does not use.

    Args:
      tables: the tables of a `Config`.
      only: places in the config whose files are looked at; by default all.

    Returns: ({"devices.path": "SHA-256 ...", "data.directory": "as it was read, ..."}, a problem for each file that
    cannot be read).

    Guarantees: digests depend on the files' contents, and not on their paths
    (tests/laws/test_files.py::test_identity_is_content).
    """
    digests = {}
    problems = []
    for place, name in _named(tables):
        if not is_at_or_inside(place, only):
            continue
        if place.startswith("data."):
            digests[place] = AS_READ
            continue
        path = Path(os.path.expanduser(name))
        try:
            with opened(path) as file:
                digests[place] = f"SHA-256 {hashlib.file_digest(file, 'sha256').hexdigest()}"
        except OSError as error:
            problems.append(problem(place, "a regular file that can be read", name, error.strerror or str(error)))
    return digests, problems


def rebased(
    tables: Mapping[str, Any], start: str | Path, to: str | Path = ".", but: Iterable[str] = ()
) -> dict[str, Any]:
    """Returns a copy of a config's tables whose relative paths lead from another folder to the same files.

    Args:
      tables: the tables of a `Config`.
      start: the folder that relative paths are relative to.
      to: the folder that they will be relative to; by default the current one.
      but: places in the config of paths, or of tables with paths, that stay as they are.

    Guarantees:
      A path in a file means the same from every folder
      (tests/config/test_files.py::test_paths_are_relative_to_their_file).
      A run and its data can be moved together (tests/config/test_files.py::test_a_run_and_its_data_move).
    """
    moved = copy.deepcopy(dict(tables))
    start_folder = os.path.realpath(start)
    end_folder = os.path.realpath(to)
    unchanged_places = set(but)
    if start_folder == end_folder:
        return moved
    for place, name in named_paths(tables).items():
        is_relative = name and not os.path.isabs(os.path.expanduser(name))
        if is_relative and not is_at_or_inside(place, unchanged_places):
            options, key = _options(moved, place)
            options[key] = os.path.relpath(os.path.join(start_folder, name), end_folder)
    return moved


def without_paths(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a config's tables without the options that name a file or a folder."""
    remaining = copy.deepcopy(dict(tables))
    for place in named_paths(tables):
        options, key = _options(remaining, place)
        del options[key]
    return remaining


def is_at_or_inside(place: str, others: Iterable[str]) -> bool:
    """Returns whether a place in a config is one of the other places, or inside one of them.

    >>> is_at_or_inside("devices.path", ["devices"]), is_at_or_inside("devices.path", ["devices.pa"])
    (True, False)
    """
    # The dot at the end keeps "devices.path" out of "devices.pa".
    return any(f"{place}.".startswith(f"{other}.") for other in others)


def _options(tables: dict[str, Any], place: str) -> tuple[dict[str, Any], str]:
    """Returns (the table that holds an option, the option's name in that table)."""
    *outer, last = place.split(".")
    return functools.reduce(operator.getitem, outer, tables), last


def _named(tables: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (place in the config, path) for every option that names a file or a folder.

    Args:
      tables: the tables of a `Config`; an absent or empty one names nothing.

    Yields: such as ("devices.path", "phones.csv"). An option of a wrapper, or of a part that is an option, has the
    names of all tables around it, with dots between them.
    """
    for table in registry.TABLES:
        table_options = tables.get(table, {})
        if table in registry.CHAINS:
            yield from _members(table, table, table_options)
        elif table_options:
            yield from _of_part(table, registry.parts_of_table(table)[table_options["name"]], table_options)
            wrappers = {
                key: inner_table for key, inner_table in table_options.items() if key in registry.wrappers(table)
            }
            yield from _members(table, table, wrappers)


def _members(table: str, place: str, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the paths of wrappers, or of a chain's transforms and of the transforms inside them."""
    known_parts = union(registry.wrappers(table), registry.parts_of_table(table) if table in registry.CHAINS else {})
    for name, options in given.items():
        if name in known_parts and isinstance(options, dict):
            yield from _of_part(f"{place}.{name}", known_parts[name], options)
            yield from _members(table, f"{place}.{name}", options)


def _of_part(place: str, part: Part, options: Mapping[str, Any], inside: bool = False) -> Iterator[tuple[str, str]]:
    """Yields the paths of one part, and of the parts that are its options."""
    known_options = registry.inside_options(part) if inside else part.options
    for key, value in options.items():
        if key not in known_options:
            continue
        is_part = isinstance(value, dict) and isinstance(known_options[key].kind, registry.Named)
        if is_part and (table := registry.chained(known_options[key].kind, value)):
            yield from _members(table, f"{place}.{key}", value)
        elif is_part:
            inner_part = registry.named(known_options[key].kind)[value["name"]]
            yield from _of_part(f"{place}.{key}", inner_part, value, True)
        elif registry.is_path(known_options[key]) and isinstance(value, str):
            yield f"{place}.{key}", value
