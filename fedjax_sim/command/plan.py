"""`fedjax-sim plan`: memory and time of a run, before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedjax_sim.command.attackers import expected_attackers
from fedjax_sim.command.errors import is_users_error
from fedjax_sim.running.environment import prepare

__all__ = ["plan", "shown_bytes"]


def plan(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG.toml | EXAMPLE]", help="As for run.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="a.b=c", help="As for run.")] = None,
    without: Annotated[list[str] | None, typer.Option("--unset", metavar="a.b", help="As for run.")] = None,
) -> None:
    """Show what a run will take: clients at once, memory, time, and the largest cohort that fits. Times some rounds."""
    from fedjax_sim.config.document import ConfigError, load

    settings = settings or []
    without = without or []
    try:
        loaded = load(config, settings, without)
        prepare()
        from fedjax_sim.config.build import build
        from fedjax_sim.running.planning import forecast, largest_cohort

        experiment = build(loaded)
        parts = experiment.algorithm, experiment.key, experiment.params, experiment.data.train
        found = forecast(*parts, client_memory=loaded.resolved()["run"]["client_memory"])
        cohort = loaded.resolved().get("sampler", {}).get("cohort_size")
        size = experiment.data.train.size
        largest = ""
        if cohort is not None and 2 * cohort <= size:
            others = [setting for setting in settings if not setting.startswith("sampler.cohort_size=")]
            try:
                most = largest_cohort(
                    lambda m: build(load(config, [*others, f"sampler.cohort_size={m}"], without)), cohort
                )
                largest = f"{min(most, size):,}" + (" (all)" if most >= size else "")
            except ConfigError as error:  # as where the sum of twice as many messages would wrap
                largest = f"unknown, for {2 * cohort:,} are refused. {error.problems[0]}"
    except (ConfigError, TypeError, ValueError) as error:
        if not is_users_error(error):
            raise  # a bug, not a wrong config
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except MemoryError as error:
        typer.echo(f"MemoryError: {error}", err=True)
        raise typer.Exit(1) from error
    options = loaded.resolved()["run"]
    if attackers := expected_attackers(experiment, options["rounds"]):
        typer.echo(attackers)
    _show_plan(options, experiment, found, largest)


def shown_bytes(value: float) -> str:
    """Bytes in a readable unit, such as "1.5 MB"."""
    from fedjax_sim.report.plots import scaled_bytes

    unit, name = scaled_bytes(value)
    return f"{value / unit:.3g} {name}"


def _show_plan(options: dict[str, Any], experiment: Any, found: Any, largest: str) -> None:
    import jax
    from rich.console import Console
    from rich.table import Table

    rounds = options["rounds"]
    grid = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    grid.add_row("clients at once", f"{experiment.plan.lanes} on each of {len(jax.devices())} devices")
    grid.add_row("population, state", shown_bytes(found.needs.arguments))
    grid.add_row("a round's work", shown_bytes(found.needs.temporary + found.needs.results))
    grid.add_row("memory", f"{shown_bytes(found.needs.total)} of {shown_bytes(found.limit)}")
    if largest:
        grid.add_row("largest cohort", largest)
    grid.add_row("compilation", f"{found.compile_seconds:.1f} s")
    grid.add_row("rounds", f"{rounds:,} of {found.round_seconds:.3g} s: {rounds * found.round_seconds:.3g} s")
    Console(soft_wrap=True).print(grid, highlight=False, markup=False)
