"""Implements `fedjax-sim study NAME`: a measurement compared with theory, as a table, a figure and a page."""

from __future__ import annotations

import importlib
import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from fedjax_sim.command.completion import study_names
from fedjax_sim.command.errors import is_users_error
from fedjax_sim.files.regular_files import content_of, json_of
from fedjax_sim.running import terminal
from fedjax_sim.running.environment import prepare


def study(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME | CONFIG.toml]", help="Without one: list the studies.", autocompletion=study_names
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="option=value", help="Override an option. Repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder; by default runs/study-NAME-NUMBER.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the study in --out.")] = False,
) -> None:
    """Measure an answer, compare it with theory, and write table, figure and page into a folder."""
    from fedjax_sim.command.folders import drop_empty
    from fedjax_sim.config.document import ConfigError
    from fedjax_sim.running.files import CheckpointError, RunLocked

    if name is None and not resume:
        return _list()
    folder = new_folder = None
    try:
        if name is None or resume:
            part, options = _stated(name, settings or [], out)
        else:
            part, options = load_study(name, settings or [])
        folder, new_folder = _folder(part.name, out, resume)
        findings = _measured(part, options, folder)
        # The table is printed before files are written: a full disk does not take it away.
        _show(findings)
        _write(findings, folder)
    except KeyboardInterrupt as error:
        drop_empty(new_folder)
        has_results = folder is not None and folder.is_dir() and (folder / STUDY_FILE).is_file()
        words = f" Finished results are safe: fedjax-sim study --resume --out {shlex.quote(str(folder))}" * has_results
        typer.echo("Interrupted." + words, err=True)
        raise typer.Exit(130) from error
    except (ConfigError, TypeError, ValueError) as error:
        drop_empty(new_folder)
        if not is_users_error(error):
            raise
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except (ArithmeticError, CheckpointError, MemoryError, OSError, RunLocked) as error:
        drop_empty(new_folder)
        words = str(error) if isinstance(error, RunLocked) else f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and folder is not None and (folder / STUDY_FILE).is_file():
            way = f"fedjax-sim study --resume --out {shlex.quote(str(folder))}"
            words += f". Finished results are kept: free space or mend the folder, then {way}"
        typer.echo(words, err=True)
        raise typer.Exit(1) from error


STUDY_COMMANDS = (study,)
STUDY_FILE = "study.json"  # of a study's folder: its name and its options, which a resume reads
KEPT = "kept"  # the folder of finished results
WIDE = 200  # the width of a table, in characters: wider than most terminals


def _stated(name: str | None, settings: list[str], out: Path | None) -> tuple[Any, dict[str, Any]]:
    """Returns the study that a folder began, and its options.

    Args:
      name, settings: as for `load_study`; None and [] for what the folder has.
      out: the folder; None if --out was not given.

    Raises: ConfigError for a folder without a study, and for another study or other options than the folder's.
    """
    from fedjax_sim.config.document import ConfigError
    from fedjax_sim.config.value_kinds import Words, problem

    path = None if out is None else out / STUDY_FILE
    if path is None or not path.is_file():
        shown_folder = Words("none") if out is None else str(out)
        rule = f"the folder of a study, with {STUDY_FILE}"
        raise ConfigError([problem("--out", rule, shown_folder, "To start, leave out --resume.")])
    try:
        begun = json_of(content_of(path))
        begun_name, begun_options = str(begun["name"]), dict(begun["options"])
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise ConfigError([f"{path}: expected a study's name and options, got a damaged file ({error})."]) from error
    shown = {key: "none" if value is None else json.dumps(value) for key, value in begun_options.items()}
    stated = {setting.removeprefix("study.").partition("=")[0].strip() for setting in settings}
    as_begun = [f"{key}={text}" for key, text in shown.items() if name is None and key not in stated]
    part, options = load_study(name or begun_name, [*as_begun, *settings])
    differing = [
        problem(key, f"{begun_options.get(key)!r}, with which the study began", options.get(key))
        for key in {**begun_options, **options}
        if json.dumps(begun_options.get(key)) != json.dumps(options.get(key))
    ]
    if part.name != begun_name:
        differing = [problem("study.name", f"{begun_name}, which the folder holds", part.name)]
    if differing:
        raise ConfigError([*differing, "Leave them out, or begin another study in another folder."])
    return part, options


def _folder(name: str, out: Path | None, resume: bool) -> tuple[Path, Path | None]:
    """Returns the folder of a study, which is there from now on, and the folder if this process made it.

    Args:
      name: the study's name.
      out: the folder that the command line states; None to take the next free one in `runs/`.
      resume: whether the study in the folder goes on.

    Raises: ConfigError for a folder that holds something, unless a study in it goes on.
    """
    from fedjax_sim.command.folders import RUNS, check_new_folder, next_folder
    from fedjax_sim.config.document import ConfigError

    if out is None:
        folder = next_folder(RUNS / f"study-{name}")
        return folder, folder
    if not resume:
        check_new_folder(out, "a study")
        if out.is_dir() and any(out.iterdir()):
            raise ConfigError([f"--out: expected an empty or a new folder, got {str(out)!r}."])
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    return out, out if is_new else None


