"""The folders of runs: which one to start in, and which one to go on with."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fedjax_sim.config.document import ConfigError
from fedjax_sim.config.kinds import problem

__all__ = [
    "RUNS",
    "check_fresh",
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
    """Refuses a folder that holds a run or cannot be made; makes none, for the config may yet be refused."""
    there = folder.absolute()
    while not there.exists() and not there.is_symlink():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "No permission to write there." if there.is_dir() else f"Not a directory: {there}."
        raise ConfigError([problem("--out", "a folder that can be made", str(folder), reason)])
    from fedjax_sim.running.log import earlier_run  # and JAX

    there = earlier_run(folder)
    if there:
        hint = f"It holds {', '.join(there)}. Add --resume to go on with it, or choose another --out."
        raise ConfigError([problem("--out", "a folder without a run", str(folder), hint)])


def folder_to_resume(out: Path | None) -> Path:
    """The run to go on with: `out`, or the newest in `RUNS`."""
    if out is None:
        there = [path for path in RUNS.glob("*/config.toml") if rounds_done(path.parent) >= 0]
        if not there:
            raise ConfigError(
                [problem("--resume", "a run with a checkpoint in runs/", "none", "Give its folder: --out.")]
            )
        return max(there, key=lambda path: (path.parent / "checkpoints").stat().st_mtime).parent
    if rounds_done(out) < 0 or not (out / "config.toml").is_file():
        hint = "Nothing to resume there: leave out --resume to start."
        raise ConfigError([problem("--out", "a folder with config.toml and a checkpoint", str(out), hint)])
    return out


def check_written(folder: Path) -> None:
    """Refuses a config that is not as the run wrote it."""
    from fedjax_sim.running.checkpoint import CheckpointError  # and JAX
    from fedjax_sim.running.checksums import check

    try:
        check(folder, ["config.toml"])
    except CheckpointError as error:
        raise ConfigError([f"{error} Changes go by --set."]) from error


def check_unfinished(folder: Path, rounds: int) -> None:
    """Refuses a run that has all of its rounds."""
    done = rounds_done(folder)
    if done > rounds or (done == rounds and _summed_up(folder) == done):
        hint = f"{folder} has all of its rounds: nothing to resume. Its page: fedjax-sim report {folder}"
        raise ConfigError([problem("run.rounds", f"more than the {done} rounds done", rounds, hint)])


def _summed_up(folder: Path) -> int | None:
    """The rounds that its summary is of; None without one that can be read."""
    try:
        return json.loads((folder / "summary.json").read_bytes())["rounds"]
    except (KeyError, OSError, TypeError, ValueError):
        return None


def drop_empty(folder: Path | None) -> None:
    """Takes away a folder that was made for a run which was then refused."""
    if folder is not None and folder.is_dir() and {path.name for path in folder.iterdir()} <= {".lock"}:
        (folder / ".lock").unlink(missing_ok=True)
        folder.rmdir()


def next_folder(base: Path) -> Path:
    """BASE-001, or the next number; made, so that two runs never share it."""
    base.parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1_000_000):
        folder = base.with_name(f"{base.name}-{number:03d}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise OSError(f"{base.parent}: no free number left for {base.name}")
