"""`fedjax-sim report`: writes a run's page again."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report", "write_page"]


def write_page(run: Path) -> Path:
    """Writes a run's page, under the lock of its folder, so that temporary files of a killed run are removed.

    The page of a run in progress, which holds the lock, is written all the same.

    Guarantees: tests/command/test_app.py::test_a_page_can_be_written_again.
    """
    from fedjax_sim.report.page import FILES, write_report
    from fedjax_sim.running.files import RunLocked, lock

    with ExitStack() as stack:
        if any((run / name).is_file() for name in FILES):
            with suppress(RunLocked):
                stack.enter_context(lock(run))
        return write_report(run)


def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, e.g. runs/digits-fedavg-0-001.")]):
    """Write a run's report.html again from its files, finished or not."""
    from fedjax_sim.running.files import CheckpointError

    try:
        typer.echo(str(write_page(run)))
    except (CheckpointError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2 if isinstance(error, FileNotFoundError) else 1) from error
