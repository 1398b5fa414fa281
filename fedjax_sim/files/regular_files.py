"""Reads files from outside: regular files alone, whose size is checked before, and JSON and TOML that are shallow."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
from io import BufferedReader
from typing import Any

MOST_DEPTH = 100  # levels of lists and tables inside one another
TOO_DEEP = f"lists and tables are nested deeper than {MOST_DEPTH} levels"
# A key a.b.c of more parts. Each part is taken whole, and the search begins at the first part, so it is linear.
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
LONG_KEY = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MOST_DEPTH}}}")
WORDS_BY_KIND = {
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}


def opened(path: str | os.PathLike) -> BufferedReader:
    """Opens a regular file, or a link to one, to read its bytes.

    Args:
      path: of the file or link.

    Raises: OSError for a file that cannot be opened, and for a pipe, a device, a socket or a folder. It neither waits
      for a pipe's writer nor reads from a device.

    Guarantees: every reader of the package refuses what is no regular file, and a size that it could not hold, in
    bounded time and memory (tests/files/test_regular_files.py::test_every_reader).
    """
    _check_kind(os.stat(path).st_mode, path)
    # Another file may have taken its place meanwhile, for whose writer a plain open would wait.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _check_kind(os.fstat(file).st_mode, path)
        return os.fdopen(file, "rb")
    except BaseException:
        os.close(file)
        raise


def content_of(path: str | os.PathLike, most_bytes: int | None = None) -> bytes:
    """Returns the bytes of a regular file.

    Args:
      path: of the file.
      most_bytes: a larger file is refused before it is read. None for half of the machine's memory.

    Raises: OSError as `opened`, and for a larger file.
    """
    most_bytes = _half_of_memory() if most_bytes is None else most_bytes
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            words = f"It has {size:,} bytes, and at most {most_bytes:,} are read"
            raise OSError(errno.EFBIG, words, os.fspath(path))
        return file.read(size)


def json_of(text: str | bytes) -> Any:
    """Returns the value of a JSON text.

    Raises: ValueError for a text that is no JSON, and for lists and tables that are nested deeper than `MOST_DEPTH`.

    >>> json_of("[" * 100_000)
    Traceback (most recent call last):
        ...
    ValueError: lists and tables are nested deeper than 100 levels
    """
    try:
        return _shallow(json.loads(text))
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def toml_of(text: str) -> dict[str, Any]:
    """Returns the tables of a TOML text.

    Args:
      text: the whole document.

    Raises: ValueError for a text that is no TOML, and for lists and tables that are nested deeper than `MOST_DEPTH`.

    >>> toml_of("a.b = 1")
    {'a': {'b': 1}}
    """
    # Memory and time of the parser grow with the square of a key's length.
    if LONG_KEY.search(text):
        raise ValueError(TOO_DEEP)
    try:
        return _shallow(tomllib.loads(text))
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def _shallow(value: Any) -> Any:
    """Returns a value; raises ValueError if lists and tables are nested deeper than `MOST_DEPTH`."""
    if _is_too_deep(value):
        raise ValueError(TOO_DEEP)
    return value


def _is_too_deep(value: Any) -> bool:
    """Returns whether lists and tables are nested deeper than `MOST_DEPTH`, where walking them could fail."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MOST_DEPTH):
        values = (inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer))
        level = [inner for inner in values if isinstance(inner, (dict, list))]
        if not level:
            return False
    return True


def _check_kind(mode: int, path: str | os.PathLike) -> None:
    """Refuses everything but a regular file."""
    if not stat.S_ISREG(mode):
        words = f"It is {WORDS_BY_KIND.get(stat.S_IFMT(mode), 'something else')}, and no regular file"
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, words, os.fspath(path))


def _half_of_memory() -> int:
    """Returns half of the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
