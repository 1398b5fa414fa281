"""The folders of runs: which one to start in, and which one to go on with."""

from __future__ import annotations

from pathlib import Path

from fedjax_sim.config import ConfigError
from fedjax_sim.kinds import problem

__all__ = ["RUNS", "check_fresh", "check_unfinished", "folder_to_resume", "next_folder", "rounds_done"]

RUNS = Path("runs")


def rounds_done(folder: Path) -> int:
    """The newest committed round; -1 if there is none."""
    found = [int(p.stem[6:]) for p in (folder / "checkpoints").glob("round_*.ckpt") if p.stem[6:].isdigit()]
    return max(found, default=-1)


def check_fresh(folder: Path) -> None:
    """Makes the folder of a new run; refuses one that holds a run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([problem("--out", "a folder that can be made", str(folder), f"{error.strerror}.")]) from error
    from fedjax_sim.runlog import earlier_run  # and JAX

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


def check_unfinished(folder: Path, rounds: int) -> None:
    """Refuses a run that has all of its rounds."""
    done = rounds_done(folder)
    if done > rounds or (done == rounds and (folder / "summary.json").exists()):
        hint = f"{folder} has all of its rounds: nothing to resume."
        raise ConfigError([problem("run.rounds", f"more than the {done} rounds done", rounds, hint)])


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
