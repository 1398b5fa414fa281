"""Implements `fedjax-sim list`: every part with its description and its options."""

from __future__ import annotations

from typing import Annotated

import typer

from fedjax_sim.command.completion import part_names
from fedjax_sim.config.signatures import Part, docstring

__all__ = ["list_parts"]


def list_parts(
    which: Annotated[
        str | None,
        typer.Argument(
            help="A subpackage (e.g. sampling), a table of the config (e.g. sampler), a part (fedbuff).",
            autocompletion=part_names,
        ),
    ] = None,
) -> None:
    """Show every part with its description; for a part also its options, its docstring and its table in a config."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from fedjax_sim.config import registry
    from fedjax_sim.config.document import RUN
    from fedjax_sim.config.hints import canonical
    from fedjax_sim.config.value_kinds import nearest_word, problem

    console = Console()
    subpackage_by_word = {table: subpackage for table, (subpackage, _) in registry.TABLES.items()}
    subpackage_by_word |= {subpackage: subpackage for subpackage in registry.SUBPACKAGES}
    if which == "run":
        for option, (_, default) in RUN.items():
            console.print(Text(f"  {option} = {registry.shown(default)}"))
        return
    # A word is a table, a subpackage, or else the name of a part in any subpackage.
    subpackages = [subpackage_by_word[which]] if which in subpackage_by_word else list(registry.SUBPACKAGES)
    shown = {
        subpackage: _parts(subpackage, None if which in subpackage_by_word else which) for subpackage in subpackages
    }
    if not any(parts for _, parts, _ in shown.values()):
        rule = "the name of a part, or one of " + ", ".join([*subpackage_by_word, "run"])
        names = [*subpackage_by_word, "run"]
        names += [name for subpackage in registry.SUBPACKAGES for name in _parts(subpackage, None)[1]]
        typer.echo(problem("which", rule, which, nearest_word(canonical(which), names)), err=True)
        raise typer.Exit(2)
    for subpackage, (tables, parts, named_parts) in shown.items():
        if not parts:
            continue
        if which in registry.TABLES and which != subpackage:
            tables = [which]
        table = tables[0] if tables else None
        grid = Table(box=None, padding=(0, 2, 0, 2), show_header=False)
        grid.add_column(no_wrap=True)
        for name, part in sorted(parts.items()):
            # Wrappers and transforms are tables inside the table.
            is_inner_table = table and (
                name in registry.wrappers(table) or (table in registry.CHAINS and name in named_parts)
            )
            words = f"[{table}.{name}]" if is_inner_table else name
            grid.add_row(Text(words + "*" if name in named_parts else words), Text(part.meaning))
            options = named_parts[name].options if which is not None and name in named_parts else {}
            for option, (kind, default) in options.items():
                choices = registry.named(kind) if isinstance(kind, registry.Named) else ()
                either = ", a number or " if choices and kind.number else ", "
                inner = either + "{name = ...} of " + ", ".join(choices) if choices else ""
                grid.add_row("", Text(f"{option} = {registry.shown(default)}{inner}", "dim"))
        where = f"   [{'], ['.join(tables)}] in a config" if table else ""
        if which in parts and which in registry.insides(subpackage):
            where = "   an option of other parts in a config, as {name = ...}"
        console.print(Text(subpackage, "bold") + Text(where, "dim"))
        console.print(grid)
        if which in parts:
            names_it = table and which in registry.parts_of_table(table) | registry.wrappers(table)
            _explain(parts[which], table if names_it else None)
    typer.echo(
        "\n* can be named in a config; `fedjax-sim list NAME` shows its options, `fedjax-sim list run` those of [run]."
    )


def _explain(part: Part, table: str | None) -> None:
    """Prints a part's docstring, and the table that names it in a config; None if no table does."""
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
    parts_of_table = registry.parts_of_table(tables[0]) | registry.wrappers(tables[0]) if tables else {}
    named_parts = registry.insides(subpackage) | parts_of_table
    parts = registry.parts(subpackage) | named_parts
    return tables, {name: part for name, part in parts.items() if only in (None, name)}, named_parts
