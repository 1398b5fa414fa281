"""Implements `fedjax-sim report`: writes a run's page again, or the timeline of one of its rounds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from fedjax_sim.command.options import OwnModules, RunFolder


def write_page(run: Path, notes: Sequence[str] = ()) -> Path:
    """Writes a run's page under the lock of its folder, so that temporary files of a killed run are removed.

    A run in progress holds the lock itself; its page is written without it.

    Args:
      run: the run's folder.
      notes: further notes on the run, which the page shows.

    Returns: the path of the page.

    Raises: FileNotFoundError for a folder of a sweep, and for one with a config alone, which may be anybody's.

    Guarantees: a run that was killed before its page was written gets one
    (tests/command/test_app.py::test_a_page_can_be_written_again).
    """
    from fedjax_sim.report.page import FILES, write_report
    from fedjax_sim.sweeps.finished import what_a_sweep_holds

    if (words := what_a_sweep_holds(run)) and not (run / "metrics.jsonl").is_file():
        raise FileNotFoundError(f"RUN: expected a run's folder, got {str(run)!r}. {words}")
    if [name for name in FILES if (run / name).is_file()] == ["config.toml"]:
        raise FileNotFoundError(f"RUN: expected a run's folder, got {str(run)!r}, which has config.toml alone.")
    with ExitStack() as stack:
        # A lock creates its folder: a folder that holds no run is not touched.
        if any((run / name).is_file() for name in FILES):
            _lock(stack, run)
        return write_report(run, notes)


def _lock(stack: ExitStack, run: Path) -> None:
    """Takes the lock of a run's folder until the stack ends, if no other process holds it."""
    from fedjax_sim.running.files import RunLocked, lock

    with suppress(RunLocked):
        stack.enter_context(lock(run))


def write_timeline_page(run: Path, round: int) -> Path:
    """Writes the page of one round of a run whose rounds take simulated time.

    The round is replayed from config and seed, and the replay is compared with the log. No file of the run is changed.

    Args:
      run: the run's folder.
      round: the number of the round, from 1.

    Returns: the path of the page.

    Raises: ConfigError for a folder without a run, for a round that the log does not have, and for a run without a
    clock or with noise. CheckpointError if files were changed, or if the replay is not the round of the log.

    Guarantees: the page shows the clients of that round, and the run's files stay as they are
    (tests/command/test_app.py::test_the_timeline_of_a_round).
    """
    from fedjax_sim.config.build import build
    from fedjax_sim.config.document import ConfigError, load
    from fedjax_sim.config.value_kinds import problem
    from fedjax_sim.instruments.timeline import timeline_of_round
    from fedjax_sim.report.page import write_timeline
    from fedjax_sim.running.environment import prepare

    logged = _logged(run)
    if round not in logged:
        rule = f"one of the rounds in the log, 1 to {max(logged)}" if logged else "a run with rounds in its log"
        raise ConfigError([problem("--timeline", rule, round)])
    config = load(run / "config.toml", ["run.log=none"])  # nothing is logged, and no logger need be installed
    if not any("round_seconds" in record for record in logged.values()):
        hint = "A config has one with [devices] and [sampler.with_clock]."
        raise ConfigError([problem("--timeline", "a run whose rounds take simulated time", str(run), hint)])
    prepare()
    with config.arithmetic():
        experiment = build(config)
        try:
            replayed = timeline_of_round(
                experiment.key, experiment.algorithm, experiment.params, experiment.data.train, round
            )
        except ValueError as error:
            raise ConfigError([f"--timeline: {error}"]) from error
    _compare(run, logged[round], replayed)
    with ExitStack() as stack:
        _lock(stack, run)
        return write_timeline(run, round, replayed)


def _logged(run: Path) -> dict[int, dict[str, Any]]:
    """Returns the log's records by round, after checking that the files are as the run wrote them."""
    from fedjax_sim.report.files import read_lines
    from fedjax_sim.running.checksums import check_files
    from fedjax_sim.running.log import check_logs, verified

    if not (run / "config.toml").is_file() or not (run / "metrics.jsonl").is_file():
        raise FileNotFoundError(f"RUN: expected a run's folder, with config.toml and metrics.jsonl, got {str(run)!r}.")
    check_files(run, ["config.toml"])
    check_logs(run)
    records = read_lines(run / "metrics.jsonl", [], verified(run))
    return {record["round"]: record for record in records if record.get("round", 0) > 0}


def _compare(run: Path, record: dict[str, Any], replayed: dict[str, Any]) -> None:
    """Raises CheckpointError if a replay is not the round of the log.

    Args:
      run: the run's folder.
      record: of the round, in the log.
      replayed: the timeline of the replayed round, with its simulated seconds and its numbers of clients.
    """
    import numpy as np

    from fedjax_sim.running.files import CheckpointError

    # Field of the log -> field of the replay. The log holds float32 numbers.
    pairs = {"round_seconds": "lasts", "clients_invited": "invited", "clients_reported": "reported"}
    for name, replayed_name in pairs.items():
        if name in record and np.float32(record[name]) != np.float32(replayed[replayed_name]):
            raise CheckpointError(
                f"{run}: the replay of round {record['round']} is not that of the log: {name} is {record[name]} there, "
                f"{replayed[replayed_name]} here. Data, or versions of fedjax_sim or JAX, are not those of the run "
                "(env.json)."
            )


def report(
    run: RunFolder,
    timeline: Annotated[
        int | None, typer.Option(metavar="ROUND", help="Instead: who did what, when, in this round of simulated time.")
    ] = None,
    own_modules: OwnModules = None,
):
    """Write a run's report.html again from its files, finished or not."""
    from fedjax_sim.command.folders import rounds_at_end
    from fedjax_sim.config import registry
    from fedjax_sim.config.document import ConfigError
    from fedjax_sim.running.checkpoint import trouble_with_newest
    from fedjax_sim.running.files import CheckpointError

    try:
        registry.admit(own_modules or [])
        # The page is of the log, which may be whole where a checkpoint is not.
        trouble = trouble_with_newest(run / "checkpoints", rounds_at_end(run))
        page = write_page(run, [trouble] if trouble else []) if timeline is None else write_timeline_page(run, timeline)
        if trouble:
            typer.echo(trouble, err=True)
        typer.echo(str(page))
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except (CheckpointError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2 if isinstance(error, FileNotFoundError) else 1) from error
