"""Knows the folders of runs, sweeps and studies, so that no command writes over their files. Imports no JAX."""

from __future__ import annotations

import re
from pathlib import Path

# What shows whose a folder is. A config alone shows nothing: users write such files too.
OF_RUNS = ("metrics.jsonl", "timing.jsonl", "privacy.json", "SHA256SUMS", "checkpoints/*.ckpt")
OF_SWEEPS = ("points.jsonl", "results.jsonl", "part-*/points.jsonl", "rung-*/points.jsonl")
OF_STUDIES = ("findings.json", "study.json")
MARKS = {"a run": OF_RUNS, "a sweep": OF_SWEEPS, "a study": OF_STUDIES}
# What each writes beside its marks. Users have files of these names too; a sweep leaves their sweep.toml as it is.
WRITTEN = {
    "a run": ("config.toml", "env.json", "summary.json", "population.json", "by_client.csv", "report.html"),
    "a sweep": (
        "sweep.pdf",
        "sweep.png",
        "sweep.svg",
        "table.csv",
        "table.md",
        "table.tex",
        "results.csv",
        "report.html",
    ),
    "a study": ("figure.png", "figure.svg", "table.csv", "report.html"),
}
FOLDERS = ("checkpoints", "tensorboard", "wandb", "kept")  # inside of these folders nothing is a user's
# Names that a later command gives to files of such a folder.
PAGES = re.compile(
    r"by_client\.\w+|config\.toml|sweep\.\w+|figure\.\w+|table\.\w+|results\.\w+|report\.html|timeline_\d+\.html"
)
EXPORTED = (".npz", ".safetensors")  # kinds of files that no run, sweep or study writes


def holds(folder: str | Path) -> dict[str, list[str]]:
    """Returns what a folder holds: "a run", "a sweep" or "a study", each with the files that show it.

    Empty files do not count: a start that was interrupted leaves them.
    """
    files_by_kind = {}
    for kind, marks in MARKS.items():
        paths = [path for mark in marks for path in sorted(Path(folder).glob(mark))]
        names = [str(path.relative_to(folder)) for path in paths if path.is_file() and path.stat().st_size]
        if names:
            files_by_kind[kind] = names
    return files_by_kind


def check_free_of(folder: str | Path, *kinds: str) -> None:
    """Refuses a folder that holds one of these kinds, such as "a run", which would be written over.

    Args:
      folder: where a run is to write; nothing need be there.
      *kinds: keys of `holds`.

    Raises: FileExistsError for such a folder; NotADirectoryError for a path at which no folder can be.

    Guarantees: no file of a run changes (tests/command/test_outputs.py::test_python_changes_no_run).
    """
    place = Path(folder).absolute()
    there = next(path for path in (place, *place.parents) if path.exists() or path.is_symlink())
    if not there.is_dir():
        raise NotADirectoryError(f"directory: expected a folder, or a place for one, got {folder}: {there} is none.")
    files_by_kind = holds(folder)
    for kind in kinds:
        if kind in files_by_kind:
            names = ", ".join(files_by_kind[kind])
            way = "Resume what is there, or choose another folder."
            raise FileExistsError(f"directory: expected a folder without {kind}, got {folder} with {names}. {way}")


def own_files(folder: str | Path, kind: str) -> list[str]:
    """Returns the user's files that "a run", "a sweep" or "a study" would write over if it began in a folder.

    A folder with a lock has none: its files are of a start that was interrupted.
    """
    folder = Path(folder)
    if (folder / ".lock").is_file():
        return []
    return [name for name in WRITTEN[kind] if (folder / name).exists() or (folder / name).is_symlink()]


def folder_around(path: str | Path) -> Path | None:
    """Returns the folder of a run, a sweep or a study in which a path lies; None outside of such folders.

    A folder that a user made inside of such a folder is outside.
    """
    target = Path(path).resolve()
    inner = target.name  # of the parent that is looked at
    for parent in target.parents:
        if (parent == target.parent or inner in FOLDERS) and holds(parent):
            return parent
        inner = parent.name
    return None


def is_kept(path: str | Path) -> bool:
    """Returns whether a file that is written at a path changes a file of a run, a sweep or a study, or passes for one.

    Models that were exported into such a folder may be exported again.
    """
    target = Path(path).resolve()
    folder = folder_around(target)
    if folder is None:
        return False
    if target.parent != folder or PAGES.fullmatch(target.name):
        return True
    return target.exists() and target.suffix not in EXPORTED
