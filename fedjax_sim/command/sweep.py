"""`fedjax-sim sweep`: a config over a grid of options and seeds, with rows, a table and a figure."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated, Any

import typer

from fedjax_sim.command.errors import is_users_error
from fedjax_sim.running.environment import prepare

__all__ = ["SWEEP_COMMANDS"]

MOST_ROWS = 60


def sweep(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG.toml | EXAMPLE]", help="A run's config with [sweep] and [sweep.grid]."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="a.b=c", help="As for run; sweep.seeds=5, sweep.grid.a.b=[1, 2]. Repeatable."),
    ] = None,
    without: Annotated[list[str] | None, typer.Option("--unset", metavar="a.b", help="As for run. Repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder; by default runs/sweep-DATA-ALGORITHM-NUMBER.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the sweep in --out.")] = False,
    metric: Annotated[str | None, typer.Option(help="Shown; by default the test accuracy, or loss.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no table.")] = False,
) -> None:
    """Run every combination of a grid with every seed, and write rows, table and figure into a folder."""
    from fedjax_sim.command.folders import RUNS, drop_empty, next_folder
    from fedjax_sim.config.document import ConfigError
    from fedjax_sim.config.value_kinds import nearest_word, problem
    from fedjax_sim.running.files import CheckpointError, RunLocked
    from fedjax_sim.sweeps.config import load_sweep, run_sweep
    from fedjax_sim.sweeps.finished import POINTS

    folder = made = None
    try:
        if resume and out is None:
            raise ConfigError(["--out: expected the folder of the sweep to resume, got none."])
        loaded = load_sweep(config, settings or [], without or [])
        if metric is not None and loaded.metrics is not None and metric not in loaded.metrics:
            rule = "one of sweep.metrics, which rows keep: " + ", ".join(loaded.metrics)
            raise ConfigError([problem("--metric", rule, metric, nearest_word(metric, loaded.metrics))])
        prepare()
        tables = loaded.configs[0].resolved()
        made = None if out else next_folder(RUNS / f"sweep-{tables['data']['name']}-{tables['algorithm']['name']}")
        folder = out or made
        found = run_sweep(loaded, folder, resume=resume, progress=not quiet, metric=metric)
        shown = metric or _metric(found)
        cells = found.summary(shown)
        _figure(found, shown, folder)
    except KeyboardInterrupt as error:
        drop_empty(made)
        kept = folder is not None and (folder / POINTS).exists()
        typer.echo("Interrupted." + f" Finished points are safe: add --resume --out {folder}." * kept, err=True)
        raise typer.Exit(130) from error
    except (ConfigError, TypeError, ValueError) as error:
        drop_empty(made)
        if not is_users_error(error):
            raise
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except (CheckpointError, MemoryError, OSError, RunLocked) as error:
        drop_empty(made)
        words = (
            str(error) if isinstance(error, (CheckpointError, FileExistsError, FileNotFoundError, RunLocked)) else ""
        )
        typer.echo(words or f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from error
    if not quiet:
        _show(found, shown, cells, folder)
        _show_differences(loaded)


SWEEP_COMMANDS = (sweep,)


def _metric(found: Any) -> str:
    last = next(row for row in found.rows if row["round"] == found.last_round)
    first = ("test_accuracy", "test_loss", "held_out_accuracy", "held_out_loss", "local_loss")
    return next(name for name in (*first, *last) if name in last and name not in ("seed", "round", *found.names))


def _figure(found: Any, metric: str, folder: Path) -> None:
    from fedjax_sim.running.files import write_atomically
    from fedjax_sim.sweeps.figure import sweep_figure

    try:
        figure = sweep_figure(found, metric)
    except (ImportError, ValueError) as error:  # rows and table are written all the same
        typer.echo(f"No figure: {error}", err=True)
        return
    for kind in ("png", "svg"):
        picture = io.BytesIO()
        figure.savefig(picture, format=kind, dpi=200)
        write_atomically(folder / f"sweep.{kind}", [picture.getvalue()])


def _number(mean: str, cell: dict[str, Any]) -> str:
    """A mean over seeds, with half of its interval's width where there is one."""
    half = (cell["high"] - cell["low"]) / 2
    return f"{mean} ± {half:.2g}" if half == half else mean


def _show_differences(loaded: Any) -> None:
    """The options that differ between the rows and are no column: a comparison of rows is one of these too."""
    differences = loaded.differences()
    if differences:
        typer.echo("Besides the grid these options differ between rows:")
    for path, values in differences.items():
        rows: dict[str, list[str]] = {}
        for value, combination in zip(values, loaded.combinations, strict=True):
            rows.setdefault("none" if value is None else str(value), []).append(
                " ".join(map(str, combination.values()))
            )
        parts = [
            f"{value} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" for value, names in rows.items()
        ]
        typer.echo(f"  {path}: {'; '.join(parts)}")


def _show(found: Any, metric: str, cells: list[dict], folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    short = [name.rpartition(".")[2] for name in found.names]
    names = short if len(set(short)) == len(short) else found.names
    for name in (*names, "seeds", metric, "minus the first", "diverged"):
        grid.add_column(name, justify="right", overflow="fold")
    for cell, pair in zip(cells[:MOST_ROWS], [None, *found.differences(metric)], strict=False):
        words = [*(str(cell[name]) for name in found.names), str(cell["seeds"]), _number(f"{cell['mean']:.5g}", cell)]
        words.append(_number(f"{pair['difference']:.4g}", pair) if pair is not None and not pair["diverged"] else "")
        grid.add_row(*words, str(cell["diverged"] or ""), style="red" if cell["diverged"] else "")
    console = Console()
    console.print(grid, highlight=False)
    words = "±: half of a 95 % interval over seeds. Differences are paired: taken seed by seed."
    console.print(Text(words, "dim"), soft_wrap=True)
    if len(cells) > MOST_ROWS:
        console.print(Text(f"... and {len(cells) - MOST_ROWS} more in results.csv", "dim"))
    if lossy := found.lossy():
        words = "left out updates that were not finite, or skipped rounds: see *_so_far in results.csv"
        console.print(Text(f"{len(lossy)} points {words}", "red"))
    seconds = f"{found.seconds:.1f} s, {found.compile_seconds:.1f} s of it compilation"
    console.print(Text(f"{len(found.seeds) * len(cells):,} points in {found.num_programs} programs, {seconds}"))
    console.print(Text(str(folder)), soft_wrap=True)
