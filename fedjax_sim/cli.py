"""The command line: `fedjax-sim run`, `fedjax-sim list`. JAX is imported only once a run's config has been read."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedjax_sim.environment import environment, prepare, versions

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
WRONG_INPUT, INTERRUPTED = 2, 130
RUNS = Path("runs")


def main() -> None:
    """Entry point: exit code 0, 2 for wrong input, 1 for a run that failed, 130 for an interrupted one."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedjax_sim {versions('fedjax-sim')['fedjax-sim']}")
        raise typer.Exit()


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Federated learning over massive simulated populations."""


@app.command()
def run(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG.toml]", help="Without one: 100,000 clients over the digits, FedAvg."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="a.b=c", help="Override an option, e.g. run.rounds=5. Repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; by default runs/DATA-ALGORITHM-SEED-NUMBER.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out, by default the newest in runs/.")
    ] = False,
    allow_previous: Annotated[
        bool, typer.Option("--allow-previous", help="With --resume: pass over a damaged newest checkpoint.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no table.")] = False,
) -> None:
    """Train, and write config, metrics, checkpoints, summary and report into a folder."""
    from fedjax_sim.config import ConfigError, load

    settings = settings or []
    try:
        folder = _folder_to_resume(out) if resume else out
        loaded = load(folder / "config.toml" if resume and config is None else config, settings)
        if resume:
            _check_unfinished(folder, loaded.tables["run"]["rounds"])
        elif folder is not None:
            _check_fresh(folder)
        prepare()
        from fedjax_sim.experiment import build

        experiment = build(loaded)
        loaded = loaded.planned(experiment.plan)
    except ConfigError as error:
        _fail("\n".join(error.problems), WRONG_INPUT)
    except KeyboardInterrupt:
        _fail("Interrupted before the first round.", INTERRUPTED)
    command = shlex.join(
        ["fedjax-sim", "run", *([str(config)] if config else []), *(x for s in settings for x in ("--set", s))]
    )
    _train(loaded, experiment, folder, {"resume": resume, "allow_previous": allow_previous}, quiet, command)


def _train(loaded: Any, experiment: Any, folder: Path | None, start: dict, quiet: bool, command: str) -> None:
    from fedjax_sim.checkpoint import CheckpointError, RunLocked, lock
    from fedjax_sim.metrics.baseline import constant_baseline
    from fedjax_sim.metrics.describe import describe, digest
    from fedjax_sim.report import write_report
    from fedjax_sim.run import run as train

    tables = loaded.resolved()
    name = f"{tables['data']['name']}-{tables['algorithm']['name']}-{tables['seed']}"
    options = tables["run"]
    try:
        if folder is None:
            folder = _next_folder(RUNS / name)
        folder.mkdir(parents=True, exist_ok=True)
        if not start["resume"]:
            with lock(folder):  # nobody else's config is overwritten
                _write(folder / "config.toml", loaded.to_toml())
                _write(folder / "env.json", _json(environment(command)))
                _write(folder / "population.json", _json(describe(experiment.data)))
        if not quiet:
            done = f" after the {_rounds(folder):,} done" if start["resume"] else ""
            typer.echo(
                f"{name}: {experiment.data.train.size:,} clients, {options['rounds']:,} rounds{done}, into {folder}"
            )
        _, history = train(
            experiment.key,
            experiment.algorithm,
            experiment.params,
            experiment.data.train,
            options["rounds"],
            evaluation=experiment.evaluation,
            evaluate_every=options["evaluate_every"],
            directory=folder,
            checkpoint_every=options["checkpoint_every"],
            keep_checkpoints=options["keep_checkpoints"],
            **start,
            progress=options["progress"] and not quiet,
            identity=loaded.identity() | {"data_sha256": digest(experiment.data)},
        )
        _write(folder / "config.toml", loaded.to_toml())  # a resumed run may have been given more rounds
        baseline = constant_baseline(experiment.data.test, experiment.data.task)
        summary = {"name": name, **history.summary, **baseline}
        _write(folder / "summary.json", _json(summary))
        report = write_report(folder)
    except KeyboardInterrupt:
        kept = _rounds(folder) if folder else -1
        if kept > 0:
            write_report(folder)
        again = f"Go on with: fedjax-sim run --resume --out {shlex.quote(str(folder))}"
        _fail(f"Interrupted. {f'Round {kept} is safe. {again}' if kept >= 0 else 'No checkpoint yet.'}", INTERRUPTED)
    except (FileExistsError, FileNotFoundError) as error:
        _fail(str(error), WRONG_INPUT)
    except (CheckpointError, RunLocked, ArithmeticError, MemoryError, OSError, RuntimeError) as error:
        if isinstance(error, ArithmeticError):
            write_report(folder)  # what happened until then
        _fail(f"{type(error).__name__}: {error}", 1)
    if not quiet:
        _show(summary, report)


@app.command("list")
def list_parts(
    room: Annotated[
        str | None, typer.Argument(help="A room (e.g. sampling) or a table of the config (e.g. sampler).")
    ] = None,
) -> None:
    """Show every part with its meaning; for one room also the options that a config can set."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from fedjax_sim import registry
    from fedjax_sim.config import RUN
    from fedjax_sim.kinds import problem

    console = Console()
    rooms = {table: place for table, (place, _) in registry.TABLES.items()} | {place: place for place in registry.ROOMS}
    if room == "run":
        for option, (_, default) in RUN.items():
            console.print(Text(f"  {option} = {_default(default)}"))
        return
    if room is not None and room not in rooms:
        _fail(problem("room", "one of " + ", ".join([*rooms, "run"]), room), WRONG_INPUT)
    tables = {place: table for table, (place, _) in registry.TABLES.items()}
    for place in registry.ROOMS if room is None else [rooms[room]]:
        table = tables.get(place)
        named = registry.table(table) | registry.wrappers(table) if table else {}
        parts = registry.parts(place) | named
        grid = Table(box=None, padding=(0, 2, 0, 2), show_header=False)
        for name, part in sorted(parts.items()):
            shown = f"[{table}.{name}]" if table and name in registry.wrappers(table) else name
            grid.add_row(Text(shown + "*" if name in named else shown), Text(part.meaning))
            for option, (_, default) in named[name].options.items() if room is not None and name in named else ():
                grid.add_row("", Text(f"{option} = {_default(default)}", "dim"))
        console.print(Text(place, "bold") + Text(f"   [{table}] in a config" if table else "", "dim"))
        console.print(grid)
    typer.echo(
        "\n* can be named in a config; `fedjax-sim list ROOM` shows its options, `fedjax-sim list run` those of [run]."
    )


