"""The command line, `fedjax-sim`. JAX is imported only once a run's config has been read."""

from __future__ import annotations

import json
import shlex
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from fedjax_sim import cli_privacy, cli_report, cli_study, cli_sweep
from fedjax_sim.environment import environment, prepare, versions
from fedjax_sim.folders import (
    RUNS,
    check_fresh,
    check_unfinished,
    check_written,
    drop_empty,
    folder_to_resume,
    next_folder,
    rounds_done,
)

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
WRONG_INPUT = 2
for _command in (*cli_report.COMMANDS, *cli_privacy.COMMANDS, *cli_study.COMMANDS, *cli_sweep.COMMANDS):
    app.command()(_command)


def main() -> None:
    """Entry point: exit code 0, 2 for wrong input, 1 for a run that failed, 130 for an interrupted one."""
    try:
        app()
    except Exception as error:  # a fault of ours: the other processes of the job must not wait for this one
        from fedjax_sim import distributed

        if not distributed.several():
            raise
        traceback.print_exc()
        distributed.leave(error)


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
        typer.Argument(metavar="[CONFIG.toml | EXAMPLE]", help="Without one: 100,000 clients over the digits, FedAvg."),
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
    coordinator: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", envvar="JAX_COORDINATOR_ADDRESS", help="Where process 0 of several is."),
    ] = None,
    num_processes: Annotated[int | None, typer.Option(envvar="JAX_NUM_PROCESSES", help="How many there are.")] = None,
    process_id: Annotated[int | None, typer.Option(envvar="JAX_PROCESS_ID", help="Which this one is.")] = None,
) -> None:
    """Train, and write config, metrics, checkpoints, summary and report into a folder."""
    from fedjax_sim import distributed
    from fedjax_sim.config import Config, ConfigError, load

    settings = settings or []

    def read() -> tuple[str | None, dict]:
        folder = folder_to_resume(out) if resume else out
        if resume and config is None:
            check_written(folder)
        loaded = load(folder / "config.toml" if resume and config is None else config, settings)
        if resume:
            check_unfinished(folder, loaded.tables["run"]["rounds"])
        elif folder is not None:
            check_fresh(folder)
        return folder and str(folder), loaded.resolved()

    try:
        distributed.initialize(coordinator, num_processes, process_id)
        folder, tables = distributed.from_first(read)
        folder, loaded = folder and Path(folder), Config(tables)
        prepare()
        from fedjax_sim.experiment import build

        experiment = distributed.agreed(lambda: build(loaded))
        loaded = loaded.planned(experiment.plan)
    except (ConfigError, distributed.PeerFailed) as error:
        _stop("\n".join(getattr(error, "problems", ())), error)
    except KeyboardInterrupt as error:
        _stop("Interrupted before the first round.", error)
    command = shlex.join(
        ["fedjax-sim", "run", *([str(config)] if config else []), *(x for s in settings for x in ("--set", s))]
    )
    _train(loaded, experiment, folder, {"resume": resume, "allow_previous": allow_previous}, quiet, command)


