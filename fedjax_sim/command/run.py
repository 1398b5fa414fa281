"""Implements `fedjax-sim run` and `launch`: train in one process, or in several."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from fedjax_sim.command.attackers import expected_attackers
from fedjax_sim.command.completion import example_names
from fedjax_sim.command.errors import is_users_error
from fedjax_sim.command.folders import (
    RUNS,
    check_fresh,
    check_there,
    check_unfinished,
    check_written,
    drop_empty,
    folder_to_resume,
    next_folder,
    rounds_done,
)
from fedjax_sim.command.options import OwnModules, Settings, Without
from fedjax_sim.command.summary import show_summary
from fedjax_sim.running import seconds, terminal
from fedjax_sim.running.environment import prepare
from fedjax_sim.running.processes import PeerFailed, Processes, current, exit_code


def run(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG.toml | EXAMPLE]",
            help="Without one: 100,000 clients over the digits, FedAvg.",
            autocompletion=example_names,
        ),
    ] = None,
    settings: Settings = None,
    without: Without = None,
    own_modules: OwnModules = None,
    *,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; by default runs/DATA-ALGORITHM-SEED-NUMBER.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out, by default the newest in runs/.")
    ] = False,
    allow_previous: Annotated[
        bool, typer.Option("--allow-previous", help="With --resume: skip a damaged newest checkpoint.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no table.")] = False,
    coordinator: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", envvar="JAX_COORDINATOR_ADDRESS", help="Address of process 0 of several."),
    ] = None,
    num_processes: Annotated[int | None, typer.Option(envvar="JAX_NUM_PROCESSES", help="How many there are.")] = None,
    process_id: Annotated[int | None, typer.Option(envvar="JAX_PROCESS_ID", help="Which this one is.")] = None,
) -> None:
    """Train, and write config, metrics, checkpoints, summary and report into a folder."""
    from fedjax_sim.config import registry
    from fedjax_sim.config.document import Config
    from fedjax_sim.running.distributed import join

    # `main` hands over when the process began.
    clock = context.with_resource(seconds.time_account(context.obj, "start"))
    try:
        processes = join(coordinator, num_processes, process_id)
        registry.admit(own_modules or [])
        stated = config, settings or [], without or []
        folder, tables = processes.from_first(
            lambda: _read(*stated, out=out, resume=resume, allow_previous=allow_previous)
        )
        folder = None if folder is None else Path(folder)
        loaded = Config(tables)
        prepare()
        from fedjax_sim.config.build import build

        experiment = processes.agreed(lambda: build(loaded))
        lanes = _lanes_in_words(loaded, experiment.plan)
    except (TypeError, ValueError, PeerFailed) as error:
        if not isinstance(error, PeerFailed) and not is_users_error(error):
            raise  # a bug, not a wrong config
        _stop("" if isinstance(error, PeerFailed) else str(error), error)
    except KeyboardInterrupt as error:
        _stop("Interrupted before the first round.", error)
    quiet = quiet or not processes.is_first
    if lanes and not quiet:
        typer.echo(lanes)
    clock.switch("other")
    _train(
        experiment,
        folder,
        processes,
        resume=resume,
        allow_previous=allow_previous,
        quiet=quiet,
        command=_command(*stated, own_modules or []),
    )


def _read(
    config: Path | None,
    settings: list[str],
    without: list[str],
    *,
    out: Path | None,
    resume: bool,
    allow_previous: bool,
) -> tuple[str | None, dict[str, Any]]:
    """Reads and checks config and folder, on process 0; returns (folder, tables) as JSON.

    Args:
      config: None: the default run, or with `resume` the config in the run's folder.
      settings, without, resume, allow_previous: as the command line states them.
      out: None: the folder is named later, or with `resume` it is the newest in runs/.

    Returns: the folder is None if the command line leaves its choice open.
    """
    from fedjax_sim.config.document import ConfigError, load
    from fedjax_sim.config.value_kinds import Words, problem

    if allow_previous and not resume:
        hint = "A new run has no earlier checkpoint."
        raise ConfigError([problem("--allow-previous", "--resume beside it", Words("none"), hint)])
    if resume:
        folder = folder_to_resume(out, config is not None)
        if config is None:
            check_written(folder)
        loaded = load(folder / "config.toml" if config is None else config, settings, without)
        check_unfinished(folder, loaded.tables["run"]["rounds"])
        check_there(loaded.tables)
        return str(folder), _with_kept_plan(loaded, folder / "config.toml").resolved()
    loaded = load(config, settings, without)
    if out is not None:
        check_fresh(out)
    return out and str(out), loaded.resolved()


def _command(config: Path | None, settings: Iterable[str], without: Iterable[str], modules: Iterable[str]) -> str:
    """Returns the command line that repeats a run, in another folder."""
    changes = [word for module in modules for word in ("--with", module)]
    changes += [word for place in without for word in ("--unset", place)]
    changes += [word for setting in settings for word in ("--set", setting)]
    return shlex.join(["fedjax-sim", "run", *([str(config)] if config else []), *changes])


def _with_kept_plan(loaded: Any, kept_config: Path) -> Any:
    """Returns the config with the lanes and chunk of the run that it continues, unless it states its own.

    On accelerators they may follow from the devices, of which there may be another number now.
    """
    from fedjax_sim import engine
    from fedjax_sim.config.document import load

    if loaded.tables["run"]["lanes"] is not None or not kept_config.is_file():
        return loaded
    kept = load(kept_config).tables["run"]
    return loaded if kept["lanes"] is None else loaded.planned(engine.Plan(kept["lanes"], kept["chunk"]))


def _lanes_in_words(loaded: Any, plan: Any) -> str:
    """Says which lanes give a run's bits elsewhere, if they followed from the number of devices; else ""."""
    from fedjax_sim import engine

    options = loaded.tables["run"]
    num_devices = len(engine.visible_devices()) if options["devices"] == "all" else options["devices"]
    if options["lanes"] is not None or num_devices == 1 or engine.target() == "cpu":
        return ""
    return (
        f"{plan.lanes:,} clients at once on each of {num_devices} devices; on other devices, "
        f"--set run.lanes={plan.lanes} gives the same bits."
    )


