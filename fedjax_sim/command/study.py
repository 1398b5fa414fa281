"""Implements `fedjax-sim study NAME`: a measurement compared with theory, as a table, a figure and a page."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from fedjax_sim.command.completion import study_names
from fedjax_sim.command.errors import is_users_error
from fedjax_sim.running import terminal
from fedjax_sim.running.environment import prepare

__all__ = ["STUDY_COMMANDS", "load_study"]


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
) -> None:
    """Measure an answer, compare it with theory, and write table, figure and page into a folder."""
    from fedjax_sim.config.document import ConfigError

    if name is None:
        return _list()
    try:
        part, options = load_study(name, settings or [])
        from fedjax_sim.command.folders import RUNS, check_new_folder, next_folder

        if out is not None:
            check_new_folder(out, "a study")
        prepare()
        with terminal.console(stderr=True).status(part.meaning):
            findings = getattr(importlib.import_module(part.module), part.name)(**options)
        folder = out or next_folder(RUNS / f"study-{part.name}")
        from fedjax_sim.study.page import write_findings

        _show(findings, write_findings(findings, folder))
    except (ConfigError, TypeError, ValueError) as error:
        if not is_users_error(error):
            raise
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except (ArithmeticError, MemoryError, OSError) as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from error


STUDY_COMMANDS = (study,)
WIDE = 200  # the width of a table, in characters: wider than most terminals


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
    from fedjax_sim.config.document import ConfigError, check_options
    from fedjax_sim.config.toml import override, read_document
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
            grid.add_row("", Text(f"{option} = {registry.shown(default)}", "dim"))
    terminal.console().print(grid)


def _show(findings: Any, page: Path) -> None:
    """Prints the findings of a study as a table, with the conclusions and the path of its page."""
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
    for paragraph in findings.reading:
        console.print(Text("\n" + paragraph))
    console.print(Text("\n" + findings.verdict(), "" if "do not" not in findings.verdict() else "red"))
    console.print(Text(str(page)), soft_wrap=True)
