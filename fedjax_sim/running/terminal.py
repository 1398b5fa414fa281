"""Writes to the terminal: every text is made printable, so that no string from outside controls the terminal."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from fedjax_sim.text.printable import printable, printable_line


class PrintableStream(io.TextIOBase):
    """A text stream that writes printable text to another one; it has no `buffer`, which would bypass it.

    Args:
      stream: the stream to write to.
    """

    def __init__(self, stream: TextIO):
        self.stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the other stream."""
        return getattr(self.stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Writes the printable form of a text; characters that the encoding lacks are escaped, too."""
        if not isinstance(text, str):
            raise TypeError(f"text: expected str, got {type(text).__name__}")  # click tells streams of bytes by this
        encoded = printable(text).encode(self.encoding, "backslashreplace")
        self.stream.write(encoded.decode(self.encoding))
        return len(text)

    def flush(self) -> None:
        """Flushes the other stream."""
        self.stream.flush()

    def isatty(self) -> bool:
        """Returns whether the other stream is a terminal."""
        return self.stream.isatty()

    def fileno(self) -> int:
        """Returns the file descriptor of the other stream."""
        return self.stream.fileno()

    def writable(self) -> bool:
        """Returns True."""
        return True


@contextmanager
def escaped_output() -> Iterator[None]:
    """Makes all that the block writes to `sys.stdout` and `sys.stderr` printable.

    This covers tables, errors, warnings, tracebacks, and what other libraries print.
    """
    streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    wrapped = {name: PrintableStream(stream) for name, stream in streams.items()}
    for name, stream in wrapped.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in wrapped.items():
            # Where nobody reads the output any more, click has put a silent stream in the place of this one.
            if getattr(sys, name) is stream:
                setattr(sys, name, streams[name])


def console(*, stderr: bool = False, **options: Any) -> Any:
    """Returns a console of rich that shows text as it is: without markup or emoji codes, and printable.

    Its own colours and bars are control characters, so it writes past `PrintableStream` and escapes each text itself.

    Args:
      stderr: whether it writes to `sys.stderr`.
      options: further ones of `rich.console.Console`.
    """
    stream: Any = sys.stderr if stderr else sys.stdout
    while isinstance(stream, PrintableStream):
        stream = stream.stream
    return _console_class()(file=stream, markup=False, emoji=False, highlight=False, **options)


def grid(*headers: str, **options: Any) -> Any:
    """Returns a table of rich without lines, whose rows are lines: a line feed in a cell is escaped.

    Args:
      headers: of the columns.
      options: further ones of `rich.table.Table`.
    """
    return _table_class()(*headers, **{"box": None, "padding": (0, 2, 0, 0)} | options)


# rich is imported when something is shown: it takes a tenth of a second.
@functools.cache
def _console_class() -> type:
    from rich.console import Console
    from rich.segment import Segment

    class PrintableConsole(Console):
        def render_str(self, text: str, **options: Any) -> Any:
            # Escaped before it is measured, so that columns stay aligned.
            return super().render_str(printable(text), **options)

        def render(self, *arguments: Any, **options: Any) -> Any:
            for segment in super().render(*arguments, **options):
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

    return PrintableConsole


@functools.cache
def _table_class() -> type:
    from rich.table import Table
    from rich.text import Text

    class PrintableTable(Table):
        def add_column(self, header: Any = "", *arguments: Any, **options: Any) -> None:
            super().add_column(_line(header), *arguments, **options)

        def add_row(self, *cells: Any, **options: Any) -> None:
            super().add_row(*map(_line, cells), **options)

    def _line(cell: Any) -> Any:
        if isinstance(cell, str):
            return printable_line(cell)
        return Text(printable_line(cell.plain), cell.style) if isinstance(cell, Text) else cell

    return PrintableTable
