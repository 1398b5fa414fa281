"""Implements `fedjax-sim plan --target`: memory and least time of a run on accelerators that need not be here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from fedjax_sim.report import numbers
from fedjax_sim.running import terminal

NOTE = """Kernels, traffic, products and exchanges are those of one device in one round. Nothing was run: times are
those of the bytes, the products and the beginnings of kernels at the full speed of the chip. On one H100, nine programs
took 1.1 to 2.1 times as long. A program whose arrays lie in a GPU's cache may be faster."""

HOST_NOTE = "The calls of the host, such as client memory on its disk, are not timed, nor what they copy to and fro."


class _Column(NamedTuple):
    """What a chip's column shows."""

    lanes: int
    forecast: Any  # a TargetForecast
    largest: int | None  # cohort; None where it is not known


def check_chips(names: Sequence[str], num_devices: int) -> list[str]:
    """Returns a problem for each chip that is not known, or that is not joined in such numbers.

    Args:
      names: of chips, as `--target` states them.
      num_devices: of each chip, as `--devices` states it.
    """
    from fedjax_sim.config.value_kinds import problem
    from fedjax_sim.instruments.chips import CHIPS
    from fedjax_sim.validate import nearest

    problems = [
        problem("--target", f"one of {', '.join(CHIPS)}", name, nearest(name, CHIPS))
        for name in names
        if name not in CHIPS
    ]
    for chip in (CHIPS[name] for name in names if name in CHIPS):
        most = chip.most_devices
        if num_devices & (num_devices - 1) or num_devices > most:
            problems.append(problem("--devices", f"a power of two, at most {most} of {chip.title}", num_devices))
    return problems


def plan_on_chips(load_config: Callable[[dict[str, Any]], Any], names: Sequence[str], num_devices: int) -> None:
    """Prints a column for each chip whose compiler is installed, and a line for each of the others.

    Args:
      load_config: changed settings by path -> the config.
      names: of the chips.
      num_devices: the number of devices of each.

    Raises: ModuleNotFoundError if no chip's compiler is installed; MemoryError if a run fits none of them;
    NotImplementedError if the compilers refuse the program.
    """
    from fedjax_sim.instruments.chips import CHIPS, missing_compiler

    columns: dict[str, _Column] = {}
    left_out: dict[str, Exception] = {}
    for name in names:
        chip = CHIPS[name]
        if hint := missing_compiler(chip):
            left_out[name] = ModuleNotFoundError(f"{chip.title}: its compiler is not installed. {hint}")
            continue
        try:
            with _uncached():
                columns[name] = _column(load_config, chip, num_devices)
        except (MemoryError, NotImplementedError) as error:
            left_out[name] = type(error)(f"{chip.title}: {error}")
    if not columns:
        raise next(iter(left_out.values()))
    _show(load_config({}), columns, num_devices)
    for error in left_out.values():
        print(error)


@contextmanager
def _uncached() -> Iterator[None]:
    """Keeps the programs of the block out of the cache: this machine cannot load programs for absent hardware again."""
    import jax

    is_cached = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", is_cached)


def _column(load_config: Callable, chip: Any, num_devices: int) -> _Column:
    """Compiles a round for a chip, and one with twice the cohort if the config has that many clients.

    Args:
      load_config: changed settings by path -> the config.
      chip: an `instruments.chips.Chip`.
      num_devices: how many of it share a cohort.

    Raises: MemoryError for a round that does not fit; NotImplementedError if the chip's compiler refuses the program.
    """
    from fedjax_sim import engine
    from fedjax_sim.config.build import build
    from fedjax_sim.config.document import ConfigError
    from fedjax_sim.instruments.chips import chip_devices
    from fedjax_sim.instruments.target_forecast import forecast_on
    from fedjax_sim.running.planning import cohort_that_fits

    devices = chip_devices(chip, num_devices)

    def forecast(changes: dict[str, Any]) -> tuple[Any, Any]:
        loaded = load_config(changes)
        client_memory = loaded.resolved()["run"]["client_memory"]
        with ExitStack() as stack:
            folder = stack.enter_context(TemporaryDirectory())
            stack.enter_context(engine.client_memory(client_memory, folder))
            stack.enter_context(engine.compiling_for(chip.platform, devices, chip.usable_bytes))
            stack.enter_context(loaded.arithmetic())
            made = build(loaded)
            predicted = forecast_on(
                chip, devices, made.algorithm, key=made.key, params=made.params, population=made.data.train
            )
            return made, predicted

    experiment, config_forecast = forecast({})
    if config_forecast.memory_bytes > chip.usable_bytes:
        needed = numbers.size(config_forecast.memory_bytes)
        raise MemoryError(f"a round needs {needed} on each device, and there are {_usable(chip)}.")
    cohort_size = _cohort_size(load_config({}))
    largest = None
    population_size = experiment.data.train.size
    if cohort_size is not None and 2 * cohort_size <= population_size:
        try:
            twice = forecast({"sampler.cohort_size": 2 * cohort_size})[1].memory_bytes
            fitting = cohort_that_fits(cohort_size, config_forecast.memory_bytes, twice, chip.usable_bytes)
            largest = min(fitting, population_size)
        except (ConfigError, MemoryError, NotImplementedError):
            largest = None  # twice as many are refused
    return _Column(experiment.plan.lanes, config_forecast, largest)


