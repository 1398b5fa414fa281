"""Implements `fedjax-sim list`: the parts with their descriptions and options, and the options of [run]."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

import typer

from fedjax_sim.command.completion import part_names
from fedjax_sim.command.options import OwnModules
from fedjax_sim.config.lazy_parts import union
from fedjax_sim.config.signatures import Part, docstring
from fedjax_sim.running import terminal

OF_METRICS = "   in run.metrics of a config"
MORE = "`fedjax-sim list NAME` shows the options of a part, `fedjax-sim list run` those of [run]"


def list_parts(
    which: Annotated[
        str | None,
        typer.Argument(
            help="A subpackage (e.g. sampling), a table (sampler), a part (fedbuff), an option (run.lanes).",
            autocompletion=part_names,
        ),
    ] = None,
    shows_all: Annotated[bool, typer.Option("--all", help="Also what Python alone can name, in whole lines.")] = False,
    own_modules: OwnModules = None,
) -> None:
    """Show the parts that a config can name; for a part also its options, its docstring and its table in a config."""
    from rich.text import Text

    from fedjax_sim.config import registry
    from fedjax_sim.config.hints import canonical
    from fedjax_sim.config.value_kinds import ConfigError, nearest_word, problem

    console = terminal.console()
    try:
        registry.admit(own_modules or [])
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    subpackage_by_word = {table: subpackage for table, (subpackage, _) in registry.TABLES.items()}
    subpackage_by_word |= {subpackage: subpackage for subpackage in registry.SUBPACKAGES}
    if which == "run":
        return _show_run(console)
    if which is None and not shows_all:
        return _show_named(console)
    # A word is a table, a subpackage, or else the name of a part in any subpackage.
    subpackages = [subpackage_by_word[which]] if which in subpackage_by_word else list(registry.SUBPACKAGES)
    shown = {
        subpackage: _parts(subpackage, None if which in subpackage_by_word else which) for subpackage in subpackages
    }
    if not any(parts for _, parts, _ in shown.values()):
        if reason := registry.why_left_out(which):
            typer.echo(reason)
            return None
        if places := _places(which or ""):
            typer.echo("\n".join(places))
            return None
        rule = "the name of a part or an option, or one of " + ", ".join([*subpackage_by_word, "run"])
        names = [*subpackage_by_word, "run"]
        names += [name for subpackage in registry.SUBPACKAGES for name in _parts(subpackage, None)[1]]
        typer.echo(problem("which", rule, which, nearest_word(canonical(which or ""), names)), err=True)
        raise typer.Exit(2)
    for subpackage, (tables, parts, named_parts) in shown.items():
        if not parts:
            continue
        if which in registry.TABLES and which != subpackage:
            tables = [which]
        table = tables[0] if tables else None
        grid = terminal.grid(padding=(0, 2, 0, 2), show_header=False)
        grid.add_column(no_wrap=True)
        for name, part in sorted(parts.items()):
            words = _words(table, name, named_parts)
            grid.add_row(Text(words + "*" if name in named_parts else words), Text(part.meaning))
            options = named_parts[name].options if which is not None and name in named_parts else {}
            for option, (kind, default) in options.items():
                choices = registry.named(kind) if isinstance(kind, registry.Named) else ()
                either = ", a number or " if choices and kind.number else ", "
                inner = either + "{name = ...} of " + ", ".join(choices) if choices else ""
                grid.add_row("", Text(f"{option} = {registry.default_as_text(default)}{inner}", "dim"))
        where = f"   [{'], ['.join(tables)}] in a config" if table else ""
        if which in parts and which in registry.insides(subpackage):
            where = (
                OF_METRICS if subpackage == "metrics" else "   an option of other parts in a config, as {name = ...}"
            )
        console.print(Text(subpackage, "bold") + Text(where, "dim"))
        console.print(grid)
        if which in parts:
            names_it = table and (which in registry.parts_of_table(table) or which in registry.wrappers(table))
            _explain(parts[which], table if names_it else None)
    typer.echo(f"\n* can be named in a config. {MORE}.")


def _words(table: str | None, name: str, named_parts: Collection[str]) -> str:
    """Returns how a config names a part: wrappers and transforms are tables inside the table."""
    from fedjax_sim.config import registry

    is_inner_table = table and (name in registry.wrappers(table) or (table in registry.CHAINS and name in named_parts))
    return f"[{table}.{name}]" if is_inner_table else name


def _show_named(console: Any) -> None:
    """Prints the parts that a config can name, a line each, cut at the terminal's width; with `--with`, one's own.

    Args:
      console: of rich, whose width counts.
    """
    from rich.text import Text

    from fedjax_sim.config import registry

    own = registry.admitted_parts()
    for subpackage in registry.SUBPACKAGES:
        tables, _, named_parts = _parts(subpackage, None)
        table = tables[0] if tables else None
        lines = {
            _words(table, name, named_parts): part.meaning
            for name, part in sorted(named_parts.items())
            if not own or name in own
        }
        if not lines:
            continue
        where = f"   [{'], ['.join(tables)}] in a config" if table else "   as an option, {name = ...}"
        where = OF_METRICS if subpackage == "metrics" else where
        console.print(Text(subpackage, "bold") + Text(where, "dim"))
        width = max(map(len, lines))
        for words, meaning in lines.items():
            line = f"  {words:<{width}}  {meaning}".rstrip()
            typer.echo(line if len(line) <= console.width else line[: console.width - 1] + "…")
    for reason in filter(None, map(registry.why_left_out, own)):
        typer.echo(reason)
    typer.echo(f"\n{MORE}, `fedjax-sim list --all` what Python alone can name.")


def _show_run(console: Any) -> None:
    """Prints the options of [run] with their defaults, their meanings, and the values that they take."""
    from rich.text import Text

    from fedjax_sim.config import registry
    from fedjax_sim.config.run_options import RUN_TABLE
    from fedjax_sim.config.value_kinds import rule

    grid = terminal.grid(padding=(0, 2, 0, 2), show_header=False)
    grid.add_column(no_wrap=True)
    for option, (kind, default, meaning) in RUN_TABLE.items():
        grid.add_row(Text(f"{option} = {registry.default_as_text(default)}"), Text(f"{meaning} ({rule(kind)})"))
    console.print(grid)


def _places(word: str) -> list[str]:
    """Returns where a config has an option, a line for each table; [] for no option.

    Args:
      word: the option's name, such as "lanes", or with its table, such as "run.lanes".
    """
    from fedjax_sim.config import registry
    from fedjax_sim.config.run_options import RUN_TABLE
    from fedjax_sim.config.value_kinds import rule

    table, _, option = word.rpartition(".")
    lines = []
    if table in ("", "run") and option in RUN_TABLE:
        kind, default, meaning = RUN_TABLE[option]
        lines.append(f"[run] {option} = {registry.default_as_text(default)}: {meaning} ({rule(kind)})")
    for name in registry.TABLES:
        parts = union(registry.parts_of_table(name), registry.wrappers(name))
        holders = [part for part, facts in parts.items() if option in facts.options]
        if table in ("", name) and holders:
            lines.append(
                f"[{name}] {option}: an option of {', '.join(holders)}. fedjax-sim list {holders[0]} shows it."
            )
    return lines


def _explain(part: Part, table: str | None) -> None:
    """Prints a part's docstring, and the table that names it in a config.

    Args:
      part: a part of any subpackage.
      table: the table's name, such as "sampler"; None if no table names the part.
    """
    from fedjax_sim.config import registry
    from fedjax_sim.config.toml import inline

    if text := docstring(part):
        typer.echo("\n" + "\n".join(f"  {line}".rstrip() for line in text.splitlines()))
    if table is None:
        return
    is_inner_table = part.name in registry.wrappers(table) or table in registry.CHAINS
    lines = [f"[{table}.{part.name}]"] if is_inner_table else [f"[{table}]", f'name = "{part.name}"']
    for name, (_, default) in part.options.items():
        if default is registry.REQUIRED:
            lines.append(f"{name} = ...  # required")
        elif default is not None:
            lines.append(f"{name} = {inline(default)}")
    typer.echo("\n  In a config:\n\n" + "\n".join(f"    {line}" for line in lines))


def _parts(subpackage: str, only: str | None) -> tuple[list[str], dict, dict]:
    """Returns (a subpackage's tables in a config, its parts, those of its parts that a config can name).

    Args:
      subpackage: such as "sampling".
      only: the name of a part; the parts are then this part alone, or none. None for all parts.
    """
    from fedjax_sim.config import registry

    tables = [name for name, (where, _) in registry.TABLES.items() if where == subpackage]
    of_table = [registry.parts_of_table(tables[0]), registry.wrappers(tables[0])] if tables else []
    named_parts = dict(union(registry.insides(subpackage), *of_table))
    parts = union(registry.parts(subpackage), named_parts)
    return tables, {name: part for name, part in parts.items() if only in (None, name)}, named_parts
