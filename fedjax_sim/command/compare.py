"""Implements `fedjax-sim compare` and `fedjax-sim show`: runs side by side, and one run's summary once more."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from fedjax_sim.command.completion import run_folders
from fedjax_sim.command.errors import is_users_error
from fedjax_sim.command.folders import check_output, rounds_at_end
from fedjax_sim.command.options import OwnModules, RunFolder
from fedjax_sim.running import terminal

MOST_OPTIONS = 4  # that a terminal's table shows as columns
MOST_CLIENTS = 10  # whose differences follow a terminal's table


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN RUN ...", help="Folders of runs; the first is the baseline.", autocompletion=run_folders
        ),
    ],
    *,
    metric: Annotated[str | None, typer.Option(help="By default of owners' models, if any are their own.")] = None,
    format: Annotated[str, typer.Option(help="terminal, csv, markdown or latex.")] = "terminal",
    out: Annotated[Path | None, typer.Option(help="Also write a page with curves, such as compared.html.")] = None,
    by_client: Annotated[bool, typer.Option("--by-client", help="Instead: each client's results, by name.")] = False,
    own_modules: OwnModules = None,
) -> None:
    """Compare runs: the options in which they differ, means over seeds, and differences taken seed by seed."""
    from fedjax_sim.config import registry
    from fedjax_sim.config.document import ConfigError
    from fedjax_sim.config.value_kinds import nearest_word, problem
    from fedjax_sim.running.files import CheckpointError
    from fedjax_sim.sweeps.by_client import clients_of_runs
    from fedjax_sim.sweeps.results import shown_by_default
    from fedjax_sim.sweeps.runs import names_of_rows, read_run, sweep_of
    from fedjax_sim.sweeps.table import FORMATS, sweep_comparison

    try:
        if out is not None:
            check_output("--out", out, (".html",))
        registry.admit(own_modules or [])
        if format not in ("terminal", *FORMATS):
            rule = "one of terminal, " + ", ".join(FORMATS)
            raise ConfigError([problem("--format", rule, format, nearest_word(format, ("terminal", *FORMATS)))])
        logged = [read_run(folder) for folder in runs]
        compared_runs = sweep_of(logged)
        table = sweep_comparison(compared_runs, metric or shown_by_default(compared_runs))
        clients = clients_of_runs(logged, compared_runs.names, compared_runs.last_round, metric)
        if by_client and isinstance(clients, str):
            raise ConfigError([f"--by-client: {clients}"])
    except (ConfigError, TypeError, ValueError) as error:
        if not is_users_error(error):
            raise
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except (CheckpointError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2 if isinstance(error, FileNotFoundError) else 1) from error
    if format != "terminal":
        typer.echo(FORMATS[format](table if isinstance(clients, str) or not by_client else clients), nl=False)
    else:
        if not by_client:
            _show_table(compared_runs, table, names_of_rows(logged, compared_runs.names))
        if any(run.clients for run in logged):
            _show_clients(clients, by_client)
    if out is None:
        return
    try:
        _write_page(compared_runs, table, clients, out)
    except OSError as error:
        typer.echo(f"{out}: not written, {error.strerror or error}.", err=True)
        raise typer.Exit(1) from error
    typer.echo(str(out), err=format != "terminal")  # the table alone is on the standard output


def show(run: RunFolder) -> None:
    """Show a run's summary again."""
    from fedjax_sim.command.summary import show_summary
    from fedjax_sim.config.document import ConfigError
    from fedjax_sim.report.files import read_json
    from fedjax_sim.running import checksums
    from fedjax_sim.running.checkpoint import trouble_with_newest
    from fedjax_sim.running.files import CheckpointError
    from fedjax_sim.sweeps.runs import read_records

    try:
        records = read_records(run)
        checksums.check_files(run, ["summary.json"])
    except (CheckpointError, ConfigError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2 if isinstance(error, (ConfigError, FileNotFoundError)) else 1) from error
    summary = read_json(run / "summary.json", [])
    if not summary:
        done = records[-1]["round"] if records else 0
        way = f"fedjax-sim run --resume --out {shlex.quote(str(run))}"
        typer.echo(f"{run} has no summary: it was stopped after {done:,} rounds. {way}")
        if trouble := trouble_with_newest(run / "checkpoints"):
            typer.echo(trouble, err=True)
        return
    first = records[0] if records else {}
    typer.echo(str(summary.get("name", run.name)))
    show_summary(summary, float(first.get("test_loss", "nan")))
    if trouble := trouble_with_newest(run / "checkpoints", rounds_at_end(run)):
        typer.echo(trouble, err=True)
    typer.echo(str(run))