def _default(value: Any) -> str:
    from fedjax_sim.registry import REQUIRED

    return "(required)" if value is REQUIRED else "none" if value is None else json.dumps(value)


def _fail(words: str, code: int) -> None:
    typer.echo(words, err=True)
    raise typer.Exit(code)


# ---- folders


def _rounds(folder: Path) -> int:
    """The newest committed round; -1 if there is none."""
    found = [int(p.stem[6:]) for p in (folder / "checkpoints").glob("round_*.ckpt") if p.stem[6:].isdigit()]
    return max(found, default=-1)


def _check_fresh(folder: Path) -> None:
    from fedjax_sim.config import ConfigError
    from fedjax_sim.kinds import problem

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([problem("--out", "a folder that can be made", str(folder), f"{error.strerror}.")]) from error
    from fedjax_sim.runlog import earlier_run

    there = earlier_run(folder)
    if there:
        hint = f"It holds {', '.join(there)}. Add --resume to go on with it, or choose another --out."
        raise ConfigError([problem("--out", "a folder without a run", str(folder), hint)])


def _folder_to_resume(out: Path | None) -> Path:
    from fedjax_sim.config import ConfigError
    from fedjax_sim.kinds import problem

    if out is None:
        there = [path for path in RUNS.glob("*/config.toml") if _rounds(path.parent) >= 0]
        if not there:
            raise ConfigError(
                [problem("--resume", "a run with a checkpoint in runs/", "none", "Give its folder: --out.")]
            )
        return max(there, key=lambda path: (path.parent / "checkpoints").stat().st_mtime).parent
    if _rounds(out) < 0 or not (out / "config.toml").is_file():
        hint = "Nothing to resume there: leave out --resume to start."
        raise ConfigError([problem("--out", "a folder with config.toml and a checkpoint", str(out), hint)])
    return out


def _check_unfinished(folder: Path, rounds: int) -> None:
    from fedjax_sim.config import ConfigError
    from fedjax_sim.kinds import problem

    done = _rounds(folder)
    if done > rounds or (done == rounds and (folder / "summary.json").exists()):
        hint = f"{folder} has all of its rounds: nothing to resume."
        raise ConfigError([problem("run.rounds", f"more than the {done} rounds done", rounds, hint)])


def _next_folder(base: Path) -> Path:
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


# ---- what a run's folder holds


def _write(path: Path, text: str) -> None:
    from fedjax_sim.checkpoint import write_atomically

    write_atomically(path, [text.encode()])


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _show(summary: dict[str, Any], report: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from fedjax_sim.plot import scaled_bytes

    def size(value: float) -> str:
        unit, name = scaled_bytes(value)
        return f"{value / unit:.3g} {name}"

    seconds = max(summary["rounds_seconds"], 1e-9)
    grid = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for place in ("test", "held_out"):
        for metric in ("accuracy", "loss"):
            if f"{place}_{metric}" in summary:
                beside = summary.get(f"baseline_{metric}") if place == "test" else None
                text = f"{float(summary[f'{place}_{metric}']):.4f}"
                grid.add_row(
                    f"{place.replace('_', '-')} {metric}",
                    text + (f"  (guessing: {beside:.4f})" if beside is not None else ""),
                )
    grid.add_row("rounds", f"{summary['rounds']:,} in {seconds:.1f} s, {summary['rounds'] / seconds:,.1f} a second")
    grid.add_row("clients trained", f"{summary['clients_trained']:,}, {summary['clients_per_second']:,.0f} a second")
    grid.add_row("compilation", f"{summary['compile_seconds']:.1f} s")
    grid.add_row("sent up, down", f"{size(summary['uplink_bytes'])}, {size(summary['downlink_bytes'])}")
    grid.add_row("peak memory", size(summary["peak_memory_bytes"]))
    grid.add_row("reported", f"{summary['clients_trained']:,} of {summary['clients_invited']:,} invited")
    grid.add_row(
        "not finite", f"{summary['dropped_clients']:,} updates dropped, {summary['skipped_rounds']:,} rounds skipped"
    )
    grid.add_row("report", str(report))
    console = Console(soft_wrap=True)
    console.print(grid, highlight=False, markup=False)
    loss, guess = float(summary.get("test_loss", 0)), float(summary.get("baseline_loss", "inf"))
    if not loss <= guess:
        console.print("The model is no better than guessing: try a lower client_optimizer.learning_rate.", style="red")


if __name__ == "__main__":
    sys.exit(main())
