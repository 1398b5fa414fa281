"""Implements `fedjax-sim sweep`: a config over a grid of options and seeds, with rows, a table and a figure."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from fedjax_sim.command.completion import example_names
from fedjax_sim.command.errors import is_users_error
from fedjax_sim.command.options import OwnModules
from fedjax_sim.files.regular_files import content_of
from fedjax_sim.running import terminal
from fedjax_sim.running.environment import prepare

MOST_ROWS = 60
COMMAND = '# "fedjax-sim sweep'  # how the file begins that a sweep writes of its config


def sweep(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG.toml | EXAMPLE]",
            help="A run's config with [sweep] and [sweep.grid].",
            autocompletion=example_names,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="a.b=c", help="As for run; sweep.seeds=5, sweep.grid.a.b=[1, 2]. Repeatable."),
    ] = None,
    without: Annotated[list[str] | None, typer.Option("--unset", metavar="a.b", help="As for run. Repeatable.")] = None,
    own_modules: OwnModules = None,
    *,
    out: Annotated[Path | None, typer.Option(help="The folder; by default runs/sweep-DATA-ALGORITHM-NUMBER.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the sweep in --out.")] = False,
    metric: Annotated[str | None, typer.Option(help="Shown; by default of own models, else of the test.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no table.")] = False,
) -> None:
    """Run every combination of a grid with every seed, and write rows, table, figure and page into a folder."""
    from fedjax_sim.command.folders import RUNS, check_new_folder, next_folder
    from fedjax_sim.config import registry
    from fedjax_sim.config.document import ConfigError
    from fedjax_sim.config.value_kinds import Words, nearest_word, problem
    from fedjax_sim.running.files import CheckpointError, RunLocked
    from fedjax_sim.sweeps.config import load_sweep, run_sweep
    from fedjax_sim.sweeps.finished import POINTS, SWEEP_FILE
    from fedjax_sim.sweeps.halving import run_halving
    from fedjax_sim.sweeps.results import shown_by_default

    folder = new_folder = new_file = None
    try:
        if resume and out is None:
            raise ConfigError(["--out: expected the folder of the sweep to resume, got none."])
        if out is not None and not resume:
            check_new_folder(out, "a sweep")
        registry.admit(own_modules or [])
        resumed = out if resume else None  # the folder of the sweep to resume
        stated = config
        if resumed is not None and config is None and (resumed / SWEEP_FILE).is_file():
            stated = resumed / SWEEP_FILE
        if resumed is not None and stated is None and not settings:
            rule = f"the config that the sweep in {resumed} was started with"
            hint = f"The folder has no {SWEEP_FILE} to read it from."
            raise ConfigError([problem("CONFIG.toml", rule, Words("none"), hint)])
        if resumed is not None and not any(resumed.glob(f"**/{POINTS}")):
            hint = f"It has no {POINTS}: leave out --resume to start."
            raise ConfigError([problem("--out", "a folder with a sweep", str(resumed), hint)])
        loaded = load_sweep(stated, settings or [], without or [])
        if metric is not None and loaded.metrics is not None and metric not in loaded.metrics:
            rule = "one of sweep.metrics, which rows keep: " + ", ".join(loaded.metrics)
            raise ConfigError([problem("--metric", rule, metric, nearest_word(metric, loaded.metrics))])
        wanted = metric or loaded.presentation.metric
        prepare()
        tables = loaded.configs[0].resolved()
        data_name = tables["data"]["name"]
        algorithm_name = tables["algorithm"]["name"]
        folder = out or next_folder(RUNS / f"sweep-{data_name}-{algorithm_name}")
        new_folder = None if out else folder
        if not any(folder.glob(f"**/{POINTS}")):
            new_file = _write_config(loaded, folder, _command(config, own_modules, without, settings))
        rungs = []
        if loaded.halving is None:
            result = run_sweep(loaded, folder, resume=resume, progress=not quiet, metric=wanted)
        else:
            rungs = run_halving(loaded, folder, resume=resume, progress=not quiet)
            result = rungs[-1].result
            result.write(folder)
            loaded = loaded.only([{name: row[name] for name in result.names} for row in result.rows])
        shown_metric = wanted or shown_by_default(result)
        cells = result.summary(shown_metric)
        _figure(result, shown_metric, loaded.presentation.drawing, folder)
        _tables(result, shown_metric, loaded.presentation.table, folder)
        _page(loaded, result, shown_metric, folder)
    except KeyboardInterrupt as error:
        has_points = _drop_unstarted(folder, new_folder, new_file)
        typer.echo("Interrupted." + f" Finished points are safe: add {_to_resume(folder)}." * has_points, err=True)
        raise typer.Exit(130) from error
    except (ConfigError, TypeError, ValueError) as error:
        _drop_unstarted(folder, new_folder, new_file)
        if not is_users_error(error):
            raise
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except (CheckpointError, MemoryError, OSError, RunLocked) as error:
        has_points = _drop_unstarted(folder, new_folder, new_file)
        speaks_for_itself = isinstance(error, (CheckpointError, FileExistsError, FileNotFoundError, RunLocked))
        words = str(error) if speaks_for_itself else ""
        if not words:
            words = f"{type(error).__name__}: {error}"
            words += f". Finished points are safe: mend that, then add {_to_resume(folder)}" * has_points
        typer.echo(words, err=True)
        raise typer.Exit(1) from error
    if not quiet:
        for rung in rungs[:-1]:
            kept = f"{len(rung.kept)} of {len(rung.result.summary(shown_metric))}"
            typer.echo(f"After {rung.num_rounds:,} rounds {kept} combinations ran on, the best: {_values(rung)}.")
        _show(result, shown_metric, cells, folder)
        _show_differences(loaded)


SWEEP_COMMANDS = (sweep,)


def _command(config: Path | None, modules: Any, without: Any, settings: Any) -> str:
    """Returns the command line that repeats a sweep."""
    words = [word for module in modules or [] for word in ("--with", module)]
    words += [word for place in without or [] for word in ("--unset", place)]
    words += [word for setting in settings or [] for word in ("--set", setting)]
    return shlex.join(["fedjax-sim", "sweep", *([str(config)] if config else []), *words])


def _write_config(loaded: Any, folder: Path, command: str) -> Path | None:
    """Writes what a resume and the page read: the command, and the config with `[sweep]`.

    Returns: the file's path; None if nothing was written, since it would not be read back or is a file of the user's.
    """
    from fedjax_sim.running.files import write_atomically
    from fedjax_sim.sweeps.finished import SWEEP_FILE

    text, path = loaded.to_toml(folder), folder / SWEEP_FILE
    if text is None or (path.exists() and not content_of(path).startswith(COMMAND.encode())):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return write_atomically(path, [f"# {json.dumps(command)}\n{text}".encode()])


def _to_resume(folder: Path | None) -> str:
    """Returns the options that continue a sweep."""
    return f"--resume --out {shlex.quote(str(folder))}"


def _drop_unstarted(folder: Path | None, new_folder: Path | None, new_file: Path | None) -> bool:
    """Returns whether a sweep has points on disk; if not, removes what this process wrote for it."""
    from fedjax_sim.command.folders import drop_empty
    from fedjax_sim.sweeps.finished import POINTS

    has_points = folder is not None and any(folder.glob(f"**/{POINTS}"))
    if new_file is not None and not has_points:
        new_file.unlink(missing_ok=True)
    drop_empty(new_folder)
    return has_points


def _values(rung: Any) -> str:
    """Names the best combination of a rung of successive halving."""
    return rung.result.row_labels()[tuple(rung.kept[0].values())]


def _figure(result: Any, metric: str, drawing: Any, folder: Path) -> None:
    """Writes the figure of a sweep, as PDF, PNG and SVG."""
    from fedjax_sim.running.files import write_atomically
    from fedjax_sim.sweeps.drawing import figure_files

    try:
        files = figure_files(result, metric, drawing)
    except (ImportError, ValueError) as error:
        # Rows and table are written all the same: matplotlib may be missing, or the values may not be plottable.
        typer.echo(f"No figure: {error}", err=True)
        return
    for form, content in files.items():
        write_atomically(folder / f"sweep.{form}", [content])


def _tables(result: Any, metric: str, options: Any, folder: Path) -> None:
    """Writes the table of a sweep's last round: its numbers as table.csv, and for a paper table.md and table.tex."""
    from fedjax_sim.running.files import write_atomically
    from fedjax_sim.sweeps.paper_table import paper_latex, paper_markdown, paper_table
    from fedjax_sim.sweeps.table import as_csv, sweep_comparison

    table = paper_table(result, metric, options)
    texts = {"csv": as_csv(sweep_comparison(result, metric)), "md": paper_markdown(table), "tex": paper_latex(table)}
    for form, text in texts.items():
        write_atomically(folder / f"table.{form}", [text.encode()])


