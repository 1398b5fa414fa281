"""The files whose content a run depends on, by the options of its config that name them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedjax_sim.config import registry
from fedjax_sim.config.signatures import Part

__all__ = ["file_contents"]


def file_contents(tables: Mapping[str, Any]) -> dict[str, str]:
    """Which files a config names outside its data, such as measured devices, a graph or a trace, and what is in them.

    Those of the data are not among them: the data's own digest covers what was read.

    Args:
      tables: of a `Config`.

    Returns: {"devices.path": "phones.csv (SHA-256 ...)"}, by the option's path in the config; without files that cannot
    be read, which the part that needs them refuses.

    Guarantees: tests/config/test_files.py::test_files_of_a_config; a run does not resume over another content
    (::test_another_content_is_another_run).
    """
    found = {}
    for path, name in _named(tables):
        try:
            with Path(name).expanduser().open("rb") as file:
                found[path] = f"{name} (SHA-256 {hashlib.file_digest(file, 'sha256').hexdigest()})"
        except OSError:
            continue
    return found


def _named(tables: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(path in the config, file) of every option that names a file."""
    for table in registry.TABLES:
        given = tables.get(table, {})
        if table in registry.CHAINS:
            yield from _members(table, table, given)
        elif given:
            yield from _of_part(table, registry.table(table)[given["name"]], given)
            yield from _members(table, table, {key: x for key, x in given.items() if key in registry.wrappers(table)})


def _members(table: str, path: str, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Those of wrappers, or of a chain's parts and what these wrap."""
    known = registry.wrappers(table) | (registry.table(table) if table in registry.CHAINS else {})
    for name, options in given.items():
        if name in known and isinstance(options, dict):
            yield from _of_part(f"{path}.{name}", known[name], options)
            yield from _members(table, f"{path}.{name}", options)


def _of_part(path: str, part: Part, options: Mapping[str, Any], inside: bool = False) -> Iterator[tuple[str, str]]:
    kinds = registry.inside_options(part) if inside else part.options
    for key, value in options.items():
        if key not in kinds:
            continue
        if isinstance(value, dict) and (table := registry.chained(kinds[key].kind, value)):
            yield from _members(table, f"{path}.{key}", value)
        elif isinstance(value, dict):
            yield from _of_part(f"{path}.{key}", registry.named(kinds[key].kind)[value["name"]], value, True)
        elif registry.is_file(kinds[key]) and value is not None:
            yield f"{path}.{key}", value