def _usable(chip: Any) -> str:
    """Returns how much memory a run may use of a device, and of how much, in words."""
    of_all = f", which JAX takes of {numbers.size(chip.memory_bytes)}" if chip.share < 1 else ""
    return numbers.size(chip.usable_bytes) + of_all


def _cohort_size(loaded: Any) -> int | None:
    """Returns the cohort size that a config states; None where its sampler has none."""
    return loaded.resolved().get("sampler", {}).get("cohort_size")


def _show(loaded: Any, columns: dict[str, _Column], num_devices: int) -> None:
    """Prints the forecasts side by side.

    Args:
      loaded: the `Config`, with the number of rounds and the size of the cohort.
      columns: by the chip's name.
      num_devices: how many of each chip there are.
    """
    from fedjax_sim.instruments.chips import CHIPS

    rounds, cohort_size = loaded.resolved()["run"]["rounds"], _cohort_size(loaded)
    grid = terminal.grid(show_header=False)

    def row(name: str, value: Callable[[str, _Column], str]) -> None:
        grid.add_row(name, *(value(chip, column) for chip, column in columns.items()))

    def exchanges(program: Any) -> str:
        number = sum(exchange.times for exchange in program.collectives)
        sent = sum(exchange.times * exchange.result_bytes for exchange in program.collectives)
        return f"{number}, {numbers.size(sent)} in all" if number else "none"

    def products(program: Any) -> str:
        return ", ".join(f"{flops / 1e9:.3g} GFLOP in {name}" for name, flops in program.flops.items()) or "none"

    def waits(chip: str, program: Any) -> str:
        # A TPU turns its loops by itself; a GPU asks the host whether there is another turn.
        loops = len(program.open_loops) if CHIPS[chip].platform == "cuda" else 0
        counts = {"loops of unknown length": loops, "calls": program.num_host_calls}
        return ", ".join(f"{words}: {number}" for words, number in counts.items() if number) or "never"

    row("devices", lambda name, _: f"{num_devices} of {CHIPS[name].title}")
    row("clients at once", lambda _, x: f"{x.lanes:,} on each device")
    row("memory of a device", lambda name, x: f"{numbers.size(x.forecast.memory_bytes)} of {_usable(CHIPS[name])}")
    if any(x.largest for x in columns.values()):
        # A line through two cohorts: the memory of larger ones grows less, once their groups of lanes are full.
        row("cohorts that fit, at least up to", lambda _, x: f"{x.largest:,}" if x.largest else "unknown")
    row("kernels", lambda _, x: f"{x.forecast.program.num_launches:,}")
    row("memory traffic", lambda _, x: numbers.size(x.forecast.program.memory_bytes))
    row("matrix products", lambda _, x: products(x.forecast.program))
    row("exchanges", lambda _, x: exchanges(x.forecast.program))
    row("waits for the host", lambda name, x: waits(name, x.forecast.program))
    row("a round, at least", lambda _, x: _seconds(x.forecast.round_seconds))
    row("most of it", lambda _, x: max(x.forecast.seconds, key=x.forecast.seconds.get))
    row(f"{rounds:,} rounds, at least", lambda _, x: _seconds(rounds * x.forecast.round_seconds))
    if cohort_size is not None:
        row("clients/s, at most", lambda _, x: f"{_rounded(cohort_size / x.forecast.round_seconds):,}")
    row("compiled in", lambda _, x: f"{x.forecast.compile_seconds:.1f} s on this machine")
    console = terminal.console(soft_wrap=True)
    console.print(grid)
    console.print(NOTE)
    if any(x.forecast.program.num_host_calls for x in columns.values()):
        console.print(HOST_NOTE)


def _seconds(value: float) -> str:
    """Returns seconds in a readable unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}" if value < 1000 else f"{value:,.0f} s"
    return f"{value / 1e-6:.3g} us"


def _rounded(value: float) -> int:
    """Returns a number rounded to two digits."""
    return int(round(value, 1 - math.floor(math.log10(value))))