def _train(loaded: Any, experiment: Any, folder: Path | None, start: dict, quiet: bool, command: str) -> None:
    from fedjax_sim import distributed
    from fedjax_sim.checkpoint import CheckpointError, RunLocked, lock
    from fedjax_sim.cli_report import write_page
    from fedjax_sim.metrics.baseline import constant_baseline
    from fedjax_sim.metrics.describe import describe, digest
    from fedjax_sim.report import write_report
    from fedjax_sim.run import run as train
    from fedjax_sim.sums import write

    tables = loaded.resolved()
    name = f"{tables['data']['name']}-{tables['algorithm']['name']}-{tables['seed']}"
    options = tables["run"]
    quiet, made, files = quiet or not distributed.is_first(), None, {}

    def begin() -> str:
        files["config.toml"] = loaded.to_toml()  # a resumed run may have been given more rounds
        if not start["resume"]:
            files["env.json"] = _json(environment(command))
            files["population.json"] = _json(describe(experiment.data))
        return str(next_folder(RUNS / name) if folder is None else folder)

    def finish() -> tuple[dict, Path]:
        summary = {"name": name, **history.summary, **constant_baseline(experiment.data.test, experiment.data.task)}
        with lock(folder):
            write(folder / "summary.json", _json(summary).encode())
            return summary, write_report(folder)

    try:
        given, folder = folder, Path(distributed.from_first(begin))
        made = folder if given is None and distributed.is_first() else None
        data_sha256 = digest(experiment.data)
        distributed.check_same("data", data_sha256, "Every process must read the same files.")
        if not quiet:
            done = f" after the {rounds_done(folder):,} done" if start["resume"] else ""
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
            client_memory=options["client_memory"],
            delta=options["delta"],
            **start,
            progress=options["progress"] and not quiet,
            identity=loaded.identity() | {"data_sha256": data_sha256},
            files=files,
        )
        finished = distributed.by_first(finish)
    except KeyboardInterrupt as error:
        kept = rounds_done(folder) if folder else -1
        drop_empty(made)
        if kept > 0 and distributed.is_first():
            write_page(folder)
        again = f"Go on with: fedjax-sim run --resume --out {shlex.quote(str(folder))}"
        _stop(f"Interrupted. {f'Round {kept} is safe. {again}' if kept >= 0 else 'No checkpoint yet.'}", error)
    except (CheckpointError, RunLocked, ArithmeticError, MemoryError, OSError, RuntimeError, ValueError) as error:
        drop_empty(made)
        if isinstance(error, ArithmeticError) and distributed.is_first():
            write_page(folder)  # what happened until then
        if distributed.lost_peer(error):
            _stop(f"Another process of this job died. Go on with --resume --out {shlex.quote(str(folder))}.", error)
        known = isinstance(error, (FileExistsError, FileNotFoundError))
        if isinstance(error, ValueError) and not known:
            if ": expected " not in str(error):  # a fault of ours, not of the config
                raise
            _stop(str(error), error)
        _stop(str(error) if known else f"{type(error).__name__}: {error}", error)
    if not quiet:
        _show(*finished)


@app.command(context_settings={"ignore_unknown_options": True})
def launch(
    arguments: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="E.g. run --set run.rounds=50.")],
    processes: Annotated[int, typer.Option("--processes", "-n", min=1, max=1024, help="How many to start.")],
) -> None:
    """Run a command in several processes on this machine, e.g. `fedjax-sim launch -n 2 -- run`."""
    from fedjax_sim.launch import launch as start

    raise typer.Exit(start(arguments, processes))


@app.command()
def plan(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG.toml | EXAMPLE]", help="As for run.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="a.b=c", help="As for run.")] = None,
) -> None:
    """Show what a run will take: clients at once, memory, time, and the largest cohort that fits. Trains two rounds."""
    from fedjax_sim.config import ConfigError, load

    settings = settings or []
    try:
        loaded = load(config, settings)
        prepare()
        from fedjax_sim.experiment import build
        from fedjax_sim.planning import forecast, largest_cohort

        experiment = build(loaded)
        parts = experiment.algorithm, experiment.key, experiment.params, experiment.data.train
        found = forecast(*parts, client_memory=loaded.resolved()["run"]["client_memory"])
        cohort = loaded.resolved()["sampler"].get("cohort_size")
        largest = None
        if cohort is not None and 2 * cohort <= experiment.data.train.size:
            others = [setting for setting in settings if not setting.startswith("sampler.cohort_size=")]
            largest = largest_cohort(lambda size: build(load(config, [*others, f"sampler.cohort_size={size}"])), cohort)
    except ConfigError as error:
        _fail("\n".join(error.problems), WRONG_INPUT)
    except MemoryError as error:
        _fail(f"MemoryError: {error}", 1)
    _show_plan(loaded.resolved()["run"], experiment, found, largest)


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
            console.print(Text(f"  {option} = {registry.shown(default)}"))
        return
    if room is not None and room not in rooms:
        _fail(problem("room", "one of " + ", ".join([*rooms, "run"]), room), WRONG_INPUT)
    for place in registry.ROOMS if room is None else [rooms[room]]:
        tables = [
            name for name, (where, _) in registry.TABLES.items() if where == place and room in (None, place, name)
        ]
        table = tables[0] if tables else None
        named = registry.table(table) | registry.wrappers(table) if table else {}
        parts = registry.parts(place) | named
        grid = Table(box=None, padding=(0, 2, 0, 2), show_header=False)
        grid.add_column(no_wrap=True)
        for name, part in sorted(parts.items()):
            inside = table and (name in registry.wrappers(table) or (table in registry.CHAINS and name in named))
            shown = f"[{table}.{name}]" if inside else name
            grid.add_row(Text(shown + "*" if name in named else shown), Text(part.meaning))
            for option, (_, default) in named[name].options.items() if room is not None and name in named else ():
                grid.add_row("", Text(f"{option} = {registry.shown(default)}", "dim"))
        console.print(Text(place, "bold") + Text(f"   [{'], ['.join(tables)}] in a config" if table else "", "dim"))
        console.print(grid)
    typer.echo(
        "\n* can be named in a config; `fedjax-sim list ROOM` shows its options, `fedjax-sim list run` those of [run]."
    )