def _show_table(compared_runs: Any, table: Any, folders: list[str]) -> None:
    """Prints a comparison as a table; options that do not fit beside the metric follow it, a line each.

    Args:
      compared_runs, table: the comparison.
      folders: the name of each row's runs.
    """
    from rich.text import Text

    from fedjax_sim.sweeps.labels import shown_value
    from fedjax_sim.sweeps.table import words_on_own_models, words_on_ties

    console = terminal.console()
    header, rows = table.texts()
    num_options = len(table.names)
    width = sum(2 + max(map(len, column)) for column in zip(header, *rows, strict=True))
    if is_listed := num_options > MOST_OPTIONS or (num_options > 0 and width > console.width):
        header = ["run", *header[num_options:]]
        rows = [[name, *row[num_options:]] for name, row in zip(folders, rows, strict=True)]
    num_labels = 1 if is_listed else num_options
    grid = terminal.grid(header_style="dim")
    for i, name in enumerate(header):
        grid.add_column(name, justify="left" if i < num_labels else "right", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    console.print(grid)
    for option in table.names if is_listed else ():
        values = " | ".join(shown_value(row[option]) for row in table.rows)
        console.print(Text(f"{option}: {values}"), soft_wrap=True)
    notes = [f"After {compared_runs.last_round:,} rounds, the last in which all runs were evaluated."]
    if "minus the first" in header:
        has_intervals = len(compared_runs.seeds) > 1
        several = "±: half of a 95 % interval over seeds. " if has_intervals else "One seed: no intervals. "
        notes.append(several + "Differences are taken seed by seed, over the seeds that both have.")
    notes += words_on_own_models(compared_runs, table.metric)
    if len(compared_runs.seeds) > 1:
        notes.append(words_on_ties(compared_runs, table.metric))
    for note in filter(None, notes):
        console.print(Text(note, "dim"), soft_wrap=True)


def _show_clients(clients: Any, are_all_shown: bool) -> None:
    """Prints the clients' results: of all, or of those that differ the most.

    Args:
      clients: a `ClientTable`, or a sentence why there is none.
      are_all_shown: whether all clients are wanted.
    """
    from rich.text import Text

    console = terminal.console()
    if isinstance(clients, str):
        console.print(Text(clients, "dim"), soft_wrap=True)
        return
    header, rows = clients.texts()
    shown = rows if are_all_shown else rows[:MOST_CLIENTS]
    grid = terminal.grid(header_style="dim")
    for i, name in enumerate(header):
        grid.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in shown:
        grid.add_row(*row)
    console.print(grid)
    if len(shown) < len(rows):
        words = f"The {len(shown)} of {len(rows):,} clients that differ the most; --by-client lists all."
        console.print(Text(words, "dim"), soft_wrap=True)


def _write_page(compared_runs: Any, table: Any, clients: Any, path: Path) -> None:
    """Writes the page of a comparison: curves, the table, and the clients' results."""
    from fedjax_sim.report.html import absent, table_of_rows
    from fedjax_sim.running.files import write_atomically
    from fedjax_sim.sweeps.page import comparison_page

    lead = f"{len(compared_runs.rows):,} evaluations of {compared_runs.num_programs} runs"
    results = absent(clients) if isinstance(clients, str) else table_of_rows(*clients.texts())
    ending = ["<h2>By client</h2>", results]
    html = comparison_page(compared_runs, table.metric, title="Compared runs", lead=lead, ending=ending)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [html.encode()])
