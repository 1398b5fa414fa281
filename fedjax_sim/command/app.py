"""Assembles the command line, `fedjax-sim`. JAX is imported only once a run's config has been read."""

from __future__ import annotations

import atexit
import gc
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedjax_sim.command import compare, data, export, parts, plan, privacy, report, run, study, sweep
from fedjax_sim.command.hinting import Hinting
from fedjax_sim.running.environment import versions
from fedjax_sim.running.seconds import process_began
from fedjax_sim.running.terminal import escaped_output


class _EscapedOutput(TyperGroup):
    """The commands; all that they print is printable, and so are errors and help."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        with escaped_output():
            return super().main(*arguments, **options)


app = typer.Typer(cls=_EscapedOutput, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command(cls=Hinting)(run.run)
app.command(context_settings={"ignore_unknown_options": True})(run.launch)
app.command(cls=Hinting)(plan.plan)
app.command(cls=Hinting)(data.data)
app.command()(report.report)
app.command()(compare.show)
app.command()(compare.compare)
app.command()(export.export)
app.command()(export.init)
app.command("list")(parts.list_parts)
for _command in (*privacy.PRIVACY_COMMANDS, *study.STUDY_COMMANDS, *sweep.SWEEP_COMMANDS):
    app.command(cls=Hinting)(_command)


def main() -> None:
    """Runs the command line; the exit code is 0, 2 for wrong input, 1 for a failed run, 130 for an interrupted one."""
    # Importing and tracing make many objects that stay. Python's garbage collector looked through them 1,300 times, an
    # eighth of the time of a short run.
    gc.set_threshold(50_000, 20, 50)
    # As the process ends, Python would look through them once more, for 0.9 s of a short run's 11 CPU seconds.
    atexit.register(gc.freeze)
    try:
        app(obj=process_began())
    except Exception as error:
        # An error that no command expected is a bug. The other processes of the job must not wait for this one.
        from fedjax_sim.running.processes import current

        with escaped_output():
            traceback.print_exc()
        current().leave(error)
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    """Prints the version and exits, if the option was given."""
    if wanted:
        typer.echo(f"fedjax_sim {versions('fedjax-sim')['fedjax-sim']}")
        raise typer.Exit()


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Federated learning over massive simulated populations."""


if __name__ == "__main__":
    sys.exit(main())