def _train(
    experiment: Any,
    stated_folder: Path | None,
    processes: Processes,
    *,
    resume: bool,
    allow_previous: bool,
    quiet: bool,
    command: str,
) -> None:
    """Trains, and shows words, summary and page; a run that fails exits with a code, after cleaning up.

    Args:
      experiment: what `config.build` made.
      stated_folder: the run's folder; None to choose one in `runs/`.
      processes: of this job.
      resume, allow_previous, command: as for `experiment.train`.
      quiet: whether nothing is printed.
    """
    from fedjax_sim.experiment import train
    from fedjax_sim.running.files import CheckpointError, RunLocked

    folder, new_folder = stated_folder, None
    try:
        if folder is None:
            folder = Path(processes.from_first(lambda: str(next_folder(RUNS / experiment.config.name))))
            # Only a folder that this process created may be removed if the run is refused.
            new_folder = folder if processes.is_first else None
        train(
            experiment,
            folder,
            resume=resume,
            allow_previous=allow_previous,
            progress=experiment.config.tables["run"]["progress"] and not quiet,
            command=command,
            processes=processes,
            before_rounds=lambda: quiet or _show_start(experiment, folder, resume),
            before_page=lambda history: quiet or _show_end(history),
        )
        # The path is not in the table, which would break a long path into lines.
        page = str(folder.resolve() / "report.html")
        processes.by_first(lambda: quiet or terminal.console(soft_wrap=True).print(page))
    except KeyboardInterrupt as error:
        _interrupted(error, folder, new_folder, processes)
    except (
        CheckpointError,
        RunLocked,
        ArithmeticError,
        MemoryError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        _failed(error, folder, new_folder, processes)


def _show_start(experiment: Any, folder: Path, resume: bool) -> None:
    """Prints what is about to be trained, and what to know about its data and attackers.

    Args:
      experiment: what `config.build` made.
      folder: the run's folder.
      resume: whether the run in the folder goes on.
    """
    rounds = experiment.config.tables["run"]["rounds"]
    done = f" after the {rounds_done(folder):,} done" if resume else ""
    clients = experiment.data.train.size
    typer.echo(f"{experiment.config.name}: {clients:,} clients, {rounds:,} rounds{done}, into {folder}")
    for warning in experiment.data.warnings:
        typer.echo(f"Warning: {warning}")
    if attackers := expected_attackers(experiment, rounds):
        typer.echo(attackers)


def _show_end(history: Any) -> None:
    """Prints the summary of a finished run, from its `History`."""
    first = history.records[0] if history.records else {}
    show_summary(history.summary, float(first.get("test_loss", "nan")))


def _interrupted(error: KeyboardInterrupt, folder: Path | None, made: Path | None, processes: Processes) -> NoReturn:
    """Ends an interrupted run: says how to continue it, and writes the page of its rounds so far.

    Args:
      error: the interrupt.
      folder: the run's folder; None if there is none yet.
      made: the folder, which is removed if it is empty; None if this process did not create it.
      processes: of this job.
    """
    safe_round = rounds_done(folder) if folder else -1
    drop_empty(made)
    if folder is not None and safe_round > 0 and processes.is_first:
        _page_of_rounds(folder)
    how_to_continue = f"Continue with: fedjax-sim run --resume --out {shlex.quote(str(folder))}"
    state = f"Round {safe_round} is safe. {how_to_continue}" if safe_round >= 0 else "No checkpoint yet."
    _stop(f"Interrupted. {state}", error)


def _failed(error: Exception, folder: Path | None, made: Path | None, processes: Processes) -> NoReturn:
    """Ends a failed run with its error's text; raises the error again if it is a bug.

    Args:
      error: what stopped the run.
      folder, made, processes: as for `_interrupted`.
    """
    from fedjax_sim.experiment import PageNotWritten

    drop_empty(made)
    # Diverged training has rounds to look at.
    if isinstance(error, ArithmeticError) and folder is not None and processes.is_first:
        _page_of_rounds(folder)
    if processes.lost_peer(error):
        _stop(f"Another process of this job died. Continue with --resume --out {shlex.quote(str(folder))}.", error)
    is_about_files = isinstance(error, (FileExistsError, FileNotFoundError))
    if isinstance(error, (TypeError, ValueError)) and not is_about_files:
        if not is_users_error(error):
            raise error
        _stop(str(error), error)
    if isinstance(error, PageNotWritten) or is_about_files:
        _stop(str(error), error)
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and folder is not None and (safe_round := rounds_done(folder)) >= 0:
        way = f"fedjax-sim run --resume --out {shlex.quote(str(folder))}"
        words += f". Round {safe_round} is safe: free space or mend the folder, then {way}"
    _stop(words, error)


def _page_of_rounds(folder: Path) -> None:
    """Writes the page of a run that stopped; where that fails too, it says so and the run's own end is told."""
    from fedjax_sim.command.report import write_page
    from fedjax_sim.running.files import CheckpointError

    try:
        write_page(folder)
    except (CheckpointError, OSError) as error:
        typer.echo(f"No page: {error}", err=True)


def launch(
    arguments: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="E.g. run --set run.rounds=50.")],
    processes: Annotated[int, typer.Option("--processes", "-n", min=1, max=1024, help="How many to start.")],
) -> None:
    """Train in several processes on this machine, e.g. `fedjax-sim launch -n 2 -- run`."""
    from fedjax_sim.config.value_kinds import problem
    from fedjax_sim.running.launch import launch_processes as start

    if arguments[0] != "run":
        hint = "Every other command does all of its work in each process: call it without launch."
        typer.echo(problem("COMMAND", "run, whose processes share the work", arguments[0], hint), err=True)
        raise typer.Exit(2)
    raise typer.Exit(start(arguments, processes))


def _stop(words: str, error: BaseException) -> NoReturn:
    """Ends the run with an error's text, which a single process of the job prints."""
    processes = current()  # the error may have come before they met
    if processes.reports(error) and words:
        typer.echo((f"Process {processes.index}: " if processes.index else "") + words, err=True)
    processes.leave(error)
    raise typer.Exit(exit_code(error))
