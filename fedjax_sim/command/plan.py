"""Implements `fedjax-sim plan`: memory and time of a run, before it starts, here or on an accelerator to be rented."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedjax_sim.command.attackers import expected_attackers
from fedjax_sim.command.completion import example_names
from fedjax_sim.command.errors import is_users_error
from fedjax_sim.command.options import OwnModules
from fedjax_sim.report import numbers
from fedjax_sim.running import terminal
from fedjax_sim.running.environment import prepare


def plan(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.toml | EXAMPLE]", help="As for run.", autocompletion=example_names)
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="a.b=c", help="As for run.")] = None,
    without: Annotated[list[str] | None, typer.Option("--unset", metavar="a.b", help="As for run.")] = None,
    own_modules: OwnModules = None,
    *,
    target: Annotated[
        str | None,
        typer.Option(metavar="CHIP", help="Plan for a100, h100, h200, v4, v5e, v5p or v6e, which need not be here."),
    ] = None,
    targets: Annotated[bool, typer.Option("--targets", help="Plan for all of these chips, side by side.")] = False,
    devices: Annotated[int, typer.Option(min=1, help="The number of devices of --target or --targets.")] = 1,
) -> None:
    """Show what a run will take: clients at once, memory, time, and the largest cohort that fits.

    Times some rounds on this machine. With --target nothing is run: a round is compiled for the chip, and the least
    time that the program can take is read from it.
    """
    from fedjax_sim.config import registry
    from fedjax_sim.config.document import ConfigError, load
    from fedjax_sim.config.value_kinds import problem

    settings = settings or []
    without = without or []
    if target is not None or targets:
        # Before an own module imports JAX: a GPU of this machine would be asked for the kernels of another.
        os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        registry.admit(own_modules or [])
        loaded = load(config, settings, without)
        if target is not None and targets:
            raise ConfigError([problem("--targets", "no --target beside it", target, "It plans for all chips.")])
        if target is not None or targets:
            on_all = {"run.devices": "all"}  # of --devices, whatever the config says of this machine's
            _plan_on_chips(lambda changes: load(config, _changed(settings, on_all | changes), without), target, devices)
            return
        if devices != 1:
            raise ConfigError([problem("--devices", "a --target that they are of", devices, "Here: run.devices.")])
        prepare()
        from fedjax_sim.config.build import build
        from fedjax_sim.running.planning import forecast, largest_cohort

        with loaded.arithmetic():
            experiment = build(loaded)
            parts = experiment.algorithm, experiment.key, experiment.params, experiment.data.train
            predicted = forecast(*parts, client_memory=loaded.resolved()["run"]["client_memory"])
        cohort_size = loaded.resolved().get("sampler", {}).get("cohort_size")
        population_size = experiment.data.train.size
        largest = ""
        # The bytes of a cohort are extrapolated from two sizes, so the population must hold twice the cohort.
        if cohort_size is not None and 2 * cohort_size <= population_size:
            try:
                with loaded.arithmetic():
                    most = largest_cohort(
                        lambda m: build(load(config, _changed(settings, {"sampler.cohort_size": m}), without)),
                        cohort_size,
                    )
                largest = f"{min(most, population_size):,}" + (" (all)" if most >= population_size else "")
            except ConfigError as error:
                # Twice as many clients may be refused, for example if the sum of their messages would wrap.
                largest = f"unknown, for {2 * cohort_size:,} are refused. {error.problems[0]}"
    except (ConfigError, TypeError, ValueError) as error:
        if not is_users_error(error):
            raise  # a bug, not a wrong config
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except (MemoryError, ModuleNotFoundError, NotImplementedError) as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from error
    options = loaded.resolved()["run"]
    if attackers := expected_attackers(experiment, options["rounds"]):
        typer.echo(attackers)
    _show_plan(options, experiment, predicted, largest)


def _changed(settings: list[str], changes: dict[str, Any]) -> list[str]:
    """Returns the settings, `a.b=c`, with some values changed."""
    from fedjax_sim.config.read import places_set

    others = [setting for setting in settings if places_set([setting]).isdisjoint(changes)]
    return [*others, *(f"{path}={value}" for path, value in changes.items())]


def _plan_on_chips(load_config: Callable[[dict[str, Any]], Any], target: str | None, num_devices: int) -> None:
    """Plans for one chip, or for all of them, on this machine's CPU.

    Args:
      load_config: changed settings by path -> the config.
      target: the chip's name; None for all.
      num_devices: the number of devices of each.
    """
    prepare()
    from fedjax_sim.command.plan_target import check_chips, plan_on_chips
    from fedjax_sim.config.document import ConfigError
    from fedjax_sim.config.value_kinds import problem
    from fedjax_sim.instruments.chips import CHIPS

    names = list(CHIPS) if target is None else [target]
    problems = check_chips(names, num_devices)
    if (chosen := load_config({}).resolved()["run"]["plan"]) == "trial":
        hint = "A trial times rounds, and nothing is run there."
        problems.append(problem("run.plan", '"auto" with --target', chosen, hint))
    if problems:
        raise ConfigError(problems)
    plan_on_chips(load_config, names, num_devices)


def _show_plan(options: dict[str, Any], experiment: Any, predicted: Any, largest: str) -> None:
    """Prints a forecast as a table.

    Args:
      options: the config's table [run].
      experiment: what `config.build` made of the config.
      predicted: a `running.planning.Forecast`.
      largest: the largest cohort that fits, in words; "" to print none.
    """
    import jax

    rounds = options["rounds"]
    grid = terminal.grid(show_header=False)
    grid.add_row("clients at once", f"{experiment.plan.lanes} on each of {len(jax.devices())} devices")
    grid.add_row("population, state", numbers.size(predicted.needs.arguments))
    grid.add_row("a round's work", numbers.size(predicted.needs.temporary + predicted.needs.results))
    grid.add_row("memory", f"{numbers.size(predicted.needs.total)} of {numbers.size(predicted.limit)}")
    if largest:
        grid.add_row("largest cohort", largest)
    grid.add_row("compilation", f"{predicted.compile_seconds:.1f} s")
    grid.add_row("rounds", f"{rounds:,} of {predicted.round_seconds:.3g} s: {rounds * predicted.round_seconds:.3g} s")
    terminal.console(soft_wrap=True).print(grid)
