"""The folders of runs: which one to start in, and which one to resume."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedjax_sim.config.document import ConfigError
from fedjax_sim.config.files import named_paths
from fedjax_sim.config.value_kinds import problem
from fedjax_sim.running.checksums import check_files
from fedjax_sim.running.files import CheckpointError

__all__ = [
    "RUNS",
    "check_fresh",
    "check_there",
    "check_unfinished",
    "check_written",
    "drop_empty",
    "folder_to_resume",
    "next_folder",
    "rounds_done",
]

RUNS = Path("runs")


def rounds_done(folder: Path) -> int:
    """The newest committed round; -1 if there is none."""
    found = [int(p.stem[6:]) for p in (folder / "checkpoints").glob("round_*.ckpt") if p.stem[6:].isdigit()]
    return max(found, default=-1)


def check_fresh(folder: Path) -> None:
    """Refuses a folder that holds a run or cannot be created; does not create it, as the config may yet be refused.

    Raises: ConfigError.
    """
    parent = folder.absolute()
    while not parent.exists() and not parent.is_symlink():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        reason = "No permission to write there." if parent.is_dir() else f"Not a directory: {parent}."
        raise ConfigError([problem("--out", "a folder that can be made", str(folder), reason)])
    from fedjax_sim.running.log import earlier_run  # here, because it imports JAX

    found = earlier_run(folder)
    if found:
        hint = f"It holds {', '.join(found)}. Add --resume to continue it, or choose another --out."
        raise ConfigError([problem("--out", "a folder without a run", str(folder), hint)])


def folder_to_resume(out: Path | None) -> Path:
    """The run to resume: `out`, or the newest in `RUNS`.

    Raises: ConfigError without such a run.
    """
    if out is None:
        found = [path for path in RUNS.glob("*/config.toml") if rounds_done(path.parent) >= 0]
        if not found:
            raise ConfigError(
                [problem("--resume", "a run with a checkpoint in runs/", "none", "Give its folder: --out.")]
            )
        return max(found, key=lambda path: (path.parent / "checkpoints").stat().st_mtime).parent
    if rounds_done(out) < 0 or not (out / "config.toml").is_file():
        hint = "Nothing to resume there: leave out --resume to start."
        raise ConfigError([problem("--out", "a folder with config.toml and a checkpoint", str(out), hint)])
    return out


def check_written(folder: Path) -> None:
    """Refuses a config that was changed after the run wrote it.

    Raises: ConfigError.
    """
    try:
        check_files(folder, ["config.toml"])
    except CheckpointError as error:
        raise ConfigError([f"{error} To change an option use --set."]) from error


def check_there(tables: Mapping[str, Any]) -> None:
    """Refuses to resume a run whose files are not where its config says.

    Args:
      tables: of a `Config`.

    Raises: ConfigError.
    """
    problems = []
    for place, name in named_paths(tables).items():
        if not os.path.exists(os.path.expanduser(name)):
            hint = f"If it was moved, name its place, --set {place}=PATH: a run goes on with the same content anywhere."
            problems.append(problem(place, "a path that exists", name, hint))
    if problems:
        raise ConfigError(problems)


def check_unfinished(folder: Path, rounds: int) -> None:
    """Refuses a run that has finished all of its `rounds`.

    Raises: ConfigError.
    """
    done = rounds_done(folder)
    if done > rounds or (done == rounds and _summed_up(folder) == done):
        hint = f"{folder} has all of its rounds: nothing to resume. Its page: fedjax-sim report {folder}"
        raise ConfigError([problem("run.rounds", f"more than the {done} rounds done", rounds, hint)])


def _summed_up(folder: Path) -> int | None:
    """The number of rounds in the run's summary; None without one that can be read."""
    try:
        return json.loads((folder / "summary.json").read_bytes())["rounds"]
    except (KeyError, OSError, TypeError, ValueError):
        return None


def drop_empty(folder: Path | None) -> None:
    """Removes a folder that was created for a run which was then refused, if nothing is in it."""
    if folder is not None and folder.is_dir() and {path.name for path in folder.iterdir()} <= {".lock"}:
        (folder / ".lock").unlink(missing_ok=True)
        folder.rmdir()


def next_folder(base: Path) -> Path:
    """BASE-001, or the next free number; it is created, so that two runs never share it."""
    base.parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1_000_000):
        folder = base.with_name(f"{base.name}-{number:03d}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise OSError(f"{base.parent}: no free number left for {base.name}")