def _stop(words: str, error: BaseException) -> None:
    """Ends the run with the words of an error, told by one process of the job."""
    from fedjax_sim import distributed

    if distributed.speaks(error) and words:
        typer.echo((f"Process {distributed.index()}: " if distributed.index() else "") + words, err=True)
    distributed.leave(error)
    raise typer.Exit(distributed.exit_code(error))


def _fail(words: str, code: int) -> None:
    typer.echo(words, err=True)
    raise typer.Exit(code)


# ---- what a run's folder holds


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _size(value: float) -> str:
    """Bytes as a person reads them."""
    from fedjax_sim.plot import scaled_bytes

    unit, name = scaled_bytes(value)
    return f"{value / unit:.3g} {name}"


def _show(summary: dict[str, Any], report: Path) -> None:
    from rich.console import Console
    from rich.table import Table

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
    visits, distinct = summary["client_visits"], summary.get("distinct_clients")
    by = "" if distinct is None else f" by {distinct:,} different clients"
    grid.add_row("client visits", f"{visits:,}{by}, {summary['clients_per_second']:,.0f} a second")
    grid.add_row("compilation", f"{summary['compile_seconds']:.1f} s")
    grid.add_row("sent up, down", f"{_size(summary['uplink_bytes'])}, {_size(summary['downlink_bytes'])}")
    grid.add_row("peak memory", _size(summary["peak_memory_bytes"]))
    grid.add_row("reported", f"{visits - summary['dropped_clients']:,} of {summary['clients_invited']:,} invited")
    grid.add_row(
        "not finite", f"{summary['dropped_clients']:,} updates dropped, {summary['skipped_rounds']:,} rounds skipped"
    )
    if "privacy" in summary:
        spent = summary["privacy"]
        grid.add_row("privacy", spent.get("statement") or f"no epsilon: {spent['refused']}")
    console = Console(soft_wrap=True)
    console.print(grid, highlight=False, markup=False)
    console.print(str(report), highlight=False, markup=False)  # in a table a long path would be cut in two
    loss, guess = float(summary.get("test_loss", 0)), float(summary.get("baseline_loss", "inf"))
    if not loss <= guess:
        console.print("The model is no better than guessing: try a lower learning rate.", style="red")


def _show_plan(options: dict[str, Any], experiment: Any, found: Any, largest: int | None) -> None:
    import jax
    from rich.console import Console
    from rich.table import Table

    rounds, population = options["rounds"], experiment.data.train.size
    grid = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    grid.add_row("clients at once", f"{experiment.plan.lanes} on each of {len(jax.devices())} devices")
    grid.add_row("population, state", _size(found.needs.arguments))
    grid.add_row("a round's work", _size(found.needs.temporary + found.needs.results))
    grid.add_row("memory", f"{_size(found.needs.total)} of {_size(found.limit)}")
    if largest is not None:
        grid.add_row("largest cohort", f"{min(largest, population):,}" + (" (all)" if largest >= population else ""))
    grid.add_row("compilation", f"{found.compile_seconds:.1f} s")
    grid.add_row("rounds", f"{rounds:,} of {found.round_seconds:.3g} s: {rounds * found.round_seconds:.3g} s")
    Console(soft_wrap=True).print(grid, highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(main())
