"""Chooses and checks the folders of runs: where a run starts, and which run is resumed."""

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
    """Returns the newest committed round of a run's folder; -1 if there is none."""
    checkpoints = (folder / "checkpoints").glob("round_*.ckpt")
    rounds = [int(path.stem[6:]) for path in checkpoints if path.stem[6:].isdigit()]
    return max(rounds, default=-1)


def check_fresh(folder: Path) -> None:
    """Refuses a folder that holds a run or cannot be created; does not create it, as the config may yet be refused.

    Raises: ConfigError for a folder that holds a run, or that cannot be created.
    """
    # The nearest folder that exists decides whether the others can be created.
    parent = folder.absolute()
    while not parent.exists() and not parent.is_symlink():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        reason = "No permission to write there." if parent.is_dir() else f"Not a directory: {parent}."
        raise ConfigError([problem("--out", "a folder that can be made", str(folder), reason)])
    from fedjax_sim.running.log import earlier_run  # imported here, because it imports JAX

    remains = earlier_run(folder)
    if remains:
        hint = f"It holds {', '.join(remains)}. Add --resume to continue it, or choose another --out."
        raise ConfigError([problem("--out", "a folder without a run", str(folder), hint)])


def folder_to_resume(out: Path | None) -> Path:
    """Returns the folder of the run to resume: `out`, or the folder in `RUNS` with the newest checkpoint.

    Raises: ConfigError if `out` has no config.toml or no checkpoint; without `out`, if no folder in `RUNS` has both.
    """
    if out is None:
        configs = [path for path in RUNS.glob("*/config.toml") if rounds_done(path.parent) >= 0]
        if not configs:
            raise ConfigError(
                [problem("--resume", "a run with a checkpoint in runs/", "none", "Give its folder: --out.")]
            )
        return max(configs, key=lambda path: (path.parent / "checkpoints").stat().st_mtime).parent
    if rounds_done(out) < 0 or not (out / "config.toml").is_file():
        hint = "Nothing to resume there: leave out --resume to start."
        raise ConfigError([problem("--out", "a folder with config.toml and a checkpoint", str(out), hint)])
    return out


def check_written(folder: Path) -> None:
    """Refuses a config that was changed after the run wrote it.

    Raises: ConfigError if the folder's config.toml is not the file that the run wrote.
    """
    try:
        check_files(folder, ["config.toml"])
    except CheckpointError as error:
        raise ConfigError([f"{error} To change an option use --set."]) from error


def check_there(tables: Mapping[str, Any]) -> None:
    """Refuses to resume a run whose files are not where its config says.

    Args:
      tables: the tables of a `Config`.

    Raises: ConfigError with a problem for each file that is missing.
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

    Raises: ConfigError if more than `rounds` are done, or exactly `rounds` with a written summary.
    """
    # A run that was killed after its last round has no summary yet: a resume writes it.
    done = rounds_done(folder)
    if done > rounds or (done == rounds and _summed_up(folder) == done):
        hint = f"{folder} has all of its rounds: nothing to resume. Its page: fedjax-sim report {folder}"
        raise ConfigError([problem("run.rounds", f"more than the {done} rounds done", rounds, hint)])


def _summed_up(folder: Path) -> int | None:
    """Returns the number of rounds in the run's summary; None without a summary that can be read."""
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
    """Returns BASE-001, or the next free number; the folder is created, so that two runs never share it."""
    base.parent.mkdir(parents=True, exist_ok=True)
    # Making a folder is atomic: of two runs that start together, one gets the next number.
    for number in range(1, 1_000_000):
        folder = base.with_name(f"{base.name}-{number:03d}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise OSError(f"{base.parent}: no free number left for {base.name}")