def _page(loaded: Any, result: Any, metric: str, folder: Path) -> None:
    """Writes report.html: what differs, the figures, the table, the options that differ, and how to repeat it.

    Args:
      loaded: the `SweepConfig`.
      result: the finished sweep.
      metric: the name of the metric that is shown, such as "test_accuracy".
      folder: the sweep's folder.
    """
    from fedjax_sim.report.page import how_to_repeat
    from fedjax_sim.running.environment import environment
    from fedjax_sim.running.files import write_atomically
    from fedjax_sim.sweeps.finished import SWEEP_FILE
    from fedjax_sim.sweeps.page import comparison_page

    grid = ", ".join(result.names) or "seeds alone"
    lead = f"{len(loaded.combinations)} combinations of {grid}, {len(result.seeds)} seeds each"
    # A resumed sweep is repeated by the command that began it.
    stated = content_of(folder / SWEEP_FILE).decode() if (folder / SWEEP_FILE).is_file() else ""
    line, _, text = stated.partition("\n")
    command = json.loads(line.removeprefix("# ")) if line.startswith(COMMAND) else ""
    configs = {"The sweep": text if command else stated} if stated else {}
    configs["Resolved configuration of the first combination"] = loaded.configs[0].to_toml(folder)
    ending = how_to_repeat(environment(command), configs)
    html = comparison_page(result, metric, title=folder.name, lead=lead, differing=loaded.differences(), ending=ending)
    write_atomically(folder / "report.html", [html.encode()])