def _measured(part: Any, options: dict[str, Any], folder: Path) -> Any:
    """Runs a study in its folder, where its results are kept; returns its findings.

    Args:
      part: the study, as `registry.studies` has it.
      options: of the study, by name.
      folder: the study's folder.
    """
    prepare()
    from fedjax_sim.running import kept_results
    from fedjax_sim.running.files import lock, write_atomically

    with lock(folder), kept_results.keeping(folder / KEPT) as kept:
        begun = json.dumps({"name": part.name, "options": options}, indent=2) + "\n"
        write_atomically(folder / STUDY_FILE, [begun.encode()])
        try:
            with terminal.console(stderr=True).status(part.meaning):
                findings = getattr(importlib.import_module(part.module), part.name)(**options)
        except BaseException:
            # What was refused before it had a result is no study. The lock shows that it is nobody else's.
            if not (folder / KEPT).exists() and not (folder / "findings.json").exists():
                (folder / STUDY_FILE).unlink(missing_ok=True)
            raise
    if kept.earlier:
        words = f"{len(kept.used)} results were kept, {kept.num_computed} are computed anew."
        if kept.num_unused:
            words += f" {kept.num_unused} kept ones are damaged, or of other code, versions or devices: not used."
        typer.echo(words, err=True)
    return findings


def _write(findings: Any, folder: Path) -> None:
    """Writes a study's files, and prints the path of its page."""
    from rich.text import Text

    from fedjax_sim.running.files import lock
    from fedjax_sim.study.page import write_findings

    with lock(folder):
        page = write_findings(findings, folder)
    terminal.console().print(Text(str(page)), soft_wrap=True)


def load_study(name: str, settings: list[str]) -> tuple[Any, dict[str, Any]]:
    """Returns a study and its options, from its name or from a TOML file with a table `[study]`.

    Args:
      name: the study's name, with "-" or "_" between words, or the path of a file that ends in ".toml"; the file's
        table has the study's `name` too.
      settings: texts `option=value`, which replace options of the file.

    Raises: config.ConfigError for a file that is not one table [study], an unknown study, and options that the study
    does not take. The error lists the problems of all options.

    >>> part, options = load_study("error-floor", ["seed=7"])
    >>> part.name, options["seed"]
    ('error_floor', 7)
    """
    from fedjax_sim.config import registry
    from fedjax_sim.config.document import ConfigError
    from fedjax_sim.config.read import override, read_document
    from fedjax_sim.config.resolve import check_options
    from fedjax_sim.config.value_kinds import nearest_word, problem

    document = read_document(Path(name)) if name.endswith(".toml") else {"study": {"name": name}}
    problems = list(override(document, [f"study.{setting.removeprefix('study.')}" for setting in settings]))
    studies = registry.studies()
    study_table = document.get("study")
    if not isinstance(study_table, dict) or document.keys() - {"study"}:
        raise ConfigError([problem(name, "one table [study]", sorted(document))])
    study_name = study_table.pop("name", None)
    # A name on the command line is written error-floor, the function error_floor.
    study_name = study_name.replace("-", "_") if isinstance(study_name, str) else study_name
    if study_name not in studies:
        shown_names = [name.replace("_", "-") for name in studies]
        hint = nearest_word(study_name, shown_names)
        raise ConfigError([problem("study.name", "one of " + ", ".join(shown_names), study_name, hint)])
    options = check_options("study", studies[study_name].options, study_table, problems, also=("name",))
    if problems:
        raise ConfigError(problems)
    return studies[study_name], options


def _list() -> None:
    """Prints all studies with their options."""
    from rich.text import Text

    from fedjax_sim.config import registry

    grid = terminal.grid(padding=(0, 2, 0, 2), show_header=False)
    grid.add_column(no_wrap=True)
    for name, part in registry.studies().items():
        grid.add_row(Text(name.replace("_", "-"), "bold"), Text(part.meaning))
        for option, (_, default) in part.options.items():
            grid.add_row("", Text(f"{option} = {registry.default_as_text(default)}", "dim"))
    terminal.console().print(grid)


def _show(findings: Any) -> None:
    """Prints the findings of a study as a table, with the conclusions.

    Args:
      findings: a `study.findings.Findings`. A row is red if its prediction lies outside of its interval.
    """
    from rich.text import Text

    from fedjax_sim.study.page import table

    columns, rows = table(findings)
    grid = terminal.grid(header_style="dim")
    for name in columns:
        grid.add_column(name, justify="right" if name in ("measured", "predicted", "ratio") else "left")
    for row in rows:
        grid.add_row(*(Text(cell, "red" if row[-1] else "") for cell in row))
    console = terminal.console()
    console.print(Text(findings.question, "bold"))
    # With this width a narrow terminal wraps lines, where a narrower table would cut numbers.
    terminal.console(width=max(console.width, WIDE)).print(grid)
    for claim in findings.claims:
        console.print(Text(f"\n{claim}", "red" if claim.holds is False else ""))
    console.print(Text("\n" + findings.verdict(), "" if "do not" not in findings.verdict() else "red"))
