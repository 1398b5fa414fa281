"""Keeps the finished points of a sweep on disk, a line each, so that a sweep killed at any moment can resume."""

from __future__ import annotations

import json
import os
import shlex
import zlib
from pathlib import Path
from typing import Any

from fedjax_sim import tree
from fedjax_sim.files.regular_files import content_of, json_of
from fedjax_sim.running.files import CheckpointError, write_atomically
from fedjax_sim.running.kept_files import check_free_of

POINTS = "points.jsonl"
SWEEP_FILE = "sweep.toml"  # the config with `[sweep]`; its first line is the command that began the sweep


def what_a_sweep_holds(folder: str | Path) -> str:
    """Returns a sentence about a sweep's folder and the command that reads it; "" for another folder."""
    if not any((Path(folder) / name).is_file() for name in (SWEEP_FILE, POINTS, "results.jsonl")):
        return ""
    return (
        "It holds a sweep: rows in results.csv, a table in table.csv, a page in report.html. "
        f"fedjax-sim sweep --resume --out {shlex.quote(str(folder))} shows the table."
    )


def check_directory(directory: str | Path | None, resume: bool) -> None:
    """Refuses a folder that holds a run, a study or a sweep; or, for a resume, a folder without a sweep.

    Args:
      directory: of the sweep; None: no folder, and nothing is refused.
      resume: whether a sweep in the folder goes on.

    Raises: FileExistsError for a folder with a run or a study, and with a sweep if `resume` is False; FileNotFoundError
    for a folder without a sweep if `resume` is True.
    """
    if directory is None:
        return
    path = Path(directory) / POINTS
    check_free_of(directory, "a run", "a study")
    if resume and not path.exists():
        raise FileNotFoundError(f"resume: expected {path}, found none. Start without resume.")
    if not resume and path.exists():
        raise FileExistsError(
            f"directory: expected a folder without a sweep, got {path.parent}. Resume it, or choose another."
        )


class Finished:
    """A `Finished` holds rows by point in memory and, given a directory, in its file `points.jsonl`.

    Each point is a line of the file, with its CRC-32.

    Args:
      directory: the sweep's folder; None to write nothing.
      identity: what the sweep is, as JSON: it must be equal for a resume.
      resume: whether the points in the folder are read.

    Guarantees:
      Killed at any moment and resumed, the rows are those of an uninterrupted sweep
      (tests/sweeps/test_sweep.py::test_kill_and_resume).
      Another sweep's file is refused, with the differences
      (tests/sweeps/test_sweep.py::test_another_sweep_is_refused).
      A damaged line is refused (tests/sweeps/test_sweep.py::test_a_flipped_digit_is_refused).
    """

    def __init__(self, directory: str | Path | None, identity: dict[str, Any], resume: bool):
        self.rows: dict[int, list[dict]] = {}
        self.path = None if directory is None else Path(directory) / POINTS
        if self.path is None:
            return
        check_directory(directory, resume)
        if resume:
            self._read_back(self.path, identity)
        else:
            write_atomically(self.path, [_line({"sweep": identity})])

    def add(self, found: dict[int, list[dict]]) -> None:
        """Adds finished points: rows by the point's number."""
        self.rows |= found
        if self.path is not None:
            # Opened for an update, so that a file that was deleted meanwhile is an error and not begun anew.
            with open(self.path, "r+b", buffering=0) as file:
                file.seek(0, os.SEEK_END)
                text = memoryview(b"".join(_line({"point": point, "rows": rows}) for point, rows in found.items()))
                while text:
                    text = text[os.write(file.fileno(), text) :]
                os.fsync(file.fileno())

    def drop_empty(self) -> None:
        """Removes a file without any point, so that a sweep that was refused can be started again."""
        if self.path is not None and not self.rows:
            self.path.unlink(missing_ok=True)

    def _read_back(self, path: Path, identity: dict[str, Any]) -> None:
        """Reads the finished points, after comparing the sweep's identity with the file's.

        A last line without an end is cut off, since a kill may have stopped its writing.

        Args:
          path: of the file.
          identity: what the sweep is, as JSON.

        Raises: CheckpointError for a damaged file, and for the file of another sweep, with the differences.
        """
        text = content_of(path)
        # A kill may have cut off the last line: only lines with an end count.
        complete_bytes = text.rfind(b"\n") + 1
        try:
            header, *lines = [self._checked(i, line) for i, line in enumerate(text[:complete_bytes].splitlines(), 1)]
            stored = header["sweep"]
            self.rows = {line["point"]: line["rows"] for line in lines}
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: expected lines of a sweep, got others ({error}).") from error
        stored = tree.dotted(stored)
        given = tree.dotted(json.loads(json.dumps(identity)))
        differing = [
            f"  {name}: {_short(stored.get(name, 'absent'))} in the file, {_short(given.get(name, 'absent'))} now"
            for name in sorted(stored.keys() | given.keys())
            if stored.get(name, "absent") != given.get(name, "absent")
        ]
        if differing:
            raise CheckpointError(f"{path}: these are points of another sweep:\n" + "\n".join(differing))
        if complete_bytes < len(text):
            with open(path, "r+b") as file:
                file.truncate(complete_bytes)

    def _checked(self, number: int, line: bytes) -> dict:
        """Returns a line's value, after comparing its checksum."""
        value = dict(json_of(line))
        if value.pop("crc32") != zlib.crc32(json.dumps(value).encode()):
            raise CheckpointError(
                f"{self.path}: line {number} is damaged." + " Take it out: its point is run again." * (number > 1)
            )
        return value


def _line(value: dict) -> bytes:
    """Returns a value as a line, with the checksum of its JSON text."""
    return json.dumps(value | {"crc32": zlib.crc32(json.dumps(value).encode())}).encode() + b"\n"


def _short(value: Any) -> str:
    """Returns a value as text of at most 160 characters."""
    text = repr(value)
    return text if len(text) <= 160 else text[:157] + "..."
