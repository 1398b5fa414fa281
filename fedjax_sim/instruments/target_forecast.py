"""Forecasts a round on an accelerator that is not there, from the program that the vendor's compiler makes for it."""

from __future__ import annotations

import time
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from fedjax_sim import engine
from fedjax_sim.instruments.chips import Chip
from fedjax_sim.instruments.compiled import Collective, CompiledProgram, read_compiled
from fedjax_sim.types import Algorithm, Array, Population, PyTree

__all__ = ["TargetForecast", "forecast_on", "least_seconds"]


class TargetForecast(NamedTuple):
    """A round on one or several devices of a chip."""

    memory_bytes: int  # that a device needs
    program: CompiledProgram  # what each device does
    seconds: dict[str, float]  # of a round at least, by what binds: see `least_seconds`
    compile_seconds: float  # on this machine

    @property
    def round_seconds(self) -> float:
        """The least time of a round."""
        return sum(self.seconds.values())


def forecast_on(
    chip: Chip, devices: list[jax.Device], algorithm: Algorithm, key: Array, params: PyTree, population: Population
) -> TargetForecast:
    """Compiles a round for devices of a chip, reads the program, and runs nothing.

    Call it inside of `engine.compiling_for(chip.platform, devices, chip.memory_bytes)`. The algorithm must have been
    made in there too, because its plan and its mesh follow the devices.

    Args:
      chip: what the devices are.
      devices: from `chips.chip_devices`.
      algorithm, key, params, population: as for `run`; of the population only shapes count.
    """
    state = jax.eval_shape(algorithm.init, key, params, population)
    mesh = engine.device_mesh()
    everywhere = SingleDeviceSharding(devices[0]) if mesh is None else NamedSharding(mesh, PartitionSpec())
    # The key says which devices there are. With several of them, the compiler places state and population, as in a run.
    place = everywhere if mesh is None else None
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=everywhere)
    others = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), (state, population))
    arguments = (key, *others)
    start_seconds = time.perf_counter()
    lowered = jax.jit(algorithm.step, donate_argnums=1).trace(*arguments).lower(lowering_platforms=(chip.platform,))
    # Autotuning would run kernels.
    options = {"xla_gpu_autotune_level": "0"} if chip.platform == "cuda" else {}
    compiled = lowered.compile(compiler_options=options)
    compile_seconds = time.perf_counter() - start_seconds
    program = read_compiled(compiled.as_text(), engine.target())
    memory_bytes = engine.needs(compiled).total // len(devices)
    return TargetForecast(memory_bytes, program, least_seconds(program, chip, len(devices)), compile_seconds)


def least_seconds(program: CompiledProgram, chip: Chip, num_devices: int) -> dict[str, float]:
    """Returns the least seconds that a program can take on a chip, by what binds.

    A kernel takes at least the time of its bytes at the memory's full speed, or of its matrix products at the peak of
    the matrix units, whichever is longer ("memory", "matrix products"); and a launch ("launches"). Other arithmetic is
    taken to cost nothing. An exchange takes at least the time in which a ring of devices passes its bytes on
    ("exchanges").

    Guarantees: each is as computed by hand (tests/instruments/test_target_forecast.py::test_seconds_by_hand).
    """
    seconds = dict.fromkeys(("memory", "matrix products", "launches", "exchanges"), 0.0)
    for kernel in program.kernels:
        in_memory = kernel.memory_bytes / chip.bytes_per_second
        # A precision that the chip does not state, such as float64, is not faster than float32.
        fastest = chip.flops_per_second["float32"]
        in_products = sum(flops / chip.flops_per_second.get(name, fastest) for name, flops in kernel.flops)
        bound = "memory" if in_memory >= in_products else "matrix products"
        seconds[bound] += kernel.times * max(in_memory, in_products)
        seconds["launches"] += kernel.times * chip.launch_seconds
    for exchange in program.collectives:
        passed_bytes = _shares_passed_on(exchange, num_devices) * exchange.result_bytes
        seconds["exchanges"] += exchange.times * passed_bytes / chip.link_bytes_per_second
    return seconds


def _shares_passed_on(exchange: Collective, num_devices: int) -> float:
    """Returns how often each device of a ring sends as many bytes as its result has."""
    others = (num_devices - 1) / num_devices
    if exchange.opcode == "all-reduce":
        return 2 * others
    # The result of a scattered sum is one device's share of it.
    return others * num_devices if exchange.opcode == "reduce-scatter" else others
