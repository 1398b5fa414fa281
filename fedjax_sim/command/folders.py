"""Chooses and checks the folders of runs: where a run starts, and which run is resumed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_sim.config.document import ConfigError
from fedjax_sim.config.files import named_paths
from fedjax_sim.config.value_kinds import problem
from fedjax_sim.files.regular_files import content_of, json_of
from fedjax_sim.running.checksums import check_files
from fedjax_sim.running.files import CheckpointError
from fedjax_sim.running.kept_files import folder_around, holds, is_kept, own_files

RUNS = Path("runs")
LOG_IS_GONE = "Its metrics.jsonl is gone: put it back from a copy, or begin anew in another --out, without --resume."


def rounds_done(folder: Path) -> int:
    """Returns the newest committed round of a run's folder; -1 if there is none."""
    checkpoints = (folder / "checkpoints").glob("round_*.ckpt")
    rounds = [int(path.stem[6:]) for path in checkpoints if path.stem[6:].isdigit()]
    return max(rounds, default=-1)


def check_fresh(folder: Path) -> None:
    """Refuses a folder for a new run that holds one or cannot be created; does not create it.

    Raises: ConfigError for a folder that holds a run, a sweep or a study, or that cannot be created.
    """
    check_new_folder(folder, "a run")


def check_new_folder(folder: Path, kind: str) -> None:
    """Refuses a folder in which nothing new can be begun; does not create it, as the config may yet be refused.

    Args:
      folder: of --out.
      kind: what will be begun: "a run", "a sweep" or "a study".

    Raises: ConfigError for a folder that holds a run, a sweep or a study, or files of a user's that would be written
      over, or that cannot be created.

    Guarantees: no file of a run changes (tests/command/test_outputs.py::test_no_output_changes_a_run), and no file that
    a user has there (::test_a_users_files_stay).
    """
    if reason := _why_not(folder):
        raise ConfigError([problem("--out", "a folder that can be made", str(folder), reason)])
    for held_kind, names in holds(folder).items():
        way = "Add --resume to continue it, or choose another --out." if held_kind == kind else "Choose another --out."
        if held_kind == "a run" == kind and rounds_done(folder) < 0:
            way = "No checkpoint is left to resume from: choose another --out."
        elif held_kind == "a run" == kind and not (folder / "metrics.jsonl").is_file():
            way = LOG_IS_GONE
        elif held_kind == "a run" == kind and not (folder / "config.toml").is_file():
            way = "Its config.toml is gone: name the config and add --resume, or choose another --out."
        rule = f"a folder without {held_kind}"
        raise ConfigError([problem("--out", rule, str(folder), f"It holds {', '.join(names)}. {way}")])
    if names := own_files(folder, kind):
        hint = f"It holds {', '.join(names)}. Choose another --out."
        raise ConfigError([problem("--out", f"a folder without files that {kind} writes", str(folder), hint)])
    if (around := folder_around(folder / "new")) is not None:
        hint = f"It lies among the files of {around}."
        raise ConfigError([problem("--out", "a folder of its own", str(folder), hint)])


def check_output(option: str, path: Path, suffixes: Sequence[str]) -> None:
    """Refuses a file that a command cannot write, or must not, before the command does its work.

    Args:
      option: the name of the option or argument, such as "--out".
      path: the file.
      suffixes: that the file may have, such as ".html".

    Raises: ConfigError for a file of another kind, one of a run, a sweep or a study, and one that cannot be written.

    Guarantees: no file of a run changes (tests/command/test_outputs.py::test_no_output_changes_a_run).
    """
    if path.suffix not in suffixes:
        raise ConfigError([problem(option, "a name that ends in " + " or ".join(suffixes), str(path))])
    if path.is_dir():
        raise ConfigError([problem(option, "a file", str(path), "It is a folder.")])
    if is_kept(path):
        hint = f"It is, or would pass for, a file of {folder_around(path)}: give another name."
        raise ConfigError([problem(option, "a file that no run keeps", str(path), hint)])
    if reason := _why_not(path.parent):
        raise ConfigError([problem(option, "a file that can be written", str(path), reason)])


def _why_not(folder: Path) -> str:
    """Says why a folder cannot be written to or made; "" where it can."""
    # The nearest folder that exists decides whether the others can be created.
    parent = folder.absolute()
    while not parent.exists() and not parent.is_symlink():
        parent = parent.parent
    if not parent.is_dir():
        return f"Not a directory: {parent}."
    return "" if os.access(parent, os.W_OK | os.X_OK) else "No permission to write there."


def folder_to_resume(out: Path | None, has_config: bool = False) -> Path:
    """Returns the folder of the run to resume: `out`, or the folder in `RUNS` with the newest checkpoint.

    Args:
      out: of --out; None if it was not given.
      has_config: whether the command line names a config, so that the folder need not have one.

    Raises: ConfigError if `out` cannot be resumed, with a way that works; without `out`, if no folder in `RUNS` can.

    Guarantees: each refusal of a folder, to begin and to resume, names a way that is not refused
    (tests/command/test_trouble.py::test_every_folder_has_a_way).
    """
    if out is None:
        configs = [path for path in RUNS.glob("*/config.toml") if rounds_done(path.parent) >= 0]
        if not configs:
            raise ConfigError(
                [problem("--resume", "a run with a checkpoint in runs/", "none", "Give its folder: --out.")]
            )
        return max(configs, key=lambda path: (path.parent / "checkpoints").stat().st_mtime).parent
    hint = ""
    if rounds_done(out) < 0:
        hint = "Nothing to resume there: leave out --resume to start."
        if holds(out) or own_files(out, "a run"):
            hint = "No checkpoint is left of its run: begin anew in another --out, without --resume."
    elif not (out / "metrics.jsonl").is_file():
        hint = LOG_IS_GONE
    elif not has_config and not (out / "config.toml").is_file():
        hint = "Its config.toml is gone: put it back, or name the run's config, fedjax-sim run CONFIG.toml --resume ..."
    if hint:
        rule = "a folder with config.toml, metrics.jsonl and a checkpoint"
        raise ConfigError([problem("--out", rule, str(out), hint)])
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
        way = f"fedjax-sim report {shlex.quote(str(folder))}"
        hint = f"{folder} has all of its rounds: nothing to resume. Its page: {way}"
        raise ConfigError([problem("run.rounds", f"more than the {done} rounds done", rounds, hint)])


def rounds_at_end(folder: Path) -> int:
    """Returns the number of rounds of a run that has ended; 0 for a run that has no summary that can be read."""
    number = _summed_up(folder)
    return number if isinstance(number, int) else 0


def _summed_up(folder: Path) -> int | None:
    """Returns the number of rounds in the run's summary; None without a summary that can be read."""
    try:
        return json_of(content_of(folder / "summary.json"))["rounds"]
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