def _show_differences(loaded: Any) -> None:
    """Prints the options that differ between rows and are no column, since a comparison of rows compares these too.

    Args:
      loaded: the `SweepConfig`.
    """
    from fedjax_sim.sweeps.labels import shown_value

    differences = loaded.differences()
    if differences:
        typer.echo("Besides the grid these options differ between rows:")
    for path, values in differences.items():
        rows: dict[str, list[str]] = {}
        for value, combination in zip(values, loaded.combinations, strict=True):
            rows.setdefault("none" if value is None else str(value), []).append(
                " ".join(map(shown_value, combination.values()))
            )
        parts = [
            f"{value} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" for value, names in rows.items()
        ]
        typer.echo(f"  {path}: {'; '.join(parts)}")


def _show(result: Any, metric: str, cells: list[dict], folder: Path) -> None:
    """Prints the cells of a sweep as a table, with the losses of precision and the time that it took.

    Args:
      result: the finished sweep.
      metric: the name of the metric that is shown.
      cells: `result.summary(metric)`: a mean over seeds for each combination. At most `MOST_ROWS` are printed.
      folder: the sweep's folder.
    """
    from rich.text import Text

    from fedjax_sim.sweeps.labels import short_names, shown_value
    from fedjax_sim.sweeps.table import shown_metric, shown_number, words_on_own_models, words_on_ties

    grid = terminal.grid(header_style="dim")
    names = short_names(result.names)
    for name in (*names, "seeds", metric, "minus the first", "diverged"):
        grid.add_column(name, justify="right", overflow="fold")
    for cell, difference in zip(cells[:MOST_ROWS], result.difference_of_each(metric), strict=False):
        texts = [
            *(shown_value(cell[name]) for name in result.names),
            str(cell["seeds"]),
            shown_number(shown_metric(metric, cell["mean"], 5), cell["low"], cell["high"]),
        ]
        texts.append(
            shown_number(f"{difference['difference']:.4g}", difference["low"], difference["high"])
            if difference is not None and not difference["diverged"]
            else ""
        )
        grid.add_row(*texts, str(cell["diverged"] or ""), style="red" if cell["diverged"] else "")
    console = terminal.console()
    console.print(grid)
    several = len(result.seeds) > 1
    note = "±: half of a 95 % interval over seeds. " if several else "One seed: no intervals. "
    note += "Differences are paired: taken seed by seed"
    note += f", from the first row of the same {' and '.join(result.apart)}." if result.apart else "."
    console.print(Text(note, "dim"), soft_wrap=True)
    for sentence in words_on_own_models(result, metric):
        console.print(Text(sentence, "dim"), soft_wrap=True)
    if several and (ties := words_on_ties(result, metric)):
        console.print(Text(ties, "dim"), soft_wrap=True)
    if len(cells) > MOST_ROWS:
        console.print(Text(f"... and {len(cells) - MOST_ROWS} more in results.csv", "dim"))
    if lossy := result.lossy():
        note = "left out updates that were not finite, or skipped rounds: see *_so_far in results.csv"
        console.print(Text(f"{len(lossy)} points {note}", "red"))
    seconds = f"{result.seconds:.1f} s, {result.compile_seconds:.1f} s of it compilation"
    console.print(Text(f"{len(result.seeds) * len(cells):,} points in {result.num_programs} programs, {seconds}"))
    console.print(Text(str(folder)), soft_wrap=True)
